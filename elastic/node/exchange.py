"""Functions in which a rank waits for the results of collectives. They have a file of their own, as
COLLECTIVES in vitals.py recognises a waiting rank by this file on its stack."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def received(values: Tensor) -> Any:
    """Returns the result of a collective as numbers on the host, nested as by `Tensor.tolist`."""
    # On a GPU the collective has only been launched: in tolist() the rank waits for its peers.
    return values.tolist()


def gathered(mine: Tensor, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of a tensor of each rank of a group, as numbers or nested lists. On all
    ranks of the group."""
    parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [received(part) for part in parts]


class NodeExchangeSum:
    """Sum of a number over the ranks of a group, computed while the ranks continue. Created on all
    ranks, in the same order as other collectives of the group. The tensors are on the CPU, so that
    no GPU waits."""

    def __init__(self, value: float, group: dist.ProcessGroup | None = None) -> None:
        # float64, in which sums of PAUSE (1) and PAUSE_TO_LEAVE (2**20) of all ranks are exact
        self._sum = torch.tensor(float(value), dtype=torch.float64)
        self._work: dist.Work | None = dist.all_reduce(self._sum, group=group, async_op=True)

    def wait(self) -> float:
        """Wait for the sum. Each rank calls it by itself."""
        if self._work:
            self._work.wait()
            self._work = None
        return self._sum.item()
