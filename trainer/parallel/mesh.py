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

REPLICATE, SHARD, TENSOR = "dp_replicate", "dp_shard", "tp"
"""Names of dimensions: over whole replicas, over the shards of one, and over the ranks that compute
each layer together, which are neighbours."""


@dataclass(frozen=True)
class Mesh:
    """All ranks by named dimension, and this one among those that share a global batch."""

    device_mesh: DeviceMesh
    dp_rank: int
    """Data-parallel rank: which share of the global batch is this rank's."""
    dp_size: int
    """Into how many shares it is cut."""
    group: dist.ProcessGroup
    """All ranks."""
    counts: bool = True
    """Whether sums over all ranks have this rank's share from this rank: of those that compute it
    together, the first."""

    @property
    def data_mesh(self) -> DeviceMesh:
        """The dimensions over which the batch is shared."""
        names = self.device_mesh.mesh_dim_names or ()
        if TENSOR not in names:
            return self.device_mesh
        return self.device_mesh[tuple(name for name in names if name != TENSOR)]


def mesh_shape(recipe: Recipe, world_size: int, local_world_size: int) -> tuple[int, int]:
    """(replicas, shards of each) of what the ranks of `strategy.tp` hold together.

    Raises:
        RecipeError: the world does not divide into shard groups, or a node into groups of tp.
    """
    tp = recipe.strategy.tp
    if local_world_size % tp or world_size % tp:
        raise RecipeError(
            f"strategy.tp: groups of {tp} ranks do not divide the {local_world_size} rank(s) of a "
            f"node, and none may span two nodes; start a multiple of {tp} on each, or set another "
            "strategy.tp"
        )
    world_size, local_world_size = world_size // tp, local_world_size // tp
    shards = {
        "NO_SHARD": 1,
        "OPTIMIZER_STATE": 1,
        "SHARD_GRAD_OP": world_size,
        "FULL_SHARD": world_size,
        "HYBRID_SHARD": recipe.strategy.shard_size or local_world_size,
    }[recipe.sharding]
    if world_size % shards:
        groups = f"{world_size} ranks" if tp == 1 else f"{world_size} groups of tp={tp} ranks"
        raise RecipeError(
            f"strategy.shard_size: {groups} do not divide into groups of {shards}; "
            "start a multiple of the group size, or set strategy.shard_size"
        )
    return world_size // shards, shards


def is_sharded_by_fsdp(recipe: Recipe, world_size: int) -> bool:
    """Whether FSDP holds the parameters, or else DDP, perhaps with ZeRO-1. A single rank has nobody
    to shard with: FSDP would only copy its parameters. Exact mode, offload and tensor parallelism,
    whose partial gradients it sums, rest on it, though.
    """
    if recipe.exact or recipe.strategy.tp > 1:
        return True
    by_fsdp = recipe.strategy.name == "fsdp" and recipe.sharding != "OPTIMIZER_STATE"
    return by_fsdp and (world_size > 1 or recipe.strategy.offload != "none")


def build_mesh(recipe: Recipe, world: World) -> Mesh:
    """The mesh of all ranks: (REPLICATE,) for DDP, as which a single rank counts; for FSDP
    (SHARD,), or (REPLICATE, SHARD) if it has replicas, too, and TENSOR after these. Each rank has a
    share of the batch, which those of a tensor-parallel group have in common. Called on all ranks.
    """
    replicas, shards = mesh_shape(recipe, world.world_size, world.local_world_size)
    tp = recipe.strategy.tp
    sizes = {REPLICATE: replicas, SHARD: shards, **({TENSOR: tp} if tp > 1 else {})}
    if not is_sharded_by_fsdp(recipe, world.world_size):
        del sizes[SHARD]
    elif replicas == 1:
        # FSDP would all-reduce each gradient with nobody, and keep it until backward ends.
        del sizes[REPLICATE]
    device = world.device.type
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    group = dist.group.WORLD
    assert group  # init_device_mesh has made one where there was none
    rank, among = divmod(world.rank, tp)
    return Mesh(mesh, rank, world.world_size // tp, group, counts=among == 0)
