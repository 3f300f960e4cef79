"""Forked ranks, and one state spread over them in every way."""

import gc
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DTensor imports it on first use: once here rather than in each rank
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from checkpointing import TensorCheckpointer

DEADLINE = 240

# Autograd starts its threads in the first backward of a process, one for each GPU. Fake tensors
# make a CUDA build of torch count a GPU where there is none. If they came first, the thread for it
# would make torch refuse backward in the ranks that are forked here.
torch.ones((), requires_grad=True).backward()


def run_ranks(world_size: int, work: Callable[[int], Any], folder: Path) -> list[Any]:
    """work(rank) in forked processes with a gloo group; their results in order of ranks.

    A rank that raises prints its traceback and gives its exception as result; one that dies gives
    None. Nothing outlives the call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / f"store-{time.monotonic_ns()}"
    results = [folder / f"{store.name}-{rank}" for rank in range(world_size)]
    children = [
        fork_rank(rank, world_size, work, store, results[rank]) for rank in range(world_size)
    ]
    deadline = time.monotonic() + DEADLINE
    running = set(children)
    try:
        while running and time.monotonic() < deadline:
            running = {pid for pid in running if still_runs(pid)}
            time.sleep(0.002)
        assert not running, "ranks hang"
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return [pickle.loads(path.read_bytes()) if path.exists() else None for path in results]


def still_runs(pid: int) -> bool:
    """Whether it does; what ended it is printed, if it did not end by itself."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended and os.WIFSIGNALED(status):
        print(f"process {pid} was ended by signal {os.WTERMSIG(status)}", file=sys.stderr)
    return not ended


def fork_rank(
    rank: int, world_size: int, work: Callable[[int], Any], store: Path, result: Path
) -> int:
    pid = os.fork()
    if pid:
        return pid
    # Process groups of tests before are garbage: their threads, which do not exist here, would be
    # waited for.
    gc.freeze()
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=DEADLINE),
        )
        try:
            outcome = work(rank)
        except Exception as error:
            traceback.print_exc()
            outcome = error
        result.with_suffix(".part").write_bytes(pickle.dumps(outcome))
        result.with_suffix(".part").rename(result)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def save_now(checkpointer: TensorCheckpointer, step: int, **parts: Any) -> Path:
    """Save and wait for the commit; its directory."""
    checkpointer.save(step, **parts)
    checkpointer.wait()
    return checkpointer.directory / f"step-{step:08}"


def whole_state(seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(model, optimizer): shapes that no world size divides, empty shards, many dtypes."""
    draw = torch.Generator().manual_seed(seed)

    def bits(*shape: int, dtype: torch.dtype) -> Tensor:
        size = dtype.itemsize * max(1, torch.Size(shape).numel())
        data = torch.randint(0, 256, (size,), generator=draw, dtype=torch.uint8)
        return data[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).reshape(shape)

    model = {
        "embed_tokens.weight": torch.randn(13, 8, generator=draw),
        "layers.0.weight": torch.randn(5, 12, generator=draw).bfloat16(),
        "layers.0.norm.weight": torch.randn(8, generator=draw),
        "layers.0.one_row": torch.randn(1, 6, 3, generator=draw),
        "layers.0.cube": bits(7, 5, 3, dtype=torch.float16),
        "layers.0.ids": torch.randint(-(2**62), 2**62, (7,), generator=draw),
        "layers.0.mask": torch.tensor([True, False, True]),
        "layers.0.eighth": bits(6, 4, dtype=torch.float8_e4m3fn),
        "layers.0.empty": torch.zeros(0, 3),
        "layers.0.scale": torch.tensor(0.5),
    }
    optimizer: dict[str, Tensor] = {}
    for name in ("embed_tokens.weight", "layers.0.weight", "layers.0.norm.weight"):
        optimizer[f"{name}.step"] = torch.tensor(float(seed + 1))
        optimizer[f"{name}.exp_avg"] = torch.randn(model[name].shape, generator=draw)
        optimizer[f"{name}.exp_avg_sq"] = torch.rand(model[name].shape, generator=draw)
    return model, optimizer


STRATEGIES: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "replicated": ((), ()),
    "rows-1": ((1,), (Shard(0),)),
    "rows-2": ((2,), (Shard(0),)),
    "rows-3": ((3,), (Shard(0),)),
    "rows-4": ((4,), (Shard(0),)),
    "hybrid-2x2": ((2, 2), (Replicate(), Shard(0))),
    "columns-2": ((2,), (Shard(1),)),
    "replicated-columns-2x2": ((2, 2), (Replicate(), Shard(1))),
    "rows-and-columns-2x2": ((2, 2), (Shard(0), Shard(1))),
    "strided-2x2": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
}
"""Name → (mesh shape, placements)."""


def spread(whole: dict[str, Tensor], strategy: str) -> dict[str, Tensor]:
    """This rank's view of whole tensors under a strategy. Called on all ranks."""
    shape, placements = STRATEGIES[strategy]
    if not shape:
        return {name: tensor.clone() for name, tensor in whole.items()}
    mesh = init_device_mesh("cpu", shape)

    def place(tensor: Tensor) -> Tensor:
        if any(hasattr(split, "dim") and split.dim >= tensor.ndim for split in placements):
            return tensor.clone()
        return distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)

    return {name: place(tensor) for name, tensor in whole.items()}


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.numel() == 0:
        return True
    left, right = (side.contiguous().reshape(-1).view(torch.uint8) for side in (left, right))
    return torch.equal(left, right)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
