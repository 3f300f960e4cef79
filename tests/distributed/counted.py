"""A rank that counts, in every optimizer step, the collectives and what makes the host wait.

    torchrun … -m tests.distributed.counted COUNTS.json RECIPE.yaml [key=value …]

Rank 0 writes one mapping per step, name → calls. On CUDA it also lets torch warn of every
synchronisation, and counts the warnings as "synchronised". The fake CUDA runtime counts "waits":
whenever any thread waits for the device, whatever torch calls it. "seeds" are those of generators.
"""

import ctypes
import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import trainer.run.step
import trainer.run.train
from trainer.run.worker import main

WAITING = ("tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")
"""Methods that read a tensor's value without an operator that `Operators` sees."""
READING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique_dim")

counts: list[Counter[str]] = []


class Operators(TorchDispatchMode):
    """Counts collectives, and operators whose result the host waits for."""

    supports_higher_order_operators = True  # as FlexAttention is

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = operator.name().removeprefix("aten::").partition(".")[0]
        if name.startswith("c10d::") or name in READING:
            counts[-1][name] += 1
        return operator(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """Counts methods that give Python a tensor's value."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in WAITING and isinstance(args[0], torch.Tensor):
            counts[-1][name] += 1
        return function(*args, **(kwargs or {}))


plain_step = trainer.run.train.train_step
plain_seed = trainer.run.step.seed_generators


def counted_seed(*args: Any) -> None:
    """`seed_generators`, counted."""
    counts[-1]["seeds"] += 1
    plain_seed(*args)


def counted_step(*args: Any) -> Any:
    """`train_step`, counted."""
    counts.append(Counter())
    cuda = torch.cuda.is_initialized()
    host_waits = getattr(ctypes.CDLL(None), "fake_cuda_host_waits", None)
    waited = host_waits() if host_waits else 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if cuda:
            torch.cuda.set_sync_debug_mode("warn")
        with Operators(), Methods():
            result = plain_step(*args)
        if cuda:
            torch.cuda.set_sync_debug_mode("default")
    synchronised = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
    if cuda:
        counts[-1]["synchronised"] = len(synchronised)
    if host_waits and cuda:
        counts[-1]["waits"] = host_waits() - waited
    if os.environ.get("RANK", "0") == "0":  # one rank alone needs no launcher
        Path(path).write_text(json.dumps(counts))
    return result


if __name__ == "__main__":
    path = sys.argv[1]
    trainer.run.train.train_step = counted_step
    trainer.run.step.seed_generators = counted_seed
    main(sys.argv[2:])
