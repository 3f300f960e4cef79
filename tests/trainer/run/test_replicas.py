"""A rank whose bits differ is named."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.checkpointing.worlds import run_ranks
from trainer.run.witness import check_replicas, diverged_ranks


def work(rank):
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(7, 5, generator=generator),
        torch.randn(3, generator=generator).bfloat16(),
        torch.ones(()),
    ]
    found = [diverged_ranks(tensors, dist.group.WORLD)]
    if rank == 1:
        tensors[1].view(torch.int16)[2] ^= 1  # the lowest bit of one number
    found.append(diverged_ranks(tensors, dist.group.WORLD))
    return found, events_of_tensor_parallel_ranks(rank), events_of_stages(rank)


def events_of_tensor_parallel_ranks(rank):
    """Each has a part of the first weight, and all of the second."""
    mesh, events = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",)), []
    whole = torch.arange(6.0)
    weights = {
        "cut": distribute_tensor(whole, mesh, [Shard(0)]),
        "norm": distribute_tensor(whole, mesh, [Replicate()]),
    }
    run = run_of(mesh, SimpleNamespace(parameters=weights, pipeline=None), events)
    for other in (0.0, 1.0):
        weights["norm"].to_local()[2] += other * (rank == 1)
        check_replicas(run)
    return events


def events_of_stages(rank):
    """The first and the last have a weight in common; what else they have differs."""
    mesh, events = init_device_mesh("cpu", (3,), mesh_dim_names=("pp",)), []
    tied = None if rank == 1 else torch.arange(6.0)
    parameters = {"own": torch.full((3,), float(rank))}
    pipeline = SimpleNamespace(tied=tied)
    run = run_of(mesh, SimpleNamespace(parameters=parameters, pipeline=pipeline), events)
    for other in (0.0, 1.0):
        if tied is not None:
            tied[2] += other * (rank == 2)
        check_replicas(run)
    return events


def run_of(mesh, model, events):
    return SimpleNamespace(
        recipe=SimpleNamespace(elastic=SimpleNamespace(check_replicas_every=1)),
        due=lambda every: True,
        mesh=SimpleNamespace(device_mesh=mesh),
        model=model,
        world=SimpleNamespace(world_size=3),
        progress=SimpleNamespace(step=5),
        log=SimpleNamespace(event=lambda step, name, text: events.append(text)),
    )


def test_a_rank_with_one_other_bit_is_named_on_all_ranks(tmp_path):
    event = "weights of rank 1 differ from those of its replicas"
    tied = "weights of rank 0, 2 differ from those of its replicas"
    assert run_ranks(3, work, tmp_path) == [([[], [1]], [event], [tied])] * 3
