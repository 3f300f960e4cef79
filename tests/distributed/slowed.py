"""A schedule under which a rank is slow: its feed-forward layers sleep for each sequence.

It is code of a user's, which ranks run anyway. Ranks may also die, as in deadly.py.
"""

import os
import time
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.distributed import deadly
from trainer.models.decoder import MLP


def schedule(
    steps: int,
    lr: float,
    seconds: Sequence[float],
    run: str = "",
    kills: deadly.Kills | None = None,
) -> Callable[[int], float]:
    """The rate of deadly.py. `seconds`: by rank, how long each layer sleeps for a sequence."""
    rank = int(os.environ.get("RANK", "0"))
    mine = seconds[rank] if rank < len(seconds) else 0.0

    def sleep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if module.training and isinstance(module, MLP):
            time.sleep(mine * len(inputs[0]))

    if mine:
        register_module_forward_pre_hook(sleep)
    return deadly.schedule(steps, lr, run, kills or {})
