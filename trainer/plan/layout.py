"""How a recipe lies over ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainer.parallel.fsdp import gathers_ahead_on_cpu
from trainer.parallel.mesh import REPLICATE, SHARD, Group, groups_of, is_sharded_by_fsdp
from trainer.recipe import Recipe
from trainer.recipe.strategies.exact import batch_plan


@dataclass(frozen=True)
class Layout:
    """How a recipe lies over ranks."""

    groups: Mapping[str, Group]
    """As `groups_of` the mesh."""
    by_fsdp: bool
    """Whether FSDP holds the parameters, or else DDP, perhaps with ZeRO-1."""
    gathers_ahead: bool
    """Whether forward, too, gathers a block while the one before is computed, as on CPUs."""
    passes: int
    """Forward and backward passes per step."""
    reductions: int
    """How often a step reduces each gradient."""
    micro_batch: int
    """Sequences of the largest pass."""

    @property
    def replicas(self) -> int:
        """Ranks that hold the same."""
        return self.groups[REPLICATE].size

    @property
    def shards(self) -> int:
        """Ranks over which FSDP cuts what each of them would hold."""
        return self.groups[SHARD].size


def layout_of(
    recipe: Recipe, world_size: int, local_world_size: int, device: Literal["cpu", "cuda"]
) -> Layout:
    """How `recipe` lies over so many ranks.

    Raises:
        RecipeError: it cannot.
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
