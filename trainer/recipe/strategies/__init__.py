"""Rules of the strategies, in one module per strategy, named after its recipe key. Imports no
torch.

`check` yields (key, problem and remedy) for what a strategy cannot be combined with. `describe`
returns its part of a run's first line, or "" if it is not used. Other functions interpret the
strategy's keys for the plan and for `trainer.parallel`, which applies it. Only these modules read
numbers of ranks from the recipe directly.
"""

import math
from collections.abc import Iterator

from trainer.recipe.sections import Recipe, StrategySection
from trainer.recipe.strategies import cp, ep, exact, offload, pp, sharding, tp
from trainer.recipe.strategies.dimension import Divided, RecipeStrategyDimension

MODEL_PARALLEL: tuple[RecipeStrategyDimension, ...] = (tp, pp, cp, ep)


def dividing(*kinds: Divided) -> list[RecipeStrategyDimension]:
    """Return those of tp, pp, cp and ep whose DIVIDES is among `kinds`, in the order of `kinds`."""
    return [module for kind in kinds for module in MODEL_PARALLEL if kind == module.DIVIDES]


WITHIN_PASS = dividing("layers", "sequences", "experts")
"""Modules of the kinds of model parallelism that change what a rank computes and sends within a
pass."""


def check(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for module in MODEL_PARALLEL:
        yield from module.check(recipe)
    for of_all in (sharding, offload, exact):
        yield from of_all.check(recipe)


def describe(recipe: Recipe, idle: float) -> str:
    """Describe all strategies of a recipe in a line. `idle`: fraction of a step in which pipeline
    ranks wait."""
    order = dividing("experts", "sequences", "stages", "layers")
    parallel = [module.describe(recipe.strategy, idle) for module in order]
    held = sharding.describe(recipe) + offload.describe(recipe.strategy)
    return ", ".join(filter(None, (*parallel, held)))


def sizes(strategy: StrategySection) -> dict[str, int]:
    """Return recipe key → number of ranks, for each kind of model parallelism."""
    return {module.KEYS[0]: module.ranks(strategy) for module in MODEL_PARALLEL}


def ranks(strategy: StrategySection, *kinds: Divided) -> int:
    """Return the product of the sizes of the strategies that divide `kinds`: tp x pp for layers,
    stages."""
    return math.prod(module.ranks(strategy) for module in dividing(*kinds))


def together(strategy: StrategySection) -> int:
    """Return the number of ranks that compute one share of the data together: tp x pp x cp."""
    return ranks(strategy, "layers", "sequences", "stages")


def cut_ranks(strategy: StrategySection) -> int:
    """Return the number of parts into which a model is cut before FSDP shards each part."""
    return ranks(strategy, "layers", "stages")


def only(strategy: StrategySection, *modules: RecipeStrategyDimension) -> StrategySection:
    """Return a copy of `strategy` that keeps only the keys of `modules`. All other keys have their
    defaults."""
    keys = (key for module in modules for key in module.KEYS)
    return StrategySection(**{key: getattr(strategy, key) for key in keys})
