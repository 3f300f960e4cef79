"""Rules of the strategies, in one module per strategy, named after its recipe key. Imports no
torch.

`check` yields (key, problem and remedy) for what a strategy cannot be combined with. `describe`
returns its part of a run's first line, or "" if it is not used. Other functions interpret the
strategy's keys for the plan and for `trainer.parallel`, which applies it. Only the mesh reads
numbers of ranks from the recipe directly.
"""

from collections.abc import Iterator
from typing import Any

from trainer.recipe.sections import Recipe, Strategy
from trainer.recipe.strategies import cp, ep, exact, offload, pp, sharding, tp

MODEL_PARALLEL = (tp, pp, cp, ep)
"""Modules of model parallelism. The first of a module's KEYS is the number of ranks."""
WITHIN_PASS = (tp, cp, ep)
"""Modules of model parallelism that changes what a rank computes and sends in a pass."""


def check(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for module in (*MODEL_PARALLEL, sharding, offload, exact):
        yield from module.check(recipe)


def describe(recipe: Recipe, idle: float) -> str:
    """Describe all strategies. `idle`: fraction of a step in which pipeline ranks wait."""
    strategy = recipe.strategy
    together = ep.describe(strategy), cp.describe(strategy), pp.describe(strategy, idle)
    held = sharding.describe(recipe) + offload.describe(strategy)
    return ", ".join(filter(None, (*together, tp.describe(strategy), held)))


def sizes(strategy: Strategy) -> dict[str, int]:
    """Return the number of ranks of each kind of model parallelism, by key."""
    return {module.KEYS[0]: module.ranks(strategy) for module in MODEL_PARALLEL}


def only(strategy: Strategy, *modules: Any) -> Strategy:
    """Return a strategy with the keys of some modules of `MODEL_PARALLEL`, and defaults for all
    others."""
    keys = (key for module in modules for key in module.KEYS)
    return Strategy(**{key: getattr(strategy, key) for key in keys})


def cut_ranks(strategy: Strategy) -> int:
    """Return the number of parts into which a model is cut before FSDP shards each part."""
    return tp.ranks(strategy) * pp.ranks(strategy)
