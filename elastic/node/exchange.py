"""Waits of a rank for the results of collectives. A file of its own: COLLECTIVES in vitals.py
recognises a rank that waits by this file on its stack."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def received(values: Tensor) -> Any:
    """The result of a collective as numbers on the host, nested as by `Tensor.tolist`."""
    # On a GPU the collective is only launched so far: here the rank waits for its peers.
    return values.tolist()


class Sum:
    """Sum of a number over the ranks of a group, computed while the ranks continue. Created on all
    ranks, in the same order as other collectives of the group. It carries CPU tensors: no GPU
    waits."""

    def __init__(self, value: float, group: dist.ProcessGroup | None = None) -> None:
        # exact for sums of PAUSE_TO_LEAVE
        self._sum = torch.tensor(float(value), dtype=torch.float64)
        self._work: dist.Work | None = dist.all_reduce(self._sum, group=group, async_op=True)

    def wait(self) -> float:
        """The sum. Each rank calls it by itself."""
        if self._work:
            self._work.wait()
            self._work = None
        return self._sum.item()
