"""What ranks send each other to share data and stages, and how long a network takes for it.

A collective takes its latency and its bytes over the bandwidth of the slowest link (the alpha-beta
model of Hockney 1994). Constants are those of `trainer.plan.costs`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer.parallel.ddp import BUCKET_BYTES
from trainer.parallel.mesh import PIPELINE, REPLICATE, SHARD
from trainer.parallel.parallelize import DTYPES
from trainer.plan.blueprint import Stage, counted, gathered_bytes, trained_of
from trainer.plan.costs import NETWORK_SHARE, PLATEAU, Machine
from trainer.plan.layout import Layout
from trainer.plan.tape import Trace
from trainer.recipe import Recipe
from trainer.recipe.strategies import exact, sharding


@dataclass(frozen=True)
class Collective:
    """What one group of ranks sends in a step."""

    payload: float
    """Bytes of the whole tensors that are gathered or reduced, in all calls together."""
    times: int
    """How often they travel round the ring: 1 to gather or to reduce-scatter, 2 to all-reduce."""
    ranks: int
    stride: int
    """Distance between neighbours in the group, in ranks."""
    calls: float = 1
    """Into how many calls the payload is cut."""

    @property
    def sent(self) -> float:
        """Bytes that every rank sends, and receives."""
        return self.times * self.payload * (self.ranks - 1) / self.ranks

    def in_node(self, machine: Machine) -> int:
        """Neighbours of the group that a node has."""
        return max(1, min(self.ranks, machine.gpus_per_node // self.stride))

    def crosses(self, machine: Machine) -> bool:
        """Whether it goes over the network."""
        return self.ranks > self.in_node(machine)

    def latency(self, machine: Machine) -> float:
        """Seconds of a call of no bytes: steps of a ring one after the other, or for an all-reduce
        those of a tree over the nodes where that is shorter."""
        if self.ranks == 1:
            return 0.0
        inside = self.in_node(machine)
        nodes = -(-self.ranks // inside)
        within, between = machine.hop, machine.hop_between
        ring = self.times * ((self.ranks - nodes) * within + (nodes - 1) * between)
        ring *= PLATEAU if nodes > 1 else 1
        tree = 2 * ((inside - 1) * within + (nodes - 1).bit_length() * between)
        return machine.call + (min(ring, tree) if self.times == 2 else ring)

    def seconds(self, machine: Machine) -> float:
        """All calls, one after the other."""
        if not self.payload:
            return 0.0
        bandwidth = machine.gpu.link
        if self.crosses(machine):  # groups of one node share its network
            share = self.in_node(machine) / machine.gpus_per_node
            bandwidth = min(bandwidth, machine.net * share)
        return self.calls * self.latency(machine) + self.sent / (bandwidth * NETWORK_SHARE)


class Traffic(NamedTuple):
    """What the ranks of a stage send in a step to share the data, by what it may lie beside."""

    forward: tuple[Collective, ...]
    """Parameters that forward passes gather."""
    backward: tuple[Collective, ...]
    """Parameters that backward passes gather."""
    reduced: tuple[Collective, ...]
    """Gradients, which backward passes reduce: the last one, or each."""
    updated: tuple[Collective, ...] = ()
    """Parameters that are gathered after the update, beside nothing."""

    @property
    def all(self) -> tuple[Collective, ...]:
        """All of a step."""
        return (*self.forward, *self.backward, *self.reduced, *self.updated)


def traffic_of(stages: Sequence[Stage], recipe: Recipe, layout: Layout) -> Traffic:
    """What the ranks of a stage, or of the stages of a rank, communicate in a step, to share the
    data; a few bytes that carry loss and norm are left out. Each unit is a call, or each bucket."""
    strategy, shards, passes = recipe.strategy, layout.shards, layout.passes
    units, replicas = counted(stages), layout.groups[REPLICATE]
    if not layout.by_fsdp:
        payload = 4 * elements(stages, 1)
        calls = -(-payload // BUCKET_BYTES)
        updated: tuple[Collective, ...] = ()
        if sharding.zero1(recipe):  # gathers the updated parameters once more
            updated = (Collective(payload, 1, *replicas, calls),)
        return Traffic((), (), (Collective(payload, 2, *replicas, calls),), updated)
    compute, reduced = DTYPES[recipe.precision.dtype].itemsize, exact.reduced_bytes(recipe)
    # What stays gathered for the backward pass does for the next pass, too. What is in no block
    # stays so anyhow.
    kept = passes if strategy.reduce_every_pass else 1
    often = gathering_passes(recipe, layout)
    roots = [shape for stage in stages for shape in stage.units[0]]
    forward, backward, reductions = [], [], []
    for ways in sorted({shape.divided for unit, _ in units for shape in unit}):
        # Experts that are divided lie over fewer ranks.
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
        forward.append(Collective(first, 1, ranks, stride, often * calls))
        backward.append(Collective(again, 1, ranks, stride, passes * calls))
        payload = layout.reductions * reduced * trained
        calls *= layout.reductions
        reductions.append(Collective(payload, 1, ranks, stride, calls))
        reductions.append(Collective(payload // ranks, 2, *replicas, calls))
    return Traffic(tuple(forward), tuple(backward), tuple(reductions))


def gathering_passes(recipe: Recipe, layout: Layout) -> int:
    """Forward passes of a step before which FSDP gathers the blocks."""
    every = recipe.gathers_twice or recipe.strategy.reduce_every_pass
    return layout.passes if every else 1


def messages_of(stages: Sequence[Stage], traces: Sequence[Trace], layout: Layout) -> Collective:
    """What a rank of a pipeline sends to others of it in a step: hidden states, their gradients."""
    sides = sum((not stage.first) + (not stage.last) for stage in stages)
    calls = layout.passes * sides
    return Collective(calls * traces[0].hidden, 2, 2, layout.groups[PIPELINE].stride, calls)


def tied_gradients_of(stages: Sequence[Stage], layout: Layout) -> Collective:
    """What the first and the last stage of a pipeline send each other in a step: their gradients of
    a tied embedding, each its shard."""
    shapes = [shape for stage in stages for shape in trained_of(stage.tied)]
    ranks, stride = layout.groups[PIPELINE]
    payload = sum(shape.sharded(layout.shards) * shape.itemsize for shape in shapes)
    return Collective(payload, 2, 2, stride * max(1, ranks - 1))


def elements(stages: Sequence[Stage], ranks: int) -> int:
    """Elements of the first of `ranks` slices of all trained parameters."""
    return sum(
        count * sum(shape.sharded(ranks) for shape in trained_of(unit))
        for unit, count in counted(stages)
    )
