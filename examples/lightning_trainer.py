"""Lightning's Trainer: torchrun --nproc-per-node 2 lightning_trainer.py"""

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, GLOBAL_BATCH = 60, 12


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")
        self.print(f"step {self.global_step + 1} loss {mean.item():.7f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def samples():
    x = torch.randn(720, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sin().sum(dim=1, keepdim=True))


def main():
    data = samples()
    loader = DataLoader(data, GLOBAL_BATCH // 2, shuffle=True)
    saves = ModelCheckpoint("checkpoints", every_n_train_steps=10, save_last=True)
    trainer = Trainer(
        max_steps=STEPS,
        devices=2,
        strategy="ddp",
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
