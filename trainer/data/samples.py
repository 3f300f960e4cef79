"""`Samples`, the return type of `data.factory`. Imports nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IGNORED_LABEL = -100
"""Label that does not count in the loss."""


@dataclass(frozen=True)
class Samples:
    """A user's own data: the result of `data.factory`, unless it returns only the training set.

    A data set has `__len__` and `__getitem__` by integers from 0 on: a torch `Dataset`, a Hugging
    Face `datasets.Dataset`, a list. A pandas table is none: its `[0]` is a column.
    """

    train: Any
    """Training set. The run determines its order."""

    collate: Callable[[Sequence[Any]], Mapping[str, Any] | Sequence[Any]] | None = None
    """Items → one batch, one sample per row: tensors by the names of `forward`'s arguments, or a
    tuple of tensors in their order. None: items are mappings or tuples of arrays, tensors or
    numbers of one shape, and are stacked."""

    validation: Any = None
    """Data set of validation passes, used whole and in its own order."""

    fingerprint: str | None = None
    """Identity of `train`, if the data set has none of its own, as those of Hugging Face have. A
    run does not resume on data with another fingerprint."""
