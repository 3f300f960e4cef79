"""A page of shared memory between the ranks of a node and its agent: how far each rank is, and
whether it is asked to pause. Reading and writing costs no system call."""

import logging
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Self

from elastic.exits import EXIT_PAUSED, heeded, leave_at_once, leaving_code
from elastic.process import lost

logger = logging.getLogger(__name__)

RANKS = 64
"""Most ranks of one node."""
_ENTRY = 256
_SECRET, _SECRET_BYTES = RANKS * _ENTRY, 32
"""Where the secret of the round is, behind the entries."""
_FREE = _SECRET + _SECRET_BYTES
"""Offset of a uint64 for each local rank: most bytes that its device has had free."""
_BYTES = _FREE + 8 * RANKS
_ASKED, _NOTICED, _STEP, _PHASE, _SAFE, _AT, _PID, _PATIENCE, _MUTE, _ERROR = (
    0, 4, 8, 16, 20, 24, 32, 36, 40, 44,
)  # fmt: skip
_FIELDS = struct.Struct("IIQIIdIf")
"""What a rank says but for the error, each at its place above."""
PROGRESS = "PERDURE_PROGRESS"
"""Environment variable: descriptor of the page, and local rank."""
PHASES = (
    "start", "init", "load", "data", "step", "fetch", "reduce", "staging", "update", "after",
    "save", "evaluate", "end", "failed",
)  # fmt: skip
"""What a rank does; "data" is waiting for a batch, "fetch" for that of the next step while a GPU
computes, "reduce" is from the step's all-reduce on, where it waits for the others, "staging" is
waiting for the copy of a save, "after" is long work that follows only some steps, and "failed" from
an error on, until its process has ended."""

PAUSE = 1
PAUSE_TO_LEAVE = 1 << 20
"""Requests of all ranks are summed: this is more than all ranks that ask for the other."""


@dataclass(frozen=True)
class Progress:
    """What a rank said last."""

    step: int
    phase: str
    at: float
    """By time.monotonic(), which all processes of a machine share."""
    noticed: bool
    """It was told by a signal that its time is over."""
    error: str = ""
    """Why it failed, in a line."""
    safe: bool = False
    """Nothing is lost if it is ended now: what it knows is in storage."""
    pid: int = 0
    """Process id."""
    patience: float = 0.0
    """Seconds that it asks for where it waits, or does what is not done again and again."""


class ProgressPage:
    """The page, as file descriptor and mapping.

    Args:
        descriptor: of the memory; `make` makes one.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, _BYTES)

    @classmethod
    def make(cls) -> Self:
        """A page in memory without a name: it goes when the last process that has it goes."""
        descriptor = os.memfd_create("perdure-progress")
        os.ftruncate(descriptor, _BYTES)
        return cls(descriptor)

    def share_secret(self, secret: bytes) -> None:
        """Tell the ranks the secret (32 bytes) of the round that begins. By the agent. No other
        user can read this memory, as it would be possible with a file or an argument."""
        self._map[_SECRET : _SECRET + _SECRET_BYTES] = secret

    def clear(self, local_rank: int) -> None:
        """Forget a rank. By the agent, before the rank starts."""
        start = local_rank * _ENTRY
        self._map[start : start + _ENTRY] = bytes(_ENTRY)
        struct.pack_into("d", self._map, start + _AT, time.monotonic())

    def ask_to_pause(self, local_rank: int, *, leaving: bool) -> None:
        """Ask a rank, and with it all ranks of the job, to end after their step. By the agent.

        Args:
            local_rank: which.
            leaving: this node goes, and what is in its memory with it.
        """
        asked = PAUSE_TO_LEAVE if leaving else PAUSE
        struct.pack_into("I", self._map, local_rank * _ENTRY + _ASKED, asked)

    def unask(self, local_rank: int) -> None:
        """Take back what a rank was asked. By the agent."""
        struct.pack_into("I", self._map, local_rank * _ENTRY + _ASKED, 0)

    def say_mute(self, local_rank: int) -> None:
        """Tell a rank that output of its agent was dropped, for the ledger. By the agent."""
        struct.pack_into("I", self._map, local_rank * _ENTRY + _MUTE, True)

    def read(self, local_rank: int) -> Progress:
        """How far a rank is. By the agent."""
        start = local_rank * _ENTRY
        _, noticed, step, phase, safe, at, pid, patience = _FIELDS.unpack_from(self._map, start)
        error = self._map[start + _ERROR : start + _ENTRY].rstrip(b"\0").decode(errors="ignore")
        return Progress(step, PHASES[phase], at, bool(noticed), error, bool(safe), pid, patience)


class Pulse:
    """A rank's part of the page.

    Args:
        page: shared with the node's agent, or one of its own where there is no such agent.
        local_rank: whose part.
    """

    def __init__(self, page: ProgressPage, local_rank: int) -> None:
        self._map, self._start = page._map, local_rank * _ENTRY
        self._free = _FREE + 8 * local_rank
        self.wants_save = False
        """This rank would have all save after this step."""
        self._sign()

    @classmethod
    def from_environment(cls) -> Self:
        """The pulse of this process."""
        descriptor, _, local_rank = os.environ.get(PROGRESS, "").partition(":")
        if not descriptor:
            return cls(ProgressPage.make(), 0)
        return cls(ProgressPage(int(descriptor)), int(local_rank))

    @property
    def secret(self) -> bytes:
        """The secret of this round, empty where no agent has told one; see `join_world`."""
        secret = self._map[_SECRET : _SECRET + _SECRET_BYTES]
        return secret if any(secret) else b""

    @property
    def most_free(self) -> int:
        """Most bytes that this place's device has had free; 0 if that is not known. It outlives the
        process that says so, as long as the agent lives."""
        return int(struct.unpack_from("Q", self._map, self._free)[0])

    @most_free.setter
    def most_free(self, nbytes: int) -> None:
        struct.pack_into("Q", self._map, self._free, nbytes)

    def _sign(self) -> None:
        struct.pack_into("I", self._map, self._start + _PID, os.getpid())

    def forget(self) -> None:
        """Begin anew, as a process that was just started; what it was told and asked stays."""
        start, end = self._start + _STEP, self._start + _ENTRY
        self._map[start:end] = bytes(end - start)
        self.wants_save = False
        self._sign()
        self.report(0, "start")

    def report(self, step: int, phase: str) -> None:
        """Say how far this rank is: the step it works on, and one of PHASES."""
        struct.pack_into("Q", self._map, self._start + _STEP, step)
        struct.pack_into("I", self._map, self._start + _PHASE, PHASES.index(phase))
        struct.pack_into("d", self._map, self._start + _AT, time.monotonic())

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Say what this rank does within, and afterwards that it does again what it did before."""
        (step,) = struct.unpack_from("Q", self._map, self._start + _STEP)
        (before,) = struct.unpack_from("I", self._map, self._start + _PHASE)
        self.report(step, phase)
        yield
        self.report(step, PHASES[before])

    def fail(self, error: str) -> None:
        """Say, in a line, why this rank is about to end."""
        size = _ENTRY - _ERROR
        start = self._start + _ERROR
        self._map[start : start + size] = error.encode(errors="replace")[:size].ljust(size, b"\0")
        (step,) = struct.unpack_from("Q", self._map, self._start + _STEP)
        self.report(step, "failed")

    @property
    def told_by_first(self) -> bool:
        """The first rank of this node, which is another, is about to end for the same reason."""
        ours = self._map[self._start + _ERROR : self._start + _ENTRY]
        return self._start > 0 and ours == self._map[_ERROR:_ENTRY]

    def notice(self, number: int) -> None:
        """Say that this rank was told to go, by a signal."""
        struct.pack_into("I", self._map, self._start + _NOTICED, number)

    @property
    def noticed(self) -> int:
        """The signal by which this rank was told to go; 0 if it was not."""
        return int(struct.unpack_from("I", self._map, self._start + _NOTICED)[0])

    @property
    def safe(self) -> bool:
        """See `Progress`. A rank that is told to go then goes at once, whatever it is doing."""
        return bool(struct.unpack_from("I", self._map, self._start + _SAFE)[0])

    @safe.setter
    def safe(self, safe: bool) -> None:
        struct.pack_into("I", self._map, self._start + _SAFE, safe)

    @property
    def mute(self) -> bool:
        """Whether output of this process, or of its agent, was dropped; see `outlive`."""
        return bool(lost() or struct.unpack_from("I", self._map, self._start + _MUTE)[0])

    def be_patient(self, seconds: float) -> None:
        """See `Progress.patience`."""
        struct.pack_into("f", self._map, self._start + _PATIENCE, seconds)

    @property
    def asked_to_pause(self) -> int:
        """Whether the agent asks this rank to end after its step, or it was told to go: 0, PAUSE or
        PAUSE_TO_LEAVE."""
        asked, noticed = struct.unpack_from("II", self._map, self._start + _ASKED)
        return PAUSE_TO_LEAVE if noticed else int(asked)


LOOK_SECONDS = 0.1


def watch_signals(pulse: Pulse) -> None:
    """Take SIGTERM, SIGUSR1, SIGHUP and Ctrl-C as notices: the ranks agree on a last step, save and
    leave; a second Ctrl-C ends this process at once. A SIGHUP that is ignored stays ignored.

    A Python signal handler does not run while the main thread is in a collective, so the signals
    are blocked, here and in every thread and process started later (a data worker must not die of
    the group's SIGTERM before the last step has its data), and a thread waits for them. Somebody
    may let them through again: the resource tracker of multiprocessing does, up to Python 3.12,
    when the first shared memory is made. Then they are blocked and sent anew. To be called in the
    main thread, before there are others.

    An agent of ours takes Ctrl-C itself, and ends its ranks where they have nothing to save. Under
    torchrun's own agent SIGTERM is what ends a rank whose peers failed, possibly in a collective
    that will never end; there it stays deadly. So does all but SIGHUP, which that agent passes on
    when its terminal is closed; it kills what has not ended 30 s later.
    """
    from elastic.world import supervised  # imports torch

    notices, restarts = heeded(), supervised()
    if "RANK" in os.environ and not restarts:
        notices &= {signal.SIGHUP}
    if not notices:
        return

    def block(number: int | None = None, _: FrameType | None = None) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, notices)
        if number:
            os.kill(os.getpid(), number)

    block()
    for number in notices:
        signal.signal(number, block)
    take = partial(_wait, pulse, notices, restarts)
    threading.Thread(target=take, name="perdure-notice", daemon=True).start()


def pause_code(pulse: Pulse) -> int:
    """How a rank leaves that has paused."""
    from elastic.world import supervised

    return EXIT_PAUSED if supervised() else leaving_code(pulse.noticed)


def _wait(pulse: Pulse, notices: Set[signal.Signals], restarts: bool) -> None:
    number = signal.sigwait(notices)
    logger.warning("%s: saving after this step, then leaving", signal.Signals(number).name)
    pulse.notice(number)
    if restarts:
        return
    interrupted = number == signal.SIGINT
    while not pulse.safe:
        again = signal.sigtimedwait({signal.SIGINT} & notices, LOOK_SECONDS)
        if again and interrupted:
            number = signal.SIGINT
            break
        interrupted = interrupted or again is not None
    leave_at_once(number)
