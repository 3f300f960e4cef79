"""A loop of accelerate's: torchrun --nproc-per-node 2 accelerate_loop.py"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic
from checkpointing import Checkpointer

STEPS, GLOBAL_BATCH = 60, 12


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))


def samples():
    x = torch.randn(720, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sin().sum(dim=1, keepdim=True))


def main(job):
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    data = samples()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = DataLoader(data, batch_sampler=elastic.sampler(data, GLOBAL_BATCH))
    state = {"model": model, "optimizer": optimizer, "sampler": loader.batch_sampler}
    (checkpointer := Checkpointer("checkpoints", keep=2)).load(state)

    for step, batch in zip(job.steps(loader.batch_sampler, STEPS), loader, strict=False):
        x, y = (one.to(accelerator.device) for one in batch)
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"step {step} loss {mean.item():.7f}", flush=True)
        if step % 10 == 0 or job.due_to_pause():
            checkpointer.save(step, state)


if __name__ == "__main__":
    elastic.run(main)
