"""What is to be known of each strategy of a recipe: a module each, named after its key.

The mesh reads keys that say how many ranks there are. Everything else asks these modules. `check`
yields what a strategy cannot be combined with: (key, what is wrong and what to do). `describe`
gives its words in the first line of a run, or "" where it is not used. The other functions answer
what the mesh, the plan and `trainer.parallel`, which applies it, ask. Imports no torch.
"""

from collections.abc import Iterator
from typing import Any

from trainer.recipe.sections import Recipe, Strategy
from trainer.recipe.strategies import cp, ep, exact, offload, pp, sharding, tp

MODEL_PARALLEL = (tp, pp, cp, ep)
"""Strategies that have ranks compute together; the first of their KEYS says how many."""
WITHIN_PASS = (tp, cp, ep)
"""Strategies that change what a rank computes and sends in a pass."""


def check(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for one in (*MODEL_PARALLEL, sharding, offload, exact):
        yield from one.check(recipe)


def describe(recipe: Recipe, idle: float) -> str:
    """Describe all. `idle`: share of a step for which the ranks of a pipeline wait."""
    strategy = recipe.strategy
    together = ep.describe(strategy), cp.describe(strategy), pp.describe(strategy, idle)
    held = sharding.describe(recipe) + offload.describe(strategy)
    return ", ".join(filter(None, (*together, tp.describe(strategy), held)))


def sizes(strategy: Strategy) -> dict[str, int]:
    """Ranks that compute together, by key."""
    return {one.KEYS[0]: one.ranks(strategy) for one in MODEL_PARALLEL}


def only(strategy: Strategy, *modules: Any) -> Strategy:
    """Nothing of a strategy but the keys of some of `MODEL_PARALLEL`."""
    keys = (key for one in modules for key in one.KEYS)
    return Strategy(**{key: getattr(strategy, key) for key in keys})


def cut_ranks(strategy: Strategy) -> int:
    """Ranks among which a model is cut before FSDP cuts what each of them has."""
    return tp.ranks(strategy) * pp.ranks(strategy)
