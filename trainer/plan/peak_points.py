"""Computes the memory of one rank at the points of a step at which it may be largest.

[Note: peak points] Memory changes within a step. Its peak is the largest value at a few points in
time, and less than the sum of the largest values of each kind of memory. These are the points, by
the phase of the step:

- *forward*: the loss has just been computed, so logits and all activations exist; or the last block
  computes; or FSDP has just gathered a block.
- *head*: backward through loss and output head; FSDP has gathered the last block again.
- *blocks*: backward through a block, with its recomputed activations and gradients. After each
  block its activations are freed, and its reduced gradients allocated. So the maximum is at the
  last block, at the block before it (when a reduction buffer exists, too), or at the first.
- *end*: backward through the embedding.
- *reduce*: FSDP copies the gradients outside of blocks into the reduction buffer.
- *update*: all gradients are reduced; the optimizer runs.

Facts about torch that the sums rely on (2.11 to 2.13; `fsdp/_fully_shard`, `nn/parallel`):

- FSDP gathers a unit into one flat buffer, and copies its parameters out one by one. In forward the
  flat buffer is freed when the next unit has been copied out, or earlier if FSDP prefetches, as it
  does in backward, except for a stage's first block, after which nothing is gathered. The root unit
  (embedding, head) stays gathered meanwhile. Units that stay gathered are not gathered again.
- Gradients of a unit are copied into a reduction buffer of the reduction's dtype, which is freed
  when the next unit is reduced. Until then torch also refers to the last gradient. Between passes
  that do not reduce, whole gradients are kept in that dtype. The first pass casts them one by one,
  and later passes add to them: in fp32 each gradient as soon as it is computed.
- Expert-parallel experts are separate units in a block: they are gathered last, and reduced while
  the rest of the block still has its activations.
- With replicas, FSDP keeps the all-reduced shard of a unit until the unit is reduced again, or
  backward of the last pass ends. The shard is the gradient itself, unless a gradient existed
  before, or has another dtype or device.
- With offload from a GPU to the host, weights and gradients are in pinned memory, which CUDA's
  allocator rounds up to powers of two.
- A pipeline rank holds activations of several micro-batches, by the order of its schedule. One
  message per neighbour is received before it is needed. Sent gradients are kept until the receiver
  sends a message that shows their arrival. Each stage has an FSDP root, unless the rank shards
  nothing. While one stage computes, other stages of the rank keep gathered units, gradients of
  earlier passes, and the last reduction buffer.
- If gradients of weights are postponed (zero_bubble), backward of the inputs frees nothing until it
  is done, and then all that the gradients of weights do not need. The gradients of weights are
  computed from the last layer to the first, bypass FSDP's hooks, and are reduced at the end.
- DDP keeps its buckets always. Gradients of passes under `no_sync` are allocated outside of the
  buckets, and move into the buckets in the last pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from trainer.parallel.ddp import buckets
from trainer.parallel.parallelize import DTYPES
from trainer.parallel.schedules import Kind
from trainer.plan.blueprint import (
    PlannedLayout,
    PlannedParameter,
    PlannedStage,
    bytes_of,
    counted,
    gathered_bytes,
    parts_of,
    trained_of,
)
from trainer.plan.tape import PlannedPassTrace
from trainer.recipe import Recipe
from trainer.recipe.strategies import exact


@dataclass(frozen=True)
class PlannedPeak:
    """Bytes that are allocated at a point in time of a step, where the peak may be."""

    phase: str
    """Phase of the step, as [Note: peak points] names it."""
    gradients: int = 0
    """Bytes of reduced gradients, or of DDP's buckets."""
    pass_: int = 0
    """Bytes of the traced pass, of other micro-batches, and of the rank's other stages."""
    other: int = 0
    """All other bytes: gathered units, buffers of collectives, unreduced gradients."""


class PlannedStagePass(NamedTuple):
    """A pass of a rank through a stage, with all that its memory depends on."""

    kind: Kind
    before: bool
    """Whether a backward pass of the stage precedes this pass in the step."""
    last: bool
    """Whether this is the last backward pass of the stage in the step."""
    fresh: bool
    """Whether the stage's previous pass in this step is not a forward pass, or there is none."""


class _IdleStage(NamedTuple):
    """Bytes that a stage keeps while another stage of its rank computes."""

    gathered: int
    """Bytes of units that stay gathered between a forward pass and the reduction of gradients."""
    between: int
    """Bytes of gradients and buffers between the first and the last backward pass."""
    after: int
    """Bytes of reduced gradients, which are all that is kept after the last backward pass."""


def adds_gradients(recipe: Recipe, layout: PlannedLayout) -> bool:
    """Return whether FSDP adds each gradient to the sum of earlier passes as soon as it is
    computed. It does if both have one dtype, and there are several passes with one reduction."""
    same = DTYPES[recipe.precision.dtype].itemsize == exact.reduced_bytes(recipe)
    return same and layout.passes > 1 and not recipe.strategy.reduce_every_pass


class PlannedShardedStage:
    """Computes the memory of a stage that FSDP shards, from a trace of its pass."""

    def __init__(
        self,
        stage: PlannedStage,
        trace: PlannedPassTrace,
        recipe: Recipe,
        layout: PlannedLayout,
        offloaded: bool,
    ) -> None:
        self.trace = trace
        self._stage, self._layout, self._units = stage, layout, stage.units
        self._compute = DTYPES[recipe.precision.dtype].itemsize
        self._reduced = exact.reduced_bytes(recipe)
        self._every_pass = recipe.strategy.reduce_every_pass
        self._free = recipe.gathers_twice
        in_float32 = recipe.precision.master == "fp32" and not exact.used(recipe)
        self._in_place = in_float32 and not offloaded
        """Whether the all-reduced shard is the gradient itself."""
        blocks = dict.fromkeys(stage.units[1:])  # distinct blocks, because most are equal
        self._parts = [part for unit in blocks for part in parts_of(unit)]
        self._block = max((self._padded(unit) for unit in blocks), default=0)
        # All parts but experts, which are reduced before their block's other part, and whose flat
        # buffer never exists together with that of the next block.
        whole = [part for part in self._parts if part[0].divided == 1]
        self._buffer = max(map(self._buffer_of, whole), default=0)
        self._flat = max(map(self._flat_of, whole), default=0)
        self._flats = max(map(self._flat_of, self._parts), default=0)
        # The last flat buffer of forward, which is not freed before the loss.
        self._left = self._flat_of(self._parts[-1]) if self._parts else 0
        self._root = self._padded(self._units[0])
        self._root_flat = self._flat_of(self._units[0]) if self._units[0] else 0
        units = counted([stage])
        whole_units = sum(count * self._padded(unit) for unit, count in units)
        self._gathered = self._root if self._free else whole_units
        reduced = sum(count * self._slice_of(unit) for unit, count in units)
        self._slices = 0 if offloaded else reduced  # gradients of a step on the device
        self._whole = sum(count * self._accumulated(unit) for unit, count in units)
        # The root is reduced last; if it has no gradients, a block is.
        last = (*parts_of(self._units[0]), *self._parts)[:1]
        self._last_buffer = sum(map(self._buffer_of, last))

    @property
    def resting(self) -> _IdleStage:
        between = sum(self._of_passes(True)) + self._all_reduced(True, 0)
        return _IdleStage(self._gathered, between, self._slices)

    def points(self, which: PlannedStagePass) -> list[PlannedPeak]:
        """Return the peak points of a pass, with what earlier passes of the stage left."""
        kind, before, last, fresh = which
        if kind == "F":
            return self._forward(before, fresh)
        if kind == "B" or (kind == "W" and self._stage.first):
            return self._backward(before, last or self._every_pass, fresh and self._every_pass)
        if kind == "W":
            return self._backward_of_weights(before, last)
        return [] if self._stage.first else self._backward(before, False, False)

    def _flat_of(self, part: Sequence[PlannedParameter]) -> int:
        """Return the bytes of the flat buffer into which FSDP gathers a parameter group; 0 if it is
        sharded over one rank, where FSDP copies directly."""
        return self._padded(part) if part[0].over(self._layout.shards) > 1 else 0

    def _padded(self, unit: Sequence[PlannedParameter], itemsize: int | None = None) -> int:
        return gathered_bytes(unit, self._layout.shards, itemsize or self._compute)

    def _buffer_of(self, unit: Sequence[PlannedParameter]) -> int:
        """Return the bytes of the buffer in which a unit is reduced."""
        return self._padded(trained_of(unit), self._reduced)

    def _slice_of(self, unit: Sequence[PlannedParameter]) -> int:
        """Return the bytes of a rank's shard of the reduced gradients of a unit."""
        return bytes_of(trained_of(unit), self._layout.shards)

    def _accumulated(self, unit: Sequence[PlannedParameter]) -> int:
        return bytes_of(trained_of(unit), None, self._reduced)

    # In the methods below, `before` says whether the stage has had a backward pass in this step.

    def _of_passes(self, before: bool) -> tuple[int, int, int]:
        """Return the bytes that earlier backward passes left: of reduced gradients, of whole
        gradients, and of the last reduction buffer."""
        if not before:
            return 0, 0, 0
        return (self._slices, 0, self._last_buffer) if self._every_pass else (0, self._whole, 0)

    def _apart(self, before: bool) -> int:
        """Return the largest number of reductions, among all of the step if `before`, else one,
        whose all-reduced shards are separate from the gradients."""
        if self._layout.replicas == 1:
            return 0
        return (self._layout.reductions if before else 1) - self._in_place

    def _all_reduced(self, before: bool, done: int) -> int:
        """Return the bytes of all-reduced shards that are separate from the gradients, after `done`
        blocks of a backward pass that reduces."""
        apart = self._apart(before)
        units = self._units if apart > 1 else self._units[1 : done + 1] if apart else ()
        shards = self._layout.shards
        return sum(bytes_of(trained_of(unit), shards, self._reduced) for unit in units)

    def _forward(self, before: bool, fresh: bool) -> list[PlannedPeak]:
        early, aside, kept = self._of_passes(before)
        whole = fresh and (self._every_pass or not before)  # this pass also gathers the root
        gathers, ahead = self._free or whole, self._layout.gathers_ahead
        left = self._left if gathers and not ahead else 0
        beside = aside + kept + self._all_reduced(before, 0)
        other = self._gathered + beside
        own = self._block if self._free else 0
        points = [
            PlannedPeak("forward", early, self.trace.head_forward, other + left),
            PlannedPeak("forward", early, self.trace.last_forward, other + left + own),
        ]
        if gathers:  # the flat buffer of the previous unit still exists
            flats = self._flat if ahead or len(self._units) < 3 else 2 * self._flat
            held = self.trace.forward_entry
            points.append(PlannedPeak("forward", early, held, other + own + flats))
        if whole:
            flats = self._root_flat + (0 if ahead else self._flat + self._block)
            held = self.trace.hidden
            points.append(PlannedPeak("forward", early, held, self._root + flats + beside))
        return points

    def _backward(self, before: bool, reduces: bool, freed: bool) -> list[PlannedPeak]:
        """Return the peak points of a backward pass. `reduces`: whether the pass reduces gradients.
        `freed`: whether an earlier pass has freed the units that forward gathered."""
        free = self._free or freed
        whole = self._root if free else self._gathered
        trace, units = self.trace, self._units
        early, aside, kept = self._of_passes(before)
        own, flat, flats = (self._block, self._flat, self._flats) if free else (0, 0, 0)
        other = whole + aside + kept + self._all_reduced(before, 0)
        points = [PlannedPeak("head", early, trace.head_backward, other + flat)]
        if units[1:]:
            ahead = flat if units[2:] else 0  # with a single block, backward gathers nothing more
            points += [
                PlannedPeak("blocks", early, trace.entry, other + own + flats),
                PlannedPeak("blocks", early, trace.last_backward, other + own + ahead),
            ]
        if not reduces:
            for _, below in inner_blocks(self._stage):
                held = trace.first_backward + below * trace.block_saved
                ahead = flat if below else 0
                points.append(PlannedPeak("blocks", early, held, other + own + ahead))
            if not before:
                points.append(self._first_ends())
            return points
        root_slices, block_slices = (self._slice_of(units[i]) for i in (0, -1))
        root_aside, block_aside = (self._accumulated(units[i]) if aside else 0 for i in (0, -1))

        def gathered(back: int, below: int) -> int:
            if not free:
                return whole - back * self._block
            return self._root + (self._flat if below else 0)

        for back, below in inner_blocks(self._stage):
            other = gathered(back, below) + own + aside - back * block_aside + self._buffer
            held = trace.first_backward + below * trace.block_saved
            done = max(early, back * block_slices)
            points.append(
                PlannedPeak("blocks", done, held, other + self._all_reduced(before, back))
            )
            if not below:
                held, other = trace.after_block + trace.block_saved, other + flats
                points.append(
                    PlannedPeak("blocks", done, held, other + self._all_reduced(before, back))
                )
        experts = parts_of(units[-1])[1:]
        for below in {len(units) - 2, 0} if experts else ():
            # Experts are reduced before the rest of their block is. Their buffer exists until then.
            back, which = len(units) - 2 - below, int(below == 0 and bool(units[2:]))
            done = max(early, back * block_slices)
            other = gathered(back, below) + own + aside - back * block_aside
            other += self._all_reduced(before, back) - self._padded(experts[0])
            other -= self._accumulated(experts[0]) if aside else 0
            held = below * trace.block_saved if which else 0
            buffer = self._buffer_of(experts[0])
            reducing = other + self._reducing(experts[0], before)
            points += [
                PlannedPeak("blocks", done, trace.experts[which] + held, reducing),
                PlannedPeak("blocks", done, trace.rest[which] + held, other + buffer),
            ]
        for below in {len(units) - 2, 0} if units[1:] else ():
            back = len(units) - 1 - below
            other = gathered(back, below) + aside - back * block_aside
            other += max(self._reducing(part, before) for part in self._parts)
            held = trace.after_block + below * trace.block_saved
            done = max(early, (back - 1) * block_slices)
            points.append(
                PlannedPeak("blocks", done, held, other + self._all_reduced(before, back - 1))
            )
        done, after = max(early, self._slices - root_slices), self._all_reduced(before, len(units))
        other = self._root + self._buffer + root_aside + after
        return [
            *points,
            PlannedPeak("end", done, trace.tail_backward, other),
            PlannedPeak("reduce", done, 0, self._reducing(units[0], before) + after),
        ]

    def _first_ends(self) -> PlannedPeak:
        """Return the peak point at the end of the first of several passes, when the gradients of
        the last unit are being cast, and all other gradients have been cast."""
        root = self._units[0]
        last, held = (root, 0) if root else (self._parts[-1], self.trace.after_block)
        others = self._whole - self._accumulated(last)
        return PlannedPeak("end", 0, held, self._gathered + others + self._casting(last))

    def _casting(self, unit: Sequence[PlannedParameter]) -> int:
        """Return the peak bytes while a unit's gradients are cast one by one to the reduction's
        dtype."""
        unit = trained_of(unit)
        if self._compute == self._reduced:
            return self._accumulated(unit)
        most, cast, left = 0, 0, bytes_of(unit, None, self._compute)
        for shape in unit:
            cast += self._accumulated([shape])
            most = max(most, cast + left)
            left -= bytes_of([shape], None, self._compute)
        return most

    def _reducing(self, unit: Sequence[PlannedParameter], before: bool) -> int:
        """Return the peak bytes while a unit's gradients are reduced. The gradients are copied into
        a buffer, which is reduced into a second buffer, while torch still holds the gradient of the
        unit's last parameter. A shard group of one rank reduces nothing; if there are replicas,
        torch then divides the buffer by 1, into a new buffer."""
        unit = trained_of(unit)
        buffer = self._buffer_of(unit)
        ranks = unit[0].over(self._layout.shards) if unit else 1
        summed = before and not self._every_pass
        gradients = max(self._padded(unit), self._accumulated(unit) if summed else 0)
        last = bytes_of(unit[-1:], None, self._reduced if summed else self._compute)
        reduced_to = buffer // ranks
        beside = last if ranks > 1 else buffer if self._layout.replicas > 1 else 0
        most = max(gradients + buffer, buffer + reduced_to + beside)
        # The reduced shard replaces the shard of an earlier reduction of this unit.
        return most - reduced_to if self._apart(before) > 1 else most

    def _backward_of_weights(self, before: bool, last: bool) -> list[PlannedPeak]:
        """Return the peak points of a pass that computes postponed gradients of weights, and then
        reduces them unit by unit."""
        _, aside, _ = self._of_passes(before)
        # In this case gradients are added to those of earlier passes as soon as they are computed.
        added = before and self._compute == self._reduced
        units = [part for unit in self._units for part in parts_of(unit)]
        made = [bytes_of(trained_of(unit), None, self._compute) for unit in units]
        whole = [0 if added else size for size in made]
        other = self._gathered + aside
        points, done = [], 0
        head, *blocks = self._units
        computed: list[Sequence[PlannedParameter]] = [*[head] * self._stage.last, *blocks[::-1]]
        for held, unit in zip(self.trace.weights_peaks, computed, strict=True):
            points.append(PlannedPeak("blocks", 0, held, other + done))
            done += 0 if added else bytes_of(trained_of(unit), None, self._compute)
        points.append(PlannedPeak("blocks", 0, 0, other + sum(whole)))
        if not last:
            if not before:
                cast = self._casting([shape for unit in self._units for shape in unit])
                points.append(PlannedPeak("end", 0, 0, self._gathered + cast))
            return points
        for number, unit in enumerate(units):
            after = range(number + 1, len(units))
            other = sum(self._padded(units[n]) + whole[n] for n in after)
            if before:
                other += sum(self._accumulated(units[n]) for n in after)
            done = sum(map(self._slice_of, units[:number]))
            points.append(PlannedPeak("reduce", done, 0, other + self._reducing(unit, before)))
        return points


class PlannedUnshardedStage:
    """Computes the memory of a stage on a rank without FSDP, from a trace of its pass. The first
    pass allocates gradients one by one, and later passes keep them."""

    def __init__(self, stage: PlannedStage, trace: PlannedPassTrace) -> None:
        self.trace, self._stage = trace, stage
        self._root, *blocks = (bytes_of(trained_of(unit)) for unit in stage.units)
        self._block = blocks[-1] if blocks else 0
        self._whole = self._root + sum(blocks)

    @property
    def resting(self) -> _IdleStage:
        return _IdleStage(0, self._whole, self._whole)

    def points(self, which: PlannedStagePass) -> list[PlannedPeak]:
        kind, trace, whole = which.kind, self.trace, self._whole
        before = whole if which.before else 0
        if kind == "F":
            return [PlannedPeak("forward", before, trace.head_forward)]
        if kind == "W" and not self._stage.first:
            parts = [self._root] * self._stage.last + [self._block] * self._stage.blocks
            pairs = zip(accumulate([0, *parts[:-1]]), trace.weights_peaks, strict=True)
            weights = [PlannedPeak("blocks", max(before, done), held) for done, held in pairs]
            return [*weights, PlannedPeak("blocks", whole)]
        if kind == "I" and self._stage.first:
            return []
        there = kind == "I" or bool(before)  # this pass allocates no gradients of weights
        block, head = (0, 0) if there else (self._block, self._root * self._stage.last)
        points = [
            PlannedPeak("head", before, trace.head_backward),
            PlannedPeak("blocks", before + head, trace.last_backward),
            PlannedPeak("end", before if there else whole - self._root, trace.tail_backward),
        ]
        for back, below in inner_blocks(self._stage):
            held = trace.first_backward + below * trace.block_saved
            points.append(PlannedPeak("blocks", before + head + back * block, held))
        return points


def ddp_points(
    stage: PlannedStage, layout: PlannedLayout, trace: PlannedPassTrace, gathered: int
) -> list[PlannedPeak]:
    """Return the peak points of a step under DDP. `gathered`: peak bytes of the update, in ZeRO-1's
    gather or in rounding."""
    root, block = (bytes_of(trained_of(stage.units[number])) for number in (0, -1))
    whole = sum(bytes_of(trained_of(unit)) for unit in stage.units)
    earlier = whole if layout.passes > 1 else 0  # gradients of earlier passes

    def point(phase: str, held: int, done: int) -> PlannedPeak:
        """Return the point at which backward has computed `done` bytes of gradients."""
        if layout.replicas > 1:
            return PlannedPeak(phase, whole, held, max(0, earlier - done))
        return PlannedPeak(phase, earlier or done, held)

    return [
        PlannedPeak("update", whole, 0, gathered),
        point("forward", trace.head_forward, 0),
        point("head", trace.head_backward, 0),
        point("blocks", trace.last_backward, 0),
        point("end", trace.tail_backward, whole - root),
        *(
            point("blocks", trace.first_backward + below * trace.block_saved, back * block)
            for back, below in inner_blocks(stage)
        ),
    ]


def gather_bytes(shapes: Sequence[PlannedParameter], ranks: int) -> int:
    """Return the peak bytes of ZeRO-1's gather after the update: a whole bucket, this rank's part
    of the bucket, and one more copy of a tensor whose rows do not divide evenly."""
    largest = 0
    for bucket in buckets([bytes_of([shape]) for shape in shapes]):
        members = [shapes[place] for place in bucket]
        uneven = [ranks * bytes_of([shape], ranks) for shape in members if shape.rows % ranks]
        largest = max(largest, (ranks + 1) * bytes_of(members, ranks) + max(uneven, default=0))
    return largest


def inner_blocks(stage: PlannedStage) -> list[tuple[int, int]]:
    """Return (number of later blocks, number of earlier blocks) for the last block but one, and for
    the first block. Backward has finished the later blocks."""
    others = len(stage.units) - 2
    return [(1, others - 1), (others, 0)] if others > 0 else []
