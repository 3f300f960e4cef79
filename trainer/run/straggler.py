"""Slow ranks: compute times of all ranks per window → sentences. Pure.

A slow rank does not fail, it makes all others wait. Only time without waits for others shows it:
the forward pass, as a backward pass ends when the gradients of all ranks are summed. FSDP also
waits for peers inside the forward pass. Where parameters are sharded over all ranks, a straggler
shows only in what it does outside of these waits.

Ranks with uneven shares are no stragglers. A pass has a fixed cost and a cost per sequence: more
sequences take longer, fewer take longer each. A rank is slow only if it is so by both counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

SLOWER = 1.3
"""Factor over the median that deserves a message."""
ODD = 3.5
"""Robust z above which a value is an outlier (Iglewicz and Hoaglin, 1993)."""
WINDOWS = 3
"""Windows in a row after which a rank becomes a straggler, or stops being one."""
WEIGHT = 0.5
"""Weight of the newest window in the moving average."""


@dataclass(frozen=True)
class RankPace:
    """State of the comparison after a window; the empty one is the initial state."""

    smoothed: tuple[float, ...] = ()
    """By rank, moving average of the seconds of a pass."""
    contrary: tuple[int, ...] = ()
    """By rank, windows in a row that contradicted whether it is called slow."""
    named: frozenset[int] = frozenset()
    """Ranks that are called slow."""


def compare_ranks(
    pace: RankPace,
    seconds: Sequence[float],
    sequences: Sequence[float] | None = None,
    ranks: Sequence[int] | None = None,
) -> tuple[RankPace, list[str]]:
    """Judge one more window; every rank that calls it with the same values gets the same result.

    Args:
        pace: state after the window before.
        seconds: by rank, compute time of a pass in this window, without waits for other ranks.
        sequences: by rank, mean number of sequences in a pass; None: all equal.
        ranks: global ranks of the values, such as those of a pipeline stage; None: all, in order.

    Returns the new pace, and a sentence for each rank that became slow or is no longer: slow is a
    rank that is more than SLOWER times the median and an outlier, both in this window and in the
    average, for WINDOWS windows in a row. A change of the number of ranks begins anew.
    """
    if len(pace.smoothed) != len(seconds):
        pace = RankPace(tuple(seconds), (0,) * len(seconds))
    smoothed = tuple(
        WEIGHT * new + (1 - WEIGHT) * old for old, new in zip(pace.smoothed, seconds, strict=True)
    )
    sizes = sequences or [1.0] * len(seconds)

    def per_sequence(values: Sequence[float]) -> list[float]:
        return [value / size for value, size in zip(values, sizes, strict=True)]

    slow = outliers(seconds) & outliers(smoothed)
    slow &= outliers(per_sequence(seconds)) & outliers(per_sequence(smoothed))
    contrary = tuple(
        count + 1 if (rank in slow) != (rank in pace.named) else 0
        for rank, count in enumerate(pace.contrary)
    )
    changed = {rank for rank, count in enumerate(contrary) if count >= WINDOWS}
    median = median_low(smoothed) if smoothed else 0.0
    sentences = []
    for rank in sorted(changed):
        whose = "its stage" if ranks else "all ranks"
        times = f"{smoothed[rank]:.3g} s, median of {whose} {median:.3g} s"
        name = ranks[rank] if ranks else rank
        if rank in pace.named:
            sentences.append(f"rank {name} is no longer slow ({times})")
        else:
            sentences.append(
                f"rank {name} is slow, and all others wait for it: {smoothed[rank] / median:.1f} "
                f"times the median for {WINDOWS} log intervals in a row ({times}); look for "
                "other processes, heat, or lowered clocks on its machine"
            )
    contrary = tuple(0 if rank in changed else count for rank, count in enumerate(contrary))
    return RankPace(smoothed, contrary, pace.named ^ changed), sentences


def outliers(seconds: Sequence[float]) -> set[int]:
    """Ranks that are both much slower than the median and far from it, compared with the usual
    spread."""
    if not seconds:
        return set()
    # The low median makes two ranks comparable: the slower is measured by the faster.
    median = median_low(seconds)
    spread = median_low([abs(value - median) for value in seconds])
    # 0.6745 makes the median absolute deviation comparable to a standard deviation.
    return {
        rank
        for rank, value in enumerate(seconds)
        if value > SLOWER * median > 0 and 0.6745 * (value - median) > ODD * spread
    }
