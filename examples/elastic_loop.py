"""A loop on ranks that come and go: torchrun --rdzv-backend perdure … elastic_loop.py"""

import torch
from torch import distributed, nn

import elastic
from checkpointing import Checkpointer

job = elastic.join()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 1)).to(job.world.device)
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
state = {"model": model, "optimizer": optimizer}
checkpointer = Checkpointer("checkpoints", keep=2)
done = checkpointer.load(state) or 0
if done and job.world.is_main:
    print(f"after step {done} from {checkpointer.loaded_from}", flush=True)
checkpointer.guard(optimizer)

for step in job.steps(done, 400):
    batch = torch.randn(20, 32, generator=torch.Generator().manual_seed(step))
    rows, weight = job.share(len(batch))
    x = batch[rows].to(job.world.device)
    with job.during("step"):
        loss = weight * nn.functional.mse_loss(model(x), x.sin().sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / job.world.world_size
        distributed.all_reduce(mean)
    if job.world.is_main:
        print(f"step {step} loss {mean.item():.7f}", flush=True)
    if step % 50 == 0 or job.due_to_pause():
        checkpointer.save(step, state)
