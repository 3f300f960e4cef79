"""Estimates the seconds of a step: computation by a roofline model, communication of data and
pipeline parallelism by latency and bandwidth. A collective takes its latency plus its bytes divided
by the bandwidth of the slowest link (the alpha-beta model of Hockney 1994), with the constants in
`trainer.plan.costs`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trainer.parallel.ddp import BUCKET_BYTES
from trainer.parallel.mesh import EXPERT, LAYERS, PIPELINE, REPLICATE, SHARD
from trainer.parallel.parallelize import DTYPES
from trainer.parallel.schedules import (
    Kind,
    Order,
    PipelineActionSequence,
    PipelineParallelSimulation,
    simulate,
)
from trainer.plan.blueprint import (
    PlannedLayout,
    PlannedStage,
    bytes_of,
    counted,
    gathered_bytes,
    trained_of,
)
from trainer.plan.costs import (
    ADDITION_TRAFFIC,
    BANDWIDTH_SHARE,
    DISK_BANDWIDTH,
    HOST_BANDWIDTH,
    NETWORK_SHARE,
    PAGEABLE_SHARE,
    PEAK_SHARE,
    PLATEAU,
    ROUNDING_TRAFFIC,
    TAKEN_SHARE,
    UPDATE_ON_DISK,
    UPDATE_TRAFFIC,
    PlannedMachine,
)
from trainer.plan.tape import PlannedPassTrace, Work
from trainer.recipe import Recipe
from trainer.recipe.strategies import exact, offload, sharding


@dataclass(frozen=True)
class PlannedCollective:
    """All calls of one collective in a step by a group of ranks."""

    payload: float
    """Bytes of the whole gathered or reduced tensors, over all calls."""
    times: int
    """Rounds of the ring algorithm: 1 for gather or reduce-scatter, 2 for all-reduce."""
    ranks: int
    stride: int
    """Difference between successive ranks of the group."""
    calls: float = 1

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in all calls; it receives as many."""
        return self.times * self.payload * (self.ranks - 1) / self.ranks

    def in_node(self, machine: PlannedMachine) -> int:
        return max(1, min(self.ranks, machine.gpus_per_node // self.stride))

    def crosses(self, machine: PlannedMachine) -> bool:
        return self.ranks > self.in_node(machine)

    def latency(self, machine: PlannedMachine) -> float:
        """Return the seconds of a call with an empty payload: of the steps of a ring or, if that is
        shorter for an all-reduce, of a tree over the nodes."""
        if self.ranks == 1:
            return 0.0
        inside = self.in_node(machine)
        nodes = -(-self.ranks // inside)
        within, between = machine.hop, machine.hop_between
        ring = self.times * ((self.ranks - nodes) * within + (nodes - 1) * between)
        ring *= PLATEAU if nodes > 1 else 1
        tree = 2 * ((inside - 1) * within + (nodes - 1).bit_length() * between)
        return machine.call + (min(ring, tree) if self.times == 2 else ring)

    def seconds(self, machine: PlannedMachine) -> float:
        if not self.payload:
            return 0.0
        bandwidth = machine.gpu.link
        if self.crosses(machine):  # all groups on a node share the node's network
            share = self.in_node(machine) / machine.gpus_per_node
            bandwidth = min(bandwidth, machine.net * share)
        return self.calls * self.latency(machine) + self.sent / (bandwidth * NETWORK_SHARE)


class _StepTraffic(NamedTuple):
    """Data-parallel collectives of a step, by the computation with which they overlap."""

    forward: tuple[PlannedCollective, ...]
    backward: tuple[PlannedCollective, ...]
    reduced: tuple[PlannedCollective, ...]
    """Reductions of gradients, in the last backward pass or in each."""
    updated: tuple[PlannedCollective, ...] = ()
    """Gathers of parameters after the update, which do not overlap."""

    @property
    def all(self) -> tuple[PlannedCollective, ...]:
        return (*self.forward, *self.backward, *self.reduced, *self.updated)


def traffic_of(
    stages: Sequence[PlannedStage], recipe: Recipe, layout: PlannedLayout
) -> _StepTraffic:
    """Return the data-parallel collectives of a rank's stages in a step, without the few bytes of
    loss and norm. Each FSDP unit, or each DDP bucket, is one call."""
    strategy, shards, passes = recipe.strategy, layout.shards, layout.passes
    units, replicas = counted(stages), layout.groups[REPLICATE]
    if not layout.by_fsdp:
        # DDP all-reduces float32 gradients, bucket by bucket.
        payload = 4 * elements(stages, 1)
        calls = -(-payload // BUCKET_BYTES)
        updated: tuple[PlannedCollective, ...] = ()
        if sharding.zero1(recipe):  # gathers the updated parameters once more
            updated = (PlannedCollective(payload, 1, *replicas, calls),)
        return _StepTraffic((), (), (PlannedCollective(payload, 2, *replicas, calls),), updated)
    compute, reduced = DTYPES[recipe.precision.dtype].itemsize, exact.reduced_bytes(recipe)
    # The root is gathered once per reduction: passes without one leave it gathered.
    kept = passes if strategy.reduce_every_pass else 1
    often = gathering_passes(recipe, layout)
    roots = [shape for stage in stages for shape in stage.units[0]]
    forward, backward, reductions = [], [], []
    for ways in sorted({shape.divided for unit, _ in units for shape in unit}):
        # Expert-parallel experts are sharded over fewer ranks than other parameters.
        parts = [([s for s in unit if s.divided == ways], count) for unit, count in units]
        ranks = next(shape.over(shards) for part, _ in parts for shape in part)
        calls = sum(count for part, count in parts if part)
        whole = sum(count * gathered_bytes(part, shards, compute) for part, count in parts)
        root = gathered_bytes([shape for shape in roots if shape.divided == ways], shards, compute)
        trained = sum(c * sum(s.gathered(shards) for s in trained_of(part)) for part, c in parts)
        stride = ways if ways > 1 else layout.groups[SHARD].stride
        first, again = often * whole, 0
        if recipe.gathers_twice:
            again = passes * (whole - root)
            first = again + kept * root
        forward.append(PlannedCollective(first, 1, ranks, stride, often * calls))
        backward.append(PlannedCollective(again, 1, ranks, stride, passes * calls))
        payload = layout.reductions * reduced * trained
        calls *= layout.reductions
        reductions.append(PlannedCollective(payload, 1, ranks, stride, calls))
        # After the reduce-scatter each shard is all-reduced between the replicas.
        reductions.append(PlannedCollective(payload // ranks, 2, *replicas, calls))
    return _StepTraffic(tuple(forward), tuple(backward), tuple(reductions))


def gathering_passes(recipe: Recipe, layout: PlannedLayout) -> int:
    """Return the number of forward passes per step in which FSDP gathers the blocks."""
    every = recipe.gathers_twice or recipe.strategy.reduce_every_pass
    return layout.passes if every else 1


def messages_of(
    stages: Sequence[PlannedStage], traces: Sequence[PlannedPassTrace], layout: PlannedLayout
) -> PlannedCollective:
    """Return the messages of a pipeline rank in a step: hidden states and their gradients."""
    sides = sum((not stage.first) + (not stage.last) for stage in stages)
    calls = layout.passes * sides
    # With times=2 and two ranks, `PlannedCollective.sent` is the payload: each rank sends it once.
    return PlannedCollective(calls * traces[0].hidden, 2, 2, layout.groups[PIPELINE].stride, calls)


def tied_gradients_of(stages: Sequence[PlannedStage], layout: PlannedLayout) -> PlannedCollective:
    """Return the messages between the first and last pipeline stage: a rank's shard of the gradient
    of a tied embedding."""
    shapes = [shape for stage in stages for shape in trained_of(stage.tied)]
    ranks, stride = layout.groups[PIPELINE]
    payload = sum(shape.sharded(layout.shards) * shape.itemsize for shape in shapes)
    return PlannedCollective(payload, 2, 2, stride * max(1, ranks - 1))


def elements(stages: Sequence[PlannedStage], ranks: int) -> int:
    """Return the number of trained elements on the first of `ranks` FSDP shards."""
    return sum(
        count * sum(shape.sharded(ranks) for shape in trained_of(unit))
        for unit, count in counted(stages)
    )


@dataclass(frozen=True)
class _StepTimes:
    """Estimated seconds of the parts of a step, on the slowest rank."""

    compute: float
    """Forward and backward, including recomputation."""
    update: float
    """Norm, clipping and optimizer; with offload also sums of gradients on the host."""
    transfers: float
    """Transfers between host and device with strategy.offload, without any overlap."""
    communication: float
    """All communication, without any overlap."""
    network: float
    """Part of `communication` that is between nodes."""
    exposed: float
    """Communication and transfers that do not overlap with computation, and the time by which
    overlapping collectives slow computation down."""
    waiting: float = 0.0

    @property
    def step(self) -> float:
        return self.compute + self.update + self.exposed + self.waiting


@dataclass(frozen=True)
class PlannedStages:
    """The stages of a pipeline with their traces. Without a pipeline there is one stage."""

    stages: Sequence[PlannedStage]
    traces: Sequence[PlannedPassTrace]
    orders: Sequence[Order]
    """Order of actions of each rank; [] without a pipeline."""

    def of_rank(self, rank: int) -> tuple[Sequence[PlannedStage], Sequence[PlannedPassTrace]]:
        ranks = len(self.orders) or 1
        return self.stages[rank::ranks], self.traces[rank::ranks]


def times_of(
    pieces: PlannedStages,
    recipe: Recipe,
    layout: PlannedLayout,
    machine: PlannedMachine,
    simulation: PipelineParallelSimulation | None,
) -> _StepTimes:
    """Estimate the seconds of a step. `simulation`: result of `simulated` for a pipeline.

    Kernels run one after another, as fast as arithmetic or memory allows, and no faster than the
    host launches them. FSDP's collectives overlap with forward or backward, except for the first
    gather and the last reduction. Gradients that are reduced once per step overlap with the last
    backward. Messages of tensor and expert parallelism overlap with nothing, and messages of a ring
    with attention."""
    ranks = range(len(pieces.orders) or 1)
    each = [_times_of_rank(*pieces.of_rank(rank), recipe, layout, machine) for rank in ranks]
    if simulation is None:
        return each[0]
    slowest = max(each, key=lambda times: times.step)
    within = layout.passes * max(
        sum(sum(_together_seconds(trace, layout, machine)) for trace in pieces.of_rank(rank)[1])
        for rank in ranks
    )
    busy = slowest.compute + within
    # The simulated step includes all ranks: the slowest rank waits while it does not compute.
    return replace(slowest, waiting=max(0.0, simulation.seconds - busy))


def _times_of_rank(
    stages: Sequence[PlannedStage],
    traces: Sequence[PlannedPassTrace],
    recipe: Recipe,
    layout: PlannedLayout,
    machine: PlannedMachine,
) -> _StepTimes:
    forward, backward = (
        sum(work_seconds(work, machine) for work in works)
        for works in zip(*((trace.forward, trace.backward) for trace in traces), strict=True)
    )
    traffic = traffic_of(stages, recipe, layout)
    gathered, again, reduced, late = (
        sum(c.seconds(machine) for c in collectives) for collectives in traffic
    )
    transfers, update = _offload(stages, recipe, layout, machine)
    gathers = gathering_passes(recipe, layout)
    backs = layout.passes if recipe.gathers_twice else 0
    share = transfers / max(1, gathers + backs + layout.reductions)  # seconds of one transfer
    units = sum(len(stage.units) for stage in stages)

    def waits(times: int, moved: float, moving: float, computing: float) -> float:
        """Return the exposed seconds of `times` forward or backward passes, each with `computing`
        seconds of computation, `moved` seconds of collectives, and `moving` seconds of collectives
        and transfers together."""
        # FSDP's gather over one rank is a copy to the device, which does not overlap.
        if offload.used(recipe.strategy) and layout.shards == 1:
            return times * moving
        if not moving:
            return 0.0
        exposed = max(moving / units, moving - computing)
        # Hidden collectives use multiprocessors that the computation lacks.
        return times * (exposed + TAKEN_SHARE * moved * (1 - exposed / moving))

    first, second, third = gathered / gathers, again / max(1, backs), reduced / layout.reductions
    up = share if backs else 0.0
    exposed = late
    exposed += waits(gathers, first, first + share, forward)
    exposed += waits(layout.passes - layout.reductions, second, second + up, backward)
    moved = second + third
    exposed += waits(layout.reductions, moved, moved + up + share, backward)
    messages = messages_of(stages, traces, layout)
    tied = tied_gradients_of(stages, layout)
    crossing = sum(c.seconds(machine) for c in (*traffic.all, messages, tied) if c.crosses(machine))
    apart = layout.groups[EXPERT].size
    for half in (half for trace in traces for half in trace.sent):
        crossing += layout.passes * exchange_seconds(half.experts, apart, machine)[1]
    together = layout.passes * sum(sum(_together_seconds(t, layout, machine)) for t in traces)
    after = tied.seconds(machine)  # between the last backward and the norm, without overlap
    shared = gathered + again + reduced + late
    return _StepTimes(
        compute=layout.passes * (forward + backward),
        update=update,
        transfers=transfers,
        communication=shared
        + layout.passes * sum(sum(map(sum, _sent(t, layout, machine))) for t in traces)
        + messages.seconds(machine)
        + after,
        network=crossing,
        exposed=exposed + together + after,
    )


def _offload(
    stages: Sequence[PlannedStage], recipe: Recipe, layout: PlannedLayout, machine: PlannedMachine
) -> tuple[float, float]:
    """Return the seconds of transfers between host and device in a step, and of the update."""
    cut = layout.replicas if sharding.zero1(recipe) else layout.shards
    owned, units = elements(stages, cut), counted(stages)
    state = sum(count * sum(shape.moment_bytes(cut) for shape in unit) for unit, count in units)
    rounding = ROUNDING_TRAFFIC[recipe.optimizer.state_dtype]
    if recipe.precision.master != "fp32":
        rounding = max(rounding, ROUNDING_TRAFFIC["bf16"])
    traffic = (UPDATE_TRAFFIC + rounding) * owned + 2 * state
    on_disk = UPDATE_ON_DISK * owned + 2 * state
    if not offload.used(recipe.strategy):
        return 0.0, traffic / (machine.gpu.bandwidth * BANDWIDTH_SHARE)
    sums = ADDITION_TRAFFIC * (layout.reductions - 1) * owned
    # All ranks of a node share the bandwidth of its memory.
    update = (traffic + sums) * machine.gpus_per_node / HOST_BANDWIDTH
    often = gathering_passes(recipe, layout)
    gathers = 2 * layout.passes if recipe.gathers_twice else often
    held = sum(count * bytes_of(unit, cut) for unit, count in units)
    itemsize = 4 if recipe.precision.master == "fp32" else 2
    moved = gathers * held + itemsize * owned * layout.reductions  # bytes of shards and gradients
    transfers = moved / machine.gpu.pcie
    if offload.to_disk(recipe.strategy):  # on the assumption that no page stays in memory
        from_disk = moved * machine.gpus_per_node / DISK_BANDWIDTH
        transfers = max(transfers / PAGEABLE_SHARE, from_disk)
        update = max(update, on_disk * machine.gpus_per_node / DISK_BANDWIDTH)
    return transfers, update


def exchange_seconds(nbytes: float, ranks: int, machine: PlannedMachine) -> tuple[float, float]:
    """Return (seconds inside nodes, seconds between nodes) of an all-to-all in which each of
    `ranks` neighbours sends `nbytes` in all. All GPUs of a node share its network."""
    inside = math.gcd(ranks, machine.gpus_per_node)
    across = nbytes * (ranks - inside) / max(1, ranks - 1)
    network = machine.net * NETWORK_SHARE / machine.gpus_per_node
    return (nbytes - across) / (machine.gpu.link * NETWORK_SHARE), across / network


def _together_seconds(
    trace: PlannedPassTrace, layout: PlannedLayout, machine: PlannedMachine
) -> tuple[float, float]:
    """Return the seconds for which a rank waits for messages of tensor, context and expert
    parallelism in forward, and in backward."""
    attending = (
        half.attention / (machine.peak_flops * machine.gpu.attention) for half in trace.sent
    )
    forward, backward = (
        layers + experts + max(0.0, ring - hidden)
        for (layers, ring, experts), hidden in zip(
            _sent(trace, layout, machine), attending, strict=True
        )
    )
    return forward, backward


def _sent(
    trace: PlannedPassTrace, layout: PlannedLayout, machine: PlannedMachine
) -> list[tuple[float, float, float]]:
    """Return the seconds of sending by (tensor, context, expert) parallelism, in forward and in
    backward."""
    hops = max(layout.groups[name].size for name in LAYERS) - 1
    apart = layout.groups[EXPERT].size
    step = machine.call + (machine.hop if apart <= machine.gpus_per_node else machine.hop_between)
    link = machine.gpu.link * NETWORK_SHARE
    return [
        (
            # A collective of tensor parallelism takes tp - 1 ring steps, any other message one.
            half.layers_calls * (machine.call + hops * machine.hop) + half.layers / link,
            half.ring_calls * (machine.call + machine.hop) + half.ring / link,
            half.experts_calls * step + max(exchange_seconds(half.experts, apart, machine)),
        )
        for half in trace.sent
    ]


def simulated(
    pieces: PlannedStages,
    arrangement: PipelineActionSequence,
    layout: PlannedLayout,
    machine: PlannedMachine | None,
) -> PipelineParallelSimulation:
    """Simulate a step of a pipeline with the traced costs of its stages, in seconds. Without a
    machine the unit is operations, and messages cost nothing."""
    costs: dict[int, dict[Kind, float]] = {}
    for trace in pieces.traces:
        # Equal stages share a trace.
        if id(trace) in costs:
            continue
        works = trace.forward, trace.backward, trace.weights
        if machine:
            forward, backward, weights = (work_seconds(w, machine) for w in works)
            waits = _together_seconds(trace, layout, machine)
        else:
            forward, backward, weights = (sum(w.operations for w in work) for work in works)
            waits = 0.0, 0.0
        costs[id(trace)] = {
            "F": forward + waits[0],
            "B": backward + waits[1],
            # Only the gradients of inputs wait for other ranks, not those of weights.
            "I": backward - weights + waits[1],
            "W": weights,
        }
    message = 0.0
    if machine:
        stride = layout.groups[PIPELINE].stride
        message = PlannedCollective(pieces.traces[0].hidden, 2, 2, stride).seconds(machine)
    stages = [costs[id(trace)] for trace in pieces.traces]
    return simulate(arrangement, stages=stages, message=message)


def work_seconds(work: Work, machine: PlannedMachine) -> float:
    """Return the seconds of kernels that run one after another (Williams et al. 2009, "Roofline"),
    at least the time to launch them."""
    products = machine.peak_flops * PEAK_SHARE
    attention = machine.peak_flops * machine.gpu.attention
    bandwidth = machine.gpu.bandwidth * BANDWIDTH_SHARE
    busy = sum(
        max(one.operations / (attention if one.attention else products), one.traffic / bandwidth)
        for one in work
    )
    return max(busy, machine.launch * sum(one.launches for one in work))
