"""Where the time of a run went: folds over its ledger. Pure.

Goodput is the time in steps whose result survived over the wall time from the first launch to the
last line. MTBF is the time a run was up over its failures. MTTR is the mean time from a failure to
the first step beyond the highest ever reached, so it contains the steps done again. (The words
follow ByteRobust, arXiv 2509.16293, whose ETTR is our goodput.)
"""

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from elastic.exits import EXIT_PAUSED
from elastic.record.history import Attempt, History, StepLine


@dataclass(frozen=True)
class Goodput:
    """Seconds. Everything but `wall` adds up to `wall`."""

    wall: float
    kept: float
    """In steps whose result survived."""
    redone: float
    """In steps that had to be done again, the one that a failure cut off included."""
    skipped: float
    """In steps whose numbers were bad, and those that a roll-back took back."""
    starting: Mapping[str, float]
    """From a launch or a failure to the first step, by phase."""
    stalled: float
    """Standing still for saves, as far as it was measured."""
    between: float
    """Between steps otherwise: evaluation, records, waiting for the last save."""
    idle: float
    """Not running: between attempts, when neither a failure nor a change of nodes led from one to
    the next."""

    @property
    def share(self) -> float:
        """The goodput, 0 to 1."""
        return self.kept / self.wall if self.wall else 0.0

    @property
    def share_of_uptime(self) -> float:
        """Goodput if the idle time is left out."""
        up = self.wall - self.idle
        return self.kept / up if up else 0.0


def goodput(history: History) -> Goodput:
    """Account for the wall time of a run."""
    attempts = history.attempts
    kept = redone = skipped = stalled = between = 0.0
    starting: dict[str, float] = {}
    in_vain = _in_vain(history)
    for attempt in attempts:
        for phase, seconds in _startup(attempt).items():
            starting[phase] = starting.get(phase, 0.0) + seconds
        if attempt.steps:
            spent = sum(step.seconds for step in attempt.steps)
            lasting = [step for step in attempt.steps if history.survives(attempt, step)]
            bad = sum(step.seconds for step in lasting if in_vain(step))
            good = sum(step.seconds for step in lasting) - bad
            kept, skipped, redone = kept + good, skipped + bad, redone + spent - good - bad
            rest = max(0.0, attempt.finished - _first_step_began(attempt) - spent)
            stall = min(rest, sum(save.get("stall") or 0.0 for save in attempt.saves))
            stalled, between = stalled + stall, between + rest - stall
    for before, after in pairwise(attempts):
        gap = after.began - before.finished
        if after.start.cause is not None:
            cut_off = failed_at(before, after) - before.finished
            redone += cut_off
            starting["detect and restart"] = starting.get("detect and restart", 0) + gap - cut_off
        elif _regrouped(before):
            starting["change of nodes"] = starting.get("change of nodes", 0.0) + gap
    idle = sum(end - begin for begin, end in idle_spans(history))
    wall = attempts[-1].finished - attempts[0].began
    return Goodput(wall, kept, redone, skipped, starting, stalled, between, idle)


def idle_spans(history: History) -> list[tuple[float, float]]:
    """(from, to) of the times between attempts in which nothing ran."""
    return [
        (before.finished, after.began)
        for before, after in pairwise(history.attempts)
        if after.start.cause is None and not _regrouped(before) and after.began > before.finished
    ]


def failed_at(before: Attempt, after: Attempt) -> float:
    """When the failure came that led from one attempt to the next. The clock that stamped it may be
    another machine's: it was after the last line of the one, and before the launch of the other."""
    cause = after.start.cause or {}
    ago = after.start.at - float(cause.get("at") or after.start.at)
    return min(max(after.loaded - ago, before.finished), after.began)


@dataclass(frozen=True)
class Reliability:
    """How often a run fails, and how fast it is back."""

    failures: int
    node_seconds: float
    """For which nodes were up, added up over nodes."""
    mtbf: float | None
    """Seconds a run is up between failures; None without one."""
    mttr: float | None
    """Mean seconds from a failure to the first new step; None where none was ever overcome."""
    recoveries: Mapping[int, float]
    """The same by number of the attempt that a failure led to."""


def reliability(history: History) -> Reliability:
    """Count failures, and what they cost until the run was further than before."""
    attempts = history.attempts
    failures = sum(history.failed(attempt) is not None for attempt in attempts)
    idle = {end: end - begin for begin, end in idle_spans(history)}
    node_seconds = up = 0.0
    previous = attempts[0].began
    for attempt in attempts:
        seconds = attempt.finished - previous - idle.get(attempt.began, 0.0)
        up, node_seconds = up + seconds, node_seconds + seconds * attempt.start.nodes
        previous = attempt.finished
    recoveries = {}
    reached = list(accumulate((attempt.last_step for attempt in attempts), max))
    for before, after in pairwise(attempts):
        if after.start.cause is not None:
            highest = max(reached[before.number - 1], after.start.step)
            back = _passed(attempts[after.number - 1 :], highest)
            if back is not None:
                recoveries[after.number] = back - failed_at(before, after)
    mtbf = up / failures if failures else None
    mttr = sum(recoveries.values()) / len(recoveries) if recoveries else None
    return Reliability(failures, node_seconds, mtbf, mttr, recoveries)


def goodput_curve(history: History) -> list[tuple[float, float]]:
    """(Unix time, share of the uptime until then that is in steps which survived), by step."""
    spans = idle_spans(history)
    ends = [end for _, end in spans]
    idle = [0.0, *accumulate(end - begin for begin, end in spans)]
    began, kept, curve = history.attempts[0].began, 0.0, []
    in_vain = _in_vain(history)
    for attempt in history.attempts:
        for step in attempt.steps:
            now = attempt.loaded + step.after
            if history.survives(attempt, step) and not in_vain(step):
                kept += step.seconds
            up = now - began - idle[bisect.bisect_right(ends, now)]
            curve.append((now, min(1.0, kept / up) if up > 0 else 0.0))
    return curve


def _in_vain(history: History) -> Callable[[StepLine], bool]:
    """Tells whether a step on the line left nothing in the newest weights."""
    taken_back = history.taken_back()
    return lambda step: bool(step.skipped) or any(to < step.step <= last for to, last in taken_back)


def _regrouped(attempt: Attempt) -> bool:
    """The attempt paused for a change of nodes: the job went on."""
    return attempt.end is not None and attempt.end["code"] == EXIT_PAUSED


def _first_step_began(attempt: Attempt) -> float:
    first = attempt.steps[0]
    return max(attempt.began, attempt.loaded + first.after - first.seconds)


def _startup(attempt: Attempt) -> dict[str, float]:
    """From the launch to the first step, by phase. Phases may reach back before the launch of this
    attempt (a fork knows when its job was launched): then the early ones are cut."""
    end = _first_step_began(attempt) if attempt.steps else attempt.finished
    rest, phases = end - attempt.began, dict(attempt.phases)
    if "first step" in phases and attempt.steps:
        phases["first step"] = max(0.0, phases["first step"] - attempt.steps[0].seconds)
    split = {}
    for phase, seconds in reversed(phases.items()):
        split[phase] = min(rest, seconds)
        rest -= split[phase]
    return {"other": rest, **split} if rest > 0 else split


def _passed(attempts: list[Attempt], highest: int) -> float | None:
    """When the first step beyond `highest` was done."""
    for attempt in attempts:
        for step in attempt.steps:
            if step.step > highest:
                return attempt.loaded + step.after
    return None


PRIOR_SECONDS = 24 * 3600.0
"""Time between failures of one node, before anything is known of it."""
MAX_SECONDS = 30 * 60.0
MIN_STALLS = 10
"""Between two saves there are at least so many stalls: saving never costs more than a tenth."""


def expected_mtbf(failures: int, node_seconds: float, nodes: int) -> float:
    """Seconds between failures to expect of a job.

    Args:
        failures: seen so far.
        node_seconds: for which nodes were running, added up over nodes.
        nodes: of the job now.

    The failure rate of a node has a Gamma prior of shape 1 and mean one in `PRIOR_SECONDS`;
    failures are a Poisson process, so the posterior is Gamma again. This is the inverse of its mean
    rate, over all nodes.
    """
    if failures < 0 or not node_seconds >= 0 or nodes < 1:
        raise ValueError(
            f"{failures} failures in {node_seconds} node-seconds on {nodes} node(s): must be at "
            "least 0, 0 and 1"
        )
    return (PRIOR_SECONDS + node_seconds) / (1 + failures) / nodes


def best_interval(stall_seconds: float, mtbf_seconds: float) -> float:
    """Seconds between saves that lose the least time, to saving and to steps done again.

    Args:
        stall_seconds: for which training stands still at a save; not the time of writing, where
            training goes on.
        mtbf_seconds: between failures that need the checkpoint.

    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    equation 37; never below ten stalls, and not above 30 minutes unless ten stalls are longer.
    0 for a save that costs nothing: as often as can be.
    """
    if not (stall_seconds >= 0 and mtbf_seconds > 0):
        raise ValueError(
            f"stall of {stall_seconds} s, MTBF of {mtbf_seconds} s: must be at least 0 and above 0"
        )
    interval = mtbf_seconds
    if stall_seconds < 2 * mtbf_seconds:
        ratio = stall_seconds / (2 * mtbf_seconds)
        young = math.sqrt(2 * stall_seconds * mtbf_seconds)
        interval = young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds
    return max(MIN_STALLS * stall_seconds, min(interval, MAX_SECONDS))


FIRST_SECONDS = 60.0
"""When the first checkpoint of an attempt is due, by which its cost is measured."""


class SaveClock:
    """When checkpoints are due if the run is to decide. On rank 0, which tells the others.

    Args:
        mtbf: seconds between failures to expect; `expected_mtbf`.
        now: by time.monotonic(), as everywhere here.
    """

    def __init__(self, mtbf: float, now: float) -> None:
        self._mtbf, self._last = mtbf, now
        self._stall: float | None = None
        self._writing = 0.0

    @property
    def interval(self) -> float:
        """Seconds from one checkpoint to the next."""
        if self._stall is None:
            return FIRST_SECONDS
        return max(best_interval(self._stall, self._mtbf), 2 * self._writing)

    def due(self, now: float) -> bool:
        """Whether it is time."""
        return now - self._last >= self.interval

    def begun(self, now: float, stall: float) -> None:
        """A checkpoint has begun, for which training stood still for `stall` seconds."""
        self._last, self._stall = now, stall

    def written(self, seconds: float) -> None:
        """It was written in so many seconds."""
        self._writing = seconds
