"""What no strategy of `tp`, `pp`, `cp` and `ep` can be combined with by nature, but not yet."""

from collections.abc import Iterator

from trainer.recipe.sections import Recipe
from trainer.recipe.strategies import sharding


def missing_beside(recipe: Recipe, ranks: str, *keys: str) -> Iterator[tuple[str, str]]:
    """Refuse those of `keys` that the recipe uses beside `strategy.<ranks>`.

    Yields:
        (key, what is wrong and what to do).
    """
    chosen = {
        "run.determinism": (recipe.exact, "set fast"),
        "data.factory": (bool(recipe.data.factory), f"set strategy.{ranks}=1"),
        "strategy.sharding": (sharding.zero1(recipe), "use SHARD_GRAD_OP"),
    }
    for key in keys:
        used, instead = chosen[key]
        if used:
            yield key, f"does not work with strategy.{ranks} above 1 yet; {instead}"
