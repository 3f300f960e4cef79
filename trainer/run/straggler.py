"""Finds slow ranks by comparing the compute times of all ranks per log interval. Pure.

A slow rank does not fail, but makes all others wait. Only times without such waits show it: those
of forward passes, because a backward pass ends when the gradients of all ranks are summed. FSDP
waits for other ranks in forward passes too, so with FSDP a slow rank shows only in its time between
waits. Ranks with unequal shares of the batch must not look slow. A pass has a fixed cost and a cost
per sequence, so small shares take less time, but more per sequence. A rank counts as slow only if
it is slow both per pass and per sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

SLOWER = 1.3
"""A slow rank takes more than this many times the median."""
ODD = 3.5
"""Modified z-score above which a value is an outlier (Iglewicz and Hoaglin, 1993)."""
WINDOWS = 3
"""Log intervals in a row after which a rank is called slow, or no longer called slow."""
WEIGHT = 0.5
"""Weight of the newest log interval in the moving average."""


@dataclass(frozen=True)
class StragglerState:
    """State of the comparison of ranks after a log interval; the defaults are the initial state."""

    smoothed: tuple[float, ...] = ()
    """By rank, moving average of the seconds of a pass."""
    contrary: tuple[int, ...] = ()
    """By rank, number of log intervals in a row whose result disagrees with `named`."""
    named: frozenset[int] = frozenset()
    """Ranks that are called slow."""


def compare_ranks(
    pace: StragglerState,
    seconds: Sequence[float],
    sequences: Sequence[float] | None = None,
    ranks: Sequence[int] | None = None,
) -> tuple[StragglerState, list[str]]:
    """Compare the ranks in one more log interval. A rank is called slow if it takes more than
    SLOWER times the median and is an outlier, in the interval and in the moving average, for
    WINDOWS intervals in a row. If the number of ranks changes, the comparison begins anew. Returns
    the new state, and a sentence for each rank that became slow or is no longer slow.

    Args:
        seconds: by rank, mean seconds of a pass in this interval, without waits for other ranks.
        sequences: by rank, mean number of sequences in a pass; None: all equal.
        ranks: global ranks of the values, such as the ranks of a pipeline stage; None: 0, 1, ….
    """
    if len(pace.smoothed) != len(seconds):
        pace = StragglerState(tuple(seconds), (0,) * len(seconds))
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
    return StragglerState(smoothed, contrary, pace.named ^ changed), sentences


def outliers(seconds: Sequence[float]) -> set[int]:
    """Return the ranks above SLOWER times the median whose modified z-score is above ODD."""
    if not seconds:
        return set()
    # The low median: of two ranks, the slower is compared with the faster.
    median = median_low(seconds)
    spread = median_low([abs(value - median) for value in seconds])
    # 0.6745 makes the median absolute deviation comparable to a standard deviation.
    return {
        rank
        for rank, value in enumerate(seconds)
        if value > SLOWER * median > 0 and 0.6745 * (value - median) > ODD * spread
    }
