"""A plain FSDP2 loop: torchrun --nproc-per-node 2 fsdp_loop.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import elastic
from checkpointing import Checkpointer

STEPS, GLOBAL_BATCH = 60, 24


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.Linear(256, 1))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def batch(step, rank, ranks):
    """This rank's part of a step's batch."""
    x = torch.randn(GLOBAL_BATCH, 64, generator=torch.Generator().manual_seed(step))
    y = x[:, :8].sin().sum(dim=1, keepdim=True)
    return x[rank::ranks], y[rank::ranks]


def main():
    job = elastic.join()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    checkpointer = Checkpointer("checkpoints", keep=2)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    done = checkpointer.load(state) or 0
    checkpointer.guard(optimizer)
    for step in job.steps(done, STEPS):
        x, y = batch(step, rank, ranks)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.7f}", flush=True)
        if step % 10 == 0 or job.due_to_pause():
            checkpointer.save(step, state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
