"""The means that a model returns, by name: ranks add theirs up by place, so all have to return the
same ones."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from checkpointing.ranks import exchange
from trainer.recipe import RecipeError


class Names:
    """What a model returns in each micro-batch, in training or in validation: what the first one
    gave on this rank, and when `agree` has returned, on all."""

    def __init__(self) -> None:
        self._known: list[str] | None = None
        self._agreed = False

    def in_order(self, means: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Those of a micro-batch, sorted by name.

        Raises:
            RecipeError: they are others than before.
        """
        if self._known is None:
            self._known = sorted(means)
        _require_same([self._known, means])
        return [means[name] for name in self._known]

    def agree(self, elsewhere: Iterable[str], group: dist.ProcessGroup) -> list[str]:
        """The names in order. On all ranks, which tell each other the first time.

        Args:
            elsewhere: what another stage of a pipeline returns, for ranks that are not told.
            group: all ranks.

        Raises:
            RecipeError: the ranks have others than each other.
        """
        if self._known is None:
            self._known = sorted(elsewhere)
        if not self._agreed:
            _require_same(exchange(self._known, group.size(), group))
            self._agreed = True
        return self._known


def _require_same(found: Iterable[Iterable[str]]) -> None:
    first, *others = map(set, found)
    if odd := sorted(first.union(*others) - first.intersection(*others)):
        raise RecipeError(
            f"model.factory: forward returns {odd[0]!r} in some micro-batches, and in others not; "
            "return it in all, say as 0 where there is nothing to count"
        )
