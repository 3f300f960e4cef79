"""`strategy.pp` and `pp_*`: pipeline parallelism."""

from collections.abc import Iterator
from typing import Any

from trainer.recipe.sections import PipelineSchedule, Recipe, StrategySection
from trainer.recipe.strategies import sharding
from trainer.recipe.strategies.dimension import Divided, RecipeStrategySizes, missing_beside

KEYS: tuple[str, ...] = ("pp", "pp_schedule", "pp_stages_per_rank")
DIVIDES: Divided = "stages"
APPLIED_BY = "trainer.parallel.pipeline"


def ranks(strategy: StrategySection) -> int:
    return strategy.pp


def shape(strategy: StrategySection) -> tuple[PipelineSchedule, int, int]:
    """Return (schedule, number of ranks, stages per rank), the first arguments of
    `trainer.parallel.schedules.schedule`."""
    return strategy.pp_schedule, strategy.pp, strategy.pp_stages_per_rank


def stages(strategy: StrategySection) -> int:
    """Return the number of stages of the whole pipeline."""
    return strategy.pp * strategy.pp_stages_per_rank


def splits_backward(strategy: StrategySection) -> bool:
    """Return whether gradients of weights are computed later than gradients of activations."""
    return strategy.pp_schedule == "zero_bubble"


def check(recipe: Recipe) -> Iterator[tuple[str, str]]:
    strategy = recipe.strategy
    if strategy.pp == 1:
        for key, default in (("pp_schedule", "1f1b"), ("pp_stages_per_rank", 1)):
            if getattr(strategy, key) != default:
                yield f"strategy.{key}", "only with strategy.pp above 1; remove it"
        return
    yield from missing_beside(recipe, "pp", "data.factory", "strategy.sharding")
    if recipe.objective.compares:
        yield (
            "strategy.pp",
            f"objective.name={recipe.objective.name} does not work with a pipeline yet; set "
            "strategy.pp=1",
        )
    if recipe.model.factory:
        yield "model.factory", "its model cannot be cut into stages; set strategy.pp=1"
    interleaved = strategy.pp_schedule == "interleaved_1f1b"
    if interleaved != (strategy.pp_stages_per_rank > 1):
        yield (
            "strategy.pp_stages_per_rank",
            "goes with strategy.pp_schedule: interleaved_1f1b; set 2 or more with it, 1 without",
        )
    if not splits_backward(strategy):
        return
    if strategy.compile:
        yield (
            "strategy.compile",
            "compiles the backward pass as a whole, but zero_bubble computes a part of it later; "
            "set false, or another strategy.pp_schedule",
        )
    if strategy.reduce_every_pass:
        yield "strategy.reduce_every_pass", "does not work with zero_bubble; set false"
    if recipe.gathers_twice:
        yield (
            "strategy.sharding",
            "zero_bubble needs gathered weights until their gradients are computed, but "
            f"{sharding.name(recipe)} frees them; use SHARD_GRAD_OP, or another pp_schedule",
        )


def describe(strategy: StrategySection, idle: float) -> str:
    name, size, of_each = shape(strategy)
    if size == 1:
        return ""
    several = f" x {of_each}" if of_each > 1 else ""
    return f"pp={size}{several} {name} (ranks idle for {idle:.0%} of a step)"


def tried(sizes: RecipeStrategySizes) -> Iterator[dict[str, Any]]:
    for ranks in sizes.powers:
        for of_each in (1, 2, 4) if ranks > 1 else (1,):
            if ranks * of_each <= sizes.blocks:
                yield {
                    "pp": ranks,
                    "pp_stages_per_rank": of_each,
                    "pp_schedule": "interleaved_1f1b" if of_each > 1 else "1f1b",
                }


def bytes_sent(strategy: StrategySection, reduced: float, divided: float) -> float:
    return 0.0  # stages send point-to-point messages
