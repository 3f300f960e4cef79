"""The device mesh: all ranks along named dimensions. It has only the dimensions that the strategy
uses, because torch creates process groups one after the other at the start, and each gloo group has
a thread that wakes a hundred times a second."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from checkpointing.ranks import exchange
from elastic.world import World
from trainer.recipe import Recipe, RecipeError
from trainer.recipe.strategies import dividing, exact, offload, sharding, together
from trainer.recipe.strategies import ranks as ranks_of

REPLICATE, PIPELINE, SHARD = "dp_replicate", "pp", "dp_shard"
LAYERS = tuple(module.KEYS[0] for module in dividing("layers"))
EXPERT_SHARD, EXPERT = "ep_shard", "ep"
"""Names of mesh dimensions, outermost first: REPLICATE over replicas of the model, PIPELINE over
pipeline stages, SHARD over FSDP shards, and LAYERS over ranks that compute each layer together. A
second mesh, for experts, has in place of SHARD and LAYERS the dimensions EXPERT_SHARD, over ranks
that hold the same experts, and EXPERT, over ranks that together hold all experts."""
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
    """Number of ranks that hold parameters of this rank's pipeline stage."""
    place: int = 0
    """Index of this rank among the ranks of its share; 0 is on the last stage, with the loss."""
    together: int = 1
    """Number of ranks that compute a share together: tp x cp x pp."""
    experts: DeviceMesh | None = None
    """The mesh for experts; None without expert parallelism."""
    ring: dist.ProcessGroup | None = None
    """The ranks that have parts of the same sequences; None without context parallelism."""

    @property
    def counts(self) -> bool:
        """Whether this rank adds values of its share, such as the loss, to sums over all ranks: the
        first of the ranks that compute a share together."""
        return self.place == 0

    @property
    def witness(self) -> int:
        """Factor by which this rank multiplies its digest of samples before the sum over all ranks.
        The factors of the ranks that compute a share together sum to 1, so the digest of a step
        does not depend on their number. All differ, and none is 0. So the sum changes if one of
        these ranks read other samples, or swapped them with a rank of another share."""
        return 2 * self.place or 1 - self.together * (self.together - 1)

    def deal(self, count: int, size: int) -> tuple[list[range], list[list[int]]]:
        """Deal `count` sequences to the data-parallel ranks, `size` in each micro-batch. Returns,
        for this rank's micro-batches, (sequences that count, sequences to load). A rank that has
        none left loads the first micro-batch of all, so that all ranks enter the same
        collectives."""
        rank, ranks = self.dp_rank, self.dp_size
        numbers = range(rank, -(-count // (size * ranks)) * ranks, ranks)
        cuts = [range(n * size, min(n * size + size, count)) for n in numbers]
        return cuts, [list(cut) or list(range(min(size, count))) for cut in cuts]

    def dimension(self, name: str) -> DeviceMesh:
        return self.experts[name] if self.experts and name == EXPERT else self.device_mesh[name]

    @property
    def data_mesh(self) -> DeviceMesh:
        names = self.device_mesh.mesh_dim_names or ()
        shared = tuple(name for name in names if name not in (PIPELINE, *LAYERS))
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
        """Return each dictionary with the entries of all pipeline stages. Called on all ranks."""
        if PIPELINE not in (self.device_mesh.mesh_dim_names or ()):
            return [*by_name]
        group = self.device_mesh[PIPELINE].get_group()
        # One exchange for all, because each costs a round trip between the stages.
        of_stages: list[list[dict[str, Any]]] = exchange([*by_name], group.size(), group)
        return [
            {name: value for part in parts for name, value in part.items()}
            for parts in zip(*of_stages, strict=True)
        ]


def forget_meshes() -> None:
    """Clear DTensor's caches of sharding decisions. In a process with a new rank they would return
    meshes of the old world, which compare equal but name other groups."""
    _clear_sharding_prop_cache()


def replica_ranks(recipe: Recipe) -> int:
    """Return the number of ranks of a replica of the model, as far as the recipe alone determines
    it. Each possible world size is a multiple."""
    strategy = recipe.strategy
    sharing = math.lcm(ranks_of(strategy, "sequences"), sharding.fixed_group(recipe))
    of_stage = math.lcm(ranks_of(strategy, "layers") * sharing, ranks_of(strategy, "experts"))
    return ranks_of(strategy, "stages") * of_stage


def least_nodes(recipe: Recipe, nodes: int, ranks: int) -> int:
    """Return the least number of nodes, at least `nodes`, with `ranks` ranks each, whose ranks form
    whole replicas."""
    replica = replica_ranks(recipe)
    together = replica // math.gcd(replica, ranks)
    return math.ceil(nodes / together) * together


def mesh_shape(recipe: Recipe, world_size: int, local_world_size: int) -> tuple[int, int]:
    """Return (number of replicas, number of FSDP shards of each stage). Ranks of context
    parallelism count as shards or replicas, because they hold parameters as data-parallel ranks do.
    Raises RecipeError if the world or a node does not divide into the groups of the strategy."""
    strategy = recipe.strategy
    used = {
        module.KEYS[0]: module.ranks(strategy)
        for module in dividing("layers", "sequences")
        if module.ranks(strategy) > 1
    }
    in_node = math.prod(used.values())
    if local_world_size % in_node or world_size % in_node:
        *_, key = used
        groups = f"{in_node}" if len(used) == 1 else f"{' x '.join(used)} = {in_node}"
        raise RecipeError(
            f"strategy.{key}: groups of {groups} ranks do not divide the {local_world_size} "
            f"rank(s) of a node, and none may span two nodes; start a multiple of {in_node} on "
            f"each, or set another strategy.{key}"
        )
    layer, cp = ranks_of(strategy, "layers"), ranks_of(strategy, "sequences")
    pp, ep = ranks_of(strategy, "stages"), ranks_of(strategy, "experts")
    if world_size % (layer * pp):
        raise RecipeError(
            f"strategy.pp: {world_size} rank(s) do not divide into pipelines of {layer * pp}; "
            f"start a multiple of {layer * pp} ranks, or set another strategy.pp"
        )
    world_size, local_world_size = world_size // (layer * pp), local_world_size // layer
    shards = sharding.group(recipe, world_size, local_world_size)
    if world_size % shards:
        of_layer = " x ".join(f"{name}={n}" for name, n in used.items() if name in LAYERS)
        groups = f"{world_size} groups of {of_layer} ranks" if of_layer else f"{world_size} ranks"
        groups += f" of a stage of pp={pp}" if pp > 1 else ""
        raise RecipeError(
            f"strategy.shard_size: {groups} do not divide into groups of {shards}; "
            "start a multiple of the group size, or set strategy.shard_size"
        )
    if shards * layer % ep:
        raise RecipeError(
            f"strategy.ep: groups of {ep} ranks do not divide the {shards * layer} that share "
            f"parameters; start a multiple of {ep} ranks, or set another strategy.ep"
        )
    if pp > 1 and shards % cp:
        raise RecipeError(
            f"strategy.cp: with pp={pp}, a ring of {cp} ranks does not fit in shard groups of "
            f"{shards}; use strategy.sharding=SHARD_GRAD_OP, or FULL_SHARD"
        )
    return world_size // shards, shards


class MeshGroupShape(NamedTuple):
    """Size of the process groups along a mesh dimension, and the spacing of their ranks."""

    size: int
    stride: int
    """Difference between successive ranks of a group."""


def groups_of(recipe: Recipe, world_size: int, local_world_size: int) -> dict[str, MeshGroupShape]:
    """Return the shapes of the groups that each rank belongs to, by dimension. Raises RecipeError
    if the world cannot be divided, see `mesh_shape`."""
    replicas, shards = mesh_shape(recipe, world_size, local_world_size)
    groups, stride = {}, 1
    for module in dividing("layers", "sequences"):
        groups[module.KEYS[0]] = MeshGroupShape(module.ranks(recipe.strategy), stride)
        stride *= module.ranks(recipe.strategy)
    layer, pp = ranks_of(recipe.strategy, "layers"), ranks_of(recipe.strategy, "stages")
    return {
        **groups,
        EXPERT: MeshGroupShape(ranks_of(recipe.strategy, "experts"), 1),
        SHARD: MeshGroupShape(shards, layer),
        PIPELINE: MeshGroupShape(pp, layer * shards),
        REPLICATE: MeshGroupShape(replicas, layer * shards * pp),
    }


def placement(recipe: Recipe, world_size: int, local_world_size: int) -> str:
    """Describe, for the user, which groups of ranks lie inside a node, and which span nodes."""
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
    """Return whether FSDP distributes the parameters; otherwise DDP replicates them."""
    strategy, pp = recipe.strategy, ranks_of(recipe.strategy, "stages")
    alone, rounded = world_size == pp, recipe.precision.master != "fp32"
    # These features need FSDP. For instance, it sums partial gradients of tp.
    if exact.used(recipe) or rounded or ranks_of(strategy, "layers") > 1 or offload.used(strategy):
        return True
    # Stages of a pipeline get their dtype from FSDP: it gathers weights in precision.dtype, so the
    # activations that stages send have it, too. It also reduces gradients of a stage's replicas.
    if pp > 1 and (not alone or recipe.precision.dtype != "fp32"):
        return True
    # With a single rank FSDP would only cost time, for copies and hooks.
    return sharding.by_fsdp(recipe) and not alone


def build_mesh(recipe: Recipe, world: World) -> Mesh:
    """Build the mesh of all ranks: (REPLICATE,) for DDP and for a single rank; (SHARD,) for FSDP;
    (REPLICATE, SHARD) for FSDP with replicas. PIPELINE comes before SHARD, LAYERS after it. Called
    on all ranks."""
    strategy, rank = recipe.strategy, world.rank
    groups = groups_of(recipe, world.world_size, world.local_world_size)
    sizes = {name: group.size for name, group in groups.items()}
    places = {name: rank // stride % size for name, (size, stride) in groups.items()}
    by_fsdp = is_sharded_by_fsdp(recipe, world.world_size)

    def over(*names: str, always: str) -> DeviceMesh:
        # Only dimensions of several ranks: with a REPLICATE dimension of size 1, FSDP would
        # all-reduce each gradient separately, and keep it until backward ends.
        used = tuple(name for name in names if sizes[name] > 1 or name == always)
        shape = tuple(sizes[name] for name in used)
        return init_device_mesh(world.device.type, shape, mesh_dim_names=used)

    names = (REPLICATE, PIPELINE, *([SHARD] if by_fsdp else []), *reversed(LAYERS))
    mesh = over(*names, always=SHARD if by_fsdp else REPLICATE)
    group = dist.group.WORLD
    assert group  # init_device_mesh has created the default group
    ring: Any = None
    size, stride = groups[CONTEXT]
    if size > 1:
        first = rank - places[CONTEXT] * stride
        # Each ring is created by its members only.
        ring = dist.new_group(
            [*range(first, first + size * stride, stride)], use_local_synchronization=True
        )
    experts = None
    if sizes[EXPERT] > 1:
        sizes[EXPERT_SHARD] = sizes[SHARD] * ranks_of(strategy, "layers") // sizes[EXPERT]
        experts = over(REPLICATE, PIPELINE, EXPERT_SHARD, EXPERT, always=EXPERT_SHARD)
    # Ranks of a ring compute one share together.
    share = (places[REPLICATE] * sizes[SHARD] + places[SHARD]) // ranks_of(strategy, "sequences")
    of_stage = ranks_of(strategy, "layers", "sequences")
    place = (sizes[PIPELINE] - 1 - places[PIPELINE]) * of_stage + rank % of_stage
    of_share = together(strategy)
    return Mesh(
        mesh, share, world.world_size // of_share, group, world.world_size // sizes[PIPELINE],
        place, of_share, experts, ring,
    )  # fmt: skip
