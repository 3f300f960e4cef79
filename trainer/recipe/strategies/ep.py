"""`strategy.ep`: expert parallelism."""

import math
from collections.abc import Iterator
from typing import Any

from trainer.recipe.sections import Recipe, StrategySection
from trainer.recipe.strategies import cp, sharding, tp
from trainer.recipe.strategies.dimension import Divided, RecipeStrategySizes, missing_beside

KEYS: tuple[str, ...] = ("ep",)
DIVIDES: Divided = "experts"
APPLIED_BY = "trainer.parallel.expert"


def ranks(strategy: StrategySection) -> int:
    return strategy.ep


def check(recipe: Recipe) -> Iterator[tuple[str, str]]:
    strategy, data = recipe.strategy, recipe.data
    if strategy.ep == 1:
        return
    yield from missing_beside(recipe, "ep", "data.factory", "strategy.sharding")
    together, ring = tp.ranks(strategy), cp.ranks(strategy)
    if together > 1 and data.seq_len % (together * ring) and not data.factory:
        yield (
            "strategy.ep",
            f"its ranks have equal parts of a sequence, but data.seq_len={data.seq_len} is not a "
            f"multiple of tp={together} x cp={ring}; change one of them",
        )
    if sharding.name(recipe) == "NO_SHARD":
        yield (
            "strategy.ep",
            "divides experts among ranks that shard parameters, but the sharding is NO_SHARD; use "
            "strategy.sharding: SHARD_GRAD_OP, FULL_SHARD or HYBRID_SHARD",
        )
    # An expert's gradient is one sum over the micro-batches of a group of ranks. These are the same
    # micro-batches at every world size, unless only some ranks of a group have a padding pass.
    shares = math.lcm(strategy.ep, together * ring) // (together * ring)
    units = math.ceil(recipe.batch.global_batch / recipe.micro_batch)
    if recipe.exact and units % shares:
        yield (
            "strategy.ep",
            f"in exact mode each expert computes {shares} micro-batches at once, but a step has "
            f"{units}, which is no multiple; set another batch.global_batch or batch.micro_batch",
        )
    if recipe.model.factory:
        yield "model.factory", "the experts of its model are not known; set strategy.ep=1"


def describe(strategy: StrategySection, idle: float) -> str:
    return f"ep={strategy.ep}" if strategy.ep > 1 else ""


def tried(sizes: RecipeStrategySizes) -> Iterator[dict[str, Any]]:
    for ranks in sorted({1, sizes.experts_apart}):
        yield {"ep": ranks}


def bytes_sent(strategy: StrategySection, reduced: float, divided: float) -> float:
    # Routers are assumed to send equally many rows to all ranks.
    return (1 - 1 / strategy.ep) * divided
