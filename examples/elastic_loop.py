"""A loop on ranks that come and go: torchrun --rdzv-backend perdure … elastic_loop.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastic
from checkpointing import Checkpointer

STEPS, GLOBAL_BATCH = 400, 20

job = elastic.join()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 1))
model = DistributedDataParallel(model.to(job.world.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
state = {"model": model, "optimizer": optimizer}
checkpointer = Checkpointer("checkpoints", keep=2)
done = checkpointer.load(state) or 0
if done and job.world.is_main:
    print(f"after step {done} from {checkpointer.loaded_from}", flush=True)
checkpointer.guard(optimizer)

for step in job.steps(done, STEPS):
    x = torch.randn(GLOBAL_BATCH, 32, generator=torch.Generator().manual_seed(step))
    rows, weight = job.share(GLOBAL_BATCH)
    mine = x[rows].to(job.world.device)
    with job.during("step"):
        loss = weight * F.mse_loss(model(mine), mine.sin().sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / job.world.world_size
        dist.all_reduce(mean)
    if job.world.is_main:
        print(f"step {step} loss {mean.item():.7f}", flush=True)
    if step % 50 == 0 or job.due_to_pause():
        checkpointer.save(step, state)
