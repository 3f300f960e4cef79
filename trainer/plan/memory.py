"""Bytes on one rank, moment by moment of a step, as `trainer.parallel` makes torch behave.

[Note: moments] What a rank holds changes within a step, so a peak is the largest of several
moments and less than the sum of everything's largest size:

- *forward*: the loss has just been computed; logits and all activations are there.
- *head*: backward through loss and output head; FSDP has fetched the last block again.
- *blocks*: backward through a block, whose recomputed activations and gradients are there. From
  block to block activations go and reduced gradients come, so it is worst in the last block, in the
  one before it (the buffer of a reduction is there too) or in the first.
- *end*: backward below the blocks: the gradient of the embedding.
- *reduce*: FSDP copies the gradients of what belongs to no block into the reduction's buffer.
- *update*: all gradients are reduced; the optimizer runs.

Facts about torch that the sums rest on (2.11 to 2.13; `fsdp/_fully_shard`, `nn/parallel`):

- FSDP gathers into one flat buffer and copies it out, parameter by parameter. In the forward pass
  the flat buffer stays until the next unit is gathered, unless that is gathered ahead, as it is in
  the backward pass. The root unit (embedding, head) stays gathered meanwhile.
- Gradients of a unit are copied into a buffer of the reduction's format, which stays until the next
  unit is reduced. Between passes that do not reduce, whole gradients stay in that format.
- Experts that are divided among ranks are units of their own within a block.
- With replicas, FSDP keeps the shard of a unit that it all-reduced until the unit is reduced again,
  or backward of the last pass ends. It is the gradient itself, unless that was there before, has
  another format or lies elsewhere.
- What is offloaded to the host of a GPU has weights and gradients in pinned memory, which CUDA's
  allocator gives out in powers of two.
- A pipeline's rank holds activations of several micro-batches, by the order of its schedule. A
  message is received ahead of its use, one from each neighbour. Each stage has an FSDP root, whose
  weights stay gathered; with several stages a rank, those of the others add to each moment.
- DDP keeps its buckets for good; gradients of passes under `no_sync` lie beside them, and move
  into them in the last pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.optim.groups import moments as kept_by
from trainer.parallel.ddp import buckets
from trainer.parallel.offload import BUFFERS, PORTION_BYTES, copies
from trainer.parallel.parallelize import DTYPES
from trainer.parallel.schedules import Order
from trainer.plan.trace import Shape, Stage, Trace
from trainer.recipe import Recipe


@dataclass(frozen=True)
class Layout:
    """How a recipe lies over ranks."""

    replicas: int
    """Groups of ranks that hold the same."""
    shards: int
    """Ranks of such a group."""
    by_fsdp: bool
    """Whether FSDP holds the parameters, or else DDP, perhaps with ZeRO-1."""
    gathers_ahead: bool
    """Whether forward, too, gathers a block while the one before is computed, as on CPUs."""
    passes: int
    """Forward and backward passes per step."""
    reductions: int
    """How often a step reduces each gradient."""
    micro_batch: int
    """Sequences of the largest pass."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, the first one, which no other's exceed."""

    parameters: int
    """Whole or sharded."""
    gradients: int
    """When the optimizer runs."""
    optimizer_state: int
    buffers: int
    activations: int
    """Between forward and backward pass; gathered parameters are not among them."""
    transient: int
    """At the peak, besides the others: gathered units, buffers of reductions, unreduced gradients
    of earlier passes, and what operators work with."""
    peak: int
    """What the device holds at the largest moment of a step, which is less than the sum of the
    others. What torch, CUDA and NCCL need for themselves, and fragmentation, come on top."""
    moment: str
    """Which one that is: forward, head, blocks, end, reduce or update; see [Note: moments]."""
    host: int
    """In host memory instead of on the device: with `strategy.offload: cpu` parameters, gradients
    and optimizer state, with what pinned memory loses; with `nvme` what the update works in."""
    disk: int
    """In files instead: the same with `strategy.offload: nvme`. Pages of them that the kernel keeps
    in memory are counted nowhere; it gives them up when memory is needed."""


@dataclass(frozen=True)
class Moment:
    """What comes and goes, in bytes."""

    name: str
    gradients: int = 0
    """Reduced, or in DDP's buckets."""
    pass_: int = 0
    """The peak of a phase of the traced pass."""
    other: int = 0
    last: bool = False
    """Comes only in a pass that reduces."""


def memory_of(
    stages: Sequence[Stage],
    traces: Sequence[Trace],
    recipe: Recipe,
    layout: Layout,
    device: str,
    buffers: int,
    order: Order | None = None,
) -> Memory:
    """Add up what a rank holds.

    Args:
        stages: of the rank, in order; one, unless there is a pipeline.
        traces: of a pass of each.
        recipe: its strategy and precision count.
        layout: how they lie over the ranks.
        device: "cuda", or "cpu", where all is on the host and only files take something from it.
        buffers: bytes of the model's.
        order: of a pipeline, of this rank.
    """
    shapes = [shape for stage in stages for unit in stage.units for shape in unit]
    whole = _bytes(shapes)
    slices = _bytes(shapes, layout.shards)
    to_disk = recipe.strategy.offload == "nvme"
    to_host = recipe.strategy.offload == "cpu" and device != "cpu"
    offloaded = to_disk or to_host
    state = sum(shape.state_bytes(layout.shards) for shape in shapes)
    activations = traces[0].saved
    if layout.by_fsdp:
        parameters, gradients = slices, slices
        moments = [Moment("update", slices)]
        activations, beside = _in_flight(order, traces) if order else (activations, [_ALONE])
        resting = [_resting(stage, recipe, layout) for stage in stages]
        for stage, trace, own, more in zip(stages, traces, resting, beside, strict=True):
            before = _whole_gradients(stage, recipe, layout)
            for found in _fsdp_moments(stage, recipe, layout, trace, offloaded, more.from_start):
                other = found.other + sum(resting) - own
                held = more.forward if found.name == "forward" else more.backward
                if found.last and not recipe.strategy.reduce_every_pass:
                    held = more.last
                elif found.name != "forward":  # in the first pass there are none before
                    most = found.pass_ + more.first
                    moments.append(replace(found, pass_=most, other=other - before))
                moments.append(replace(found, pass_=found.pass_ + held, other=other))
    else:
        parameters, gradients = whole, whole
        gathered = 0
        if recipe.sharding == "OPTIMIZER_STATE":
            state = sum(shape.state_bytes(layout.replicas) for shape in shapes)
            gathered = _gather_bytes(shapes, layout.replicas)
        moments = _ddp_moments(stages[0], layout, traces[0], gathered)
    standing = buffers + (0 if offloaded else parameters + state)
    held = parameters + gradients + state
    in_memory = 2 * _pinned_bytes(shapes, layout.shards) + state if to_host else 0

    def device_bytes(moment: Moment) -> int:
        return standing + moment.pass_ + moment.other + (0 if offloaded else moment.gradients)

    moment = max(moments, key=device_bytes)
    portions = copies(kept_by(recipe.optimizer) or ()) * PORTION_BYTES * BUFFERS
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer_state=state,
        buffers=buffers,
        activations=activations,
        transient=moment.other + max(0, moment.pass_ - activations),
        peak=device_bytes(moment),
        moment=moment.name,
        host=portions if to_disk else in_memory,
        disk=held if to_disk else 0,
    )


@dataclass
class _Beside:
    """Most bytes that a pipeline's rank holds for other micro-batches than the one that is in a
    stage."""

    forward: int = 0
    first: int = 0
    """In the first backward."""
    backward: int = 0
    """In those after it."""
    last: int = 0
    """In the last backward."""
    from_start: bool = False
    """All forwards come before all backwards."""


_ALONE = _Beside()


def _in_flight(order: Order, traces: Sequence[Trace]) -> tuple[int, list[_Beside]]:
    """(most bytes of activations of a pipeline's rank, what is beside each of its stages)."""
    numbers = sorted({action.stage for action in order})
    found = {number: (_Beside(), trace) for number, trace in zip(numbers, traces, strict=True)}
    kinds = [action.kind for action in order]
    from_start = "F" not in kinds[kinds.count("F") :]
    held = put_off = most = 0
    begun: set[int] = set()
    for kind, number, _ in order:
        beside, trace = found[number]
        if kind == "F":
            beside.forward = max(beside.forward, held + put_off)
            held += trace.saved
            most = max(most, held)
            continue
        beside.from_start = from_start
        beside.last = held + put_off - trace.saved
        if number in begun:
            beside.backward = max(beside.backward, beside.last)
        else:
            begun.add(number)
            beside.first = beside.last
        if kind == "I":
            put_off += trace.products
            continue
        held -= trace.saved
        if kind == "W":
            put_off -= trace.products
    return most, [beside for beside, _ in found.values()]


def _resting(stage: Stage, recipe: Recipe, layout: Layout) -> int:
    """What a stage keeps while another one of its rank computes: weights that stay gathered, and
    whole gradients of passes before."""
    compute = DTYPES[recipe.precision.dtype].itemsize
    kept = stage.units[:1] if recipe.gathers_twice else stage.units
    gathered = sum(_gathered(unit, layout.shards, compute) for unit in kept)
    return gathered + _whole_gradients(stage, recipe, layout)


def _whole_gradients(stage: Stage, recipe: Recipe, layout: Layout) -> int:
    """Those of passes before, which are to be reduced with those of the last."""
    if layout.passes == 1 or recipe.strategy.reduce_every_pass:
        return 0
    return sum(_bytes(unit, 1, 8 if recipe.exact else 4) for unit in stage.units)


def _bytes(shapes: Sequence[Shape], ranks: int = 1, itemsize: int | None = None) -> int:
    return sum(shape.sharded(ranks) * (itemsize or shape.itemsize) for shape in shapes)


def _gathered(shapes: Sequence[Shape], ranks: int, itemsize: int) -> int:
    return sum(shape.gathered(ranks) * itemsize for shape in shapes)


def _pinned_bytes(shapes: Sequence[Shape], ranks: int) -> int:
    return sum(1 << (_bytes([shape], ranks) - 1).bit_length() for shape in shapes)


def _gather_bytes(shapes: Sequence[Shape], ranks: int) -> int:
    """At the peak of ZeRO-1's gather after the update: a bucket whole and this rank's part of it,
    and where ranks have different numbers of rows, a tensor once more while it is copied out."""
    largest = 0
    for bucket in buckets([_bytes([shape]) for shape in shapes]):
        members = [shapes[place] for place in bucket]
        uneven = [ranks * _bytes([shape], ranks) for shape in members if shape.rows % ranks]
        largest = max(largest, (ranks + 1) * _bytes(members, ranks) + max(uneven, default=0))
    return largest


def _ddp_moments(stage: Stage, layout: Layout, trace: Trace, gathered: int) -> list[Moment]:
    shapes = [shape for unit in stage.units for shape in unit]
    whole, root = _bytes(shapes), _bytes(stage.units[0])
    several = layout.passes > 1
    moments = [Moment("update", whole, 0, gathered)]
    if layout.replicas > 1:
        aside = whole if several else 0
        moments += [
            Moment("forward", whole, trace.head_forward, aside),
            Moment("head", whole, trace.head_backward, aside),
            Moment("blocks", whole, trace.last_backward, aside),
            Moment("end", whole, trace.tail_backward, min(aside, root)),
        ]
        block = _bytes(stage.units[-1])
        for back, below in _inner_blocks(stage):
            held = trace.first_backward + below * trace.block_saved
            moments.append(Moment("blocks", whole, held, max(0, aside - back * block)))
        return moments
    # Gradients of passes before are all there; else those of what the trace is through with.
    before, block = (whole, 0) if several else (0, _bytes(stage.units[-1]))
    moments += [
        Moment("forward", before, trace.head_forward),
        Moment("head", before, trace.head_backward),
        Moment("blocks", before, trace.last_backward),
        Moment("end", before or whole - root, trace.tail_backward),
    ]
    for back, below in _inner_blocks(stage):
        held = trace.first_backward + below * trace.block_saved
        moments.append(Moment("blocks", before + back * block, held))
    return moments


def _inner_blocks(stage: Stage) -> list[tuple[int, int]]:
    """(blocks that are through with their backward pass, blocks still to come) where the next one
    to last is at work, and where the first one is."""
    others = len(stage.units) - 2
    return [(1, others - 1), (others, 0)] if others > 0 else []


def parts_of(unit: Sequence[Shape]) -> list[list[Shape]]:
    """What FSDP gathers and reduces apart: of a block its experts, where ranks have other ones."""
    experts = [shape for shape in unit if shape.ep > 1]
    rest = [shape for shape in unit if shape.ep == 1]
    return [part for part in (rest, experts) if part]


def _fsdp_moments(
    stage: Stage,
    recipe: Recipe,
    layout: Layout,
    trace: Trace,
    offloaded: bool,
    from_start: bool = False,
) -> list[Moment]:
    shards, units = layout.shards, stage.units
    compute = DTYPES[recipe.precision.dtype].itemsize
    reduced = 8 if recipe.exact else 4

    def padded(unit: Sequence[Shape], itemsize: int) -> int:
        return _gathered(unit, shards, itemsize)

    root, root_buffer = padded(units[0], compute), padded(units[0], reduced)
    blocks = units[1:]
    block = max((padded(unit, compute) for unit in blocks), default=0)
    parts = [part for unit in dict.fromkeys(blocks) for part in parts_of(unit)]
    # Experts are reduced before the rest of their block, and gathered while what follows is not.
    whole = [part for part in parts if part[0].ep == 1]
    buffer = max((padded(part, reduced) for part in whole), default=0)
    # A group of one rank copies without it.
    flat = max((padded(part, compute) for part in whole), default=0) if shards > 1 else 0
    keeps_whole = not recipe.gathers_twice
    everything = sum(padded(unit, compute) for unit in units)

    slices = sum(_bytes(unit, shards) for unit in units)
    root_slices, block_slices = (_bytes(units[i], shards) for i in (0, -1))
    several = layout.passes > 1
    # Whole gradients of the passes before, or their reduced ones and the last buffer of that.
    aside = root_aside = block_aside = early = kept = 0
    if several and recipe.strategy.reduce_every_pass:
        early, kept = slices, root_buffer
    elif several:
        aside = _whole_gradients(stage, recipe, layout)
        root_aside, block_aside = (_bytes(units[i], 1, reduced) for i in (0, -1))

    # Reductions of a step whose all-reduced shards are not the gradients themselves.
    apart = 0
    if layout.replicas > 1:
        apart = layout.reductions - (not offloaded and not recipe.exact)

    def all_reduced(done: int) -> int:
        """Bytes of such shards, when so many blocks are through with their last backward pass."""
        found = units if apart > 1 else blocks[:done] if apart else ()
        return sum(_bytes(unit, shards, reduced) for unit in found)

    gathered = everything if keeps_whole else root
    ahead = 0 if keeps_whole else flat
    left = 0 if layout.gathers_ahead else flat
    before, after = all_reduced(0), all_reduced(len(blocks))
    moments = [
        Moment(
            "forward",
            early,
            trace.head_forward,
            gathered + left + (0 if from_start else aside + kept) + before,
        ),
        Moment("head", early, trace.head_backward, gathered + ahead + aside + kept + before),
    ]
    if blocks:
        own = 0 if keeps_whole else block
        other = gathered + own + ahead + aside + kept + before
        moments.append(Moment("blocks", early, trace.last_backward, other))
    for back, below in _inner_blocks(stage):
        other = gathered - back * block if keeps_whole else root + block + (flat if below else 0)
        other += aside - back * block_aside + buffer + all_reduced(back)
        held = trace.first_backward + below * trace.block_saved
        moments.append(Moment("blocks", max(early, back * block_slices), held, other, True))

    def reducing(unit: Sequence[Shape]) -> int:
        """Most while a unit is reduced: its gradients are copied into a buffer, and that is reduced
        into another; replicas of one rank divide it by 1 in between, which makes a third."""
        buffer, ranks = padded(unit, reduced), max(1, shards // unit[0].ep) if unit else 1
        gradients = max(padded(unit, compute), _bytes(unit, 1, reduced) if aside else 0)
        reduced_to = buffer // ranks
        divided = ranks == 1 < layout.replicas
        most = max(gradients + buffer, (1 + divided) * buffer + reduced_to)
        return most - reduced_to if apart > 1 else most  # it takes the place of the one before

    for below in {len(blocks) - 1, 0} if blocks else ():
        back = len(blocks) - below
        other = gathered - back * block if keeps_whole else root + (flat if below else 0)
        other += aside - back * block_aside + max(map(reducing, parts))
        held = trace.after_block + below * trace.block_saved
        reduced_before = max(early, (back - 1) * block_slices)
        moments.append(Moment("blocks", reduced_before, held, other + all_reduced(back - 1), True))
    done = max(early, slices - root_slices)
    return [
        *moments,
        Moment("end", done, trace.tail_backward, root + buffer + root_aside + after, True),
        Moment("reduce", done, 0, reducing(units[0]) + after, True),
    ]
