"""`Samples`, the return type of `data.factory`. Imports no other module of Perdure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IGNORED_LABEL = -100
"""Label of tokens that do not count in the loss."""


@dataclass(frozen=True)
class Samples:
    """Training and validation data of a user; a `data.factory` returns it, or just a training set.
    A data set has `__len__` and `__getitem__` by integers from 0 on: a torch `Dataset`, a Hugging
    Face `datasets.Dataset`, or a list; but not a pandas table, whose `[0]` is a column."""

    train: Any
    """Training set, whose order the run determines; or a `Stream`, which has its own order."""

    collate: Callable[[Sequence[Any]], Mapping[str, Any] | Sequence[Any]] | None = None
    """Collates items into a batch with one sample per row: tensors by the names of `forward`'s
    arguments, or a tuple of tensors in their order. None: items are mappings or tuples of arrays,
    tensors or numbers of one shape, and are stacked."""

    validation: Any = None
    """Data set or `Stream` for validation passes, used whole and in its own order."""

    fingerprint: str | None = None
    """Identity of `train`, for data sets without a fingerprint of their own (those of Hugging Face
    have one). A run does not resume on data with another fingerprint."""
