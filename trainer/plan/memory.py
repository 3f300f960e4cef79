"""Bytes on one rank, moment by moment of a step, as `trainer.parallel` makes torch behave.

[Note: moments] What a rank holds changes within a step, so a peak is the largest of several
moments and less than the sum of everything's largest size:

- *forward*: the loss has just been computed; logits and all activations are there.
- *head*: backward through loss and output head; FSDP has fetched the last block again.
- *blocks*: backward through the last block, whose recomputed activations and gradients are there.
- *end*: backward below the blocks: the gradient of the embedding.
- *reduce*: FSDP copies the gradients of what belongs to no block into the reduction's buffer.
- *update*: all gradients are reduced; the optimizer runs.

Facts about torch that the sums rest on (2.11 to 2.13; `fsdp/_fully_shard`, `nn/parallel`):

- FSDP gathers into one flat buffer and copies it out, parameter by parameter. In the forward pass
  the flat buffer stays until the next unit is gathered, in the backward pass the unit that comes
  next is gathered ahead. The root unit (embedding, head) stays gathered meanwhile.
- Gradients of a unit are copied into a buffer of the reduction's format, which stays until the next
  unit is reduced. Between passes that do not reduce, whole gradients stay in that format.
- DDP keeps its buckets for good; gradients of passes under `no_sync` lie beside them, and move
  into them in the last pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trainer.parallel.parallelize import DTYPES
from trainer.plan.trace import Blueprint, Shape, Trace
from trainer.recipe import Recipe


@dataclass(frozen=True)
class Layout:
    """How a recipe lies over ranks."""

    replicas: int
    """Groups of ranks that hold the same."""
    shards: int
    """Ranks of such a group."""
    passes: int
    """Forward and backward passes per step."""
    micro_batch: int
    """Sequences of the largest pass."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, the first one, which no other's exceed."""

    parameters: int
    """Whole or sharded; under ZeRO-1 with the slices that the optimizer updates."""
    gradients: int
    """When the optimizer runs."""
    optimizer_state: int
    buffers: int
    activations: int
    """Between forward and backward pass."""
    transient: int
    """At the peak, besides the others: gathered units, buffers of reductions, unreduced gradients
    of earlier passes, and what operators work with."""
    peak: int
    """Of the device, at the largest moment; without what torch and CUDA need for themselves."""
    moment: str
    """Which one that is; see [Note: moments]."""
    host: int
    """Of these, in host memory instead of on the device."""


@dataclass(frozen=True)
class Moment:
    """What comes and goes, in bytes."""

    gradients: int = 0
    """Reduced, or in DDP's buckets."""
    pass_: int = 0
    """The peak of a phase of the traced pass."""
    other: int = 0


def is_sharded_by_fsdp(recipe: Recipe) -> bool:
    """As `parallelize` decides."""
    return recipe.exact or (
        recipe.strategy.name == "fsdp" and recipe.sharding != "OPTIMIZER_STATE"
    )


def memory_of(
    blueprint: Blueprint, recipe: Recipe, layout: Layout, trace: Trace, device: str
) -> Memory:
    """Add up what a rank holds.

    Args:
        blueprint: the model.
        recipe: its strategy and precision count.
        layout: how they lie over the ranks.
        trace: of one pass.
        device: "cuda", or "cpu", where nothing is offloaded because all is on the host.
    """
    shapes = [shape for unit in blueprint.units for shape in unit]
    whole = _bytes(shapes)
    slices = _bytes(shapes, layout.shards)
    state = 2 * slices + 4 * len(shapes)  # two moments of the gradient, and the step
    if is_sharded_by_fsdp(recipe):
        parameters, gradients = slices, slices
        moments = _fsdp_moments(blueprint, recipe, layout, trace)
    else:
        parameters, gradients = whole, whole
        largest = 0
        if recipe.sharding == "OPTIMIZER_STATE":
            mine = _bytes(shapes, layout.replicas)
            parameters, state = whole + mine, 2 * mine + 4 * len(shapes)
            largest = max(_bytes([shape]) for shape in shapes)  # gathered one after another
        moments = _ddp_moments(blueprint, layout, trace, largest)
    offloaded = recipe.strategy.cpu_offload and device != "cpu"
    standing = blueprint.buffers + (0 if offloaded else parameters + state)

    def device_bytes(name: str) -> int:
        moment = moments[name]
        return standing + moment.pass_ + moment.other + (0 if offloaded else moment.gradients)

    name = max(moments, key=device_bytes)
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer_state=state,
        buffers=blueprint.buffers,
        activations=trace.saved,
        transient=moments[name].other + max(0, moments[name].pass_ - trace.saved),
        peak=device_bytes(name),
        moment=name,
        host=parameters + gradients + state if offloaded else 0,
    )


def _bytes(shapes: Sequence[Shape], ranks: int = 1, itemsize: int | None = None) -> int:
    return sum(shape.sharded(ranks) * (itemsize or shape.itemsize) for shape in shapes)


def _ddp_moments(
    blueprint: Blueprint, layout: Layout, trace: Trace, largest: int
) -> dict[str, Moment]:
    shapes = [shape for unit in blueprint.units for shape in unit]
    whole, root = _bytes(shapes), _bytes(blueprint.units[0])
    block = max(map(_bytes, blueprint.units[1:]), default=0)
    several = layout.passes > 1
    if layout.replicas > 1:
        aside = whole if several else 0
        return {
            "forward": Moment(whole, trace.head_forward, aside),
            "head": Moment(whole, trace.head_backward, aside),
            "blocks": Moment(whole, trace.block_backward, aside),
            "end": Moment(whole, trace.tail_backward, min(aside, root)),
            "update": Moment(whole, 0, largest),
        }
    return {
        "forward": Moment(whole if several else 0, trace.head_forward),
        "head": Moment(whole if several else root, trace.head_backward),
        "blocks": Moment(whole if several else root + block, trace.block_backward),
        "end": Moment(whole, trace.tail_backward),
        "update": Moment(whole, 0, largest),
    }


def _fsdp_moments(
    blueprint: Blueprint, recipe: Recipe, layout: Layout, trace: Trace
) -> dict[str, Moment]:
    shards, units = layout.shards, blueprint.units
    compute = DTYPES[recipe.precision.dtype].itemsize
    reduced = 8 if recipe.exact else 4

    def padded(itemsize: int) -> Callable[[Sequence[Shape]], int]:
        return lambda unit: shards * _bytes(unit, shards, itemsize)

    gathered, in_reduction = padded(compute), padded(reduced)
    root = gathered(units[0])
    block = max(map(gathered, units[1:]), default=0)
    flat = block if shards > 1 else 0  # a group of one rank copies without it
    buffer = max(map(in_reduction, units[1:]), default=0)
    root_buffer = in_reduction(units[0])
    keeps_whole = recipe.sharding not in ("FULL_SHARD", "HYBRID_SHARD")
    everything = sum(map(gathered, units))

    several = layout.passes > 1
    aside = root_aside = early = kept = 0
    slices = _bytes([shape for unit in units for shape in unit], shards)
    root_slices = _bytes(units[0], shards)
    if several and recipe.strategy.reduce_every_pass:
        early, kept = slices, root_buffer  # of the pass before, until the next reduction
    elif several:
        aside = sum(_bytes(unit, 1, reduced) for unit in units)
        root_aside = _bytes(units[0], 1, reduced)
    if keeps_whole:
        before, again, working = everything + flat, everything, everything
    else:
        before, again, working = root + flat, root + flat, root + block + flat
    blocks_reduced = max(early, slices - root_slices)
    root_gradients = max(root, root_aside)
    return {
        "forward": Moment(early, trace.head_forward, before + aside + kept),
        "head": Moment(early, trace.head_backward, again + aside + kept),
        "blocks": Moment(early, trace.block_backward, working + aside + max(buffer, kept)),
        "end": Moment(blocks_reduced, trace.tail_backward, root + buffer + root_aside),
        "reduce": Moment(
            blocks_reduced, 0, root_gradients + root_buffer + root_buffer // shards
        ),
        "update": Moment(slices),
    }


def traced_dtype(recipe: Recipe) -> tuple[torch.dtype, bool]:
    """(format of the computation, whether autocast brings it about), as `parallelize` decides."""
    return DTYPES[recipe.precision.dtype], not is_sharded_by_fsdp(recipe)
