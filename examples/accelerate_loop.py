"""A loop of accelerate's: torchrun --nproc-per-node 2 accelerate_loop.py"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, GLOBAL_BATCH = 60, 12


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))


def samples():
    x = torch.randn(720, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sin().sum(dim=1, keepdim=True))


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    data = samples()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = accelerator.prepare(DataLoader(data, GLOBAL_BATCH // 2, shuffle=True))

    for step, batch in zip(range(1, STEPS + 1), loader, strict=False):
        x, y = (one.to(accelerator.device) for one in batch)
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"step {step} loss {mean.item():.7f}", flush=True)


if __name__ == "__main__":
    main()
