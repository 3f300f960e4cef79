"""The device mesh: every rank's place, by named dimension."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastic.world import World
from trainer.recipe import Recipe, RecipeError

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA_PARALLEL = ("dp_replicate", "dp_shard")


def mesh_shape(recipe: Recipe, world_size: int, local_world_size: int) -> tuple[int, ...]:
    """Size of each of `DIMENSIONS`.

    Raises:
        RecipeError: the world does not divide into shard groups.
    """
    shard = {
        "NO_SHARD": 1,
        "OPTIMIZER_STATE": 1,
        "SHARD_GRAD_OP": world_size,
        "FULL_SHARD": world_size,
        "HYBRID_SHARD": recipe.strategy.shard_size or local_world_size,
    }[recipe.sharding]
    if world_size % shard:
        raise RecipeError(
            f"strategy.shard_size: {world_size} ranks do not divide into groups of {shard}; "
            "start a multiple of the group size, or set strategy.shard_size"
        )
    return (1, world_size // shard, shard, 1, 1)


def build_mesh(recipe: Recipe, world: World) -> DeviceMesh:
    """The mesh of all ranks. Called on all ranks."""
    shape = mesh_shape(recipe, world.world_size, world.local_world_size)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=DIMENSIONS)
