"""Which rank computes which sequences of a global batch. Pure functions.

The global batch is the same at every world size. Where it does not divide evenly, ranks have
different numbers of sequences but the same number of forward and backward passes, so that their
collectives match. A rank with nothing left to compute runs one sequence with weight 0.

The *units* that ranks divide among themselves are sequences. In a fixed plan they are
micro-batches, into which the global batch is cut equally at every world size. Ranks have equally
many units where these divide evenly, or the numbers in `BatchPlan.shares` (see shares.py)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise


@dataclass(frozen=True)
class BatchPlanPass:
    """The sequences of one forward and backward pass of a rank."""

    positions: tuple[int, ...]
    """Positions of the sequences in the global order."""

    real: bool
    """False: the pass only keeps collectives matched between ranks, and its loss has weight 0."""


@dataclass(frozen=True)
class BatchPlan:
    """How one global batch is divided among the data-parallel ranks."""

    global_batch: int
    world_size: int
    passes: int
    """Forward and backward passes of every rank per optimizer step."""
    micro_batch: int
    fixed: bool = False
    """Whether micro-batches are the same at every world size."""
    shares: tuple[int, ...] | None = None
    """Number of units of each rank; None: equally many."""
    lockstep: bool = True
    """Whether all ranks need equally many passes, because each pass has collectives. With equal
    shares all ranks have equally many passes in any case."""

    @property
    def units(self) -> int:
        """Sequences of the global batch, or its micro-batches in a fixed plan."""
        return -(-self.global_batch // self.micro_batch) if self.fixed else self.global_batch

    def units_of(self, rank: int) -> Sequence[int]:
        """Indices of the units of `rank` in the global batch, ascending. Units go to the ranks in
        turn, one at a time until each rank has its share, so that all ranks see the same mixture of
        sources."""
        if self.shares is None:
            return range(rank, self.units, self.world_size)
        return _dealt(self.shares)[rank]

    def passes_of(self, rank: int) -> int:
        if self.shares is None or self.lockstep:
            return self.passes
        return self.shares[rank] if self.fixed else -(-self.shares[rank] // self.micro_batch)

    @property
    def efficiency(self) -> float:
        """Sequences of the global batch, divided by the sequences that all ranks could compute in
        the time of the busiest rank. Assumes equal shares and equally fast ranks."""
        # The other ranks wait for the busiest rank in the collectives.
        busiest = -(-self.global_batch // self.world_size)
        # Rank 0 is the busiest. It has the last micro-batch, perhaps a smaller one, only if no
        # other rank has as many micro-batches.
        if self.fixed:
            rounds, rest = divmod(self.global_batch, self.world_size * self.micro_batch)
            busiest = rounds * self.micro_batch + min(rest, self.micro_batch)
        return self.global_batch / (self.world_size * busiest)

    def micro_batches(self, rank: int, start: int) -> Iterator[BatchPlanPass]:
        """Yield the passes of `rank` for the global batch that begins at sequence `start`."""
        units, passes = self.units_of(rank), self.passes_of(rank)
        parts: list[Sequence[int]]
        if self.fixed:
            size, end = self.micro_batch, self.global_batch
            parts = [range(unit * size, min(unit * size + size, end)) for unit in units]
        else:
            whole, extra = divmod(len(units), passes)
            cuts = [whole * number + min(number, extra) for number in range(passes + 1)]
            parts = [units[begin:end] for begin, end in pairwise(cuts)]
        for part in [*parts, *[()] * (passes - len(parts))]:
            # A pass without work takes any sequence, as its gradient is multiplied by 0.
            yield BatchPlanPass(tuple(start + row for row in part) or (start,), real=bool(part))

    def __str__(self) -> str:
        size = "fixed micro-batches of" if self.fixed else "up to"
        text = (
            f"global batch {self.global_batch} = {self.world_size} rank(s) x {self.passes} "
            f"pass(es) x {size} {self.micro_batch} sequences"
        )
        if self.efficiency < 0.95:
            text += (
                f" ({1 - self.efficiency:.0%} of the slots are idle; a global batch divisible by "
                f"{self.world_size} would use them)"
            )
        return text


@lru_cache(maxsize=8)
def _dealt(shares: tuple[int, ...]) -> list[list[int]]:
    dealt: list[list[int]] = [[] for _ in shares]
    unit = 0
    for turn in range(max(shares)):
        for rank, share in enumerate(shares):
            if share > turn:
                dealt[rank].append(unit)
                unit += 1
    return dealt


def most_ranks(global_batch: int, micro_batch: int, *, fixed: bool = False) -> int:
    """Returns the largest number of data-parallel ranks of which each has a sequence, or in a
    `fixed` plan a micro-batch. Arguments as for `plan_batch`."""
    return -(-global_batch // micro_batch) if fixed else global_batch


def plan_batch(
    global_batch: int, world_size: int, micro_batch: int, *, fixed: bool = False
) -> BatchPlan:
    """Divide `global_batch` sequences among `world_size` data-parallel ranks. `fixed`: use the same
    micro-batches at every world size.

    Args:
        micro_batch: largest number of sequences of a rank in one pass. In a fixed plan every
            micro-batch has exactly this number, except perhaps the last of a global batch.

    Raises:
        ValueError: fewer sequences (fixed: micro-batches) than ranks, or a number below 1.
    """
    if min(global_batch, world_size, micro_batch) < 1:
        raise ValueError(
            f"global_batch={global_batch}, world_size={world_size} and micro_batch={micro_batch} "
            "must each be at least 1"
        )
    if global_batch < world_size:
        raise ValueError(
            f"a global batch of {global_batch} sequences leaves {world_size - global_batch} of "
            f"{world_size} data-parallel ranks without work; raise batch.global_batch to at least "
            f"{world_size} or start fewer ranks"
        )
    if fixed:
        numbered = most_ranks(global_batch, micro_batch, fixed=True)
        if numbered < world_size:
            raise ValueError(
                f"a global batch of {global_batch} sequences, in micro-batches of {micro_batch}, "
                f"leaves {world_size - numbered} of {world_size} data-parallel ranks without work; "
                f"start at most {numbered} ranks, or a new run with a smaller batch.micro_batch"
            )
        return BatchPlan(global_batch, world_size, -(-numbered // world_size), micro_batch, True)
    per_rank = -(-global_batch // world_size)
    passes = -(-per_rank // micro_batch)
    return BatchPlan(global_batch, world_size, passes, -(-per_rank // passes))
