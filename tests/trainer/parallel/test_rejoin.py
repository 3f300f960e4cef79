"""A model that stays where it is when the groups of its ranks are made anew."""

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known

from elastic import World
from trainer.optim.optimizer import build_optimizer
from trainer.parallel.mesh import build_mesh, forget_meshes
from trainer.parallel.parallelize import parallelize, rejoin
from trainer.tasks.task import bare_model

CPU, META = torch.device("cpu"), torch.device("meta")


def fill(name, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))


@pytest.fixture
def join():
    """join(rank, size, backend) → World, in place of the one before."""

    def join(rank: int, size: int, backend: str) -> World:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(backend, store=dist.HashStore(), rank=rank, world_size=size)
        return World(rank, rank, size, size, 1, 0, 0, None, CPU)

    yield join
    dist.destroy_process_group()


def test_nothing_of_a_step_that_failed_is_left_in_the_next(join, recipe):
    """Backward has come to the first block: gradients of the head wait to be reduced."""
    exact = recipe("run.determinism=exact")
    ids = torch.arange(64).view(2, 32)
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}

    def made(mesh):
        model, blocks, _ = bare_model(exact)
        built = parallelize(model, blocks, mesh, exact, CPU, fill)
        built.draw_weights()
        return built

    def gradients(built):
        for forward in built.run([batch], train=True):
            forward.root = forward(batch)["loss"]
        return [one.grad.to_local() for one in built.parameters.values()]

    world = join(0, 1, "gloo")
    untouched = gradients(made(build_mesh(exact, world)))
    mesh = build_mesh(exact, world)
    built = made(mesh)
    block = built.module.model.layers[0]

    def lose_a_peer(_gradient):
        raise RuntimeError("Connection closed by peer")

    hook = block.register_forward_hook(
        lambda _, given, out: out.register_hook(lose_a_peer) and None
    )
    with pytest.raises(RuntimeError, match="closed by peer"):
        gradients(built)
    hook.remove()
    built, mesh = rejoin(built, mesh, build_mesh(exact, join(0, 1, "gloo")))
    assert mesh.group is dist.group.WORLD
    for ours, theirs in zip(gradients(built), untouched, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "layout", [("strategy.sharding=HYBRID_SHARD", "strategy.shard_size=2"), ("strategy.tp=2",)]
)
def test_a_process_that_becomes_another_rank_has_no_mesh_of_the_one_that_it_was(
    join, recipe, layout
):
    spread = recipe(*layout)
    for rank in (0, 3):
        mesh = build_mesh(spread, join(rank, 4, "fake"))
        model, blocks, _ = bare_model(spread)
        built = parallelize(model, blocks, mesh, spread, META, fill)
        optimizer = build_optimizer(built.optimized, spread.optimizer, exact=False)
        groups = set()
        for kept in optimizer.state.values():
            groups |= set(kept["exp_avg"].device_mesh._dim_group_names)
        assert groups == set(mesh.device_mesh._dim_group_names), rank
        forget_meshes()
