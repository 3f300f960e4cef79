"""Which rank hangs: time-outs learned per phase, stack dumps, blame.

[Note: hang] A rank that hangs makes all others wait in their next collective, so every rank looks
stuck. The one to find is the one the others wait for. Each node's agent sees how far its own ranks
are (progress.py) and knows what is usual (`PhaseTimes`). When one is overdue, all agents ask their
ranks for stack dumps and share where each rank stands (`Standing`); from the same standings every
agent comes to the same `blame`.

A dump is written by a signal handler in C, so a rank that waits in C++ for its peers writes one
too; a rank that waits for a dead disk does not, and that tells as much. A rank that is stopped is
one by what the kernel says (vitals.py), in whatever phase and however busy the machine is.

Nobody healthy is to be ended. So a rank says of every wait what it is for: data and storage have
minutes. And time in which it was ready to run and got no core does not count against it, nor
against those that may have waited for it.
"""

import faulthandler
import os
import re
import signal
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Literal, get_args

from elastic.node.progress import Progress
from elastic.node.vitals import MOST, NO_SIGNS, Signs

ORDER = (
    "failed", "start", "init", "load", "data", "step", "fetch", "reduce", "staging", "update",
    "after", "evaluate", "save", "end",
)  # fmt: skip
"""The phases as a rank goes through them; within a step, "data" to "save". A rank that failed is
behind all others, which wait for it until its process has ended."""
WITHIN_STEP = ("step", "reduce", "update")

FLOOR = 3.5
"""No time-out is shorter: steps of milliseconds are held up for seconds by a busy machine."""
PATIENCE = 300.0
"""For what was not done often enough to know: importing, meeting, a first step that compiles, all
from cold caches."""
UNHURRIED = dict.fromkeys(
    ("load", "data", "fetch", "after", "evaluate", "first evaluate", "staging", "save", "end"), 2
)
"""Times PATIENCE: as long as the state takes to cross a slow filesystem."""
SAVE_SECONDS = 1200.0
"""After which a save is given up, unless the program says otherwise (`Facts.save_seconds`)."""
SAVES = {"staging": 1.2, "save": 1.2, "end": 2.4}
"""Times that, on top: the last rank hears a fifth later that a save was given up, and in the end
two saves may follow each other. So no rank is ended for a save that may still take so long."""
HURRIED = (*WITHIN_STEP, "evaluate")
"""What is done again and again, and computes. All else is done once in a process, or seldom, or
with storage, which stalls when one of its servers is replaced: that it was quick before, perhaps in
a smaller world or from memory, is no reason to hurry now."""
FACTOR = 12
"""A time-out is so many times what 99 of 100 took: a step may well take ten times as long as those
before, with other data or by the user's own schedule."""
WORKING = 30.0
"""No time-out of a rank that computes is shorter: it may have met a hard case."""
ENOUGH = 5
"""Durations from which a time-out is learned."""
KEPT = 200
"""Latest durations of a phase that count."""
AWAY = 1.0
"""Seconds between two looks after which we, and so perhaps the ranks, must have been stopped."""

Where = Literal["stopped", "silent", "elsewhere", "unclear", "collective", "unknown"]
"""What a rank does, by the kernel or its dump; the more suspicious first."""


class PhaseTimes:
    """How long phases take on the ranks of a node, learned from their progress.

    Args:
        floor: shortest time-out, in seconds.
        patience: time-out, in seconds, of what happens once in a process.

    The first step of a process, and its first validation, always have at least `patience`: they
    compile. It is also the second try of a step that was taken for a hang, and must not fail for
    the same reason.
    """

    def __init__(self, floor: float = FLOOR, patience: float = PATIENCE) -> None:
        self.floor, self.patience = floor, patience
        self.save_seconds = SAVE_SECONDS
        """After which a save is given up; the agent sets it to what the program says."""
        self.woke = float("-inf")
        """When the last look came that was late: time before it does not count against a rank."""
        self._durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._looked: float | None = None
        self._last: dict[int, Progress] = {}
        self._first: dict[tuple[int, str], int] = {}
        """By rank and phase: the step in which this process was first in it."""

    def begin(self, rank: int) -> None:
        """A new process takes the place of a rank."""
        self._last.pop(rank, None)
        self._first = {key: step for key, step in self._first.items() if key[0] != rank}

    def follow(self, progress_by_rank: Mapping[int, Progress], now: float) -> None:
        """Take note of how far ranks are. At every look, so that a duration is known as well as
        looks are frequent."""
        if self._looked is not None and now - self._looked > AWAY:
            self.woke = now
        self._looked = now
        for rank, progress in progress_by_rank.items():
            before = self._last.get(rank)
            if before and progress.at != before.at and before.at >= self.woke:
                self.add(self._kind(rank, before), progress.at - before.at)
            if progress.phase in HURRIED:
                self._first.setdefault((rank, _group(progress.phase)), progress.step)
            self._last[rank] = progress

    def forget_steps(self) -> None:
        """Steps, and all else that ranks share, are going to take longer from now on."""
        for kind in HURRIED:
            self._durations.pop(kind, None)

    def add(self, kind: str, seconds: float) -> None:
        """A phase, a "first step" or "first evaluate", was completed."""
        self._durations[kind].append(seconds)

    def limit(self, rank: int, progress: Progress) -> float:
        """Seconds that a rank may stay where it is."""
        kind = self._kind(rank, progress)
        if kind in WITHIN_STEP:  # it may wait for a rank that uses all the time that a step has
            return max(self._learned(kind), self._learned("step"))
        return max(self._learned(kind), 0 if kind in HURRIED else progress.patience)

    def _kind(self, rank: int, progress: Progress) -> str:
        if progress.phase not in HURRIED:
            return progress.phase
        group = _group(progress.phase)
        first = self._first.get((rank, group), progress.step)
        return f"first {group}" if progress.step <= first else progress.phase

    def _learned(self, kind: str) -> float:
        durations = sorted(self._durations[kind])
        patience = self.patience * UNHURRIED.get(kind, 1)
        patience += self.save_seconds * SAVES.get(kind, 0)
        if len(durations) < ENOUGH:
            return patience
        usual = durations[ceil(0.99 * len(durations)) - 1]
        return max(self.floor if kind in HURRIED else patience, FACTOR * usual)


def _group(phase: str) -> str:
    return "step" if phase in WITHIN_STEP else phase


@dataclass(frozen=True)
class Standing:
    """Where a rank stands; shared between agents as JSON."""

    rank: int
    step: int
    phase: str
    seconds: float
    """Since it entered the phase."""
    limit: float
    """Seconds that the phase may take."""
    where: Where = "unknown"
    starved: float = 0.0
    """Seconds of these that it waited for a core."""

    @property
    def overdue(self) -> bool:
        """Its own time is up."""
        return self.seconds - self.starved > self.limit

    @property
    def position(self) -> tuple[int, int]:
        """How far it is, comparable between ranks."""
        return self.step, ORDER.index(self.phase)


def standings(
    progress_by_rank: Mapping[int, Progress],
    now: float,
    times: PhaseTimes,
    dumps: Mapping[int, str] | None = None,
    signs: Mapping[int, Signs] | None = None,
) -> list[Standing]:
    """Where the ranks of this node stand.

    Args:
        progress_by_rank: what they said last.
        now: by time.monotonic().
        times: what is usual here.
        dumps: by rank, from `take_dumps`; a rank without one stays "unknown".
        signs: by rank, what the kernel says.
    """
    ranks = []
    for rank, progress in sorted(progress_by_rank.items()):
        sign = (signs or {}).get(rank, NO_SIGNS)
        limit = times.limit(rank, progress)
        dump = (dumps or {}).get(rank)
        if dump and compiles(dump):
            limit = max(limit, times.patience)
        one = Standing(
            rank,
            progress.step,
            progress.phase,
            max(0.0, now - max(progress.at, times.woke)),
            max(limit, WORKING) if sign.busy else limit,
            "stopped" if sign.stopped else "unknown" if dump is None else where(dump),
            sign.starved,
        )
        if sign.stopped > times.floor:
            one = replace(one, limit=times.floor, starved=0.0)
        ranks.append(one)
    return ranks


def overdue(
    progress_by_rank: Mapping[int, Progress],
    now: float,
    times: PhaseTimes,
    signs: Mapping[int, Signs] | None = None,
) -> list[Standing]:
    """The ranks of this node whose time is up."""
    return [one for one in standings(progress_by_rank, now, times, signs=signs) if one.overdue]


@dataclass(frozen=True)
class Blame:
    """Who hangs, and why we think so."""

    ranks: tuple[int, ...]
    """Empty when all ranks wait in the same place: the network, or a peer outside the job."""
    reason: str


def blame(standings: Sequence[Standing]) -> Blame | None:
    """The ranks that the others wait for; None while these still have time.

    Args:
        standings: of all ranks of the job, with their dumps: one that is missing is not blamed.

    A rank that is stopped is to blame, and so is one that gives no dump, though overdue; within a
    step it is so as soon as one that waits for it is, whose node may have learned the time of a
    step when its own has not.
    Otherwise it is among those that are the furthest behind: they did not enter the collective in
    which the others wait. FSDP has collectives in the forward and backward pass, where all ranks
    report the same phase; there the dumps tell. When all wait in the same place, each may wait for
    what any of them had no core for.
    """
    waiting = [one.limit for one in standings if one.overdue and one.phase in WITHIN_STEP]
    silent = [
        replace(one, limit=min(one.limit, *waiting))
        if waiting and one.phase in WITHIN_STEP
        else one
        for one in standings
        if one.where in ("stopped", "silent")
    ]
    silent = [one for one in silent if one.overdue]
    if silent:
        stopped = all(one.where == "stopped" for one in silent)
        how = "stopped by a signal" if stopped else "no sign of life: it wrote no stack dump"
        return Blame(_ranks(silent), f"{_describe(silent)}; {how}")
    behind = min(one.position for one in standings)
    last = [one for one in standings if one.position == behind]
    worst = min(_suspicion(one) for one in last)
    suspects = [one for one in last if _suspicion(one) == worst]
    if len(suspects) == len(standings) > 1:
        starved = sum(one.starved for one in standings)
        if not all(one.seconds - min(starved, MOST * one.seconds) > one.limit for one in standings):
            return None
        return Blame(
            (), f"all {len(standings)} ranks stand in the same place: {_describe(last[:1])}"
        )
    if not any(one.overdue for one in suspects):
        return None
    how = "behind all others" if len(last) < len(standings) else "the others wait in a collective"
    if len(standings) == 1:
        how = "it is the only one"
    if suspects[0].where == "elsewhere":
        how += "; by its stack dump it is not in a collective"
    return Blame(_ranks(suspects), f"{_describe(suspects)}; {how}")


def _suspicion(standing: Standing) -> int:
    return get_args(Where).index(standing.where)


def _ranks(standings: Iterable[Standing]) -> tuple[int, ...]:
    return tuple(one.rank for one in standings)


def _describe(standings: Sequence[Standing]) -> str:
    one = standings[0]
    which = "rank" if len(standings) == 1 else "ranks"
    without = f", {one.starved:.1f} s of them without a core" if one.starved > 0.1 else ""
    return (
        f"{which} {', '.join(map(str, _ranks(standings)))} in step {one.step}, phase {one.phase}, "
        f"for {one.seconds:.1f} s{without} (allowed: {one.limit:.1f} s)"
    )


# --- stack dumps -----------------------------------------------------------------------------

DUMP_SIGNAL = signal.SIGUSR2
STILL = 0.1
"""A dump that has not grown for so many seconds is complete."""
SILENT_SECONDS = 1.0
"""After which a rank that has not answered is called silent."""


def register_dumps(path: Path) -> None:
    """Have SIGUSR2 append the Python stacks of all threads to a file. By a rank, once.

    Args:
        path: on a local disk or in memory: the dump must not wait for what the rank hangs on.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    faulthandler.register(DUMP_SIGNAL, file=descriptor, all_threads=True, chain=False)


def take_dumps(ranks: Mapping[int, tuple[int, Path]]) -> dict[int, str]:
    """Stack dumps of ranks of this node, empty for one that does not answer. By the agent.

    Args:
        ranks: by rank, its process id and the path it gave to `register_dumps`.

    It takes 0.1 s, and SILENT_SECONDS where a rank does not answer. A rank that has not registered
    yet, which the signal would kill, or has ended, is left out of the result; and so is one that
    would answer, but gets no core to do it.
    """
    asked = {rank: path for rank, (pid, path) in ranks.items() if _ready(pid)}
    sizes = {rank: path.stat().st_size for rank, path in asked.items()}
    for rank in asked:
        with suppress(ProcessLookupError):  # it ended this moment; its agent hears of that anyway
            os.kill(ranks[rank][0], DUMP_SIGNAL)
    dumps = dict.fromkeys(asked, "")
    grown = dict.fromkeys(asked, time.monotonic())
    deadline = time.monotonic() + SILENT_SECONDS
    while True:
        time.sleep(STILL / 5)
        now = time.monotonic()
        for rank, path in asked.items():
            dump = read_dump(path, sizes[rank])
            if dump != dumps[rank]:
                dumps[rank], grown[rank] = dump, now
        if now > deadline or all(dumps[rank] and now - grown[rank] >= STILL for rank in asked):
            return {rank: dump for rank, dump in dumps.items() if dump or not _runs(ranks[rank][0])}


def read_dump(path: Path, start: int = 0) -> str:
    """What was appended to a file of dumps after its first `start` bytes."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def _ready(pid: int) -> bool:
    """Whether a process runs, or is stopped, and has a handler for the signal."""
    fields = _status(pid)
    if fields["State"].split()[0] in "ZX":  # it ended, though its handlers are still told
        return False
    return bool(int(fields["SigCgt"], 16) >> (DUMP_SIGNAL - 1) & 1)


def _runs(pid: int) -> bool:
    """Whether a process has a core, or would take one."""
    return _status(pid)["State"].split()[0] == "R"


def _status(pid: int) -> dict[str, str]:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return {"State": "X"}
    return dict(line.split(":", 1) for line in status.splitlines())


FORWARDING = (
    "/torch/_ops.py",
    "/torch/utils/_contextlib.py",
    "/torch/distributed/c10d_logger.py",
    "/torch/autograd/function.py",
)
"""Frames that only pass a call on."""
COLLECTIVES = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/_functional_collectives.py",
    "/torch/distributed/nn/functional.py",
    "/torch/distributed/fsdp/",
    "/torch/distributed/tensor/_collective_utils.py",
    "/torch/distributed/tensor/_redistribute.py",
    "/torch/distributed/utils.py",
    "/torch/nn/parallel/distributed.py",
    "/elastic/node/exchange.py",
)
"""Where ranks wait for each other. FSDP's hooks call the user's modules from outside: the innermost
frame is one of FSDP's only while it gathers, scatters, or waits for either."""
UNCLEAR = (
    "/torch/autograd/",  # backward in C++: DDP waits for its buckets here, but kernels hang too
    "/torchinductor_",  # compiled code, with and without collectives
)

COMPILING = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/graph.py",  # also of a backward pass, which is compiled on first use
    "/torch/_inductor/async_compile.py",
    "/triton/compiler/",
)
"""What is on the stack of a rank that compiles, or waits for processes that do it: at any step, if
a shape is new."""

_FRAME = re.compile(r'^  File "(.*)", line \d+ in ', re.MULTILINE)


def in_collective(dump: str) -> bool | None:
    """Whether the main thread waits for other ranks; None if its stack does not tell.

    Args:
        dump: of all threads, as faulthandler writes it: innermost frame first, and the main thread,
            which is the oldest, last.

    Judged by the innermost Python frame that does not only pass the call on: time spent in C++ is
    seen as time in the Python function that called it.
    """
    files = _main_thread(dump)
    innermost = next((file for file in files if not _within(file, FORWARDING)), None)
    if innermost is None or _within(innermost, UNCLEAR):
        return None
    return _within(innermost, COLLECTIVES)


def compiles(dump: str) -> bool:
    """Whether the main thread compiles."""
    return any(_within(file, COMPILING) for file in _main_thread(dump))


def _main_thread(dump: str) -> list[str]:
    """Files of the frames of the main thread, the innermost first."""
    main_thread = re.split(r"^(?:Current thread|Thread) ", dump, flags=re.MULTILINE)[-1]
    return _FRAME.findall(main_thread)


def where(dump: str) -> Where:
    """What a dump says of a rank; an empty one, that it is silent."""
    if not dump:
        return "silent"
    waits = in_collective(dump)
    if waits is None:
        return "unclear"
    return "collective" if waits else "elsewhere"


def _within(file: str, places: Iterable[str]) -> bool:
    return any(place in file for place in places)
