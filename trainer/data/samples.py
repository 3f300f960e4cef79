"""What `data.factory` returns. Imports nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IGNORED_LABEL = -100
"""Labels of this number are no part of the loss."""


@dataclass(frozen=True)
class Samples:
    """Data of the user's own: what `data.factory` returns, unless it is the training set alone.

    A data set has `__len__` and `__getitem__`, by whole numbers from 0 on: a torch `Dataset`, a
    Hugging Face `datasets.Dataset`, a list. A table of pandas is none: its `[0]` is a column.
    """

    train: Any
    """Data set that is trained on, in an order that the run decides; or a `Stream`, which has its
    own."""

    collate: Callable[[Sequence[Any]], Mapping[str, Any] | Sequence[Any]] | None = None
    """Items → one batch, one sample a row: tensors by the names of `forward`'s arguments, or a
    tuple of tensors in their order. Unless set, items are mappings or tuples of arrays, tensors or
    numbers of one shape, and are stacked."""

    validation: Any = None
    """Data set, or `Stream`, of validation passes, taken whole and in its own order."""

    fingerprint: str | None = None
    """Says which data `train` is, if it cannot do so itself, as one of Hugging Face does. A
    checkpoint of a run on data with another fingerprint is refused."""
