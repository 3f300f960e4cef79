"""Memory shared between the ranks of a node and their agent: each rank reports its progress and the
signals it received, the agent requests pauses and passes on the round's secret. Reads and writes
take no system call."""

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
from types import FrameType
from typing import Self

from elastic.exits import EXIT_PAUSED, handled_signals, leave_at_once, leaving_code
from elastic.process import lost_output

logger = logging.getLogger(__name__)

RANKS = 64
_ENTRY = 256
_SECRET, _SECRET_BYTES = RANKS * _ENTRY, 32
"""Offset and size of the secret of the round, behind the entries of the ranks."""
_FREE = _SECRET + _SECRET_BYTES
"""Offset of one uint64 per local rank: the largest number of free bytes that its device has had."""
_BYTES = _FREE + 8 * RANKS
_PAUSE, _NOTICED, _STEP, _PHASE, _SAFE, _AT, _PID, _PATIENCE, _MUTE, _ERROR = (
    0, 4, 8, 16, 20, 24, 32, 36, 40, 44,
)  # fmt: skip
_FIELDS = struct.Struct("IIQIIdIf")
PROGRESS = "PERDURE_PROGRESS"
"""Environment variable `DESCRIPTOR:LOCAL_RANK`: descriptor of the `NodeProgressPage`, and the rank
whose entry in it this process uses."""
PHASES = (
    "start", "init", "load", "data", "step", "fetch", "reduce", "staging", "update", "after",
    "save", "evaluate", "end", "failed",
)  # fmt: skip
"""Phases of a rank. "data": waiting for a batch; "fetch": waiting for the batch of the next step
while a GPU computes this step; "reduce": begins with the step's all-reduce, where ranks wait for
each other; "staging": waiting for the copy of a save; "after": long work that follows only some
steps; "failed": from an error until the process has ended."""

PAUSE = 1
PAUSE_TO_LEAVE = 1 << 20
"""Value of `Pulse.pause_request` if the node leaves. Ranks sum their requests, and this value
exceeds any sum of PAUSE."""


@dataclass(frozen=True)
class NodeRankProgress:
    """The last report of a rank to its agent."""

    step: int
    phase: str
    at: float
    """Time of the report, by time.monotonic(), which all processes of a machine share."""
    noticed: bool
    error: str = ""
    safe: bool = False
    """Whether all state of the rank is in storage, so that it can end without loss."""
    pid: int = 0
    patience: float = 0.0
    """Time limit in seconds that the rank requests for waits and for phases that happen once."""


class NodeProgressPage:
    """Shared memory with an entry for each rank of a node, mapped from `descriptor`."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, _BYTES)

    @classmethod
    def make(cls) -> Self:
        """Create a page in anonymous memory, freed when the last process that maps it ends."""
        descriptor = os.memfd_create("perdure-progress")
        os.ftruncate(descriptor, _BYTES)
        return cls(descriptor)

    def share_secret(self, secret: bytes) -> None:
        """Write the secret (32 bytes) of the round that begins, for the ranks. Other users can read
        arguments of processes, and perhaps files, but not this memory."""
        self._map[_SECRET : _SECRET + _SECRET_BYTES] = secret

    def clear(self, local_rank: int) -> None:
        start = local_rank * _ENTRY
        self._map[start : start + _ENTRY] = bytes(_ENTRY)
        # The time limit of phase PHASES[0] counts from now.
        struct.pack_into("d", self._map, start + _AT, time.monotonic())

    def request_pause(self, local_rank: int, *, leaving: bool) -> None:
        """Request that a rank, and thereby all ranks of the job, end after the step. `leaving`:
        whether this node leaves, so that its memory will be lost."""
        request = PAUSE_TO_LEAVE if leaving else PAUSE
        struct.pack_into("I", self._map, local_rank * _ENTRY + _PAUSE, request)

    def withdraw_pause(self, local_rank: int) -> None:
        struct.pack_into("I", self._map, local_rank * _ENTRY + _PAUSE, 0)

    def set_mute(self, local_rank: int) -> None:
        """Tell a rank that its agent had to drop output, for the rank to record in the ledger."""
        struct.pack_into("I", self._map, local_rank * _ENTRY + _MUTE, True)

    def read(self, local_rank: int) -> NodeRankProgress:
        start = local_rank * _ENTRY
        _, noticed, step, phase, safe, at, pid, patience = _FIELDS.unpack_from(self._map, start)
        error = self._map[start + _ERROR : start + _ENTRY].rstrip(b"\0").decode(errors="ignore")
        return NodeRankProgress(
            step, PHASES[phase], at, bool(noticed), error, bool(safe), pid, patience
        )


class Pulse:
    """A rank's own entry in the `NodeProgressPage`, through which it reports to its agent. Without
    an agent the page is private to this process."""

    def __init__(self, page: NodeProgressPage, local_rank: int) -> None:
        self._map, self._start = page._map, local_rank * _ENTRY
        self._free = _FREE + 8 * local_rank
        self.wants_save = False
        """The program sets this to make all ranks save after this step."""
        self.wants_pause = False
        """The program sets this to make all ranks end after this step, and start again."""
        self._sign()

    @classmethod
    def from_environment(cls) -> Self:
        descriptor, _, local_rank = os.environ.get(PROGRESS, "").partition(":")
        if not descriptor:
            return cls(NodeProgressPage.make(), 0)
        return cls(NodeProgressPage(int(descriptor)), int(local_rank))

    @property
    def secret(self) -> bytes:
        """The secret of this round; empty if there is no agent. See `join_world`."""
        secret = self._map[_SECRET : _SECRET + _SECRET_BYTES]
        return secret if any(secret) else b""  # without an agent there are only zeros

    @property
    def most_free(self) -> int:
        """Largest number of free bytes that this rank's device has had; 0: unknown. The value
        outlives the process: it is lost when the agent ends."""
        return int(struct.unpack_from("Q", self._map, self._free)[0])

    @most_free.setter
    def most_free(self, nbytes: int) -> None:
        struct.pack_into("Q", self._map, self._free, nbytes)

    def _sign(self) -> None:
        struct.pack_into("I", self._map, self._start + _PID, os.getpid())

    def forget(self) -> None:
        """Reset this rank's entry as for a new process, but keep received signals and the agent's
        requests."""
        start, end = self._start + _STEP, self._start + _ENTRY
        self._map[start:end] = bytes(end - start)
        self.wants_save = self.wants_pause = False
        self._sign()
        self.report(0, "start")

    def report(self, step: int, phase: str) -> None:
        """Report the step that this rank works on, and its phase (one of PHASES)."""
        struct.pack_into("Q", self._map, self._start + _STEP, step)
        struct.pack_into("I", self._map, self._start + _PHASE, PHASES.index(phase))
        # The time is written last, because a new time tells the agent that the report is new.
        struct.pack_into("d", self._map, self._start + _AT, time.monotonic())

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Report `phase` inside the block, and the previous phase after it, unless the block raises
        an exception."""
        (step,) = struct.unpack_from("Q", self._map, self._start + _STEP)
        (before,) = struct.unpack_from("I", self._map, self._start + _PHASE)
        self.report(step, phase)
        yield
        self.report(step, PHASES[before])

    def fail(self, error: str) -> None:
        """Report the error, in one line, because of which this rank is about to end."""
        size = _ENTRY - _ERROR
        start = self._start + _ERROR
        self._map[start : start + size] = error.encode(errors="replace")[:size].ljust(size, b"\0")
        (step,) = struct.unpack_from("Q", self._map, self._start + _STEP)
        self.report(step, "failed")

    @property
    def same_error_as_first(self) -> bool:
        """Whether another rank, the first of this node, has reported the same error."""
        own = self._map[self._start + _ERROR : self._start + _ENTRY]
        return self._start > 0 and own == self._map[_ERROR:_ENTRY]

    def notice(self, number: int) -> None:
        """Report that this rank received signal `number`, which asks it to leave."""
        struct.pack_into("I", self._map, self._start + _NOTICED, number)

    @property
    def noticed(self) -> int:
        """Number of the signal that asked this rank to leave; 0: none."""
        return int(struct.unpack_from("I", self._map, self._start + _NOTICED)[0])

    @property
    def safe(self) -> bool:
        """Whether no state is lost if this rank ends now. It then leaves at once on a signal."""
        return bool(struct.unpack_from("I", self._map, self._start + _SAFE)[0])

    @safe.setter
    def safe(self, safe: bool) -> None:
        struct.pack_into("I", self._map, self._start + _SAFE, safe)

    @property
    def mute(self) -> bool:
        """Whether this process or its agent dropped output; see process.py [Note: output]."""
        return bool(lost_output() or struct.unpack_from("I", self._map, self._start + _MUTE)[0])

    def request_patience(self, seconds: float) -> None:
        struct.pack_into("f", self._map, self._start + _PATIENCE, seconds)

    @property
    def pause_request(self) -> int:
        """The pending request to end after this step: 0 (none), PAUSE, or PAUSE_TO_LEAVE, also
        after a signal to leave."""
        request, noticed = struct.unpack_from("II", self._map, self._start + _PAUSE)
        return PAUSE_TO_LEAVE if noticed else int(request) or PAUSE * self.wants_pause


def watch_signals(pulse: Pulse) -> None:
    """After SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, the ranks agree on a last step, save and leave. A
    second Ctrl-C ends this process at once. A SIGHUP that is ignored stays ignored. Called in the
    main thread.

    A Python signal handler does not run while the main thread is in a collective. So the signals
    are blocked, and a thread waits for them. A signal that an older thread receives is passed on
    once the main thread runs Python. The signals stay blocked in data workers, which must outlive
    a SIGTERM to their process group until the last step has its data.

    The agent of a node handles Ctrl-C itself, and ends ranks that have nothing to save. Under
    torchrun without an agent, all signals but SIGHUP still kill: torchrun sends SIGTERM to a rank
    whose peers failed, and this rank may be in a collective that never ends."""
    from elastic.world import supervised  # imports torch

    notices, restarts = handled_signals(), supervised()
    if "RANK" in os.environ and not restarts:
        notices &= {signal.SIGHUP}
    if not notices:
        return

    take = threading.Thread(
        target=_wait, args=(pulse, notices, restarts), name="perdure-notice", daemon=True
    )

    def pass_on(number: int, _: FrameType | None) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, notices)
        # Not os.kill, since a thread that has not blocked the signals would receive it again, and
        # this handler would call itself. In a forked child the thread is not alive.
        if take.is_alive() and take.ident:
            signal.pthread_kill(take.ident, number)

    signal.pthread_sigmask(signal.SIG_BLOCK, notices)
    take.start()
    for number in notices:
        # A library may unblock the signals (multiprocessing does), or have older threads.
        signal.signal(number, pass_on)


def pause_code(pulse: Pulse) -> int:
    # imported here, as it imports torch
    from elastic.world import supervised

    return EXIT_PAUSED if supervised() else leaving_code(pulse.noticed)


def _wait(pulse: Pulse, notices: Set[signal.Signals], restarts: bool) -> None:
    number = signal.sigwait(notices)
    logger.warning("%s: saving after this step, then leaving", signal.Signals(number).name)
    pulse.notice(number)
    if restarts:  # the agent reads the notice, and decides when this process ends
        threading.Event().wait()  # for ever, as later signals are passed on to this thread
    interrupted = number == signal.SIGINT
    while not pulse.safe:
        again = signal.sigtimedwait({signal.SIGINT} & notices, 0.1)
        # a second Ctrl-C ends the process without a save
        if again and interrupted:
            number = signal.SIGINT
            break
        interrupted = interrupted or again is not None
    leave_at_once(number)
