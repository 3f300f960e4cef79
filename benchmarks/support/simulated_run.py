"""A training run under failures, simulated from what saving and recovering cost.

[Note: windows] Between two failures a run does the same again and again: some steps, then a
checkpoint. So a `Window` is arithmetic, not a loop over steps, and a simulated year takes
milliseconds. Two copies of the state matter: in memory and in storage. Which of them a failure
leaves, and how old it is, decides what is done again.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from benchmarks.support.failure_traces import DAY, NODES_LOST
from elastic import SaveClock, expected_mtbf

JOIN = "join"
"""A node comes, for which the run pauses between two steps."""


@dataclass(frozen=True, kw_only=True)
class System:
    """How a trainer saves and recovers. Seconds, where nothing else is said."""

    name: str
    stall: float
    """Training stands still for a save: what a run measures, and decides by."""
    save: float
    """What a save costs training in all, steps that are slower meanwhile among it."""
    own_copy: float
    """From a save until a process that dies does not cost it; infinite: only storage counts."""
    peer_copy: float
    """From a save until a node that is lost does not cost it; infinite: only storage counts."""
    written: float
    """From a save until it is in storage."""
    memory_load: float
    storage_load: float
    restart: Mapping[str, float]
    """From a failure of each kind, and `JOIN`, to the first step, without loading."""
    saves_on_notice: bool = True
    checkpoint_steps: int = 0
    """Steps between checkpoints; 0: `SaveClock` decides, from the failures so far."""
    snapshot_steps: int = 0
    """Steps between copies in memory; 0: copies only with checkpoints."""
    spares: bool = True
    """Whether another node takes the place of a lost one at once."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained, where."""

    nodes: int
    step: float
    """Seconds of a step with all nodes."""
    replica_nodes: int
    """Nodes that hold one replica of the model, which come and go together."""
    replica_sequences: int
    """Sequences of a replica in a step, with all nodes. A step always has as many in all."""
    repair_days: float

    def slowdown(self, away: int) -> float:
        """Time of a step without `away` nodes, by that with all."""
        replicas = self.nodes // self.replica_nodes
        left = max(1, (self.nodes - away) // self.replica_nodes)
        return math.ceil(replicas * self.replica_sequences / left) / self.replica_sequences


@dataclass
class Account:
    """Seconds of a simulated run by use, which add up to `wall`; numbers of saves and failures."""

    wall: float
    kept: float = 0.0
    """Seconds in steps whose result survived."""
    redone: float = 0.0
    saving: float = 0.0
    restarting: float = 0.0
    short: float = 0.0
    """Seconds lost to slower steps while replicas are away."""
    saves: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def goodput(self) -> float:
        """Share of the time in steps whose result survived."""
        return self.kept / self.wall


@dataclass(frozen=True, kw_only=True)
class Window:
    """Steps and checkpoints from `begin` on, until something happens."""

    begin: float
    step: float
    """Seconds of a step, its share of snapshots in memory included."""
    first: int
    """Steps before the first checkpoint."""
    later: int
    """Steps from one checkpoint to the next."""
    save: float
    """Seconds that a checkpoint costs."""

    def saves(self, at: float) -> int:
        """Number of checkpoints that have begun at time `at`."""
        past = at - self.begin - self.first * self.step
        return 0 if past < 0 else 1 + int(past / (self.save + self.later * self.step))

    def steps(self, at: float) -> int:
        """Number of steps that are done at time `at`."""
        saves = self.saves(at)
        if not saves:
            return max(0, int((at - self.begin) / self.step))
        return self.saved(saves) + int(max(0.0, at - self._resumed(saves)) / self.step)

    def saved(self, saves: int) -> int:
        """Steps done at the checkpoint of this number, from 1; 0 before the first."""
        return self.first + (saves - 1) * self.later if saves else 0

    def saving(self, at: float) -> float:
        """Seconds that checkpoints have cost until `at`."""
        saves = self.saves(at)
        return saves * self.save - max(0.0, self._resumed(saves) - at) if saves else 0.0

    def _resumed(self, saves: int) -> float:
        """End of the checkpoint of this number."""
        return self.begin + self.saved(saves) * self.step + saves * self.save


def simulate(
    system: System, job: Job, failures: Iterator[tuple[float, str]], seconds: float, draw: Random
) -> Account:
    """A run of so many seconds.

    Args:
        failures: (time, kind), in order, without end; restarts do not stop them.
        draw: for the times that lost nodes stay away.
    """
    account = Account(wall=seconds)
    now = delay = 0.0
    step = stored = 0
    away: list[float] = []  # when each lost node is back, where no spare takes its place
    at, kind = next(failures)
    while now < seconds:
        change = _next_change(job, away)
        end = min(at, change, seconds)
        slow = job.slowdown(len(away))
        window = _window(system, job, slow, min(now + delay, end), step, account)
        done, begin = window.steps(end), step
        _charge(account, system, job, slow, now, window, end)
        stored = max(stored, _stored(window, begin, end - system.written))
        step += done
        now, delay = end, max(0.0, now + delay - end)
        if end == at < seconds:
            account.failures[kind] += 1
            in_memory = _in_memory(system, kind, window, begin, end)
            back = max(in_memory, stored)
            load = system.memory_load if back == in_memory else system.storage_load
            account.redone += (step - back) * job.step
            step, delay = back, system.restart[kind] + load
            if not system.spares:
                lost = NODES_LOST.get(kind, 0)
                mean = job.repair_days * DAY
                away += [end + draw.expovariate(1 / mean) for _ in range(lost)]
            at, kind = next(failures)
        elif end == change:
            away = [back_at for back_at in away if back_at > end]
            delay = max(delay, system.restart[JOIN] + system.memory_load)
    account.kept = step * job.step
    return account


def _next_change(job: Job, away: list[float]) -> float:
    """When so many nodes are back that a step takes less time."""
    for back, at in enumerate(sorted(away), 1):
        if job.slowdown(len(away) - back) < job.slowdown(len(away)):
            return at
    return math.inf


def _window(
    system: System, job: Job, slow: float, begin: float, step: int, account: Account
) -> Window:
    """The window that begins at `begin`, after `step` steps."""
    seconds = job.step * slow
    if system.snapshot_steps:
        seconds += system.save / system.snapshot_steps
    if system.checkpoint_steps:
        later = system.checkpoint_steps
        return Window(
            begin=begin, step=seconds, first=later - step % later, later=later, save=system.save
        )
    node_seconds = begin * job.nodes
    mtbf = expected_mtbf(account.failures.total(), node_seconds, job.nodes)
    clock = SaveClock(mtbf, begin)
    first = math.ceil(clock.interval / seconds)
    clock.begun(begin, system.stall)
    clock.written(system.written)
    later = math.ceil((clock.interval - system.save) / seconds)
    return Window(
        begin=begin, step=seconds, first=max(1, first), later=max(1, later), save=system.save
    )


def _charge(
    account: Account, system: System, job: Job, slow: float, now: float, window: Window, end: float
) -> None:
    """Add to the account what the time from `now` to `end` was spent on, but for kept steps."""
    done = window.steps(end)
    snapshots = done * (window.step - job.step * slow)
    saving = window.saving(end) + snapshots
    account.restarting += window.begin - now
    account.saving += saving
    account.saves += window.saves(end)
    account.short += done * job.step * (slow - 1)
    account.redone += end - window.begin - saving - done * job.step * slow  # a step is cut off


def _stored(window: Window, begin: int, at: float) -> int:
    """Newest step of the window in storage, of checkpoints begun until `at`."""
    saves = window.saves(at)
    return begin + window.saved(saves) if saves else 0


def _in_memory(system: System, kind: str, window: Window, begin: int, at: float) -> int:
    """Newest step that a failure leaves in memory; -1: none."""
    if kind == "notice" and system.saves_on_notice:
        return begin + window.steps(at)
    delay = {"process": system.own_copy, "hang": system.own_copy, "rack": math.inf}
    copied = at - delay.get(kind, system.peer_copy)
    if copied == -math.inf:
        return -1
    newest = begin + window.saved(window.saves(copied))
    if system.snapshot_steps:
        done = begin + window.steps(copied)
        newest = max(newest, done - done % system.snapshot_steps)
    return max(newest, begin)  # from there the run went on, so the copy is there
