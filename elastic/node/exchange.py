"""Where a rank waits for what ranks have exchanged."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def received(values: Tensor) -> Any:
    """What a collective gave, as numbers on the host, as `Tensor.tolist` nests them.

    On a GPU the collective was only launched: here a rank waits for the others, and for what all
    have launched before. watchdog.py knows a rank that waits by this file on its stack.
    """
    return values.tolist()


class Sum:
    """A number summed over the ranks of a group while they go on. On all ranks, in one order with
    the other collectives of the group, which carries CPU tensors: no GPU waits."""

    def __init__(self, value: float, group: dist.ProcessGroup | None = None) -> None:
        self._sum = torch.tensor(float(value), dtype=torch.float64)
        self._work: dist.Work | None = dist.all_reduce(self._sum, group=group, async_op=True)

    def wait(self) -> float:
        """The sum. On each rank by itself."""
        if self._work:
            self._work.wait()
            self._work = None
        return self._sum.item()
