"""The small key-value store through which the nodes of a job find each other.

It is torch's TCPStore, on a node of the job or outside of it (`perdure store`). It believes
everybody; its readers do not (secret.py [Note: trust]). A client outlives the host: it connects
again when the host is back, also to an empty store; what must not be lost is then put back by those
who know it (rendezvous.py).
"""

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

from elastic.process import outlive

T = TypeVar("T")

CONNECT_SECONDS = ANSWER_SECONDS = 5.0
END_SECONDS, CUT_SECONDS = 0.5, 10.0
"""How long a thread that waits for a store has to end when the process does: by itself, and then
with its connections closed, which it notes at once, but tells as slowly as a busy machine lets it.
A thread that connects needs up to CONNECT_SECONDS."""
NOTHING = "\0nothing"
"""No key has this value."""
LOST = (dist.DistNetworkError, dist.DistStoreError, ConnectionError)
"""Errors of a store that is not there, or not there any more."""


class StoreLostError(Exception):
    """The store could not be reached for as long as one was willing to wait."""


class StoreClient:
    """A client that survives its host.

    Args:
        host: of the store.
        port: of the store.
        patience: seconds to go on trying when the store does not answer.

    Methods raise StoreLostError when `patience` has passed.
    """

    def __init__(self, host: str, port: int, patience: float) -> None:
        self.host, self.port, self.patience = host, port, patience
        self._connection: _Connection | None = None
        self.connections = 0
        """How often a connection was made: more than once, and the store may be a new one."""

    def get(self, key: str) -> bytes | None:
        """The value of a key, None if it has none."""

        def read(store: dist.TCPStore) -> bytes | None:
            # For a key without a value the store answers with what was expected: one way there and
            # back, where `check` and `get` take two.
            found = store.compare_set(key, NOTHING, NOTHING)
            return None if found == NOTHING.encode() else found

        return self.call(read)

    def set(self, key: str, value: bytes) -> None:
        """Give a key a value."""
        self.call(lambda store: store.set(key, cast(str, value)))

    def append(self, key: str, value: bytes) -> None:
        """Put something behind the value of a key."""
        append = "append"  # torch does not declare it
        self.call(lambda store: getattr(store, append)(key, value))

    def swap(self, key: str, old: bytes | None, new: bytes) -> bytes | None:
        """Replace `old` (None: no value) by `new` unless the value is another by now; returns the
        value that the key has afterwards."""

        def swap(store: dist.TCPStore) -> bytes | None:
            # torch declares text, and takes bytes; what strangers have written may be no text.
            found = store.compare_set(key, cast(str, old or b""), cast(str, new))
            # For a key without a value the store answers with what was expected.
            return store.get(key) if store.check([key]) else None if found != new else new

        return self.call(swap)

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of several keys."""

        def read(store: dist.TCPStore) -> list[bytes | None]:
            try:
                return (
                    list(store.multi_get(list(keys)))
                    if store.check(list(keys))
                    else one_by_one(store)
                )
            except dist.DistStoreError:
                return one_by_one(store)

        def one_by_one(store: dist.TCPStore) -> list[bytes | None]:
            found = [store.compare_set(key, NOTHING, NOTHING) for key in keys]
            return [None if one == NOTHING.encode() else one for one in found]

        return self.call(read) if keys else []

    def close(self) -> None:
        """Give the connection back."""
        if self._connection:
            self._connection.end()
        self._connection = None

    def call(self, action: Callable[[dist.TCPStore], T]) -> T:
        """Do something with the store: anew, on another connection, until it has been done."""
        try:
            for attempt in Retrying(
                retry=retry_if_exception_type(LOST),
                wait=wait_random_exponential(multiplier=0.05, max=1.0),
                stop=stop_after_delay(self.patience),
            ):
                with attempt:
                    try:
                        return self._connected().call(action, ANSWER_SECONDS)
                    except LOST:
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
            # TCPStore's own wait for a host that is not there is long and cannot be interrupted.
            socket.create_connection((self.host, self.port), timeout=CONNECT_SECONDS).close()
            self._connection = _Connection(self.host, self.port)
            self.connections += 1
        return self._connection


class _Connection:
    """A TCPStore in a thread of its own. It waits for an answer for as long as TCP sends again what
    was lost on the way, which is minutes after a cable was pulled and put back; so one that does
    not answer is left behind, and ends some time.

    Args:
        host: of the store.
        port: of the store.
    """

    def __init__(self, host: str, port: int) -> None:
        self._todo: SimpleQueue[tuple[Callable[[dist.TCPStore], Any], SimpleQueue[Any]] | None] = (
            SimpleQueue()
        )
        self._made = False
        call_stores(lambda: self._run(host, port), self.end, port, "perdure-store")

    def call(self, action: Callable[[dist.TCPStore], T], seconds: float) -> T:
        """Raises ConnectionError if there is no answer within `seconds`; the first call may take
        CONNECT_SECONDS more."""
        answer: SimpleQueue[tuple[T, None] | tuple[None, Exception]] = SimpleQueue()
        self._todo.put((action, answer))
        try:
            value, error = answer.get(timeout=seconds + (0 if self._made else CONNECT_SECONDS))
        except Empty:
            raise ConnectionError(f"no answer within {seconds:.0f} s") from None
        if error:
            raise error
        return cast(T, value)

    def end(self) -> None:
        """Close it, as soon as it answers. From any thread."""
        self._todo.put(None)

    def _run(self, host: str, port: int) -> None:
        store: dist.TCPStore | None = None
        while wanted := self._todo.get():
            action, answer = wanted
            try:
                store = store or dist.TCPStore(
                    host,
                    port,
                    is_master=False,
                    timeout=timedelta(seconds=CONNECT_SECONDS),
                    wait_for_workers=False,
                )
                self._made = True
                answer.put((action(store), None))
            except Exception as error:
                answer.put((None, error))


Calls = dict[threading.Thread, tuple[Callable[[], None], int]]
"""Threads that call stores: what ends each, and the port of its store."""
_calling: Calls = {}
_ended = threading.Event()
"""Set when the process ends: who connects again then calls no store any more."""


def call_stores(work: Callable[[], None], end: Callable[[], None], port: int, name: str) -> None:
    """Run work() in a daemon thread that ends before the interpreter does. One whose call of torch
    returns to an interpreter that ends would abort the process (SIGABRT), whatever its exit code.

    Args:
        work: calls a TCPStore.
        end: has work() return after its present call; from another thread.
        port: of that store.
        name: of the thread.
    """

    def run() -> None:
        _calling[threading.current_thread()] = end, port
        try:
            if not _ended.is_set():  # after the line above: `_end_calls` sees it there, or it ends
                work()
        finally:
            del _calling[threading.current_thread()]

    threading.Thread(target=run, name=name, daemon=True).start()


@atexit.register
def _end() -> None:
    """No thread calls a store any more."""
    _ended.set()
    _end_calls()


def _end_calls() -> None:
    """End the threads of `call_stores`; those that wait for an answer by closing connections."""
    left = dict(_calling)
    for end, _ in left.values():
        end()
    _join(left, END_SECONDS)
    deadline = time.monotonic() + CUT_SECONDS
    while (ports := {port for _, port in left.values()}) and time.monotonic() < deadline:
        _cut(ports)
        _join(left, END_SECONDS)  # and again: torch connects anew where it is cut off connecting


def _cut(ports: set[int]) -> None:
    """Shut this process's connections to ports; whoever has opened them still closes them."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # no socket, or not connected
            connection = socket.socket(fileno=int(name))
            try:
                if connection.getpeername()[1:2] in {(port,) for port in ports}:
                    connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()


def _join(calls: Calls, seconds: float) -> None:
    """Wait for at most `seconds` until all threads have ended; those that have are taken out."""
    deadline = time.monotonic() + seconds
    for thread in list(calls):
        thread.join(max(0.0, deadline - time.monotonic()))
        if not thread.is_alive():
            del calls[thread]


def host_store(host: str, port: int) -> dist.TCPStore:
    """Host a store in this process, for as long as the result lives.

    Args:
        host: address to tell clients. A store that is told as a loopback address listens there
            only, any other on every interface.
        port: 0 for a free one; `.port` tells.

    Raises:
        OSError: the port is taken.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # 1024 are usual, one for each client
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if ip_address(address[0]).is_loopback:
        listener = socket.create_server((address[0], port), family=family)
    else:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    port = listener.getsockname()[1]
    try:  # the store closes the listener's descriptor
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    except (dist.DistNetworkError, RuntimeError) as error:
        raise OSError(
            f"cannot host a store on port {port}: {str(error).splitlines()[0]}"
        ) from error


def serve(port: int, host: str = "0.0.0.0") -> None:
    """Host a store until the process is ended."""
    outlive()
    store = host_store(host, port)
    print(f"store: listening on port {store.port}", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    serve(int(sys.argv[1]), *sys.argv[2:])
