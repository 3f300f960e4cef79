"""The key-value store through which the nodes of a job communicate.

The store is torch's TCPStore, on a node of the job or outside of it (`perdure store`). It accepts
writes from anybody, so nodes verify what they read (job_secret.py [Note: trust]). A client
reconnects when the store's host has restarted, even if the store is empty then. A node then writes
its copy of the membership document back (membership.newer)."""

import atexit
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, cast

import torch.distributed as dist
from tenacity import RetryError, Retrying, retry_if_exception_type, stop_after_delay
from tenacity.wait import wait_random_exponential

from elastic.process import tolerate_lost_output

T = TypeVar("T")

CONNECT_SECONDS = ANSWER_SECONDS = 5.0
END_SECONDS, CUT_SECONDS = 0.5, 10.0
"""Seconds that store threads have to end when the process does: by themselves, and after their
connections are cut. A thread that is connecting needs up to CONNECT_SECONDS."""
NO_VALUE = "\0nothing"
STORE_ERRORS = (dist.DistNetworkError, dist.DistStoreError, ConnectionError)


class StoreLostError(Exception):
    """The store did not answer within `StoreClient.patience`."""


class StoreClient:
    """A client that reconnects after a restart of the store. Every method raises StoreLostError if
    the store does not answer for `patience` seconds."""

    def __init__(self, host: str, port: int, patience: float) -> None:
        self.host, self.port, self.patience = host, port, patience
        self._connection: _Connection | None = None
        self.connections = 0
        """Connections opened so far. After the first, the store may be a new and empty one."""

    def get(self, key: str) -> bytes | None:
        """Returns the value of a key; None if it has none."""
        return self.call(lambda store: _value(store, key))

    def set(self, key: str, value: bytes) -> None:
        self.call(lambda store: store.set(key, cast(str, value)))

    def append(self, key: str, value: bytes) -> None:
        append = "append"  # called by name, as torch's type stubs lack it
        self.call(lambda store: getattr(store, append)(key, value))

    def swap(self, key: str, old: bytes | None, new: bytes) -> bytes | None:
        """Set a key to `new` if its value still is `old` (None: it has no value). Returns the value
        of the key afterwards, None without one."""

        def swap(store: dist.TCPStore) -> bytes | None:
            # Bytes, though torch's types say text: a stranger's value may not be valid text.
            current = store.compare_set(key, cast(str, old or b""), cast(str, new))
            # For a key without a value the store returns the expected value.
            return store.get(key) if store.check([key]) else None if current != new else new

        return self.call(swap)

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the values of several keys; None for a key without a value."""

        def read(store: dist.TCPStore) -> list[bytes | None]:
            with suppress(dist.DistStoreError):
                if store.check(list(keys)):
                    return list(store.multi_get(list(keys)))
            return [_value(store, key) for key in keys]

        return self.call(read) if keys else []

    def close(self) -> None:
        if self._connection:
            self._connection.end()
        self._connection = None

    def call(self, action: Callable[[dist.TCPStore], T]) -> T:
        """Run `action` on the store. Each retry opens a new connection."""
        try:
            for attempt in Retrying(
                retry=retry_if_exception_type(STORE_ERRORS),
                # random waits, so that nodes do not all reconnect at once
                wait=wait_random_exponential(multiplier=0.05, max=1.0),
                stop=stop_after_delay(self.patience),
            ):
                with attempt:
                    try:
                        return self._connected().call(action, ANSWER_SECONDS)
                    except STORE_ERRORS:
                        self.close()
                        raise
        except RetryError as error:
            cause = error.last_attempt.exception()
            raise StoreLostError(
                f"the store at {self.host}:{self.port} did not answer for {self.patience:.0f} s: "
                f"{str(cause).splitlines()[0]}"
            ) from cause
        raise AssertionError  # Retrying ends by return or raise

    def _connected(self) -> "_Connection":
        if self._connection is None:
            # TCPStore's own wait for a missing host is long and cannot be interrupted.
            socket.create_connection((self.host, self.port), timeout=CONNECT_SECONDS).close()
            self._connection = _Connection(self.host, self.port)
            self.connections += 1
        return self._connection


def connect_store(host: str, port: int, seconds: float) -> dist.TCPStore:
    """Connect to a store, with a time-out of `seconds` for each call."""
    wait = timedelta(seconds=seconds)
    return dist.TCPStore(host, port, is_master=False, timeout=wait, wait_for_workers=False)


def _value(store: dist.TCPStore, key: str) -> bytes | None:
    # One round trip, as compare_set returns `expected` for a key without a value.
    current = store.compare_set(key, NO_VALUE, NO_VALUE)
    return None if current == NO_VALUE.encode() else current


class _Connection:
    """A TCPStore used by one thread of its own. If a cable is unplugged, a TCPStore waits for an
    answer as long as TCP retransmits, for minutes. So a connection that does not answer is
    abandoned, and its thread ends some time later."""

    def __init__(self, host: str, port: int) -> None:
        self._todo: SimpleQueue[tuple[Callable[[dist.TCPStore], Any], SimpleQueue[Any]] | None] = (
            SimpleQueue()
        )
        self._open = False
        run_store_thread(lambda: self._run(host, port), self.end, port, "perdure-store")

    def call(self, action: Callable[[dist.TCPStore], T], seconds: float) -> T:
        """Run `action` in the thread; returns its result. Raises ConnectionError if it takes longer
        than `seconds`; the first call may take CONNECT_SECONDS more."""
        # a queue for each call: a late answer must not reach the next call
        answer: SimpleQueue[tuple[T, None] | tuple[None, Exception]] = SimpleQueue()
        self._todo.put((action, answer))
        try:
            value, error = answer.get(timeout=seconds + (0 if self._open else CONNECT_SECONDS))
        except Empty:
            raise ConnectionError(f"no answer within {seconds:.0f} s") from None
        if error:
            raise error
        return cast(T, value)

    def end(self) -> None:
        """Close the connection after its current request. Called from any thread."""
        self._todo.put(None)

    def _run(self, host: str, port: int) -> None:
        store: dist.TCPStore | None = None
        while task := self._todo.get():
            action, answer = task
            try:
                store = store or connect_store(host, port, CONNECT_SECONDS)
                self._open = True
                answer.put((action(store), None))
            except Exception as error:
                answer.put((None, error))


StoreThreads = dict[threading.Thread, tuple[Callable[[], None], int]]
"""Thread that uses a store → (function that makes the thread end, port of its store)."""
_threads: StoreThreads = {}
_process_ends = threading.Event()
"""Set when the process ends. Then no new thread of `run_store_thread` begins its work."""


def run_store_thread(
    work: Callable[[], None], end: Callable[[], None], port: int, name: str
) -> None:
    """Run work(), which calls a TCPStore, in a daemon thread that ends before the interpreter does.
    If a call of torch returned to a thread while the interpreter shuts down, the process would
    abort with SIGABRT. `end`: called from another thread; makes work() return after its current
    call."""

    def run() -> None:
        _threads[threading.current_thread()] = end, port
        try:
            # Checked after registering: either `_end_threads` knows this thread, or no work begins.
            if not _process_ends.is_set():
                work()
        finally:
            del _threads[threading.current_thread()]

    threading.Thread(target=run, name=name, daemon=True).start()


@atexit.register
def _at_exit() -> None:
    _process_ends.set()
    _end_threads()


def _end_threads() -> None:
    """End all store threads, and cut the connections of threads that still wait for an answer."""
    left = dict(_threads)
    for end, _ in left.values():
        end()
    _join(left, END_SECONDS)
    deadline = time.monotonic() + CUT_SECONDS
    while (ports := {port for _, port in left.values()}) and time.monotonic() < deadline:
        _cut(ports)
        _join(left, END_SECONDS)  # cut again, as torch reconnects if it is cut off while connecting


def _cut(ports: set[int]) -> None:
    """Shut down this process's connections to `ports`, without closing their descriptors."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor is no socket, or not connected
            connection = socket.socket(fileno=int(name))
            try:
                if connection.getpeername()[1:2] in {(port,) for port in ports}:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()  # the owner of the socket closes the descriptor


def _join(calls: StoreThreads, seconds: float) -> None:
    """Wait up to `seconds` for all threads. Remove ended threads from `calls`."""
    deadline = time.monotonic() + seconds
    for thread in list(calls):
        thread.join(max(0.0, deadline - time.monotonic()))
        if not thread.is_alive():
            del calls[thread]


def host_store(host: str, port: int) -> dist.TCPStore:
    """Host a store in this process, for as long as the returned object lives. Raises OSError if
    that is not possible. The store listens on `host` if that is a loopback address, and otherwise
    on every interface. `port` 0: any free port. The result's `port` is the port in use."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # each client takes a descriptor, and the usual limit is 1024
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if ip_address(address[0]).is_loopback:
        listener = socket.create_server((address[0], port), family=family)
    else:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    port = listener.getsockname()[1]
    try:  # TCPStore closes the descriptor of the listener
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    except (dist.DistNetworkError, RuntimeError) as error:
        raise OSError(
            f"cannot host a store on port {port}: {str(error).splitlines()[0]}"
        ) from error


def serve(port: int, host: str = "0.0.0.0") -> None:
    tolerate_lost_output()
    store = host_store(host, port)
    print(f"store: listening on port {store.port}", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    serve(int(sys.argv[1]), *sys.argv[2:])
