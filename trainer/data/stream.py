"""The interface of data to the training loop."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

CONSUMED = "perdure.consumed"
"""Key of the digest of a micro-batch's samples. No argument of a model can have this name or the
next."""
COUNTED = "perdure.counted"
"""Key of the count that a micro-batch's mean loss is taken over, if not its number of samples."""


class Stream(Protocol):
    """Samples by position. `fetch` must be a pure function of the positions, so that restarts and
    world sizes do not change what a run is trained on."""

    sequences: int
    """Samples in one epoch."""
    fingerprint: str
    """Identity of the stream without the seed: a position is valid only in the same stream."""

    def fetch(self, positions: Sequence[int]) -> dict[str, Any]:
        """One micro-batch: the model's inputs, tensors by name; may have COUNTED.

        Raises:
            DataError: a sample is damaged or missing.
        """

    def describe(self, global_batch: int) -> str:
        """Contents of a global batch, as text after "… x up to 4 sequences"."""


@runtime_checkable
class Accounted(Stream, Protocol):
    """A stream with digests of its micro-batches."""

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, sample) of each position, (N,) int64 each."""

    def fetch_with_digest(self, positions: Sequence[int]) -> tuple[dict[str, Any], tuple[int, int]]:
        """A micro-batch and its digest: two numbers below 2**32. The first covers which samples are
        at these positions, the second their contents, or is 0. Digests of parts sum, modulo 2**32,
        to the digest of the whole, however it is cut.

        Raises:
            DataError: a sample is damaged.
        """
