"""What the loop asks of data, whatever it is."""

from collections.abc import Sequence
from typing import Protocol

import torch

from trainer.data.shards import DataError


class Stream(Protocol):
    """Samples by position. `__getitems__` must be a pure function of the positions, so that no
    restart and no world size can change what a run is trained on."""

    sequences: int
    """Samples in one epoch."""
    fingerprint: str
    """What the stream is, the seed aside: a position means nothing in another one."""

    def __getitems__(self, positions: Sequence[int]) -> dict[str, torch.Tensor] | DataError:
        """One micro-batch: what the model is called with."""

    def describe(self, global_batch: int) -> str:
        """What a global batch holds, to go on after "… x up to 4 sequences"."""
