"""Names of the scalars that a model returns. Ranks sum these scalars by position, so all
micro-batches must return the same names."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from checkpointing.ranks import exchange
from trainer.recipe import RecipeError


class ScalarNames:
    """Checks that a model returns the same scalars in all micro-batches and on all ranks."""

    def __init__(self) -> None:
        self._known: list[str] | None = None
        self._agreed = False

    def in_order(self, means: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return the scalars of a micro-batch, sorted by name. Raises RecipeError if the names
        differ from those of an earlier micro-batch."""
        if self._known is None:
            self._known = sorted(means)
        _require_same([self._known, means])
        return [means[name] for name in self._known]

    def agree(self, last_stage: Iterable[str], group: dist.ProcessGroup) -> list[str]:
        """Return the sorted names of the model's scalars. The first call compares them between all
        ranks in `group`, and raises RecipeError if they differ. On all ranks. `last_stage`: names
        of the last pipeline stage's scalars, used on a rank that has had no scalars."""
        if self._known is None:
            self._known = sorted(last_stage)
        # Only once, because an exchange at every step would cost a round trip each.
        if not self._agreed:
            _require_same(exchange(self._known, group.size(), group))
            self._agreed = True
        return self._known


def _require_same(names: Iterable[Iterable[str]]) -> None:
    first, *others = map(set, names)
    if odd := sorted(first.union(*others) - first.intersection(*others)):
        raise RecipeError(
            f"model.factory: forward returns {odd[0]!r} in some micro-batches, and in others not; "
            "return it in all, say as 0 where there is nothing to count"
        )
