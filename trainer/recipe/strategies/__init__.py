"""What is to be known of each strategy of a recipe: a module each, with the name of its key.

A module alone reads its key; all others ask it. `check` says what the strategy cannot be combined
with, and why. `describe` says its words at the start of a run. The other functions answer what the
mesh, the plan and the modules that apply it ask: see docs/extending.md. Imports no torch.
"""

from collections.abc import Iterator

from trainer.recipe.sections import Recipe, Strategy
from trainer.recipe.strategies import cp, pp, tp


def check(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Pairs of (key, what is wrong and what to do) for strategies that cannot be combined so."""
    for one in (tp, pp, cp):
        yield from one.check(recipe)


def sizes(strategy: Strategy) -> dict[str, int]:
    """Ranks that compute together, by key."""
    return {
        "tp": tp.ranks(strategy),
        "pp": pp.ranks(strategy),
        "cp": cp.ranks(strategy),
        "ep": strategy.ep,
    }


def cut_ranks(strategy: Strategy) -> int:
    """Ranks among which a model is cut before FSDP cuts what each of them has."""
    return tp.ranks(strategy) * pp.ranks(strategy)
