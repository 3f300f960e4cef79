"""Makes a gradient of a training process NaN when `perdure chaos` requests it
(lab/chaos/faults.py).

Only the process that forks training processes imports this module, because PERDURE_PRELOAD names
it.
"""

import os
from contextlib import suppress
from pathlib import Path

import torch

from checkpointing.format.tensors import local_tensor
from lab.chaos.faults import POISON
from trainer.parallel.parallel_model import ParallelModel

_collect_gradients = ParallelModel.collect_gradients


def _poisoned(model: ParallelModel) -> None:
    with suppress(FileNotFoundError):
        (Path(os.environ[POISON]) / str(os.getpid())).unlink()
        gradient = next(p.grad for p in model.parameters.values() if p.grad is not None)
        local_tensor(gradient).view(-1)[:1] = torch.nan
    _collect_gradients(model)


ParallelModel.collect_gradients = _poisoned  # type: ignore[method-assign,assignment]  # the fault
