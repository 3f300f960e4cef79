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

import trainer.run.train
from checkpointing import optimizer_tensors
from trainer.run.worker import main

plain_save = trainer.run.train.save


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, in memory of its own."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu().clone()


def kept_save(
    checkpointer: Any, state: Any, recipe: Any, task: Any, world: Any, **how: Any
) -> None:
    """`save`, after what it is to save is kept."""
    tensors = {
        **state.model.tensors,
        **optimizer_tensors(state.optimizer, state.model.optimized),
    }
    kept = {name: whole(tensor) for name, tensor in tensors.items()}
    if os.environ.get("RANK", "0") == "0":
        torch.save(kept, Path(recipe.run.dir) / f"kept-{state.progress.step}.pt")
    plain_save(checkpointer, state, recipe, task, world, **how)


if __name__ == "__main__":
    trainer.run.train.save = kept_save
    main(sys.argv[1:])
