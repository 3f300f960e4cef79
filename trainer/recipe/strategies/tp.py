"""`strategy.tp` and `sequence_parallel`: tensor parallelism."""

from collections.abc import Iterator
from typing import Any

from trainer.recipe.sections import Recipe, StrategySection
from trainer.recipe.strategies import cp
from trainer.recipe.strategies.dimension import Divided, RecipeStrategySizes, missing_beside

KEYS: tuple[str, ...] = ("tp", "sequence_parallel")
DIVIDES: Divided = "layers"
APPLIED_BY = "trainer.parallel.tensor"


def ranks(strategy: StrategySection) -> int:
    return strategy.tp


def stream_parts(strategy: StrategySection) -> int:
    """Return the number of parts into which the residual stream is cut along the sequence."""
    return strategy.tp if strategy.sequence_parallel else 1


def check(recipe: Recipe) -> Iterator[tuple[str, str]]:
    strategy, data = recipe.strategy, recipe.data
    if strategy.tp == 1:
        if strategy.sequence_parallel:
            yield "strategy.sequence_parallel", "only with strategy.tp above 1; remove it"
        return
    yield from missing_beside(recipe, "tp", "strategy.sharding")
    ring = cp.ranks(strategy)
    uneven = data.seq_len % (strategy.tp * ring) and not data.factory
    if strategy.sequence_parallel and uneven:
        among = f"tp={strategy.tp}" + (f" x cp={ring}" if ring > 1 else "")
        yield (
            "strategy.sequence_parallel",
            f"data.seq_len={data.seq_len} is not a multiple of strategy.{among}; change one",
        )
    if recipe.precision.matmul:
        yield (
            "strategy.tp",
            f"does not work with precision.matmul={recipe.precision.matmul} yet; set strategy.tp=1",
        )


def describe(strategy: StrategySection, idle: float) -> str:
    if strategy.tp == 1:
        return ""
    sequence = " with sequence parallelism" if strategy.sequence_parallel else ""
    return f"tp={strategy.tp}{sequence}"


def tried(sizes: RecipeStrategySizes) -> Iterator[dict[str, Any]]:
    for ranks in sizes.in_node:
        yield {"tp": ranks, "sequence_parallel": ranks > 1}


def bytes_sent(strategy: StrategySection, reduced: float, divided: float) -> float:
    # An all-reduce is a reduce-scatter and an all-gather.
    return 2 * (1 - 1 / strategy.tp) * reduced
