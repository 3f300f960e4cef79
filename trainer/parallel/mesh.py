"""The device mesh: all ranks along named dimensions.

The mesh has only the dimensions that the strategy uses, because each costs time at the start: torch
creates process groups one after the other. With gloo each group also has a thread that wakes a
hundred times a second.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from checkpointing.ranks import exchange
from elastic.world import World
from trainer.recipe import Recipe, RecipeError
from trainer.recipe.strategies import exact, offload, sharding

REPLICATE, PIPELINE, SHARD, TENSOR = "dp_replicate", "pp", "dp_shard", "tp"
EXPERT_SHARD, EXPERT = "ep_shard", "ep"
"""Names of mesh dimensions, outermost first: REPLICATE over replicas of the model, PIPELINE over
pipeline stages, SHARD over FSDP shards, TENSOR over ranks of tensor parallelism, which are
neighbours. A second mesh, for experts, has in place of the last two EXPERT_SHARD over ranks that
hold the same experts, and EXPERT over neighbours that together hold all experts."""
CONTEXT = "cp"
"""Name of the groups of context parallelism (rings). They are no dimension of the mesh, because
FSDP treats their ranks as data-parallel ranks."""


@dataclass(frozen=True)
class Mesh:
    """The device mesh, and the share of the global batch that this rank computes."""

    device_mesh: DeviceMesh
    dp_rank: int
    """Data-parallel rank: index of the share of the global batch that this rank computes."""
    dp_size: int
    """Number of shares of the global batch."""
    group: dist.ProcessGroup
    """The process group of all ranks."""
    holders: int
    """Number of ranks of this rank's pipeline stage, over which its parameters are distributed."""
    place: int = 0
    """Index of this rank among the ranks that compute its share together; 0 is on the last
    pipeline stage."""
    together: int = 1
    """Number of ranks that compute a share together: tp x cp x pp."""
    experts: DeviceMesh | None = None
    """The mesh for experts; None without expert parallelism."""
    ring: dist.ProcessGroup | None = None
    """The ranks that have parts of the same sequences, in order; None without context
    parallelism."""

    @property
    def counts(self) -> bool:
        """Whether this rank adds values of its share, such as the loss, to sums over all ranks."""
        return self.place == 0

    @property
    def witness(self) -> int:
        """Factor by which this rank multiplies its digest of samples before the sum over all ranks.

        Over the ranks that compute a share together, the factors sum to 1, so the digest of a step
        does not depend on their number. All factors differ, and none is 0. So the sum changes if
        one of these ranks read other samples, or swapped them with a rank of another share.
        """
        return 2 * self.place or 1 - self.together * (self.together - 1)

    def dimension(self, name: str) -> DeviceMesh:
        """Return the 1-D mesh of a dimension, which may be EXPERT."""
        return self.experts[name] if self.experts and name == EXPERT else self.device_mesh[name]

    @property
    def data_mesh(self) -> DeviceMesh:
        """The mesh over the data-parallel dimensions."""
        names = self.device_mesh.mesh_dim_names or ()
        shared = tuple(name for name in names if name not in (PIPELINE, TENSOR))
        return self.device_mesh if shared == names else self.device_mesh[shared]

    @property
    def expert_data_mesh(self) -> DeviceMesh | None:
        """The mesh over ranks that hold the same experts; None without expert parallelism."""
        if self.experts is None:
            return None
        names = self.experts.mesh_dim_names or ()
        return self.experts[tuple(name for name in names if name not in (PIPELINE, EXPERT))]

    @property
    def stages(self) -> list[list[int]]:
        """The ranks of each pipeline stage; without a pipeline one list of all ranks."""
        names = self.device_mesh.mesh_dim_names or ()
        if PIPELINE not in names:
            return [[*range(dist.get_world_size(self.group))]]
        of_stages: list[list[int]] = (
            self.device_mesh.mesh.movedim(names.index(PIPELINE), 0).flatten(1).tolist()
        )
        return of_stages

    def merged(self, *by_name: dict[str, Any]) -> list[dict[str, Any]]:
        """Return each dictionary (by parameter name) with the entries of all pipeline stages. On
        all ranks."""
        if PIPELINE not in (self.device_mesh.mesh_dim_names or ()):
            return [*by_name]
        group = self.device_mesh[PIPELINE].get_group()
        # One exchange for all dictionaries, since each costs a round trip between the stages.
        of_stages: list[list[dict[str, Any]]] = exchange([*by_name], group.size(), group)
        return [
            {name: value for part in parts for name, value in part.items()}
            for parts in zip(*of_stages, strict=True)
        ]


def forget_meshes() -> None:
    """Clear DTensor's caches of sharding decisions. If this process has a new rank, they would
    return meshes of the old world, which compare equal but name other groups."""
    _clear_sharding_prop_cache()


def replica_ranks(recipe: Recipe) -> int:
    """Return a number of ranks that divides any possible world size: the ranks of one replica of
    the model, as far as the recipe alone determines them."""
    strategy = recipe.strategy
    shards = sharding.fixed_group(recipe)
    return strategy.pp * math.lcm(strategy.tp * math.lcm(strategy.cp, shards), strategy.ep)


def least_nodes(recipe: Recipe, nodes: int, ranks: int) -> int:
    """Return the least number of nodes, at least `nodes`, that form whole replicas. `ranks`: ranks
    per node."""
    replica = replica_ranks(recipe)
    together = replica // math.gcd(replica, ranks)
    return math.ceil(nodes / together) * together


def mesh_shape(recipe: Recipe, world_size: int, local_world_size: int) -> tuple[int, int]:
    """Return (number of replicas, number of FSDP shards of each stage). Ranks of context
    parallelism count as shards or replicas: they hold parameters as data-parallel ranks do.

    Raises:
        RecipeError: the world does not divide into shard groups or stages, or a node into groups of
            tp x cp ranks.
    """
    tp, pp = recipe.strategy.tp, recipe.strategy.pp
    together = tp * recipe.strategy.cp
    if local_world_size % together or world_size % together:
        key = "strategy.tp" if together == tp else "strategy.cp"
        groups = f"{together}" if together in (tp, recipe.strategy.cp) else f"tp x cp = {together}"
        raise RecipeError(
            f"{key}: groups of {groups} ranks do not divide the {local_world_size} rank(s) of a "
            f"node, and none may span two nodes; start a multiple of {together} on each, or set "
            f"another {key}"
        )
    if world_size % (tp * pp):
        raise RecipeError(
            f"strategy.pp: {world_size} rank(s) do not divide into pipelines of {tp * pp}; start a "
            "multiple of that, or set another strategy.pp"
        )
    world_size, local_world_size = world_size // (tp * pp), local_world_size // tp
    shards = sharding.group(recipe, world_size, local_world_size)
    if world_size % shards:
        groups = f"{world_size} groups of tp={tp} ranks" if tp > 1 else f"{world_size} ranks"
        groups += f" of a stage of pp={pp}" if pp > 1 else ""
        raise RecipeError(
            f"strategy.shard_size: {groups} do not divide into groups of {shards}; "
            "start a multiple of the group size, or set strategy.shard_size"
        )
    if shards * tp % recipe.strategy.ep:
        raise RecipeError(
            f"strategy.ep: groups of {recipe.strategy.ep} ranks do not divide the {shards * tp} "
            "that share parameters; start a multiple of that, or set another strategy.ep"
        )
    if pp > 1 and shards % recipe.strategy.cp:
        raise RecipeError(
            f"strategy.cp: with pp={pp}, a ring of {recipe.strategy.cp} ranks does not fit in "
            f"shard groups of {shards}; use strategy.sharding=SHARD_GRAD_OP, or FULL_SHARD"
        )
    return world_size // shards, shards


class GroupShape(NamedTuple):
    """Size of the process groups along a mesh dimension, and the spacing of their ranks."""

    size: int
    stride: int
    """Difference between successive ranks of a group."""


def groups_of(recipe: Recipe, world_size: int, local_world_size: int) -> dict[str, GroupShape]:
    """Return the shapes of the groups that each rank belongs to, by dimension.

    Raises:
        RecipeError: the world cannot be divided, see `mesh_shape`.
    """
    replicas, shards = mesh_shape(recipe, world_size, local_world_size)
    tp, pp, cp = recipe.strategy.tp, recipe.strategy.pp, recipe.strategy.cp
    return {
        TENSOR: GroupShape(tp, 1),
        CONTEXT: GroupShape(cp, tp),
        EXPERT: GroupShape(recipe.strategy.ep, 1),
        SHARD: GroupShape(shards, tp),
        PIPELINE: GroupShape(pp, tp * shards),
        REPLICATE: GroupShape(replicas, tp * shards * pp),
    }


def placement(recipe: Recipe, world_size: int, local_world_size: int) -> str:
    """Describe which groups of ranks lie inside a node, and which span nodes."""
    inside: list[str] = []
    across: list[str] = []
    for name, (size, stride) in groups_of(recipe, world_size, local_world_size).items():
        if size > 1:
            where = across if local_world_size % (size * stride) else inside
            where.append(f"{name}={size}")
    places = [f"{', '.join(inside)} inside a node"] if inside else []
    if across:
        places.append(f"{', '.join(across)} across {world_size // local_world_size} nodes")
    return "; ".join(places)


def is_sharded_by_fsdp(recipe: Recipe, world_size: int) -> bool:
    """Return whether FSDP distributes the parameters. Otherwise DDP replicates them, with or
    without ZeRO-1."""
    strategy, alone = recipe.strategy, world_size == recipe.strategy.pp
    rounded = recipe.precision.master != "fp32"
    # These features need FSDP: e.g. it sums partial gradients of tp, and bf16 gradients in float32.
    if exact.used(recipe) or rounded or strategy.tp > 1 or offload.used(strategy):
        return True
    # In a pipeline FSDP also casts the activations that stages send.
    if strategy.pp > 1 and (not alone or recipe.precision.dtype != "fp32"):
        return True
    # With a single rank FSDP would only cost time, for copies and hooks.
    return sharding.by_fsdp(recipe) and not alone


def build_mesh(recipe: Recipe, world: World) -> Mesh:
    """Build the mesh of all ranks: (REPLICATE,) for DDP and for a single rank; (SHARD,) for FSDP;
    (REPLICATE, SHARD) for FSDP with replicas. PIPELINE comes before SHARD, TENSOR after it. The
    ranks of a pipeline, a tensor-parallel group or a ring have the same share of the global batch.
    On all ranks."""
    groups = groups_of(recipe, world.world_size, world.local_world_size)
    sizes = {name: group.size for name, group in groups.items()}
    places = {name: world.rank // stride % size for name, (size, stride) in groups.items()}
    tp, pp, cp, ep = sizes[TENSOR], sizes[PIPELINE], sizes[CONTEXT], sizes[EXPERT]
    by_fsdp = is_sharded_by_fsdp(recipe, world.world_size)

    def over(*names: str, always: str) -> DeviceMesh:
        """Create a mesh of `always` and those of `names` that have several ranks."""
        # With a REPLICATE dimension of size 1, FSDP would all-reduce each gradient separately, and
        # keep it until backward ends.
        used = tuple(name for name in names if sizes[name] > 1 or name == always)
        shape = tuple(sizes[name] for name in used)
        return init_device_mesh(world.device.type, shape, mesh_dim_names=used)

    fsdp_dimensions = (SHARD,) if by_fsdp else ()
    mesh = over(
        REPLICATE, PIPELINE, *fsdp_dimensions, TENSOR, always=SHARD if by_fsdp else REPLICATE
    )
    group = dist.group.WORLD
    assert group  # init_device_mesh has created the default group
    ring_rank = places[CONTEXT]
    ring: Any = None  # Any, because new_group returns a number on ranks outside of the group
    if cp > 1:
        first = world.rank - ring_rank * tp
        ranks = [*range(first, first + tp * cp, tp)]
        # Each ring is created by its members only.
        ring = dist.new_group(ranks, use_local_synchronization=True)
    experts = None
    if ep > 1:
        sizes[EXPERT_SHARD] = sizes[SHARD] * tp // ep
        experts = over(REPLICATE, PIPELINE, EXPERT_SHARD, EXPERT, always=EXPERT_SHARD)
    # Ranks of a ring compute one share together.
    share = (places[REPLICATE] * sizes[SHARD] + places[SHARD]) // cp
    # Place 0 is on the last stage, which computes the loss.
    place = ((pp - 1 - places[PIPELINE]) * cp + ring_rank) * tp + places[TENSOR]
    together = recipe.strategy.together
    return Mesh(
        mesh, share, world.world_size // together, group, world.world_size // pp, place, together,
        experts, ring,
    )  # fmt: skip
