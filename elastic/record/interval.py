"""How often to save: measured stall and failures → seconds between checkpoints. Pure."""

import math

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
