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

import json
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, get_args

from elastic.group.member import Member
from elastic.group.membership import Membership, calm, lose, over, raise_alarm, ranks_of, suspect
from elastic.node.progress import Progress, ProgressPage
from elastic.node.vitals import (
    MOST,
    NO_SIGNS,
    Signs,
    Vigil,
    Where,
    compiles,
    take_dumps,
    where,
)

logger = logging.getLogger(__name__)

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


LOOK_AGAIN_SECONDS, LOOK_AGAIN_SHARE, LOOK_AGAIN_MOST = 1.0, 0.25, 30.0
"""After an alarm for which nobody was to blame yet: at least, as a share of how long a rank has
waited by then, at most. Each alarm has all ranks of the job dump their stacks."""
MISSING_SECONDS = 5.0
"""Beyond its limit that a rank waits for one without a process, before the node of that is lost."""


class Running(Protocol):
    """A training process of a rank."""

    pid: int
    local_rank: int
    dumps: int
    """File in memory for its stack dumps."""


class HangWatch:
    """What a node knows of its ranks, from look to look.

    Args:
        group: the membership.
        page: where the ranks say how far they are.
    """

    def __init__(self, group: Member, page: ProgressPage) -> None:
        self.times = PhaseTimes()
        self._group, self._page, self._vigil = group, page, Vigil()
        self._stood: dict[int, Progress] | None = None
        """What the ranks had said when this node told where they stand, since the alarm."""
        self._summed = 0
        """The last alarm of which this node has summed up the standings."""
        self._judged = 0
        """The last alarm whose suspects this node has looked at."""
        self._quiet_until = 0.0
        """No alarm before."""
        self._last_dumps: dict[int, str] = {}

    def look(
        self,
        state: Membership,
        generation: tuple[int, int],
        running: Mapping[int, Running],
        done: Mapping[int, int] = MappingProxyType({}),
    ) -> list[int]:
        """Take the next step; returns the ranks that are to be ended now.

        Args:
            state: of the membership.
            generation: (round, generation) that the ranks of this node are in.
            running: the processes of this node, by rank.
            done: local ranks of this node whose process has ended well, by rank.
        """
        progress = {rank: self._page.read(one.local_rank) for rank, one in running.items()}
        now = time.monotonic()
        self.times.follow(progress, now)
        signs = self._vigil.look({rank: one.pid for rank, one in running.items()}, progress, now)
        if (state.round, state.generation) != generation or over(state):
            return []
        if not state.alarm:
            late = overdue(progress, now, self.times, signs)
            longest = max((one.seconds for one in late), default=0.0)
            quiet = min(max(LOOK_AGAIN_SECONDS, LOOK_AGAIN_SHARE * longest), LOOK_AGAIN_MOST)
            if self._stood is not None:
                self._stood, self._quiet_until = None, now + quiet
            self._quiet_until = min(self._quiet_until, now + quiet)  # who was late has gone on
            stopped = any(one.where == "stopped" for one in late)
            if late and (stopped or now > self._quiet_until):
                self._group.change(lambda state: raise_alarm(state, *generation))
        elif self._stood is None:
            self._stood = {}
            self._stand(state.alarm, running, done, now, signs)
        elif state.suspicion:
            return self._judge(state, progress)
        elif state.alarm != self._summed:
            self._sum(state)
        return []

    def _stand(
        self,
        alarm: int,
        running: Mapping[int, Running],
        done: Mapping[int, int],
        now: float,
        signs: Mapping[int, Signs],
    ) -> None:
        """Tell all nodes where our ranks stand. Aside: a rank that hangs is waited for."""
        ranks = {
            number: (one.pid, Path(f"/proc/self/fd/{one.dumps}"))
            for number, one in running.items()
            if not signs[number].stopped
        }

        def work() -> None:
            self._last_dumps = take_dumps(ranks)
            # Who has gone on meanwhile does not hang.
            self._stood = {rank: self._page.read(one.local_rank) for rank, one in running.items()}
            ours = standings(self._stood, now, self.times, self._last_dumps, signs)
            for rank, local_rank in done.items():  # it is ahead of all that still run
                ours.append(Standing(rank, self._page.read(local_rank).step, "end", 0.0, PATIENCE))
            self._group.stand(alarm, json.dumps([asdict(one) for one in ours]))

        threading.Thread(target=work, name="perdure-dumps", daemon=True).start()

    def _sum(self, state: Membership) -> None:
        """On the first node: once all have told where their ranks stand, find the one that the
        others wait for. Nobody is blamed while a rank of the job has no process: the others may
        wait for that one, which its own node starts, or reports. A node that does neither is lost.
        """
        alarm, texts = state.alarm, self._group.standings(state.alarm)
        if texts is None:
            return
        self._summed = alarm
        by_node = [[Standing(**one) for one in json.loads(text)] for text in texts]
        everyone = [one for ones in by_node for one in ones]
        missing = [
            node
            for node, ones in zip(state.members, by_node, strict=False)
            if len(ones) < ranks_of(state, node)
        ]
        if missing:
            late = max((one.seconds - one.starved - one.limit for one in everyone), default=0.0)
            why = f"no process of a rank for {MISSING_SECONDS:.0f} s, for which the others wait"
            gone = late > MISSING_SECONDS
            if gone:
                logger.warning("node %s is lost: %s", missing[0], why)
            self._group.change(
                lambda state: (
                    lose(calm(state), missing[0], time.time(), why)
                    if gone and state.alarm == alarm
                    else calm(state)
                )
            )
            return
        found = blame(everyone) if everyone else None
        if found:
            ranks, reason = found.ranks, found.reason
            self._group.change(lambda state: suspect(state, alarm, ranks, reason))
        else:
            self._group.change(calm)

    def _judge(self, state: Membership, progress: Mapping[int, Progress]) -> list[int]:
        """The rank that the others wait for, if it is here; of ranks that all wait for each other,
        the first node's first."""
        self._quiet_until = time.monotonic() + LOOK_AGAIN_SECONDS
        if self._judged == state.alarm:
            return []
        self._judged = state.alarm
        first = sorted(progress)[:1] if self._group.name in state.members[:1] else []
        mine = [rank for rank in state.suspects or first if rank in progress]
        stood = self._stood or {}
        if any(progress[rank] != stood.get(rank) for rank in mine):
            self._group.change(calm)  # it has gone on after all
            return []
        logger.warning("a hang: %s", state.suspicion)
        for rank in mine:
            logger.warning("stack of rank %d:\n%s", rank, self._last_dumps.get(rank, ""))
        return mine
