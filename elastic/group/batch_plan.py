"""Which rank computes which sequences of a global batch. Pure functions.

The global batch is the same at every world size. Where it does not divide evenly, ranks have
different numbers of sequences but the same number of forward and backward passes, so that their
collectives match. A rank with nothing left to compute runs one sequence with weight 0.

The *units* that ranks divide among themselves are sequences. In a fixed plan they are
micro-batches, into which the global batch is cut equally at every world size. Ranks have equally
many units where these divide evenly, or the numbers in `GroupBatchPlan.shares` ([Note: shares]).

Shares are in proportion to the measured speed of ranks. Ranks with the same measurements reach the
same decision without another message.

[Note: shares] A *window* is one measurement: the seconds per sequence of each rank. The shares
change only for a lasting gain:

- The pace of a rank is the median of its last KEPT windows.
- Ranks within ALIKE of the median rank count as equally fast, so that noise changes nothing.
  Without this rule there were 95 changes in 1,000 calm windows of 64 ranks.
- Each window shows what fraction of its time the best shares for these paces would have saved. The
  excess of this fraction over GAIN adds up over windows, and at ENOUGH the shares change. So a
  large gain takes a few windows, and a small gain as many as it takes to tell it from noise.
- Once the shares have changed, GAIN_AGAIN replaces GAIN until the pace of a rank, relative to the
  median rank, has changed by the fraction MOVED. Without this rule a rank that stayed 5 to 12 %
  slower changed the shares two to six times in 300 windows, as noise took its pace across the
  border of ALIKE.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import pairwise
from math import inf, isfinite
from statistics import median


@dataclass(frozen=True)
class GroupBatchPlanPass:
    """The sequences of one forward and backward pass of a rank."""

    positions: tuple[int, ...]
    """Positions of the sequences in the global order."""

    real: bool
    """False: the pass only keeps collectives matched between ranks, and its loss has weight 0."""


@dataclass(frozen=True)
class GroupBatchPlan:
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

    def micro_batches(self, rank: int, start: int) -> Iterator[GroupBatchPlanPass]:
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
            yield GroupBatchPlanPass(
                tuple(start + row for row in part) or (start,), real=bool(part)
            )

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
) -> GroupBatchPlan:
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
        return GroupBatchPlan(
            global_batch, world_size, -(-numbered // world_size), micro_batch, True
        )
    per_rank = -(-global_batch // world_size)
    passes = -(-per_rank // micro_batch)
    return GroupBatchPlan(global_batch, world_size, passes, -(-per_rank // passes))


KEPT, ALIKE, MOVED = 5, 0.1, 0.25
GAIN, GAIN_AGAIN, ENOUGH = 0.05, 0.12, 1.5
PASS_COST = 0.2
"""Fixed cost of a pass that all ranks run in lockstep, as a number of sequences of the median rank.
It keeps the number of passes small."""


@dataclass
class GroupBatchPlanner:
    """Decides how many units of a global batch each rank computes, anew after each measurement. All
    ranks reach the same decision."""

    plan: GroupBatchPlan
    """The current plan, at first with equal shares. All plans keep its `lockstep`."""
    micro_batch: int
    """Largest number of sequences of a pass that fit in memory."""
    _seen: list[tuple[float, ...]] = field(default_factory=list)
    """Seconds per sequence of each rank, in the last KEPT windows."""
    _counted: tuple[float, ...] = ()
    """Pace of each rank when the shares last changed, divided by that of the median rank; empty:
    the shares have not changed yet."""
    _saved: float = 0.0
    """Sum over windows of the fraction saved above GAIN or GAIN_AGAIN, never below 0."""

    @property
    def paces(self) -> list[float]:
        """Seconds per sequence of each rank: the median of its last KEPT windows. Ranks within
        ALIKE of the median rank have its value."""
        paces = [median(of_rank) for of_rank in zip(*self._seen, strict=True)]
        usual = median(paces)
        return [usual if abs(pace / usual - 1) < ALIKE else pace for pace in paces]

    def window(self, paces: Sequence[float]) -> bool:
        """Add a measurement, seconds per sequence of each rank; returns whether `plan` has changed.
        The window is dropped if a rank measured nothing (0, or not finite)."""
        if not all(isfinite(pace) and pace > 0 for pace in paces):
            return False
        self._seen = [*self._seen, tuple(paces)][-KEPT:]
        now, better = self.paces, self.plan
        usual = median(now)
        relative = tuple(pace / usual for pace in now)
        if self._counted or len(set(now)) > 1:  # else the current, equal shares are the best
            better = best_plan(self.plan, now, self.micro_batch)
        moved = not self._counted or any(
            abs(pace / known - 1) > MOVED
            for pace, known in zip(relative, self._counted, strict=True)
        )
        # Measured by this window alone: medians would repeat an odd window several times.
        saved = 1 - step_seconds(better, paces) / step_seconds(self.plan, paces)
        self._saved = max(0.0, self._saved + saved - (GAIN if moved else GAIN_AGAIN))
        if self._saved < ENOUGH:
            return False
        self.plan, self._counted, self._saved = better, relative, 0.0
        return True


def best_plan(plan: GroupBatchPlan, paces: Sequence[float], micro_batch: int) -> GroupBatchPlan:
    """Return the plan of the same global batch whose predicted step is the shortest. A plan of one
    pass keeps one pass, because further passes need memory for gradients. `paces`: seconds per
    sequence of each rank. `micro_batch`: largest number of sequences of a pass."""
    single = plan.passes == 1
    if plan.fixed or not plan.lockstep:
        size, most = (plan.micro_batch, 1) if plan.fixed else (micro_batch, micro_batch)
        shares = fastest_shares(paces, plan.units, most if single else None)
        return replace(plan, micro_batch=size, shares=shares)
    # Equal shares often fill all passes; then fast ranks can take more only in additional passes.
    fewest = -(-plan.units // (plan.world_size * micro_batch))
    plans = [
        replace(
            plan,
            passes=passes,
            micro_batch=micro_batch,
            shares=fastest_shares(paces, plan.units, passes * micro_batch),
        )
        for passes in range(fewest, 2 if single else 2 * fewest + 2)
    ]
    return min(plans, key=lambda one: step_seconds(one, paces))


def fastest_shares(paces: Sequence[float], units: int, most: int | None = None) -> tuple[int, ...]:
    """Returns the number of units of each rank, from 1 to `most`, that minimises the time of the
    slowest rank. Each unit goes to the rank that would finish it first, which is optimal for equal
    units. `paces`: seconds per unit of each rank. Raises ValueError if no such numbers exist."""
    ranks, most = len(paces), units if most is None else most
    if not ranks <= units <= most * ranks:
        raise ValueError(f"{units} units do not fit {ranks} ranks of which each takes 1 to {most}")
    shares = [1] * ranks
    done = [(2 * pace if most > 1 else inf, rank) for rank, pace in enumerate(paces)]
    heapify(done)
    for _ in range(units - ranks):
        rank = done[0][1]
        shares[rank] += 1
        full = shares[rank] == most
        heapreplace(done, (inf if full else (shares[rank] + 1) * paces[rank], rank))
    return tuple(shares)


def step_seconds(plan: GroupBatchPlan, paces: Sequence[float]) -> float:
    """Return the predicted seconds of a step's passes, from the seconds per sequence of each rank.

    Ranks wait for each other at the end of a step; in lockstep after each pass, where a rank with
    no sequence left computes a sequence with weight 0."""
    shares = [len(plan.units_of(rank)) for rank in range(plan.world_size)]
    kinds = set(zip(shares, paces, strict=True))  # a set, as most ranks are alike
    if not plan.lockstep:
        return max(share * pace for share, pace in kinds) * (plan.micro_batch if plan.fixed else 1)
    return plan.passes * PASS_COST * median(paces) + sum(
        max(
            max(1, share // plan.passes + (number < share % plan.passes)) * pace
            for share, pace in kinds
        )
        for number in range(plan.passes)
    )
