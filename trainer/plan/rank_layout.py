"""The division of a recipe's work among ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainer.parallel.fsdp import gathers_ahead_on_cpu
from trainer.parallel.mesh import REPLICATE, SHARD, GroupShape, groups_of, is_sharded_by_fsdp
from trainer.recipe import Recipe
from trainer.recipe.strategies import together
from trainer.recipe.strategies.exact import batch_plan


@dataclass(frozen=True)
class RankLayout:
    """The process groups, passes and micro-batch of a recipe for a given number of ranks."""

    groups: Mapping[str, GroupShape]
    """Result of `trainer.parallel.mesh.groups_of`."""
    by_fsdp: bool
    """Whether FSDP distributes parameters; otherwise DDP replicates them, with or without
    ZeRO-1."""
    gathers_ahead: bool
    """Whether forward gathers a block while the previous block computes, see fsdp.py."""
    passes: int
    reductions: int
    micro_batch: int

    @property
    def replicas(self) -> int:
        return self.groups[REPLICATE].size

    @property
    def shards(self) -> int:
        return self.groups[SHARD].size


def layout_of(
    recipe: Recipe, world_size: int, local_world_size: int, device: Literal["cpu", "cuda"]
) -> RankLayout:
    """Return the layout of `recipe`; RecipeError if the recipe cannot run on so many ranks."""
    strategy = recipe.strategy
    groups = groups_of(recipe, world_size, local_world_size)
    plan = batch_plan(recipe, world_size // together(strategy))
    return RankLayout(
        groups=groups,
        by_fsdp=is_sharded_by_fsdp(recipe, world_size),
        gathers_ahead=gathers_ahead_on_cpu(recipe, device),
        passes=plan.passes,
        reductions=plan.passes if strategy.reduce_every_pass else 1,
        micro_batch=plan.micro_batch,
    )
