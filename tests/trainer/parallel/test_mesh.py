"""Where ranks are placed, which layouts are refused, and what the stages of a pipeline exchange."""

import random
from functools import partial
from itertools import combinations, product

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known

from elastic.world import World
from tests.checkpointing.worlds import run_ranks
from trainer.data.loader import MASK
from trainer.parallel import mesh
from trainer.parallel.mesh import build_mesh, least_nodes, mesh_shape, placement, replica_ranks
from trainer.recipe import RecipeError


@pytest.fixture
def recipe(recipe):
    """recipe(*overrides) → Recipe, of eight layers."""
    return partial(recipe, "model.architecture.num_hidden_layers=8")


@pytest.mark.parametrize(
    ("overrides", "world", "node", "shown"),
    [
        (["tp=2"], 8, 4, "tp=2 inside a node; dp_shard=4 across 2 nodes"),
        (["tp=2", "pp=2", "name=ddp"], 8, 4, "tp=2, pp=2 inside a node; dp_replicate=2 across 2"),
        (["tp=4", "pp=2", "name=ddp"], 16, 4, "tp=4 inside a node; pp=2, dp_replicate=2 across 4"),
        (["tp=2", "pp=2"], 16, 4, "tp=2 inside a node; dp_shard=4, pp=2 across 4 nodes"),
        (["cp=4"], 8, 4, "cp=4 inside a node; dp_shard=8 across 2 nodes"),
        (["tp=2", "cp=2", "pp=2"], 8, 8, "tp=2, cp=2, dp_shard=2, pp=2 inside a node"),
        (["pp=2", "name=ddp"], 4, 1, "pp=2, dp_replicate=2 across 4 nodes"),
    ],
)
def test_the_first_lines_say_what_goes_across_nodes(recipe, overrides, world, node, shown):
    chosen = recipe(*(f"strategy.{one}" for one in overrides))
    assert placement(chosen, world, node).startswith(shown)


@pytest.mark.parametrize(
    ("overrides", "world", "node", "reason"),
    [
        (["tp=4"], 8, 2, "groups of 4 ranks do not divide the 2 rank(s) of a node, and none may"),
        (["tp=2", "cp=2"], 8, 2, "groups of tp x cp = 4 ranks do not divide the 2 rank(s) of a"),
        (["pp=4"], 6, 3, "6 rank(s) do not divide into pipelines of 4; start a multiple"),
        (
            ["tp=2", "sharding=HYBRID_SHARD", "shard_size=4"], 12, 4,
            "6 groups of tp=2 ranks do not divide into groups of 4",
        ),
        (["pp=2", "cp=2", "name=ddp"], 4, 4, "a ring of 2 ranks does not fit in shard groups of 1"),
    ],
)  # fmt: skip
def test_what_does_not_divide_or_would_cross_nodes_is_refused(
    recipe, overrides, world, node, reason
):
    with pytest.raises(RecipeError) as error:
        mesh_shape(recipe(*(f"strategy.{one}" for one in overrides)), world, node)
    assert reason in str(error.value)


def test_whole_replicas_are_what_mesh_shape_takes(recipe):
    """A world of so many ranks, or a multiple, is never refused; others are."""
    for overrides, unit in (
        (["tp=2", "pp=2"], 4),
        (["pp=2", "cp=2", "sharding=SHARD_GRAD_OP"], 4),
        (["pp=3", "name=ddp"], 3),
        (["tp=2", "sharding=HYBRID_SHARD", "shard_size=2"], 4),
    ):
        chosen = recipe(*(f"strategy.{one}" for one in overrides))
        assert replica_ranks(chosen) == unit
        for world in range(1, 4 * unit + 1):
            fits = True
            try:
                mesh_shape(chosen, world, world)
            except RecipeError:
                fits = False
            assert fits == (world % unit == 0), (overrides, world)
    assert [least_nodes(recipe("strategy.pp=4"), nodes, 2) for nodes in (1, 2, 3)] == [2, 2, 4]


@pytest.fixture
def meshes():
    """meshes(recipe, world size) → the mesh of each rank."""

    def made(recipe, size):
        found = []
        for rank in range(size):
            store = dist.HashStore()
            dist.init_process_group("fake", store=store, rank=rank, world_size=size)
            world = World(rank, rank, size, size, 1, 0, 0, None, torch.device("cpu"))
            found.append(build_mesh(recipe, world))
            dist.destroy_process_group()
        return found

    yield made
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("tp=2",),
        ("tp=4", "name=ddp"),
        ("pp=2", "name=ddp"),
        ("cp=2",),
        ("tp=2", "cp=2", "pp=2"),
    ],
    ids="-".join,
)
def test_samples_that_are_not_a_ranks_own_show_in_the_sum(recipe, meshes, overrides):
    """Whichever ranks take others, or if two that have different parts of the work exchange theirs.
    The right sum is that of ranks that each have samples of their own."""
    ranks = meshes(recipe(*(f"strategy.{one}" for one in overrides)), 8)
    own, others = (
        [random.Random(f"{what} {mesh.dp_rank}").getrandbits(32) for mesh in ranks]
        for what in ("own", "other")
    )

    def told(taken):
        return sum(one * mesh.witness & MASK for one, mesh in zip(taken, ranks, strict=True)) & MASK

    counted = [one for one, mesh in zip(own, ranks, strict=True) if mesh.counts]
    assert len(counted) == ranks[0].dp_size == 8 // ranks[0].together
    assert told(own) == sum(counted) & MASK
    for wrong in product([False, True], repeat=8):
        shifted = [b if odd else a for a, b, odd in zip(own, others, wrong, strict=True)]
        assert (told(shifted) == told(own)) == (not any(wrong)), wrong
    for a, b in combinations(range(8), 2):
        swapped = [*own]
        swapped[a], swapped[b] = own[b], own[a]
        mixed = own[a] != own[b] and ranks[a].place != ranks[b].place
        assert (told(swapped) != told(own)) == mixed, (a, b)


def test_a_save_in_a_pipeline_takes_one_exchange(recipe, tmp_path, monkeypatch):
    layout, exchange, exchanges = recipe("strategy.pp=2", "strategy.name=ddp"), mesh.exchange, []

    def counted(*arguments):
        exchanges.append(arguments)
        return exchange(*arguments)

    def work(rank):
        monkeypatch.setattr(mesh, "exchange", counted)
        world = World(rank, rank, 2, 2, 1, 0, 0, None, torch.device("cpu"))
        stages = build_mesh(layout, world)
        return stages.merged({f"tree{rank}": rank}, {}, {f"group{rank}": -rank}), len(exchanges)

    union = [{"tree0": 0, "tree1": 1}, {}, {"group0": 0, "group1": -1}]
    assert run_ranks(2, work, tmp_path) == [(union, 1)] * 2
