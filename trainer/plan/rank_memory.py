"""Memory of one rank: sums over a step, and its largest moment."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.optim.formats import PORTION, ROUNDING_BYTES
from trainer.optim.groups import moments as kept_by
from trainer.parallel.offload import BUFFERS, PORTION_BYTES, copies
from trainer.parallel.schedules import Action, Order, incoming
from trainer.plan.blueprint import Shape, Stage, bytes_of, counted, trained_of
from trainer.plan.moments import Held, Moment, Pass, Unsharded, ddp_moments, gather_bytes
from trainer.plan.rank_layout import Layout
from trainer.plan.tape import Trace
from trainer.recipe import Recipe
from trainer.recipe.strategies import offload, sharding


@dataclass(frozen=True)
class Memory:
    """Predicted bytes of the first rank, which needs at least as much as any other."""

    parameters: int
    """Bytes of the parameters, whole or sharded."""
    gradients: int
    """Bytes at the optimizer's step."""
    optimizer_state: int
    buffers: int
    activations: int
    """Bytes between forward and backward, without gathered parameters."""
    transient: int
    """Bytes at the peak besides the others: gathered units, reduction buffers, unreduced gradients
    of earlier passes, and memory of operators."""
    peak: int
    """Bytes on the device at the largest moment of a step, less than the sum of the other fields.
    The needs of torch, CUDA and NCCL themselves, and fragmentation, are added to it."""
    moment: str
    """Name of that moment: forward, head, blocks, end, reduce or update; see [Note: moments]."""
    host: int
    """Bytes in host memory instead of on the device: with `strategy.offload: cpu` parameters,
    gradients and optimizer state, with the padding of pinned memory; with `nvme` the buffers of the
    update."""
    disk: int
    """Bytes in files instead, with `strategy.offload: nvme`. Their pages in the kernel's cache are
    not counted, as the kernel frees them on demand."""


def memory_of(
    stages: Sequence[Stage],
    traces: Sequence[Trace],
    recipe: Recipe,
    layout: Layout,
    device: str,
    buffers: int,
    order: Order | None = None,
    messages: Sequence[int] = (),
) -> Memory:
    """Add up what a rank holds.

    Args:
        stages: of the rank, in order; one without a pipeline.
        traces: a pass of each stage.
        recipe: with strategy and precision.
        layout: of the recipe over the ranks.
        device: "cuda", or "cpu", where only files reduce host memory.
        buffers: bytes of the model's.
        order: of this rank in a pipeline.
        messages: bytes of messages held during each of its actions.
    """
    shapes = [shape for stage in stages for unit in stage.units for shape in unit]
    units = counted(stages)
    whole, whole_trained = (
        sum(count * bytes_of(of(unit)) for unit, count in units) for of in (list, trained_of)
    )
    slices, slices_trained = (
        sum(count * bytes_of(of(unit), layout.shards) for unit, count in units)
        for of in (list, trained_of)
    )
    to_disk = offload.to_disk(recipe.strategy)
    to_host = offload.to_host(recipe.strategy) and device != "cpu"
    offloaded = to_disk or to_host
    state = _state_bytes(units, layout.shards)
    rounding = 0
    if recipe.optimizer.state_dtype != "fp32" or recipe.precision.master != "fp32":
        owned = sum(
            count * sum(shape.sharded(layout.shards) for shape in trained_of(unit))
            for unit, count in units
        )
        # Only one portion at a time is in float32.
        rounding = ROUNDING_BYTES * min(PORTION["cpu" if device == "cpu" else "cuda"], owned)
    activations = traces[0].saved
    if layout.by_fsdp or order:
        parameters, gradients = slices, slices_trained
        held = [
            Held(stage, trace, recipe, layout, offloaded)
            if layout.by_fsdp
            else Unsharded(stage, trace)
            for stage, trace in zip(stages, traces, strict=True)
        ]
        alone = [Action("F", 0, 0), Action("B", 0, 0)] * layout.passes
        each = recipe.strategy.reduce_every_pass
        activations, by_stage = _passes(
            order or alone, held, each, messages or [0] * len(order or alone)
        )
        moments = [Moment("update", gradients, 0, 0 if offloaded else rounding)] + [
            replace(moment, pass_=moment.pass_ + beside)
            for of_stage, passes in zip(held, by_stage, strict=True)
            for which, beside in passes.items()
            for moment in of_stage.moments(which)
        ]
    else:
        parameters, gradients = whole, whole_trained
        gathered = 0
        if sharding.zero1(recipe):
            state = _state_bytes(units, layout.replicas)
            gathered = gather_bytes(trained_of(shapes), layout.replicas)
        moments = ddp_moments(stages[0], layout, traces[0], max(gathered, rounding))
    # Held throughout the step; with offload only the buffers stay on the device.
    standing = buffers + (0 if offloaded else parameters + state)
    pinned = sum(_pinned_bytes(some, layout.shards) for some in (shapes, trained_of(shapes)))
    in_memory = pinned + state if to_host else 0

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
        disk=parameters + gradients + state if to_disk else 0,
    )


def _passes(
    order: Order, held: Sequence[Held | Unsharded], every_pass: bool, messages: Sequence[int]
) -> tuple[int, list[dict[Pass, int]]]:
    """(most bytes of activations on a rank; for each of its stages, pass → most bytes held beside
    it, for other micro-batches and stages). `every_pass`: whether each backward reduces gradients;
    `messages`: bytes held during each action."""
    backward = Counter(action.stage for action in order if action.kind in "BW")
    stages = dict(zip(sorted(backward), held, strict=True))
    by_stage: dict[int, dict[Pass, int]] = {number: {} for number in stages}
    rests = {number: stage.resting for number, stage in stages.items()}
    remaining, resting = dict(backward), dict.fromkeys(stages, 0)
    gathered = dict.fromkeys(stages, False)
    fresh = dict.fromkeys(stages, True)
    forward = put_off = most = 0
    for (kind, number, _), message in zip(order, messages, strict=True):
        trace, before = stages[number].trace, remaining[number] < backward[number]
        which = Pass(kind, before, kind in "BW" and remaining[number] == 1, fresh[number])
        # What the pass itself holds is part of its trace.
        own = {"F": 0, "W": trace.kept + trace.put_off}.get(kind, trace.saved)
        beside = forward + put_off - own + sum(resting.values()) - resting[number] + message
        by_stage[number][which] = max(beside, by_stage[number].get(which, 0))
        # F forward; B whole backward; I gradients of inputs, W of weights, where these are split.
        match kind:
            case "F":
                forward += trace.saved
            case "B":
                forward -= trace.saved
            case "I":
                forward += trace.kept - trace.saved
                put_off += trace.put_off
            case "W":
                forward -= trace.kept
                put_off -= trace.put_off
        fresh[number] = kind != "F"
        remaining[number] -= kind in "BW"
        rest, between = rests[number], remaining[number] < backward[number]
        # Forward leaves units gathered; backward frees them only if it reduces gradients.
        gathered[number] = kind == "F" or (gathered[number] and not every_pass)
        resting[number] = rest.gathered * gathered[number] + rest.between * between
        if remaining[number] == 0:
            resting[number] = rest.after
        most = max(most, forward)
    return most, list(by_stage.values())


def messages_beside(orders: Sequence[Order]) -> list[list[int]]:
    """Number of messages that each rank holds during each action, besides those that the action
    uses and those that are activations: as `_Messages` of the pipeline does.

    There is a buffer for the next message of each neighbour, some messages arrive before their use,
    and sent gradients stay until a message shows that they have arrived.
    """
    place = {action: place for order in orders for place, action in enumerate(order)}
    counts: list[list[int]] = []
    for order, senders in zip(orders, incoming(orders) if orders else (), strict=True):
        expected = {peer: deque(actions) for peer, actions in senders.items()}
        sent: dict[int, deque[int]] = {}
        early: set[Action] = set()
        counts.append([])
        for action in order:
            source = action._replace(stage=action.stage + (-1 if action.kind == "F" else 1))
            if action.kind != "W" and source in place:
                peer = source.stage % len(orders)
                while action not in early:
                    early.add(expected[peer].popleft())
                early.remove(action)
                while sent.get(peer) and sent[peer][0] < place[source]:
                    sent[peer].popleft()
            posted = sum(map(bool, expected.values()))
            counts[-1].append(posted + len(early) + sum(map(len, sent.values())))
            if action.kind in "BI" and action.stage:
                below = action._replace(stage=action.stage - 1)
                sent.setdefault(below.stage % len(orders), deque()).append(place[below])
    return counts


def _state_bytes(units: Sequence[tuple[Sequence[Shape], int]], ranks: int) -> int:
    return sum(count * sum(shape.state_bytes(ranks) for shape in unit) for unit, count in units)


def _pinned_bytes(shapes: Sequence[Shape], ranks: int) -> int:
    # CUDA's allocator of pinned memory rounds up to powers of two.
    return sum(1 << (bytes_of([shape], ranks) - 1).bit_length() for shape in shapes)
