"""`strategy.cp`: context parallelism."""

from collections.abc import Iterator
from typing import Any

from trainer.recipe.sections import Recipe, StrategySection
from trainer.recipe.strategies.dimension import Divided, RecipeStrategySizes, missing_beside

KEYS: tuple[str, ...] = ("cp",)
DIVIDES: Divided = "sequences"
APPLIED_BY = "trainer.parallel.context"

LONG = 16_384
"""Sequence length from which on the plan tries context parallelism."""


def ranks(strategy: StrategySection) -> int:
    return strategy.cp


def chunks(strategy: StrategySection) -> int:
    """Return the number of chunks of a sequence: an early and a late one for each rank of a ring,
    so that causal attention is equal work for all ranks."""
    return 2 * strategy.cp if strategy.cp > 1 else 1


def check(recipe: Recipe) -> Iterator[tuple[str, str]]:
    strategy, length = recipe.strategy, recipe.data.seq_len
    if strategy.cp == 1:
        return
    yield from missing_beside(recipe, "cp", "data.factory")
    if recipe.objective.compares:
        yield (
            "strategy.cp",
            f"objective.name={recipe.objective.name} does not cut sequences yet; set strategy.cp=1",
        )
    if recipe.model.factory:
        yield "model.factory", "its model cannot compute parts of sequences; set strategy.cp=1"
    if recipe.model.attention != "auto":
        yield "model.attention", "strategy.cp computes attention in a ring of ranks; set auto"
    if length < chunks(strategy) and not recipe.data.factory:
        yield (
            "strategy.cp",
            f"a sequence is cut into {chunks(strategy)} chunks, but data.seq_len is {length}; "
            "lower strategy.cp, or raise data.seq_len",
        )


def describe(strategy: StrategySection, idle: float) -> str:
    return f"cp={strategy.cp}" if strategy.cp > 1 else ""


def tried(sizes: RecipeStrategySizes) -> Iterator[dict[str, Any]]:
    for ranks in sizes.in_node if sizes.seq_len >= LONG else [1]:
        yield {"cp": ranks}


def bytes_sent(strategy: StrategySection, reduced: float, divided: float) -> float:
    return 0.0  # a ring sends point-to-point messages; means of a loss are a few bytes
