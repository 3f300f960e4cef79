"""The device mesh: every rank's place, by named dimension.

It has the dimensions that the strategy uses, and no others of one rank each: torch makes a process
group for every one of those on every rank, one after the other, and with gloo each has a thread
that wakes a hundred times a second.
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
"""The ranks of a ring. They are no dimension of a mesh, as they hold parameters like any others."""


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
    holders: int
    """Ranks over which whatever parameters this one has are spread: all those of its stage."""
    place: int = 0
    """This rank's number among those that compute its share together; the first is of the last
    stage."""
    together: int = 1
    """How many these are."""
    experts: DeviceMesh | None = None
    """Expert parallelism: all ranks by the dimensions of experts."""
    ring: dist.ProcessGroup | None = None
    """Context parallelism: the ranks with a part each of the same sequences, in their order."""

    @property
    def counts(self) -> bool:
        """Whether sums over all ranks have this rank's share from this rank."""
        return self.place == 0

    @property
    def witness(self) -> int:
        """By what this rank multiplies the digest of the samples it took, for a sum over all ranks.

        Over the ranks that compute a share together these sum to 1, so that the digest of a step
        does not depend on their number. No two are the same, and none is 0: the sum is another one
        if some of these ranks took other samples, or exchanged theirs with those of another share.
        """
        return 2 * self.place or 1 - self.together * (self.together - 1)

    def dimension(self, name: str) -> DeviceMesh:
        """The 1-D mesh of one of its dimensions, or of those of experts."""
        return self.experts[name] if self.experts and name == EXPERT else self.device_mesh[name]

    @property
    def data_mesh(self) -> DeviceMesh:
        """The dimensions over which the batch is shared."""
        names = self.device_mesh.mesh_dim_names or ()
        shared = tuple(name for name in names if name not in (PIPELINE, TENSOR))
        return self.device_mesh if shared == names else self.device_mesh[shared]

    @property
    def expert_data_mesh(self) -> DeviceMesh | None:
        """The dimensions over the ranks that have the same experts."""
        if self.experts is None:
            return None
        names = self.experts.mesh_dim_names or ()
        return self.experts[tuple(name for name in names if name not in (PIPELINE, EXPERT))]

    @property
    def stages(self) -> list[list[int]]:
        """The ranks of each stage of a pipeline; all ranks, where there is none."""
        names = self.device_mesh.mesh_dim_names or ()
        if PIPELINE not in names:
            return [[*range(dist.get_world_size(self.group))]]
        of_stages: list[list[int]] = (
            self.device_mesh.mesh.movedim(names.index(PIPELINE), 0).flatten(1).tolist()
        )
        return of_stages

    def merged(self, by_name: dict[str, Any]) -> dict[str, Any]:
        """What the stages of a pipeline know, each of its own parameters. On all ranks."""
        if PIPELINE not in (self.device_mesh.mesh_dim_names or ()):
            return by_name
        group = self.device_mesh[PIPELINE].get_group()
        parts: list[dict[str, Any]] = exchange(by_name, group.size(), group)
        return {name: value for part in parts for name, value in part.items()}


def forget_meshes() -> None:
    """Have DTensor forget the meshes of a world in which this process was another rank: the caches
    in which it keeps what follows for a tensor would give them back for those of now, which are
    equal but for the names of groups."""
    _clear_sharding_prop_cache()


def replica_ranks(recipe: Recipe) -> int:
    """Ranks of which a world must have a multiple: those of a whole replica of the model, as far as
    the recipe alone says how it is spread."""
    strategy = recipe.strategy
    shards = sharding.fixed_group(recipe)
    return strategy.pp * math.lcm(strategy.tp * math.lcm(strategy.cp, shards), strategy.ep)


def least_nodes(recipe: Recipe, nodes: int, ranks: int) -> int:
    """Nodes, of so many ranks each, that hold whole replicas, and are no fewer than `nodes`."""
    replica = replica_ranks(recipe)
    together = replica // math.gcd(replica, ranks)
    return math.ceil(nodes / together) * together


def mesh_shape(recipe: Recipe, world_size: int, local_world_size: int) -> tuple[int, int]:
    """(replicas, shards of each) of what the ranks of `strategy.tp` and `pp` hold together. Those
    of `strategy.cp` have parts of the same sequences, but hold parameters like any others.

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
    """The ranks of a group, which are as far from each other as in any other of its dimension."""

    size: int
    stride: int
    """Distance between neighbours, in ranks."""


def groups_of(recipe: Recipe, world_size: int, local_world_size: int) -> dict[str, Group]:
    """The groups that each rank is in, by dimension, the nearest neighbours first.

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
    """Which groups of ranks that compute together lie inside a node, and which go across."""
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
    """Whether FSDP holds the parameters, or else DDP, perhaps with ZeRO-1. A rank that has nobody
    to shard with would only have its parameters copied, and hooks in each pass. Exact mode, offload
    and tensor parallelism rest on FSDP, though: it sums the partial gradients of the latter. In a
    pipeline it also casts what stages send. Of weights in bf16 it adds up gradients in float32.
    """
    strategy, alone = recipe.strategy, world_size == recipe.strategy.pp
    rounded = recipe.precision.master != "fp32"
    if exact.used(recipe) or rounded or strategy.tp > 1 or offload.used(strategy):
        return True
    if strategy.pp > 1 and (not alone or recipe.precision.dtype != "fp32"):
        return True
    return sharding.by_fsdp(recipe) and not alone


def build_mesh(recipe: Recipe, world: World) -> Mesh:
    """The mesh of all ranks: (REPLICATE,) for DDP, as which a single rank counts; for FSDP
    (SHARD,), or (REPLICATE, SHARD) if it has replicas, too; PIPELINE before, TENSOR after SHARD.
    Each rank has a share of the batch, which those of a pipeline, of a tensor-parallel group, or of
    a ring have in common. Called on all ranks.
    """
    groups = groups_of(recipe, world.world_size, world.local_world_size)
    sizes = {name: group.size for name, group in groups.items()}
    places = {name: world.rank // stride % size for name, (size, stride) in groups.items()}
    tp, pp, cp, ep = sizes[TENSOR], sizes[PIPELINE], sizes[CONTEXT], sizes[EXPERT]
    by_fsdp = is_sharded_by_fsdp(recipe, world.world_size)

    def over(*names: str, always: str) -> DeviceMesh:
        """A mesh with the dimensions of several ranks, and one that it has in any case. Over one
        replica FSDP would all-reduce each gradient with nobody, and keep it until backward ends."""
        used = tuple(name for name in names if sizes[name] > 1 or name == always)
        shape = tuple(sizes[name] for name in used)
        return init_device_mesh(world.device.type, shape, mesh_dim_names=used)

    held = (SHARD,) if by_fsdp else ()
    mesh = over(REPLICATE, PIPELINE, *held, TENSOR, always=SHARD if by_fsdp else REPLICATE)
    group = dist.group.WORLD
    assert group  # init_device_mesh has made one where there was none
    part = places[CONTEXT]
    ring: Any = None  # not None or a group: new_group gives ranks outside of it a number
    if cp > 1:
        first = world.rank - part * tp
        ranks = [*range(first, first + tp * cp, tp)]
        ring = dist.new_group(ranks, use_local_synchronization=True)
    experts = None
    if ep > 1:
        sizes[EXPERT_SHARD] = sizes[SHARD] * tp // ep
        experts = over(REPLICATE, PIPELINE, EXPERT_SHARD, EXPERT, always=EXPERT_SHARD)
    share = (places[REPLICATE] * sizes[SHARD] + places[SHARD]) // cp
    place = ((pp - 1 - places[PIPELINE]) * cp + part) * tp + places[TENSOR]
    together = recipe.strategy.together
    return Mesh(
        mesh, share, world.world_size // together, group, world.world_size // pp, place, together,
        experts, ring,
    )  # fmt: skip
