"""The device mesh: every rank's place, by named dimension.

It has the dimensions that the strategy uses, and no others of one rank each: torch makes a process
group for every one of those on every rank, one after the other, and with gloo each has a thread
that wakes a hundred times a second.
"""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastic.world import World
from trainer.recipe import Recipe, RecipeError

REPLICATE, SHARD = "dp_replicate", "dp_shard"
"""Names of dimensions: over whole replicas, and over the shards of one."""


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


def is_sharded_by_fsdp(recipe: Recipe) -> bool:
    """Whether FSDP holds the parameters, or else DDP, perhaps with ZeRO-1."""
    return recipe.exact or (recipe.strategy.name == "fsdp" and recipe.sharding != "OPTIMIZER_STATE")


def build_mesh(recipe: Recipe, world: World) -> DeviceMesh:
    """The mesh of all ranks: (REPLICATE,) for DDP; for FSDP (SHARD,), or (REPLICATE, SHARD) if it
    has replicas, too. Called on all ranks."""
    replicas, shards = mesh_shape(recipe, world.world_size, world.local_world_size)
    sizes = {REPLICATE: replicas, SHARD: shards}
    if not is_sharded_by_fsdp(recipe):
        del sizes[SHARD]
    elif replicas == 1:
        # FSDP would all-reduce each gradient with nobody, and keep it until backward ends.
        del sizes[REPLICATE]
    device = world.device.type
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
