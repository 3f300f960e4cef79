"""The watchdog: time-outs per phase, learned from the run, and the decision which rank hangs.

[Note: hang] A rank that hangs makes all others wait in their next collective, so every rank looks
stuck. The watchdog finds the rank that all others wait for. Each node's agent reads the progress of
its own ranks (progress.py) and knows the usual durations (`NodePhaseTimes`).

  1. A node with an overdue rank raises an alarm in the membership (`NodeHangWatch.look`).
  2. Every node takes stack dumps of its ranks and publishes the status of each (`_publish`).
  3. The first node reads the statuses of all nodes and records suspects (`_evaluate`, `blame`).
  4. The node of a suspect kills it, unless its progress has changed (`_suspects_here`).

A signal handler in C writes the dump. So a rank that waits in C++ for its peers writes a dump; a
rank that waits for a dead disk does not, which is evidence too. A rank counts as stopped if the
kernel reports it (vitals.py), in any phase and however busy the machine is.

No healthy rank may be killed. So a rank reports what it waits for, and waits for data and storage
may take minutes. Time in which a rank was ready to run without a core counts neither against that
rank nor against ranks that may have waited for it."""

import json
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from elastic.group.member import Member
from elastic.group.membership import (
    Membership,
    end_alarm,
    lose_unstarted,
    raise_alarm,
    ranks_of,
    record_suspects,
    round_over,
)
from elastic.node.progress import NodeProgressPage, NodeRankProgress
from elastic.node.rank_process import NodeRank
from elastic.node.vitals import (
    MAX_STARVED_SHARE,
    NO_SIGNS,
    Activity,
    NodeRankVitals,
    NodeVitalsWatch,
    classify_dump,
    is_compiling,
    main_stack,
    take_dumps,
)

logger = logging.getLogger(__name__)

ORDER = (
    "failed", "start", "init", "load", "data", "step", "fetch", "reduce", "staging", "update",
    "after", "evaluate", "save", "end",
)  # fmt: skip
"""Phases in the order in which a rank goes through them; "data" to "save" repeat in each step. The
phase "failed" comes first, because it is furthest behind: the other ranks wait for a failed rank
until its process has ended."""
WITHIN_STEP = ("step", "reduce", "update")

MIN_SECONDS = 3.5
"""Shortest time-out in seconds: a busy machine delays steps of milliseconds by seconds."""
DEFAULT_SECONDS = 300.0
"""Time-out in seconds of phases with fewer than MIN_SAMPLES durations so far, and shortest time-out
of phases outside LEARNED_PHASES. A first step that compiles, with cold caches, needs less."""
SLOW_FACTORS = dict.fromkeys(
    ("load", "data", "fetch", "after", "evaluate", "first evaluate", "staging", "save", "end"), 2
)
"""Factors of DEFAULT_SECONDS for phases in which the rank may use a slow filesystem."""
SAVE_SECONDS = 1200.0
"""Time limit of a save in seconds, unless the program sets `NodeJobFacts.save_seconds`."""
SAVE_FACTORS = {"staging": 1.2, "save": 1.2, "end": 2.4}
"""Phase → multiple of the time limit of a save that is added to the phase's time-out. Ranks learn
up to a fifth of the limit later that a save was abandoned, and two saves may end a run."""
LEARNED_PHASES = (*WITHIN_STEP, "evaluate")
"""Phases that repeat and compute, whose time-outs are learned. Other phases happen once in a
process or seldom, or depend on storage, which stalls when one of its servers is replaced."""
TIMEOUT_FACTOR = 12
"""A learned time-out is this multiple of the 99th percentile: a step may take ten times as long as
earlier steps, with other data or by the user's own schedule."""
BUSY_SECONDS = 30.0
"""Shortest time-out in seconds of a rank that computes, as an unusual input may take long."""
MIN_SAMPLES, MAX_SAMPLES = 5, 200
"""Number of durations of a phase needed to learn a time-out, and number of newest ones kept."""
STOPPED_SECONDS = 1.0
"""If more seconds pass between two polls, this node, perhaps with its ranks, was stopped."""


class NodePhaseTimes:
    """Durations of phases on a node's ranks, learned from their progress.

    Args:
        floor: shortest time-out, in seconds.
        patience: time-out, in seconds, of phases that happen once in a process. The first step of a
            process and its first validation have at least this time-out, as they compile, and as
            the first step may repeat a step that was mistaken for a hang.
    """

    def __init__(self, floor: float = MIN_SECONDS, patience: float = DEFAULT_SECONDS) -> None:
        self.floor, self.patience = floor, patience
        self.save_seconds = SAVE_SECONDS
        self.woke = float("-inf")
        """Time of the last poll that came more than STOPPED_SECONDS after the poll before it. Time
        before this counts towards no time-out."""
        self._durations: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_SAMPLES))
        self._looked: float | None = None
        self._last: dict[int, NodeRankProgress] = {}
        self._first: dict[tuple[int, str], int] = {}
        """(rank, phase) → first step of the rank's process in that phase."""

    def begin(self, rank: int) -> None:
        """Forget the process that was `rank`, as a new one begins."""
        self._last.pop(rank, None)
        self._first = {key: step for key, step in self._first.items() if key[0] != rank}

    def follow(self, progress_by_rank: Mapping[int, NodeRankProgress], now: float) -> None:
        """Record, at every poll, the progress of ranks and the durations of ended phases."""
        if self._looked is not None and now - self._looked > STOPPED_SECONDS:
            self.woke = now
        self._looked = now
        for rank, progress in progress_by_rank.items():
            before = self._last.get(rank)
            # A duration in which this machine was stopped would raise the time-outs.
            if before and progress.at != before.at and before.at >= self.woke:
                self.add(self._kind(rank, before), progress.at - before.at)
            if progress.phase in LEARNED_PHASES:
                self._first.setdefault((rank, _group(progress.phase)), progress.step)
            self._last[rank] = progress

    def forget_steps(self) -> None:
        """Forget the learned durations, because fewer nodes take longer."""
        for kind in LEARNED_PHASES:
            self._durations.pop(kind, None)

    def add(self, kind: str, seconds: float) -> None:
        """Record a duration. `kind`: a phase, or "first step" or "first evaluate"."""
        self._durations[kind].append(seconds)

    def limit(self, rank: int, progress: NodeRankProgress) -> float:
        kind = self._kind(rank, progress)
        # The rank may wait for another rank, which may take the whole time of a step.
        if kind in WITHIN_STEP:
            return max(self._learned(kind), self._learned("step"))
        return max(self._learned(kind), 0 if kind in LEARNED_PHASES else progress.patience)

    def _kind(self, rank: int, progress: NodeRankProgress) -> str:
        if progress.phase not in LEARNED_PHASES:
            return progress.phase
        group = _group(progress.phase)
        first = self._first.get((rank, group), progress.step)
        return f"first {group}" if progress.step <= first else progress.phase

    def _learned(self, kind: str) -> float:
        durations = sorted(self._durations[kind])
        patience = self.patience * SLOW_FACTORS.get(kind, 1)
        patience += self.save_seconds * SAVE_FACTORS.get(kind, 0)
        if len(durations) < MIN_SAMPLES:
            return patience
        usual = durations[ceil(0.99 * len(durations)) - 1]
        return max(self.floor if kind in LEARNED_PHASES else patience, TIMEOUT_FACTOR * usual)


def _group(phase: str) -> str:
    return "step" if phase in WITHIN_STEP else phase


@dataclass(frozen=True)
class NodeRankStatus:
    """State of a rank, published to other nodes as JSON. `seconds`: time since the rank reported
    that it entered `phase` of `step`."""

    rank: int
    step: int
    phase: str
    seconds: float
    limit: float
    """Seconds of own time ([Note: own time] in vitals.py) that the phase may take."""
    where: Activity = "unknown"
    starved: float = 0.0
    """Part of `seconds` in which the rank waited for a core."""

    @property
    def overdue(self) -> bool:
        return self.seconds - self.starved > self.limit

    @property
    def position(self) -> tuple[int, int]:
        """(step, index of the phase in ORDER), which is smaller for a rank that is further
        behind."""
        return self.step, ORDER.index(self.phase)


def rank_statuses(
    progress_by_rank: Mapping[int, NodeRankProgress],
    now: float,
    times: NodePhaseTimes,
    dumps: Mapping[int, str] | None = None,
    signs: Mapping[int, NodeRankVitals] | None = None,
) -> list[NodeRankStatus]:
    """Returns the status of each rank of this node, at time `now` by time.monotonic(). `dumps`:
    result of `take_dumps`. `signs`: result of `NodeVitalsWatch.look`."""
    ranks = []
    for rank, progress in sorted(progress_by_rank.items()):
        sign = (signs or {}).get(rank, NO_SIGNS)
        limit = times.limit(rank, progress)
        dump = (dumps or {}).get(rank)
        # A new shape of the input may cause a compilation in any step, for minutes.
        if dump and is_compiling(dump):
            limit = max(limit, times.patience)
        status = NodeRankStatus(
            rank,
            progress.step,
            progress.phase,
            max(0.0, now - max(progress.at, times.woke)),
            max(limit, BUSY_SECONDS) if sign.busy else limit,
            "stopped" if sign.stopped else "unknown" if dump is None else classify_dump(dump),
            sign.starved,
        )
        # A rank that was stopped by a signal hangs in every phase.
        if sign.stopped > times.floor:
            status = replace(status, limit=times.floor, starved=0.0)
        ranks.append(status)
    return ranks


def overdue(
    progress_by_rank: Mapping[int, NodeRankProgress],
    now: float,
    times: NodePhaseTimes,
    signs: Mapping[int, NodeRankVitals] | None = None,
) -> list[NodeRankStatus]:
    statuses = rank_statuses(progress_by_rank, now, times, signs=signs)
    return [status for status in statuses if status.overdue]


@dataclass(frozen=True)
class _HangVerdict:
    """Which ranks hang, and why."""

    ranks: tuple[int, ...]
    """The ranks that all others wait for. Empty if all ranks wait in the same place: for the
    network, or for a peer outside the job."""
    reason: str


def blame(statuses: Sequence[NodeRankStatus]) -> _HangVerdict | None:
    """Decide, by the statuses of all ranks of the job, which ranks all others wait for; None while
    no rank is overdue.

    An overdue rank hangs if it was stopped by a signal or wrote no stack dump. Within a step such a
    rank counts as overdue as soon as any rank within a step is overdue: nodes may have learned
    different limits. If there is no such rank, the suspects are among the ranks that are furthest
    behind, which have not entered the collective in which the other ranks wait. FSDP has
    collectives in the forward and backward pass, where all ranks report the same phase; there the
    dumps decide. If all ranks wait in the same place, they may wait for a rank that has no core."""
    waiting = [
        status.limit for status in statuses if status.overdue and status.phase in WITHIN_STEP
    ]
    silent = [
        replace(status, limit=min(status.limit, *waiting))
        if waiting and status.phase in WITHIN_STEP
        else status
        for status in statuses
        if status.where in ("stopped", "silent")
    ]
    silent = [status for status in silent if status.overdue]
    if silent:
        stopped = all(status.where == "stopped" for status in silent)
        how = "stopped by a signal" if stopped else "no sign of life: it wrote no stack dump"
        return _HangVerdict(_ranks(silent), f"{_describe(silent)}; {how}")
    behind = min(status.position for status in statuses)
    last = [status for status in statuses if status.position == behind]
    worst = min(_suspicion(status) for status in last)
    suspects = [status for status in last if _suspicion(status) == worst]
    if len(suspects) == len(statuses) > 1:
        starved = sum(status.starved for status in statuses)
        if not all(
            status.seconds - min(starved, MAX_STARVED_SHARE * status.seconds) > status.limit
            for status in statuses
        ):
            return None
        return _HangVerdict(
            (), f"all {len(statuses)} ranks stand in the same place: {_describe(last[:1])}"
        )
    if not any(status.overdue for status in suspects):
        return None
    how = "behind all others" if len(last) < len(statuses) else "the others wait in a collective"
    if len(statuses) == 1:
        how = "it is the only one"
    if suspects[0].where == "elsewhere":
        how += "; by its stack dump it is not in a collective"
    return _HangVerdict(_ranks(suspects), f"{_describe(suspects)}; {how}")


def _suspicion(status: NodeRankStatus) -> int:
    return get_args(Activity).index(status.where)


def _ranks(statuses: Iterable[NodeRankStatus]) -> tuple[int, ...]:
    return tuple(status.rank for status in statuses)


def _describe(statuses: Sequence[NodeRankStatus]) -> str:
    status = statuses[0]
    which = "rank" if len(statuses) == 1 else "ranks"
    without = f", {status.starved:.1f} s of them without a core" if status.starved > 0.1 else ""
    return (
        f"{which} {', '.join(map(str, _ranks(statuses)))} in step {status.step}, "
        f"phase {status.phase}, for {status.seconds:.1f} s{without} (allowed: {status.limit:.1f} s)"
    )


REALARM_SECONDS, REALARM_SHARE, REALARM_MAX = 1.0, 0.25, 30.0
"""Pause after an alarm that named no suspect, as each alarm makes all ranks of the job dump their
stacks: shortest in seconds, fraction of the longest wait so far, longest in seconds."""
MISSING_SECONDS = 5.0
"""If a rank waits so many seconds beyond its limit while another rank has no process, the node of
that other rank is removed."""


class NodeHangWatch:
    """The search of one node for hanging ranks, see [Note: hang]; `look` does its next step."""

    def __init__(self, group: Member, page: NodeProgressPage) -> None:
        self.times = NodePhaseTimes()
        self._group, self._page, self._vitals = group, page, NodeVitalsWatch()
        self._published: dict[int, NodeRankProgress] | None = None
        """Rank → its report when this node published statuses; None: there is no alarm."""
        self._evaluated_alarm = 0
        self._handled_alarm = 0
        self._quiet_until = 0.0
        self._last_dumps: dict[int, str] = {}

    def stack(self, rank: int) -> str:
        """Returns the main thread's stack of a rank at the last alarm; "" if there is no dump."""
        return main_stack(self._last_dumps.get(rank, ""))

    def look(
        self,
        state: Membership,
        generation: tuple[int, int],
        running: Mapping[int, NodeRank],
        done: Mapping[int, int] = MappingProxyType({}),
    ) -> list[int]:
        """Do the next step of [Note: hang]; returns the ranks of this node to be killed now.
        `generation`: (round, generation) of this node's ranks. `running`: ranks that have a
        training process. `done`: rank → local rank, of ranks that have finished or paused."""
        progress = {number: self._page.read(rank.local_rank) for number, rank in running.items()}
        now = time.monotonic()
        self.times.follow(progress, now)
        signs = self._vitals.look(
            {number: rank.pid for number, rank in running.items()}, progress, now
        )
        if (state.round, state.generation) != generation or round_over(state):
            return []
        if not state.alarm:
            late = overdue(progress, now, self.times, signs)
            longest = max((status.seconds for status in late), default=0.0)
            quiet = min(max(REALARM_SECONDS, REALARM_SHARE * longest), REALARM_MAX)
            # an alarm has just ended
            if self._published is not None:
                self._published, self._quiet_until = None, now + quiet
            # The pause is shorter once the rank that was late for the longest has moved on.
            self._quiet_until = min(self._quiet_until, now + quiet)
            stopped = any(status.where == "stopped" for status in late)
            if late and (stopped or now > self._quiet_until):
                self._group.change(
                    partial(raise_alarm, round=state.round, generation=state.generation)
                )
        elif self._published is None:
            self._published = {}  # set at once: an alarm causes only one set of dumps
            self._publish(state.alarm, running, done, now, signs)
        elif state.suspicion:
            return self._suspects_here(state, progress)
        elif state.alarm != self._evaluated_alarm:
            self._evaluate(state)
        return []

    def _publish(
        self,
        alarm: int,
        running: Mapping[int, NodeRank],
        done: Mapping[int, int],
        now: float,
        signs: Mapping[int, NodeRankVitals],
    ) -> None:
        """Publish the status of this node's ranks, in a thread: dumps of hanging ranks are slow."""
        ranks = {
            number: (rank.pid, Path(f"/proc/self/fd/{rank.dumps}"))
            for number, rank in running.items()
            if not signs[number].stopped
        }

        def work() -> None:
            self._last_dumps = take_dumps(ranks)
            # A rank whose report changes after this does not hang.
            self._published = {
                number: self._page.read(rank.local_rank) for number, rank in running.items()
            }
            own = rank_statuses(self._published, now, self.times, self._last_dumps, signs)
            # Ranks that have finished or paused are ahead of all ranks that still run.
            for number, local_rank in done.items():
                step = self._page.read(local_rank).step
                own.append(NodeRankStatus(number, step, "end", 0.0, DEFAULT_SECONDS))
            self._group.publish(alarm, json.dumps([asdict(status) for status in own]))

        threading.Thread(target=work, name="perdure-dumps", daemon=True).start()

    def _evaluate(self, state: Membership) -> None:
        """Evaluate the statuses of all ranks, on the first node, once all nodes have published
        them. While a rank has no process, no rank is blamed, as all ranks may wait for the missing
        process. If its node does not start it within MISSING_SECONDS, the node is removed."""
        alarm, texts = state.alarm, self._group.statuses(state.alarm)
        if texts is None:
            return
        # Evaluated only once: the result appears in the document only after a moment.
        self._evaluated_alarm = alarm
        by_node = [[NodeRankStatus(**status) for status in json.loads(text)] for text in texts]
        statuses = [status for of_node in by_node for status in of_node]
        missing = [
            node
            for node, of_node in zip(state.members, by_node, strict=False)
            if len(of_node) < ranks_of(state, node)
        ]
        if missing:
            waits = [status.seconds - status.starved - status.limit for status in statuses]
            # the node may be starting the process just now
            if max(waits, default=0.0) <= MISSING_SECONDS:
                self._group.change(end_alarm)
                return
            why = f"no process of a rank for {MISSING_SECONDS:.0f} s, for which the others wait"
            logger.warning("node %s is lost: %s", missing[0], why)
            loss = partial(lose_unstarted, alarm=alarm, node=missing[0], now=time.time(), why=why)
            self._group.change(loss)
        elif statuses and (verdict := blame(statuses)):
            ranks, reason = verdict.ranks, verdict.reason
            self._group.change(partial(record_suspects, alarm=alarm, ranks=ranks, reason=reason))
        else:
            self._group.change(end_alarm)

    def _suspects_here(
        self, state: Membership, progress: Mapping[int, NodeRankProgress]
    ) -> list[int]:
        """Returns the suspects on this node, or none if a suspect has moved on. If all ranks wait
        for each other, the only suspect is the first rank of the first node."""
        self._quiet_until = time.monotonic() + REALARM_SECONDS
        # The suspects have been killed already, and the document does not show it yet.
        if self._handled_alarm == state.alarm:
            return []
        self._handled_alarm = state.alarm
        first = sorted(progress)[:1] if self._group.name in state.members[:1] else []
        suspects = [rank for rank in state.suspects or first if rank in progress]
        published = self._published or {}
        if any(progress[rank] != published.get(rank) for rank in suspects):
            self._group.change(end_alarm)  # a suspect has moved on
            return []
        logger.warning("a hang: %s", state.suspicion)
        for rank in suspects:
            logger.warning("stack of rank %d:\n%s", rank, self._last_dumps.get(rank, ""))
        return suspects
