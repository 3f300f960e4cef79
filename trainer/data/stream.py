"""What the loop asks of data, whatever it is."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

CONSUMED = "perdure.consumed"
"""Name under which a micro-batch carries the digest of its samples, for the step. Like the next, no
argument can have it."""
COUNTED = "perdure.counted"
"""Name under which a micro-batch carries over how many things its mean loss is taken, where that is
not its number of samples."""


@runtime_checkable
class Stream(Protocol):
    """Samples by position. `fetch` must be a pure function of the positions, so that no
    restart and no world size can change what a run is trained on."""

    sequences: int
    """Samples in one epoch."""
    fingerprint: str
    """What the stream is, the seed aside: a position means nothing in another one."""

    def fetch(self, positions: Sequence[int]) -> dict[str, Any]:
        """One micro-batch: what the model is called with, tensors by name; may have COUNTED.

        Raises:
            DataError: a sample is damaged, or cannot be had.
        """

    def describe(self, global_batch: int) -> str:
        """What a global batch holds, to go on after "… x up to 4 sequences"."""


@runtime_checkable
class Accounted(Stream, Protocol):
    """A stream that can say what a micro-batch is made of."""

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, sample) of each position, (N,) int64 each."""

    def fetch_with_digest(self, positions: Sequence[int]) -> tuple[dict[str, Any], tuple[int, int]]:
        """A micro-batch, and a digest of it: two numbers below 2**32. The first tells which samples
        stand at these positions, the second what they hold, or 0. The digests of parts sum, modulo
        2**32, to that of the whole, however it was cut.

        Raises:
            DataError: a sample is damaged.
        """
