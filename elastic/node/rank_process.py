"""A rank as the agent of its node represents it, and what the exit of its process means."""

import signal
import socket
from contextlib import suppress
from dataclasses import dataclass, replace

from elastic.exits import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_DONE,
    EXIT_MENDED,
    EXIT_OUTVOTED,
    EXIT_PAUSED,
    EXIT_PEER_GONE,
    EXIT_WRONG_INPUT,
)
from elastic.group.membership import MembershipEnd, MembershipFailure
from elastic.node.progress import NodeRankProgress
from elastic.node.zygote import MAX_MESSAGE

FROM_OUTSIDE = {
    *(signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
}
"""Signals that no error of a program causes: another process has sent them, or the kernel (SIGKILL,
out of memory)."""


@dataclass
class NodeRankProcess:
    """A training process. All times are by time.monotonic()."""

    key: str
    """Name of the process in messages to the zygote."""
    recall: socket.socket | None
    """Socket to the process, see recall.py; None once the process has closed its end."""
    pid: int = 0
    """Process id; 0 until the zygote reports it."""
    able: float | None = None
    """Time from which the agent can recall the process, so that it continues as a rank of a later
    generation (recall.py); None: it cannot."""
    recalled: float | None = None
    """Time at which the agent recalled the process (recall.py); None: it was not recalled, or has
    become ready for its generation since."""
    stuck: bool = False
    """Whether the process, after its recall, still waits in a collective that never ends."""
    lost: float | None = None
    """Time at which the process reported that it lost a peer; None: it lost none, or the failure
    has been reported since."""


@dataclass
class NodeReserveProcess:
    """A spare process that can become any rank of this node; see recall.py."""

    process: NodeRankProcess
    dumps: int
    """Descriptor of the file in memory for its stack dumps."""
    _waits: bool = False

    def waits(self) -> bool:
        """Whether the process has finished its preparations, and waits to become a rank."""
        with suppress(OSError):
            if self.process.recall and not self._waits:
                self._waits = bool(self.process.recall.recv(MAX_MESSAGE, socket.MSG_DONTWAIT))
        return self._waits


@dataclass
class NodeRank:
    """A rank of this node: its stand-in (standin.py), and its training process if it has one."""

    connection: socket.socket
    """Socket to the stand-in, the process that torchrun has started for the rank."""
    descriptors: list[int]
    """Descriptors from the stand-in: its program, stdin, stdout and stderr."""
    round: int
    rank: int
    local_rank: int
    dumps: int
    """Descriptor of the file in memory for the stack dumps of its process."""
    process: NodeRankProcess | None = None
    code: int | None = None
    """Exit code of the last process; None: it has not exited."""

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0


def judge_exit(
    rank: int,
    code: int,
    progress: NodeRankProgress,
    blank: MembershipFailure,
    *,
    job_done: bool,
    first_start: bool,
    out_of_memory: bool,
    how: str = "",
) -> MembershipEnd | MembershipFailure | None:
    """Decide what the exit of a training process means for the job: its end, a failure to report,
    or nothing (None), if the rank has paused.

    Args:
        code: exit code; negative: minus the number of the signal that ended the process.
        blank: a `MembershipFailure` with node, step and time of the exit, to be completed.
        first_start: whether the process belonged to the job's first generation.
        out_of_memory: whether the kernel has just killed a process for lack of memory.
        how: what is known about the exit besides its code.
    """
    why, error = signal.Signals(-code).name if code < 0 else f"exit code {code}", progress.error
    if how or error:
        why += f" ({how or error})"
    if code == EXIT_DONE or job_done:
        return MembershipEnd(EXIT_DONE, "the run is finished")
    # Wrong input ends the job only at its first start: later the input was right, so the storage
    # that it is read from may be unavailable.
    wrong_input = code == EXIT_WRONG_INPUT and first_start and not progress.step
    if code == EXIT_DO_NOT_REQUEUE or wrong_input:
        return MembershipEnd(code, f"rank {rank} ended with {why}")
    if code == EXIT_PAUSED:
        return None
    if code == EXIT_PEER_GONE:  # the failed peer may be on a lost node, which cannot report it
        return replace(blank, why=f"rank {rank} lost its connection to another")
    if code == EXIT_OUTVOTED:
        return replace(blank, rank=rank, why=error.partition(": ")[2], error=error, unfit=True)
    # A rank that has reported an error fails because of it, whatever signal follows.
    outside = -code in FROM_OUTSIDE and not error
    if code == -signal.SIGKILL and out_of_memory:
        outside, error = False, "the kernel killed it: out of memory"
        why += f" ({error})"
    mended = code == EXIT_MENDED
    return replace(blank, rank=rank, why=why, error=error, mended=mended, outside=outside)
