"""What is to be known of each strategy of a recipe: a module each, with the name of its key.

A module alone reads its key; all others ask it. `check` says what the strategy cannot be combined
with, and why. `describe` says its words at the start of a run. The other functions answer what the
mesh, the plan and the modules that apply it ask: see docs/extending.md. Imports no torch.
"""

from collections.abc import Iterator
from typing import Any

from trainer.recipe.sections import Recipe, Strategy
from trainer.recipe.strategies import cp, ep, exact, offload, pp, sharding, tp

MODEL_PARALLEL = (tp, pp, cp, ep)
"""Those that have ranks compute together. The first of their KEYS says how many."""


def check(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Pairs of (key, what is wrong and what to do) for strategies that cannot be combined so."""
    for one in (*MODEL_PARALLEL, sharding, offload, exact):
        yield from one.check(recipe)


def describe(recipe: Recipe, idle: float) -> str:
    """How a model is spread over ranks, in the words of the first line of a run. `idle`: share of a
    step for which the ranks of a pipeline wait."""
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
