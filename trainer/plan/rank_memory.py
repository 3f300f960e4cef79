"""Predicts the memory of one rank: the bytes of each kind, and the peak of a step."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainer.optim.formats import PORTION, ROUNDING_BYTES
from trainer.optim.optimizer import moments as kept_by
from trainer.parallel.offload import BUFFERS, PORTION_BYTES, copies
from trainer.parallel.schedules import Order, PipelineAction, incoming
from trainer.plan.blueprint import (
    PlannedLayout,
    PlannedParameter,
    PlannedStage,
    bytes_of,
    counted,
    trained_of,
)
from trainer.plan.peak_points import (
    PlannedPeak,
    PlannedShardedStage,
    PlannedStagePass,
    PlannedUnshardedStage,
    ddp_points,
    gather_bytes,
)
from trainer.plan.tape import PlannedPassTrace
from trainer.recipe import Recipe
from trainer.recipe.strategies import offload, sharding


@dataclass(frozen=True)
class PlannedRankMemory:
    """Predicted bytes of one rank. The shards of the first rank are counted, because they are the
    largest."""

    parameters: int
    gradients: int
    """Bytes of reduced gradients when the optimizer's step begins."""
    optimizer_state: int
    buffers: int
    activations: int
    """Bytes of activations between forward and backward, without gathered parameters."""
    transient: int
    """Bytes at the peak besides the other fields: gathered units, reduction buffers, unreduced
    gradients of earlier passes, and temporary memory of operators."""
    peak: int
    """Largest number of bytes on the device in a step, at most the sum of the other fields.
    Excludes what torch, CUDA and NCCL themselves need, and fragmentation."""
    peak_phase: str
    """Phase of the step in which the peak is: forward, head, blocks, end, reduce or update; see
    [Note: peak points] in peak_points.py."""
    host: int
    """Bytes in host memory. With `strategy.offload: cpu`: parameters, gradients and optimizer
    state, with the padding of pinned memory. With `nvme`: buffers of the update."""
    disk: int
    """Bytes in files instead of on the device, with `strategy.offload: nvme`. Pages of the files in
    the kernel's cache are not counted, because the kernel frees them on demand."""


def memory_of(
    stages: Sequence[PlannedStage],
    traces: Sequence[PlannedPassTrace],
    recipe: Recipe,
    layout: PlannedLayout,
    device: str,
    buffers: int,
    order: Order | None = None,
    messages: Sequence[int] = (),
) -> PlannedRankMemory:
    """Add up the memory of a rank.

    Args:
        stages: the pipeline stages that the rank holds, by ascending number.
        traces: for each of the stages, the trace of a pass through it.
        device: "cuda", or "cpu", where only offload to files reduces memory.
        buffers: bytes of the buffers of the rank's blocks.
        order: the rank's actions in a pipeline; None: there is no pipeline.
        messages: bytes of messages that exist during each action.
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
        # Rounding needs float32 temporaries for one portion at a time.
        rounding = ROUNDING_BYTES * min(PORTION["cpu" if device == "cpu" else "cuda"], owned)
    activations = traces[0].saved
    if layout.by_fsdp or order:
        parameters, gradients = slices, slices_trained
        held = [
            PlannedShardedStage(stage, trace, recipe, layout, offloaded)
            if layout.by_fsdp
            else PlannedUnshardedStage(stage, trace)
            for stage, trace in zip(stages, traces, strict=True)
        ]
        alone = [PipelineAction("F", 0, 0), PipelineAction("B", 0, 0)] * layout.passes
        each = recipe.strategy.reduce_every_pass
        activations, by_stage = _passes(
            order or alone, held, each, messages or [0] * len(order or alone)
        )
        points = [PlannedPeak("update", gradients, 0, 0 if offloaded else rounding)] + [
            replace(point, pass_=point.pass_ + beside)
            for of_stage, passes in zip(held, by_stage, strict=True)
            for which, beside in passes.items()
            for point in of_stage.points(which)
        ]
    else:
        parameters, gradients = whole, whole_trained
        gathered = 0
        if sharding.zero1(recipe):
            state = _state_bytes(units, layout.replicas)
            gathered = gather_bytes(trained_of(shapes), layout.replicas)
        points = ddp_points(stages[0], layout, traces[0], max(gathered, rounding))
    # Bytes that exist throughout the step; with offload only the buffers are on the device.
    standing = buffers + (0 if offloaded else parameters + state)
    pinned = sum(_pinned_bytes(some, layout.shards) for some in (shapes, trained_of(shapes)))
    in_memory = pinned + state if to_host else 0

    def device_bytes(point: PlannedPeak) -> int:
        return standing + point.pass_ + point.other + (0 if offloaded else point.gradients)

    highest = max(points, key=device_bytes)
    portions = copies(kept_by(recipe.optimizer) or ()) * PORTION_BYTES * BUFFERS
    return PlannedRankMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer_state=state,
        buffers=buffers,
        activations=activations,
        transient=highest.other + max(0, highest.pass_ - activations),
        peak=device_bytes(highest),
        peak_phase=highest.phase,
        host=portions if to_disk else in_memory,
        disk=parameters + gradients + state if to_disk else 0,
    )


def _passes(
    order: Order,
    held: Sequence[PlannedShardedStage | PlannedUnshardedStage],
    every_pass: bool,
    messages: Sequence[int],
) -> tuple[int, list[dict[PlannedStagePass, int]]]:
    """Follow the memory of a rank through its actions. Returns (peak bytes of activations; for each
    of the `held` stages, pass → most bytes that other micro-batches and stages have meanwhile)."""
    backward = Counter(action.stage for action in order if action.kind in "BW")
    stages = dict(zip(sorted(backward), held, strict=True))
    by_stage: dict[int, dict[PlannedStagePass, int]] = {number: {} for number in stages}
    rests = {number: stage.resting for number, stage in stages.items()}
    remaining, resting = dict(backward), dict.fromkeys(stages, 0)
    gathered = dict.fromkeys(stages, False)
    fresh = dict.fromkeys(stages, True)
    forward = put_off = most = 0
    for (kind, number, _), message in zip(order, messages, strict=True):
        trace, before = stages[number].trace, remaining[number] < backward[number]
        which = PlannedStagePass(
            kind, before, kind in "BW" and remaining[number] == 1, fresh[number]
        )
        # The trace of a pass includes its own activations, so they are subtracted here.
        own = {"F": 0, "W": trace.kept + trace.put_off}.get(kind, trace.saved)
        beside = forward + put_off - own + sum(resting.values()) - resting[number] + message
        by_stage[number][which] = max(beside, by_stage[number].get(which, 0))
        # See [Note: schedules] for the kinds.
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
        # Forward leaves units gathered; only a backward pass that reduces gradients frees them.
        gathered[number] = kind == "F" or (gathered[number] and not every_pass)
        resting[number] = rest.gathered * gathered[number] + rest.between * between
        if remaining[number] == 0:
            resting[number] = rest.after
        most = max(most, forward)
    return most, list(by_stage.values())


def messages_beside(orders: Sequence[Order]) -> list[list[int]]:
    """Return, per rank, the number of messages in memory during each action, as
    `trainer.parallel.pipeline._Messages` keeps them: the receive buffer for the next message of
    each neighbour, messages that arrived before their use, and sent gradients that are not yet
    known to have arrived. Messages that the action uses are not counted, nor are activations."""
    place = {action: place for order in orders for place, action in enumerate(order)}
    counts: list[list[int]] = []
    for order, senders in zip(orders, incoming(orders) if orders else (), strict=True):
        expected = {peer: deque(actions) for peer, actions in senders.items()}
        sent: dict[int, deque[int]] = {}
        early: set[PipelineAction] = set()
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


def _state_bytes(units: Sequence[tuple[Sequence[PlannedParameter], int]], ranks: int) -> int:
    return sum(count * sum(shape.state_bytes(ranks) for shape in unit) for unit, count in units)


def _pinned_bytes(shapes: Sequence[PlannedParameter], ranks: int) -> int:
    # CUDA's allocator of pinned memory rounds up to powers of two.
    return sum(1 << (bytes_of([shape], ranks) - 1).bit_length() for shape in shapes)
