"""The layout of a recipe over ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainer.parallel.fsdp import gathers_ahead_on_cpu
from trainer.parallel.mesh import REPLICATE, SHARD, Group, groups_of, is_sharded_by_fsdp
from trainer.recipe import Recipe
from trainer.recipe.strategies.exact import batch_plan


@dataclass(frozen=True)
class Layout:
    """Groups of ranks, passes and micro-batch of a recipe in a world."""

    groups: Mapping[str, Group]
    """See `groups_of` in trainer/parallel/mesh.py."""
    by_fsdp: bool
    """Whether FSDP holds the parameters; else DDP, with or without ZeRO-1."""
    gathers_ahead: bool
    """Whether forward also gathers a block while the one before is computed, as on CPUs."""
    passes: int
    """Forward and backward passes per step."""
    reductions: int
    """Reductions of each gradient per step."""
    micro_batch: int
    """Sequences of the largest pass."""

    @property
    def replicas(self) -> int:
        """Ranks with equal parameters."""
        return self.groups[REPLICATE].size

    @property
    def shards(self) -> int:
        """Ranks over which FSDP shards parameters."""
        return self.groups[SHARD].size


def layout_of(
    recipe: Recipe, world_size: int, local_world_size: int, device: Literal["cpu", "cuda"]
) -> Layout:
    """The layout of `recipe` in a world.

    Raises:
        RecipeError: the recipe does not fit the world.
    """
    strategy = recipe.strategy
    groups = groups_of(recipe, world_size, local_world_size)
    plan = batch_plan(recipe, world_size // strategy.together)
    return Layout(
        groups=groups,
        by_fsdp=is_sharded_by_fsdp(recipe, world_size),
        gathers_ahead=gathers_ahead_on_cpu(recipe, device),
        passes=plan.passes,
        reductions=plan.passes if strategy.reduce_every_pass else 1,
        micro_batch=plan.micro_batch,
    )
