"""Lightning's Trainer with strategies that save through this engine; test_worlds.py kills it."""

import pytest
import torch
from torch import nn

from checkpointing import CheckpointError
from tests.late import Late

pl, ours = Late("pytorch_lightning"), Late("checkpointing.adapters.lightning")


def line():
    """A model."""

    class Line(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            self.log("better", float(self.global_step))
            return self.layer(batch).square().mean()

        def test_step(self, batch, batch_idx):
            self.log("weight", self.layer.weight.sum())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    return Line()


def trainer(folder, steps, *callbacks):
    return pl.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, default_root_dir=folder,
        strategy=ours.CheckpointedSingleDevice(device="cpu", checkpoint={"keep": 2}),
        enable_progress_bar=False, enable_model_summary=False, callbacks=[*callbacks],
        enable_checkpointing=bool(callbacks),
    )  # fmt: skip


def test_a_trainer_saves_by_its_own_callback_and_tests_what_it_saved(tmp_path):
    data = torch.utils.data.DataLoader(torch.randn(4, 2), 2)
    kept, run = pl.callbacks.ModelCheckpoint, tmp_path / "run"
    best = kept(run, monitor="better", mode="max", every_n_train_steps=2)
    also = kept(run, every_n_epochs=1)  # saves the same steps once more
    trainer(tmp_path, 6, best, also).fit(line(), data)
    steps = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert steps == ["step-00000004", "step-00000006"], "keep decides, not save_top_k"

    at = f"{tmp_path}/run/epoch=2-step=6.ckpt"
    fresh, last = line(), trainer(tmp_path, 6)
    last.fit(fresh, data, ckpt_path=at)  # it was finished: what is loaded is what is left
    assert last.global_step == 6
    weight = fresh.layer.weight.sum().item()
    assert weight != pytest.approx(line().layer.weight.sum().item())
    for path in at, tmp_path / "run", f"{tmp_path}/run/step-00000006":
        (found,) = trainer(tmp_path, 6).test(line(), data, ckpt_path=path, verbose=False)
        assert found["weight"] == pytest.approx(weight)


def test_what_cannot_be_saved_or_loaded_is_refused_in_a_line(tmp_path):
    data = torch.utils.data.DataLoader(torch.randn(4, 2), 2)
    one = trainer(tmp_path, 1)
    with pytest.raises(CheckpointError, match="no checkpoint; save one first"):
        one.fit(line(), data, ckpt_path=tmp_path / "run")
    one = trainer(tmp_path, 1)
    one.fit(line(), data)
    with pytest.raises(ValueError, match=r"last\.ckpt: let its name have the step"):
        one.save_checkpoint(tmp_path / "run" / "last.ckpt")
    with pytest.raises(ValueError, match="cannot save weights alone"):
        one.save_checkpoint(tmp_path / "run" / "step-00000001", weights_only=True)
