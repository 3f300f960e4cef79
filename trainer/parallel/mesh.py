"""The device mesh: every rank's place, by named dimension.

It has the dimensions that the strategy uses, and no others of one rank each: torch makes a process
group for every one of those on every rank, one after the other, and with gloo each has a thread
that wakes a hundred times a second.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastic.world import World
from trainer.recipe import Recipe, RecipeError

REPLICATE, SHARD = "dp_replicate", "dp_shard"
"""Names of dimensions: over whole replicas, and over the shards of one."""


@dataclass(frozen=True)
class Mesh:
    """All ranks by named dimension, and this one among those that share a global batch."""

    device_mesh: DeviceMesh
    dp_rank: int
    """Data-parallel rank: which share of the global batch is this rank's."""
    dp_size: int
    """Into how many shares it is cut."""
    dp_group: dist.ProcessGroup
    """The ranks of all shares."""


def mesh_shape(recipe: Recipe, world_size: int, local_world_size: int) -> tuple[int, int]:
    """(replicas, shards of each).

    Raises:
        RecipeError: the world does not divide into shard groups.
    """
    shards = {
        "NO_SHARD": 1,
        "OPTIMIZER_STATE": 1,
        "SHARD_GRAD_OP": world_size,
        "FULL_SHARD": world_size,
        "HYBRID_SHARD": recipe.strategy.shard_size or local_world_size,
    }[recipe.sharding]
    if world_size % shards:
        raise RecipeError(
            f"strategy.shard_size: {world_size} ranks do not divide into groups of {shards}; "
            "start a multiple of the group size, or set strategy.shard_size"
        )
    return world_size // shards, shards


def is_sharded_by_fsdp(recipe: Recipe, world_size: int) -> bool:
    """Whether FSDP holds the parameters, or else DDP, perhaps with ZeRO-1. A single rank has nobody
    to shard with: FSDP would only copy its parameters. Exact mode and offload rest on it, though.
    """
    if recipe.exact:
        return True
    by_fsdp = recipe.strategy.name == "fsdp" and recipe.sharding != "OPTIMIZER_STATE"
    return by_fsdp and (world_size > 1 or recipe.strategy.offload != "none")


def build_mesh(recipe: Recipe, world: World) -> Mesh:
    """The mesh of all ranks: (REPLICATE,) for DDP, as which a single rank counts; for FSDP
    (SHARD,), or (REPLICATE, SHARD) if it has replicas, too. Each rank has a share of the batch.
    Called on all ranks."""
    replicas, shards = mesh_shape(recipe, world.world_size, world.local_world_size)
    sizes = {REPLICATE: replicas, SHARD: shards}
    if not is_sharded_by_fsdp(recipe, world.world_size):
        del sizes[SHARD]
    elif replicas == 1:
        # FSDP would all-reduce each gradient with nobody, and keep it until backward ends.
        del sizes[REPLICATE]
    device = world.device.type
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    group = dist.group.WORLD
    assert group  # init_device_mesh has made one where there was none
    return Mesh(mesh, world.rank, world.world_size, group)
