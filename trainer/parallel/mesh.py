"""The device mesh: all ranks along named dimensions.

The mesh has only the dimensions that a strategy uses: for each dimension torch creates a process
group on every rank, one after the other, and with gloo each has a thread that wakes a hundred times
a second.
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
"""Names of dimensions, in their order: over whole replicas, over the stages of one, over the shards
of a stage, and over the ranks that compute each layer together, which are neighbours. For experts
SHARD and TENSOR are two others: over ranks that have the same ones, and over neighbours that have
all of them."""
CONTEXT = "cp"
"""Name of the ranks of a ring. They are no dimension of the mesh, since to FSDP they are
data-parallel ranks like others."""


@dataclass(frozen=True)
class Mesh:
    """All ranks along named dimensions, and this rank's share of the global batch."""

    device_mesh: DeviceMesh
    dp_rank: int
    """Data-parallel rank: index of the share of the global batch that this rank computes."""
    dp_size: int
    """Number of shares."""
    group: dist.ProcessGroup
    """All ranks."""
    holders: int
    """Number of ranks over which this rank's parameters are spread: all those of its stage."""
    place: int = 0
    """Index of this rank among those that compute its share together; 0 is on the last stage."""
    together: int = 1
    """Number of ranks that compute a share together: tp x cp x pp."""
    experts: DeviceMesh | None = None
    """With expert parallelism: all ranks along the dimensions of experts."""
    ring: dist.ProcessGroup | None = None
    """With context parallelism: the ranks with parts of the same sequences, in order."""

    @property
    def counts(self) -> bool:
        """Whether this rank adds its share's values to sums over all ranks."""
        return self.place == 0

    @property
    def witness(self) -> int:
        """Factor of this rank's digest of consumed samples in a sum over all ranks.

        Over the ranks that compute a share together the factors sum to 1, so the digest of a step
        does not depend on their number. All factors differ, and none is 0: the sum changes if some
        of these ranks consumed other samples, or swapped theirs with ranks of another share.
        """
        return 2 * self.place or 1 - self.together * (self.together - 1)

    def dimension(self, name: str) -> DeviceMesh:
        """The 1-D mesh of a dimension, including those of experts."""
        return self.experts[name] if self.experts and name == EXPERT else self.device_mesh[name]

    @property
    def data_mesh(self) -> DeviceMesh:
        """The mesh over the data-parallel dimensions."""
        names = self.device_mesh.mesh_dim_names or ()
        shared = tuple(name for name in names if name not in (PIPELINE, TENSOR))
        return self.device_mesh if shared == names else self.device_mesh[shared]

    @property
    def expert_data_mesh(self) -> DeviceMesh | None:
        """The mesh over ranks that hold the same experts."""
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
        """Union of each dictionary by parameter name over the stages of a pipeline. On all
        ranks."""
        if PIPELINE not in (self.device_mesh.mesh_dim_names or ()):
            return [*by_name]
        group = self.device_mesh[PIPELINE].get_group()
        # One exchange for all of them: each is a round trip between the stages.
        of_stages: list[list[dict[str, Any]]] = exchange([*by_name], group.size(), group)
        return [
            {name: value for part in parts for name, value in part.items()}
            for parts in zip(*of_stages, strict=True)
        ]


def forget_meshes() -> None:
    """Clear DTensor's caches of sharding decisions. After a change of rank they would return meshes
    of the old world, which compare equal and differ in the names of groups."""
    _clear_sharding_prop_cache()


def replica_ranks(recipe: Recipe) -> int:
    """Ranks of one whole replica of the model, as far as the recipe determines it; a world has a
    multiple."""
    strategy = recipe.strategy
    shards = sharding.fixed_group(recipe)
    return strategy.pp * math.lcm(strategy.tp * math.lcm(strategy.cp, shards), strategy.ep)


def least_nodes(recipe: Recipe, nodes: int, ranks: int) -> int:
    """Fewest nodes, at least `nodes`, whose `ranks` each form whole replicas."""
    replica = replica_ranks(recipe)
    together = replica // math.gcd(replica, ranks)
    return math.ceil(nodes / together) * together


def mesh_shape(recipe: Recipe, world_size: int, local_world_size: int) -> tuple[int, int]:
    """(replicas, shards of each) per group of `strategy.tp` and `pp` ranks. Ranks of `strategy.cp`
    count as shards or replicas: they hold parameters like data-parallel ranks.

    Raises:
        RecipeError: the world does not divide into shard groups or stages, or a node into groups of
            tp x cp.
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


class Group(NamedTuple):
    """Size of the groups along a dimension, and the distance of their ranks."""

    size: int
    stride: int
    """Distance between neighbours, in ranks."""


def groups_of(recipe: Recipe, world_size: int, local_world_size: int) -> dict[str, Group]:
    """The groups that each rank belongs to, by dimension, nearest neighbours first.

    Raises:
        RecipeError: as `mesh_shape`.
    """
    replicas, shards = mesh_shape(recipe, world_size, local_world_size)
    tp, pp, cp = recipe.strategy.tp, recipe.strategy.pp, recipe.strategy.cp
    return {
        TENSOR: Group(tp, 1),
        CONTEXT: Group(cp, tp),
        EXPERT: Group(recipe.strategy.ep, 1),
        SHARD: Group(shards, tp),
        PIPELINE: Group(pp, tp * shards),
        REPLICATE: Group(replicas, tp * shards * pp),
    }


def placement(recipe: Recipe, world_size: int, local_world_size: int) -> str:
    """A description of which groups of ranks lie inside a node, and which span nodes."""
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
    """Whether FSDP holds the parameters; else DDP does, with or without ZeRO-1."""
    strategy, alone = recipe.strategy, world_size == recipe.strategy.pp
    rounded = recipe.precision.master != "fp32"
    # These rest on FSDP: for tp it sums partial gradients, for bf16 weights it adds up in float32.
    if exact.used(recipe) or rounded or strategy.tp > 1 or offload.used(strategy):
        return True
    # In a pipeline FSDP also casts what stages send.
    if strategy.pp > 1 and (not alone or recipe.precision.dtype != "fp32"):
        return True
    # Alone, a rank would only have its parameters copied, and hooks in each pass.
    return sharding.by_fsdp(recipe) and not alone


def build_mesh(recipe: Recipe, world: World) -> Mesh:
    """Build the mesh of all ranks: (REPLICATE,) for DDP and for a single rank; (SHARD,) for FSDP,
    or (REPLICATE, SHARD) with replicas. PIPELINE comes before SHARD, TENSOR after it. Ranks of a
    pipeline, a tensor-parallel group or a ring have the same share of the batch. On all ranks."""
    groups = groups_of(recipe, world.world_size, world.local_world_size)
    sizes = {name: group.size for name, group in groups.items()}
    places = {name: world.rank // stride % size for name, (size, stride) in groups.items()}
    tp, pp, cp, ep = sizes[TENSOR], sizes[PIPELINE], sizes[CONTEXT], sizes[EXPERT]
    by_fsdp = is_sharded_by_fsdp(recipe, world.world_size)

    def over(*names: str, always: str) -> DeviceMesh:
        """A mesh of the dimensions with several ranks, and of `always`."""
        # A dimension of one replica would make FSDP all-reduce each gradient alone, and keep it
        # until backward ends.
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
    ring: Any = None  # Any: outside of its ranks new_group returns a number in place of a group
    if cp > 1:
        first = world.rank - ring_rank * tp
        ranks = [*range(first, first + tp * cp, tp)]
        # Only its members create a ring, each its own.
        ring = dist.new_group(ranks, use_local_synchronization=True)
    experts = None
    if ep > 1:
        sizes[EXPERT_SHARD] = sizes[SHARD] * tp // ep
        experts = over(REPLICATE, PIPELINE, EXPERT_SHARD, EXPERT, always=EXPERT_SHARD)
    # Ranks of a ring have parts of the same sequences.
    share = (places[REPLICATE] * sizes[SHARD] + places[SHARD]) // cp
    # 0 on the last stage, which computes the loss.
    place = ((pp - 1 - places[PIPELINE]) * cp + ring_rank) * tp + places[TENSOR]
    together = recipe.strategy.together
    return Mesh(
        mesh, share, world.world_size // together, group, world.world_size // pp, place, together,
        experts, ring,
    )  # fmt: skip
