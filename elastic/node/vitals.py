"""What the kernel tells of a rank that has been where it is for long: whether it is stopped, works,
or waits for a core. Linux; where /proc does not tell, nothing is assumed.

[Note: own time] On a machine with more to do than it has cores a healthy rank takes many times as
long as usual. The kernel counts for every thread how long it was ready to run and did not get a
core (the second number of schedstat), and how long the hypervisor ran somebody else (steal). A rank
is judged by the time without these: its own. That of a rank that sleeps, waits for ever or is
stopped is all its own, however busy the machine is; and so is a tenth of anybody's, so that who
spins for ever is found, too.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from elastic.node.progress import Progress

YOUNG = 0.5
"""Seconds in a phase before which nobody is looked at: what goes well costs nothing."""
EVERY = 0.25
"""Seconds between two looks at a rank: many threads are many files of /proc."""
MOST = 0.9
"""At most this share of the time is taken for waiting for a core."""
_TICKS, _CORES = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_NPROCESSORS_ONLN")


@dataclass(frozen=True)
class Vitals:
    """What the kernel tells of a process, in seconds since it began."""

    stopped: bool
    """By SIGSTOP: it does nothing until somebody has it go on."""
    runs: int
    """How often its main thread was given a core."""
    worked: float
    """CPU time of its threads."""
    starved: float
    """Time in which its threads were ready and had no core, and that was stolen of one core."""


@dataclass(frozen=True)
class Signs:
    """What is known of a rank since it entered its phase."""

    stopped: float = 0.0
    """Seconds for which it has been stopped, up to now."""
    starved: float = 0.0
    """Seconds that are not its own."""
    busy: bool = False
    """It computes, or would, most of the time."""


NO_SIGNS = Signs()


@dataclass
class _Mark:
    """A rank when it was first looked at in a phase."""

    pid: int
    entered: float
    at: float
    vitals: Vitals
    looked: float = 0.0
    signs: Signs = NO_SIGNS
    """By the last look."""
    stopped_at: float | None = None
    runs: int = 0
    """How often its main thread had run when it was seen to be stopped."""


class Vigil:
    """Follows the ranks of a node."""

    def __init__(self) -> None:
        self._marks: dict[int, _Mark] = {}

    def look(
        self, pids: Mapping[int, int], progress_by_rank: Mapping[int, Progress], now: float
    ) -> dict[int, Signs]:
        """The signs of all ranks; at every look, so that it is known since when.

        Args:
            pids: process ids by rank; 0 for one that is just being forked.
            progress_by_rank: what they said last.
            now: by time.monotonic().
        """
        signs = {}
        stolen: float | None = None
        for rank, progress in progress_by_rank.items():
            mark = self._marks.get(rank)
            same = mark is not None and (mark.pid, mark.entered) == (pids[rank], progress.at)
            if mark and same and now - mark.looked < EVERY:
                signs[rank] = mark.signs
                continue
            vitals = None
            if pids[rank] and now - progress.at > YOUNG:
                stolen = _stolen() if stolen is None else stolen
                vitals = read_vitals(pids[rank], stolen)
            signs[rank] = self.note(rank, pids[rank], progress.at, now, vitals)
        return signs

    def note(self, rank: int, pid: int, entered: float, now: float, vitals: Vitals | None) -> Signs:
        """What follows for a rank, in its phase since `entered`, from what the kernel told `now`
        and before."""
        if vitals is None:
            self._marks.pop(rank, None)
            return NO_SIGNS
        mark = self._marks.get(rank)
        if mark is None or (mark.pid, mark.entered) != (pid, entered):
            mark = self._marks[rank] = _Mark(pid, entered, now, vitals)
        mark.looked = now
        if not vitals.stopped:
            mark.stopped_at = None
        elif mark.stopped_at is None or vitals.runs != mark.runs:  # it has run between two looks
            mark.stopped_at, mark.runs = now, vitals.runs
        starved = max(0.0, vitals.starved - mark.vitals.starved)
        wanted = vitals.worked - mark.vitals.worked + starved
        mark.signs = Signs(
            stopped=0.0 if mark.stopped_at is None else now - mark.stopped_at,
            starved=min(starved, MOST * (now - entered)),
            busy=wanted > 0.5 * (now - mark.at) > 0,
        )
        return mark.signs


def read_vitals(pid: int, stolen: float = 0.0) -> Vitals | None:
    """What the kernel tells of a process now; None if it has ended, or /proc does not tell.

    `stolen`: by the hypervisor, seconds of one core since the machine began.
    """
    try:
        state, *fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        runs = int(_read(f"/proc/{pid}/schedstat").split()[2])
        threads = os.listdir(f"/proc/{pid}/task")
    except (OSError, IndexError):
        return None
    starved = stolen
    for thread in threads:
        with suppress(OSError, IndexError):  # one that has just ended
            starved += int(_read(f"/proc/{pid}/task/{thread}/schedstat").split()[1]) / 1e9
    return Vitals(state == "T", runs, (int(fields[10]) + int(fields[11])) / _TICKS, starved)


def _stolen() -> float:
    with suppress(OSError, IndexError):
        return int(_read("/proc/stat").split(maxsplit=9)[8]) / _TICKS / _CORES
    return 0.0


def _read(path: str) -> str:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 4096).decode(errors="replace")
    finally:
        os.close(descriptor)
