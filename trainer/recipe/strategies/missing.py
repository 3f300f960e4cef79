"""Combinations of `tp`, `pp`, `cp` and `ep` with other keys that are not implemented yet."""

from collections.abc import Iterator

from trainer.recipe.sections import Recipe
from trainer.recipe.strategies import sharding


def missing_beside(recipe: Recipe, ranks: str, *keys: str) -> Iterator[tuple[str, str]]:
    """Yield (key, problem and remedy) for each of `keys` whose setting does not work together with
    `strategy.<ranks>` yet."""
    chosen = {
        "data.factory": (bool(recipe.data.factory), f"set strategy.{ranks}=1"),
        "strategy.sharding": (sharding.zero1(recipe), "use SHARD_GRAD_OP"),
    }
    for key in keys:
        used, instead = chosen[key]
        if used:
            yield key, f"does not work with strategy.{ranks} above 1 yet; {instead}"
