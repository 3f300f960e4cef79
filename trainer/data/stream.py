"""The interfaces of training data: `Samples`, the return type of `data.factory`; and streams, from
which the training loop reads. Imports no other module of Perdure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

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


CONSUMED = "perdure.consumed"
"""Key of the digest of a micro-batch's samples. No argument of a model can have such a name, which
is no Python identifier."""
COUNTED = "perdure.counted"
"""Key of the number over which a micro-batch's mean loss is taken, if that is not its number of
samples."""


@runtime_checkable
class Stream(Protocol):
    """Samples by position. `fetch` must be a pure function of the positions, so that restarts and
    world sizes do not change what a run trains on."""

    sequences: int
    """Number of samples in one epoch."""
    fingerprint: str
    """Identity of the stream, without the seed: a position is valid only in the same stream."""

    def fetch(self, positions: Sequence[int]) -> dict[str, Any]:
        """Read one micro-batch: the model's inputs, tensors by name; may have COUNTED. Raises
        DataError if a sample is damaged or missing."""

    def describe(self, global_batch: int) -> str:
        """Return text about a global batch, which the console shows after "… x up to 4
        sequences"."""


@runtime_checkable
class AccountedStream(Stream, Protocol):
    """A stream with digests of its micro-batches."""

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, sample) of each position, (N,) int64 each."""

    def fetch_with_digest(self, positions: Sequence[int]) -> tuple[dict[str, Any], tuple[int, int]]:
        """Read a micro-batch and its digest: two numbers below 2**32. The first number covers which
        samples are at these positions; the second covers their contents; it is 0 if samples are
        random. Digests of parts sum, modulo 2**32, to the digest of the whole, in any partition.
        Raises DataError if a sample is damaged."""
