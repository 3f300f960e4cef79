"""The rules of each strategy: a module each, named after its recipe key. Imports no torch.

`check` yields what a strategy cannot be combined with: (key, problem and remedy). `describe` gives
its words in the first line of a run, or "" if it is unused. The other functions answer the mesh,
the plan and `trainer.parallel`, which applies the strategy. Only the mesh reads numbers of ranks
from the recipe itself.
"""

from collections.abc import Iterator
from typing import Any

from trainer.recipe.sections import Recipe, Strategy
from trainer.recipe.strategies import cp, ep, exact, offload, pp, sharding, tp

MODEL_PARALLEL = (tp, pp, cp, ep)
"""Strategies whose ranks compute together; the first of a module's KEYS is their number."""
WITHIN_PASS = (tp, cp, ep)
"""Strategies that change what a rank computes and sends in a pass."""


def check(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for module in (*MODEL_PARALLEL, sharding, offload, exact):
        yield from module.check(recipe)


def describe(recipe: Recipe, idle: float) -> str:
    """Describe all strategies. `idle`: share of a step in which pipeline ranks wait."""
    strategy = recipe.strategy
    together = ep.describe(strategy), cp.describe(strategy), pp.describe(strategy, idle)
    held = sharding.describe(recipe) + offload.describe(strategy)
    return ", ".join(filter(None, (*together, tp.describe(strategy), held)))


def sizes(strategy: Strategy) -> dict[str, int]:
    """Ranks that compute together, by key."""
    return {module.KEYS[0]: module.ranks(strategy) for module in MODEL_PARALLEL}


def only(strategy: Strategy, *modules: Any) -> Strategy:
    """A strategy with only the keys of some modules of `MODEL_PARALLEL`."""
    keys = (key for module in modules for key in module.KEYS)
    return Strategy(**{key: getattr(strategy, key) for key in keys})


def cut_ranks(strategy: Strategy) -> int:
    """Number of parts into which a model is cut before FSDP shards each part."""
    return tp.ranks(strategy) * pp.ranks(strategy)
