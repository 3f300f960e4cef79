"""A rank's connection to the writer process of its node. The first rank starts the process."""

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

from checkpointing.errors import StorageError, explain
from checkpointing.save import messages as msg
from checkpointing.save.channel import SaveChannel, call
from checkpointing.wire import pack

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 20
RESTART_SECONDS = 5
END_SECONDS = 10
GONE = "the checkpoint writer process of this node is gone"


class WriterGoneError(Exception):
    """The writer process is gone or does not answer."""


class WriterUnansweredError(WriterGoneError):
    """The writer process was lost after a request was sent. Other ranks may have the answer."""


def launch() -> "subprocess.Popen[bytes]":
    """Start a writer process. It imports its modules and waits for its setup on standard input."""
    return subprocess.Popen(
        [sys.executable, "-m", "checkpointing.save.writer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # signals of the terminal are for the job's ranks only
        # the child must import this very package, and nothing from its working directory
        env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def end(process: "subprocess.Popen[bytes]", seconds: float) -> int:
    """Wait for a process that has no connections, and kill it after `seconds`. Returns its exit
    code, negative if a signal has ended it."""
    if process.stdin:
        with suppress(BrokenPipeError):
            process.stdin.close()
    # a killed process closes its connections a moment before it is dead
    if _code(process, seconds) is None:
        process.kill()
    if process.stdout:
        process.stdout.close()
    code = _code(process, END_SECONDS)
    # without a code the process hangs in an uninterruptible system call
    return -signal.SIGKILL if code is None else code


def _code(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """Wait for a process like `Popen.wait`, which polls ever less often, while other ranks wait for
    this one. Returns its exit code; None if it has not ended within `seconds`."""
    with suppress(ProcessLookupError):  # it has ended, and another thread has asked for its code
        if process.poll() is None:
            descriptor, poll = os.pidfd_open(process.pid), select.poll()
            poll.register(descriptor, select.POLLIN)
            try:
                poll.poll(seconds * 1000)
            finally:
                os.close(descriptor)
    return process.poll()


class SpareWriter:
    """A writer process that is started before it is needed, since its imports take a while. A rank
    has one for all its checkpointers. Used in the main thread; an unused writer process ends with
    the rank."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start a spare writer process unless there is one. Errors are ignored."""
        if self._process is None:
            with suppress(OSError):  # `take` tries again
                self._process = launch()

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            end(process, 0)

    def take(self) -> "subprocess.Popen[bytes]":
        """Returns the spare process, or starts one. Raises OSError if none can be started."""
        process, self._process = self._process, None
        # the spare process may have ended, for example for lack of memory
        if process is not None and process.poll() is not None:
            end(process, 0)
            process = None
        return process or launch()


class WriterLink:
    """A rank's connection to the writer process of its node. Every rank has one. `process`, the
    result of `launch` on the node's first rank and None on the others, ends with this object."""

    def __init__(
        self, setup: msg.WriterSetup, rank: int, process: "subprocess.Popen[bytes] | None"
    ) -> None:
        self._setup, self._rank, self._process = setup, rank, process
        self._connection: SaveChannel | None = None
        self._interrupted = False

    @property
    def secret(self) -> bytes:
        return self._setup.secret

    def start(self) -> msg.Address:
        """Send the setup if this rank owns the process; returns the process's address for other
        nodes. On other ranks returns ("", 0)."""
        process = self._process
        if process is None:
            return "", 0
        if process.stdin is None or process.stdout is None:
            raise StorageError("the checkpoint writer process was started without pipes")
        setup = pack(replace(self._setup, parent=os.getpid()))
        with suppress(BrokenPipeError):  # the process has ended, so readline returns nothing
            # the size comes first: a forked child may keep the pipe open, without EOF
            process.stdin.write(len(setup).to_bytes(msg.SIZE_BYTES, "little") + setup)
            process.stdin.close()
        line = process.stdout.readline()
        if not line:
            raise StorageError("the checkpoint writer process did not start; see its error above")
        # a restarted process must listen on the same port, where other nodes expect it
        self._setup = replace(self._setup, port=int(line))
        return self._setup.host, int(line)

    def connect(self, seconds: float = CONNECT_SECONDS) -> None:
        """Connect to the process, which may still be starting or restarting. Raises WriterGoneError
        if it is not reached within `seconds`, or `interrupt` was called."""
        deadline = time.monotonic() + seconds
        while True:
            if self._interrupted:  # `interrupt` may be called before there is a connection
                raise WriterGoneError(GONE)
            try:
                left = max(0.01, deadline - time.monotonic())
                self._connection = call(self._setup.address, self._setup.secret, left)
                self._connection.send(msg.SaveCallerGreeting("rank", self._rank))
                return
            except (OSError, EOFError) as error:
                if self._process and (code := self._process.poll()) is not None:
                    raise WriterGoneError(
                        f"the checkpoint writer process ended with code {code} as soon as it had "
                        "started; see its error above"
                    ) from error
                if time.monotonic() > deadline:
                    raise WriterGoneError(
                        "the checkpoint writer process cannot be reached"
                    ) from error
                time.sleep(0.01)

    def restart(self, voided: int = 0) -> None:
        """Restart the process if this rank owns it, and connect again; `voided`: see WriterSetup.
        Raises WriterGoneError if that fails, or `interrupt` was called."""
        if self._interrupted:
            raise WriterGoneError(GONE)
        if self._process:
            # the end of the process frees the name of the socket, and the lock on the slots
            code = end(self._process, END_SECONDS)
            logger.warning(
                "the checkpoint writer process ended with code %d; starting it again", code
            )
            try:
                self._process = launch()
                self._setup = replace(self._setup, voided=voided)
                self.start()
            except (OSError, StorageError) as error:
                raise WriterGoneError(
                    f"the checkpoint writer process cannot be started again: {explain(error)}"
                ) from error
        # A short wait: if the node's first rank already has its answer, it does not restart the
        # process now.
        self.connect(RESTART_SECONDS)

    def send(self, message: msg.FromRank) -> None:
        """Send a message. Raises WriterGoneError if there is no connection. Callable from any
        thread."""
        connection = self._connection
        if connection is None:
            raise WriterGoneError(GONE)
        try:
            connection.send(message)
        except OSError as error:
            raise WriterGoneError(GONE) from error

    def receive(self, seconds: float) -> msg.ToRank | None:
        """Returns the next message; None if none arrives within `seconds`. Raises WriterGoneError
        if there is no connection."""
        if self._connection is None:
            raise WriterGoneError(GONE)
        try:
            # a message that has begun to arrive is read completely, however long that takes
            if not self._connection.poll(seconds):
                return None
            message: msg.ToRank = self._connection.recv()
            return message
        except (OSError, EOFError) as error:
            self._connection = None
            raise WriterGoneError(GONE) from error

    def interrupt(self) -> None:
        """End the connection for good, and wake threads that wait for it. From any thread."""
        self._interrupted = True
        if self._connection is not None:
            self._connection.shut()

    def kill(self) -> None:
        """End the connection and, if this rank owns it, kill the process."""
        if self._connection is not None:
            self._connection.shut()
            self._connection = None
        if self._process is not None:
            self._process.kill()

    def end(self, seconds: float) -> None:
        """Close the connection. If this rank owns the process, wait up to `seconds` for it to end,
        which it does once no rank is connected; then kill it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            end(self._process, seconds)
            self._process = None


def own_address() -> str:
    """Returns the address, for other nodes, of this machine's interface towards MASTER_ADDR."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        family, *_, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # over UDP this sends nothing, and only selects the route
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostbyname(socket.gethostname())
