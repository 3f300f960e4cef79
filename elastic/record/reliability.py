"""Goodput, failures and recovery times of a run, and the save interval. Pure functions.

Goodput is the time in steps whose result is part of the newest weights, divided by the wall time
from the first launch to the last line. MTBF is the run's uptime divided by its failures. MTTR is
the mean time from a failure to the first step beyond the highest one reached before, so it includes
repeated steps. (Terms as in ByteRobust, arXiv 2509.16293, whose ETTR is our goodput.)"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from elastic.exits import EXIT_PAUSED
from elastic.record.attempt import RecordedAttempt
from elastic.record.history import RecordHistory


@dataclass(frozen=True)
class Goodput:
    """The seconds of a run, divided by use. `wall` is the sum of all other fields."""

    wall: float
    kept: float
    """Time in steps whose result is part of the newest weights."""
    redone: float
    """Time in steps that were repeated, including steps that a failure interrupted."""
    skipped: float
    """Time in steps that were skipped for bad numbers, and in steps that a roll-back undid."""
    starting: Mapping[str, float]
    """Phase → time from a launch or a failure to the first step."""
    stalled: float
    """Time in which saves stopped training, as far as measured."""
    between: float
    """Time between steps for other reasons: evaluation, logging, waiting for the last save."""
    idle: float
    """Time in which no attempt ran, except after a failure or for a change of nodes."""

    @property
    def share(self) -> float:
        return self.kept / self.wall if self.wall else 0.0

    @property
    def share_of_uptime(self) -> float:
        """Fraction of the uptime (the wall time without idle time) that is goodput, 0 to 1."""
        up = self.wall - self.idle
        return self.kept / up if up else 0.0


def goodput(history: RecordHistory) -> Goodput:
    attempts = history.attempts
    kept = redone = skipped = stalled = between = 0.0
    starting: dict[str, float] = {}
    for attempt in attempts:
        for phase, seconds in startup(attempt).items():
            starting[phase] = starting.get(phase, 0.0) + seconds
        if attempt.steps:
            good, bad, lost = time_in_steps(history, attempt)
            kept, skipped, redone = kept + good, skipped + bad, redone + lost
            rest = max(0.0, attempt.finished - _first_step_began(attempt) - good - bad - lost)
            # Rounded, the stalls by saves may exceed `rest`, the attempt's time outside of steps.
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


def idle_spans(history: RecordHistory) -> list[tuple[float, float]]:
    """Returns (begin, end), in Unix time, of each pause between two attempts that had no failure
    and no change of nodes as its cause."""
    return [
        (before.finished, after.began)
        for before, after in pairwise(history.attempts)
        if after.start.cause is None and not _regrouped(before) and after.began > before.finished
    ]


def failed_at(before: RecordedAttempt, after: RecordedAttempt) -> float:
    """Returns the Unix time of the failure between two attempts. The recorded time may be by the
    clock of another machine, so it is limited to the time between the attempts."""
    cause = after.start.cause or {}
    ago = after.start.at - float(cause.get("at") or after.start.at)
    return min(max(after.loaded - ago, before.finished), after.began)


@dataclass(frozen=True)
class Reliability:
    """How often a run fails, and how fast it recovers."""

    failures: int
    node_seconds: float
    """Sum of the uptimes of all nodes."""
    mtbf: float | None
    """Seconds of uptime between failures; None without a failure."""
    mttr: float | None
    """Mean seconds from a failure to the first new step; None without a recovery."""
    recoveries: Mapping[int, float]
    """Number of the attempt after a failure → seconds from the failure to its first new step."""


def reliability(history: RecordHistory) -> Reliability:
    """Count the failures of a run, and measure the time until each was recovered."""
    attempts = history.attempts
    failures = sum(history.failed(attempt) is not None for attempt in attempts)
    idle = {end: end - begin for begin, end in idle_spans(history)}
    node_seconds = up = 0.0
    previous = attempts[0].began
    for attempt in attempts:
        # The time between two attempts of one launch counts, as the nodes were up.
        seconds = attempt.finished - previous - idle.get(attempt.began, 0.0)
        up, node_seconds = up + seconds, node_seconds + seconds * attempt.start.nodes
        previous = attempt.finished
    recoveries = {}
    reached = list(accumulate((attempt.last_step for attempt in attempts), max))
    for before, after in pairwise(attempts):
        if after.start.cause is not None:
            # A run has recovered only once it is beyond every step done before the failure.
            highest = max(reached[before.number - 1], after.start.step)
            for attempt in attempts[after.number - 1 :]:
                if step := attempt.steps.beyond(highest):
                    seconds = attempt.loaded + step.after - failed_at(before, after)
                    recoveries[after.number] = seconds
                    break
    mtbf = up / failures if failures else None
    mttr = sum(recoveries.values()) / len(recoveries) if recoveries else None
    return Reliability(failures, node_seconds, mtbf, mttr, recoveries)


def time_in_steps(history: RecordHistory, attempt: RecordedAttempt) -> tuple[float, float, float]:
    """Returns the seconds in steps of an attempt: (kept in the newest weights, skipped or rolled
    back, computed again by a later attempt)."""
    number, seconds = attempt.steps.column("step"), attempt.steps.column("seconds")
    lasting = number <= history.kept.get(attempt.number, -1)
    vain = np.isin(number, [step.step for step in attempt.steps.skipped()])
    for to, last in history.taken_back():
        # a roll-back has undone these steps
        vain |= (to < number) & (number <= last)
    good, bad = float(seconds[lasting & ~vain].sum()), float(seconds[lasting & vain].sum())
    return good, bad, float(seconds[~lasting].sum())


def _regrouped(attempt: RecordedAttempt) -> bool:
    """Whether the attempt ended with a pause, such as for a change of nodes; the job then
    continues."""
    return attempt.end is not None and attempt.end["code"] == EXIT_PAUSED


def _first_step_began(attempt: RecordedAttempt) -> float:
    first = attempt.steps[0]
    return max(attempt.began, attempt.loaded + first.after - first.seconds)


def startup(attempt: RecordedAttempt) -> dict[str, float]:
    """Returns phase → seconds, from the beginning of an attempt to its first step; "other" is the
    remainder. An attempt never begins before the last line of the previous one, so phases that
    reach further back are shortened."""
    end = _first_step_began(attempt) if attempt.steps else attempt.finished
    rest, phases = end - attempt.began, dict(attempt.phases)
    if "first step" in phases and attempt.steps:
        phases["first step"] = max(0.0, phases["first step"] - attempt.steps[0].seconds)
    split = {}
    for phase, seconds in reversed(phases.items()):
        split[phase] = min(rest, seconds)
        rest -= split[phase]
    return {"other": rest, **split} if rest > 0 else split


PRIOR_SECONDS = 24 * 3600.0
"""1 / the prior mean of a node's failure rate, in seconds."""
MAX_SECONDS = 30 * 60.0
MIN_STALLS = 10
"""Shortest interval between saves, as a multiple of the stall of a save, the time for which it
stops training. So stalls take at most a tenth of the time."""


def expected_mtbf(failures: int, node_seconds: float, nodes: int) -> float:
    """Returns the expected seconds between failures of a job.

    Args:
        failures: failures observed so far.
        node_seconds: sum of the nodes' uptimes so far.
        nodes: nodes of the job.

    Failures are a Poisson process. A node's failure rate has a Gamma prior of shape 1 and mean
    1 / `PRIOR_SECONDS`, so its posterior is Gamma too. The result is 1 / (mean rate x nodes).
    """
    if failures < 0 or not node_seconds >= 0 or nodes < 1:
        raise ValueError(
            f"{failures} failures in {node_seconds} node-seconds on {nodes} node(s): must be at "
            "least 0, 0 and 1"
        )
    return (PRIOR_SECONDS + node_seconds) / (1 + failures) / nodes


def best_interval(stall_seconds: float, mtbf_seconds: float) -> float:
    """Returns the seconds between saves that minimise the time lost to saving and to repeated steps
    (Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    equation 37). They are at least ten stalls, and otherwise at most 30 minutes.

    Args:
        stall_seconds: seconds for which a save stops training, without the writing that overlaps.
        mtbf_seconds: seconds between failures after which a checkpoint is loaded.
    """
    if not (stall_seconds >= 0 and mtbf_seconds > 0):
        raise ValueError(
            f"stall of {stall_seconds} s, MTBF of {mtbf_seconds} s: the first must be at least 0, "
            "the second above 0"
        )
    # Daly's second case: the stall is so long that the approximation is not valid.
    interval = mtbf_seconds
    if stall_seconds < 2 * mtbf_seconds:
        ratio = stall_seconds / (2 * mtbf_seconds)
        young = math.sqrt(2 * stall_seconds * mtbf_seconds)
        interval = young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds
    return max(MIN_STALLS * stall_seconds, min(interval, MAX_SECONDS))


FIRST_SECONDS = 60.0
"""Seconds until the first checkpoint of an attempt, which measures the cost of a save."""


class SaveClock:
    """Decides when checkpoints are due. Used on rank 0, which broadcasts the decision.

    Args:
        mtbf: expected seconds between failures, see `expected_mtbf`.
        now: current time by time.monotonic(), as in all methods.
    """

    def __init__(self, mtbf: float, now: float) -> None:
        self._mtbf, self._last = mtbf, now
        self._stall: float | None = None
        self._writing = 0.0

    @property
    def interval(self) -> float:
        if self._stall is None:
            return FIRST_SECONDS
        # Writing may take at most half of the time.
        return max(best_interval(self._stall, self._mtbf), 2 * self._writing)

    def due(self, now: float) -> bool:
        return now - self._last >= self.interval

    def begun(self, now: float, stall: float) -> None:
        """Record that a save began, for which training stopped for `stall` seconds."""
        self._last, self._stall = now, stall

    def written(self, seconds: float) -> None:
        """Record that the save took `seconds` to write."""
        self._writing = seconds
