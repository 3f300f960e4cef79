"""A rank's side of the writer process: start it, talk to it, bring it back when it died."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

from checkpointing.errors import StorageError, explain
from checkpointing.save.channel import Channel, call
from checkpointing.save.messages import SIZE_BYTES, Address, Caller, FromRank, Setup, ToRank
from checkpointing.wire import pack

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 20
RESTART_SECONDS = 5
END_SECONDS = 10
GONE = "the checkpoint writer process of this node is gone"


class WriterGoneError(Exception):
    """The writer process does not answer any more."""


class UnansweredError(WriterGoneError):
    """The writer process has taken a request, and may have answered it to others."""


def launch() -> "subprocess.Popen[bytes]":
    """Start a writer process, which imports what it needs and waits to be told what to be."""
    return subprocess.Popen(
        [sys.executable, "-m", "checkpointing.save.writer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # signals to the job are for us to pass on
        env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def end(process: "subprocess.Popen[bytes]", seconds: float) -> int:
    """Wait for the end of a process whose connections are closed (a process that is killed closes
    them a moment before it is dead), or kill it after so long; returns its exit code."""
    if process.stdin:
        with suppress(BrokenPipeError):
            process.stdin.close()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
    if process.stdout:
        process.stdout.close()
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:  # in a system call that the kernel does not interrupt
        return -signal.SIGKILL


class Spare:
    """A writer process that is started before it is needed: what it imports takes a while. For one
    process, whatever number of checkpointers it has one after the other. Used in the main thread;
    what is left of it ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Have one, if that is possible."""
        if self._process is None:
            with suppress(OSError):  # whoever takes it tries again
                self._process = launch()

    def end(self) -> None:
        """Have none any more."""
        process, self._process = self._process, None
        if process is not None:
            end(process, 0)

    def take(self) -> "subprocess.Popen[bytes]":
        """The spare process, or another that is started now.

        Raises:
            OSError: it cannot be started.
        """
        process, self._process = self._process, None
        if process is not None and process.poll() is not None:
            end(process, 0)
            process = None
        return process or launch()


class Link:
    """A connection to the writer process of this node. All ranks of a node have one.

    Args:
        setup: of the writer process.
        rank: this rank (global).
        process: what `launch` has started, on the node's first rank; it ends with the link.
    """

    def __init__(self, setup: Setup, rank: int, process: "subprocess.Popen[bytes] | None") -> None:
        self._setup, self._rank, self._process = setup, rank, process
        self._connection: Channel | None = None
        self._given_up = False

    @property
    def secret(self) -> bytes:
        """Who does not know it is not listened to."""
        return self._setup.secret

    def start(self) -> Address:
        """Tell the process what to be, if it is this rank's; returns where other nodes reach it."""
        process = self._process
        if process is None:
            return "", 0
        if process.stdin is None or process.stdout is None:
            raise StorageError("the checkpoint writer process has no pipes")
        setup = pack(replace(self._setup, parent=os.getpid()))
        with suppress(BrokenPipeError):  # it has ended: no line will come
            # With its size: a process that this one has forked may keep the pipe open.
            process.stdin.write(len(setup).to_bytes(SIZE_BYTES, "little") + setup)
            process.stdin.close()
        line = process.stdout.readline()
        if not line:
            raise StorageError("the checkpoint writer process did not start; see its error above")
        # Should it have to be started again, others find it where it was.
        self._setup = replace(self._setup, port=int(line))
        return self._setup.host, int(line)

    def connect(self, seconds: float = CONNECT_SECONDS) -> None:
        """Connect to the process; it may still be starting, or being started again."""
        deadline = time.monotonic() + seconds
        while True:
            if self._given_up:
                raise WriterGoneError(GONE)
            try:
                left = max(0.01, deadline - time.monotonic())
                self._connection = call(self._setup.address, self._setup.secret, left)
                self._connection.send(Caller("rank", self._rank))
                return
            except (OSError, EOFError) as error:
                if time.monotonic() > deadline:
                    raise WriterGoneError(
                        "the checkpoint writer process cannot be reached"
                    ) from error
                time.sleep(0.01)

    def restart(self, voided: int = 0) -> None:
        """Bring the process back, and connect again.

        Args:
            voided: see messages.Setup.

        Raises:
            WriterGoneError: that is not possible, or this rank has given the process up.
        """
        if self._given_up:
            raise WriterGoneError(GONE)
        if self._process:
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
        # If it died when it had answered the first rank and not yet this one, nobody starts it
        # again before the next save.
        self.connect(RESTART_SECONDS)

    def send(self, message: FromRank) -> None:
        """Send a message; from any thread.

        Raises:
            WriterGoneError: nobody is there.
        """
        connection = self._connection
        if connection is None:
            raise WriterGoneError(GONE)
        try:
            connection.send(message)
        except OSError as error:
            raise WriterGoneError(GONE) from error

    def receive(self, timeout: float | None = None) -> ToRank | None:
        """The next message; None if none came within `timeout` seconds (None: no limit).

        Raises:
            WriterGoneError: nobody is there.
        """
        if self._connection is None:
            raise WriterGoneError(GONE)
        try:
            if timeout is not None and not self._connection.poll(timeout):
                return None
            message: ToRank = self._connection.recv()
            return message
        except (OSError, EOFError) as error:
            self._connection = None
            raise WriterGoneError(GONE) from error

    def give_up(self) -> None:
        """Part with the process for good. From any thread."""
        self._given_up = True
        if self._connection is not None:
            self._connection.shut()

    def kill(self) -> None:
        """Part with the process whatever it does, and end it if it is this rank's."""
        if self._connection is not None:
            self._connection.shut()
            self._connection = None
        if self._process is not None:
            self._process.kill()

    def end(self, seconds: float) -> None:
        """Let go of the process. It ends when no rank is connected any more; if it is this rank's,
        after so long at the latest."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            end(self._process, seconds)
            self._process = None


def own_address() -> str:
    """The address of this machine that others of the job reach: the one that faces the store."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    try:
        family, *_, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostbyname(socket.gethostname())
