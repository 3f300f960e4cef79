"""A rank that keeps what it saves: `python -m tests.fake_cuda.recorded RECIPE.yaml [key=value …]`.

At each checkpoint every tensor is put together from its shards, on the stream that trains, and rank
0 writes them to RUN/kept-STEP.pt. What the checkpoint has must be these bits.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer.run import saves
from trainer.run.state import Run
from trainer.run.worker import main

plain_save = saves.save


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, in memory of its own."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().clone()


def kept_save(run: Run, **how: Any) -> None:
    """`save`, after what it is to save is kept."""
    tensors = {**run.model.saved, **run.model.state_of(run.optimizer)}
    kept = {name: whole(tensor) for name, tensor in tensors.items()}
    if os.environ.get("RANK", "0") == "0":
        torch.save(kept, Path(run.recipe.run.dir) / f"kept-{run.progress.step}.pt")
    plain_save(run, **how)


if __name__ == "__main__":
    saves.save = kept_save
    main(sys.argv[1:])
