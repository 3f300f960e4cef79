"""The named peer: a training loop by hand on FSDP2 that saves with torch.distributed.checkpoint and
goes on from the newest checkpoint. Start it with torchrun and `Task` as JSON.

The same decoder, AdamW and sequences per step as the recipe it is compared with; random tokens, no
metrics, no validation. Rank 0 prints a line for every step, and where the time to the first one
went.
"""

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from elastic.process import die_with_parent

STARTED = time.time()


@dataclass(frozen=True)
class Task:
    """What to train."""

    architecture: dict[str, Any]
    seq_len: int
    global_batch: int
    """Sequences per step, over all ranks."""
    steps: int
    save_every: int
    """Steps between checkpoints."""
    directory: str
    """Where the checkpoints go."""
    timeout: float = 0.0
    """Seconds that a collective may take; 0: torch's default."""


def main(task: Task) -> None:
    die_with_parent()  # not for the loop's sake: nothing may outlive the benchmark
    seconds = {"python": STARTED - process_start()}
    last = STARTED

    def mark(part: str) -> None:
        nonlocal last
        now = time.time()
        seconds[part], last = now - last, now

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from trainer.models import Decoder
    from trainer.recipe.architecture import Architecture

    mark("import")
    dist.init_process_group(
        "gloo", timeout=timedelta(seconds=task.timeout) if task.timeout else None
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mark("process group")

    torch.manual_seed(0)
    model = Decoder(Architecture(**task.architecture))
    mesh = init_device_mesh("cpu", (world_size,))
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    mark("model")

    done = newest(task.directory)
    if done:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path(task.directory, done))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    mark("checkpoint")
    if rank == 0:
        print(f"step {done} is loaded; FSDP2 over {world_size} rank(s)", flush=True)

    resumed = done
    while done < task.steps:
        generator = torch.Generator().manual_seed(done)
        size = (task.global_batch, task.seq_len + 1)
        tokens = torch.randint(task.architecture["vocab_size"], size, generator=generator)
        share = tokens.tensor_split(world_size)[rank]
        # FSDP averages gradients over ranks, whose shares may differ in size.
        weight = len(share) * world_size / task.global_batch
        (model(share[:, :-1], share[:, 1:]) * weight).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if rank == 0 and done == resumed + 1:
            mark("first step")
            parts = ", ".join(f"{part} {value:.2f}" for part, value in seconds.items())
            print(f"first step after {sum(seconds.values()):.2f} s: {parts}", flush=True)
        if rank == 0:
            print(f"step {done}/{task.steps}", flush=True)
        if done % task.save_every == 0:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments}
            dcp.save(state, checkpoint_id=path(task.directory, done))
            if rank == 0:
                shutil.rmtree(path(task.directory, done - 3 * task.save_every), ignore_errors=True)
    dist.destroy_process_group()


def path(directory: str, step: int) -> str:
    """Where the checkpoint of a step lies."""
    return f"{directory}/step-{step:08}"


def newest(directory: str) -> int:
    """The newest whole checkpoint, 0 if there is none; `.metadata` is what dcp.save writes last."""
    whole = Path(directory).glob("step-*/.metadata")
    return max((int(file.parent.name.removeprefix("step-")) for file in whole), default=0)


def process_start() -> float:
    """When this process was started, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
