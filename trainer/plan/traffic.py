"""Communication of data and pipeline parallelism, and its time on a network. A collective takes its
latency plus its bytes divided by the bandwidth of the slowest link (the alpha-beta model of Hockney
1994), with the constants in `trainer.plan.costs`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer.parallel.ddp import BUCKET_BYTES
from trainer.parallel.mesh import PIPELINE, REPLICATE, SHARD
from trainer.parallel.parallelize import DTYPES
from trainer.plan.blueprint import PlannedLayout, PlannedStage, counted, gathered_bytes, trained_of
from trainer.plan.costs import NETWORK_SHARE, PLATEAU, PlannedMachine
from trainer.plan.tape import PlannedPassTrace
from trainer.recipe import Recipe
from trainer.recipe.strategies import exact, sharding


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
    # The root stays gathered from pass to pass until gradients are reduced.
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
