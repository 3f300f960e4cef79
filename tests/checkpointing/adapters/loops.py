"""One training of each library, written as its users write it. It saves every EVERY steps, and goes
on from what it finds. By torchrun: loops.py LIBRARY RUN DIE, where DIE is a step or 0."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

from checkpointing import newest_checkpoint

STEPS, EVERY, GLOBAL_BATCH, SAMPLES = 12, 4, 12, 48
DIE = 10
"""A step after the second save, which may be on its way."""


def ranks():
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank():
    return int(os.environ.get("RANK", "0"))


class Samples(torch.utils.data.Dataset):
    """Inputs and what is to be learned of them."""

    def __init__(self):
        self.x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, place):
        return {"x": self.x[place], "labels": self.x[place, :3].sin()}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))

    def forward(self, x, labels):
        return {"loss": mse_loss(self.net(x), labels)}


def optimizer_and_schedule(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def batches(done):
    """This rank's part of each batch that is left."""
    data = Samples()
    for step in range(done, STEPS):
        places = range(step * GLOBAL_BATCH % SAMPLES + rank(), SAMPLES, ranks())
        some = [data[place] for place in list(places)[: GLOBAL_BATCH // ranks()]]
        yield step + 1, {key: torch.stack([one[key] for one in some]) for key in some[0]}


def begin(run, done):
    print(f"begins at step {done}", file=sys.stderr, flush=True)
    if rank() == 0:
        Path(run).parent.joinpath("begins").write_text(str(done))


def die(run, step, at):
    """SIGKILL at step `at`, once the first save is in storage."""
    if step == at:
        while newest_checkpoint(Path(run)) is None:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def dcp(run, at):
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    from checkpointing.adapters import dcp

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = Model()
    fully_shard(model.net[0])
    fully_shard(model)
    optimizer, schedule = optimizer_and_schedule(model)

    def state(done):
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "schedule": schedule, "n": {"step": done}}

    done = 0
    if newest := newest_checkpoint(Path(run)):
        found = state(0)
        dcp.load(found, checkpoint_id=newest)
        weights, moments = found["model"], found["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        done = found["n"]["step"]
    begin(run, done)
    for step, batch in batches(done):
        model(**batch)["loss"].backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            saving = dcp.async_save(state(step), checkpoint_id=f"{run}/step-{step:08}")
        die(run, step, at)
    saving.result()
    return torch.cat([one.full_tensor().flatten() for one in model.parameters()])


def accelerate(run, at):
    from accelerate import Accelerator

    from checkpointing import Checkpointer

    # Its schedules step once for each process otherwise.
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    model = Model()
    optimizer, schedule = optimizer_and_schedule(model)
    data = torch.utils.data.DataLoader(Samples(), GLOBAL_BATCH // ranks())
    model, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, data)
    checkpointer = Checkpointer(run, keep=2)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    step = checkpointer.load(state) or 0
    checkpointer.guard(optimizer)
    begin(run, step)
    rest = accelerator.skip_first_batches(data, step % len(data))
    while step < STEPS:
        for batch in rest:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % EVERY == 0:
                checkpointer.save(step, state)
            die(run, step, at)
        rest = data
    checkpointer.close()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def fabric(run, at):
    from lightning_fabric import Fabric

    from checkpointing.adapters.fabric import CheckpointedDDP, CheckpointedSingleDevice

    keep = {"keep": 2}
    single = CheckpointedSingleDevice(device="cpu", checkpoint=keep)
    strategy = CheckpointedDDP(checkpoint=keep) if ranks() > 1 else single
    fabric = Fabric(accelerator="cpu", devices=ranks(), strategy=strategy)
    fabric.launch()
    model = Model()
    optimizer, schedule = optimizer_and_schedule(model)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
    if newest_checkpoint(Path(run)):
        fabric.load(run, state)
    begin(run, state["step"])
    for step, batch in batches(state["step"]):
        fabric.backward(model(**batch)["loss"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            fabric.save(f"{run}/step-{step:08}", {**state, "step": step})
        die(run, step, at)
    fabric.strategy.close_checkpoints()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def lightning(run, at):
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint

    from checkpointing.adapters.lightning import CheckpointedDDP, CheckpointedSingleDevice

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, place):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            optimizer, schedule = optimizer_and_schedule(self)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def on_train_start(self):
            begin(run, self.trainer.global_step)

    class Die(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            die(run, trainer.global_step, at)

    keep = {"keep": 2}
    single = CheckpointedSingleDevice(device="cpu", checkpoint=keep)
    module, samples = Module(), Samples()
    order = torch.utils.data.DistributedSampler(samples, ranks(), rank(), shuffle=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks(), max_steps=STEPS, logger=False,
        strategy=CheckpointedDDP(checkpoint=keep) if ranks() > 1 else single,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        default_root_dir=Path(run).parent,
        callbacks=[ModelCheckpoint(run, every_n_train_steps=EVERY, save_top_k=-1), Die()],
    )  # fmt: skip
    data = torch.utils.data.DataLoader(samples, GLOBAL_BATCH // ranks(), sampler=order)
    trainer.fit(module, data, ckpt_path=run if newest_checkpoint(Path(run)) else None)
    return torch.cat([one.detach().flatten() for one in module.parameters()])


def hugging_face(run, at):
    import transformers

    from checkpointing.adapters.hugging_face import CheckpointCallback

    class Die(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            begin(run, state.global_step)

        def on_step_end(self, args, state, control, **kwargs):
            die(run, state.global_step, at)

    model = Model()
    arguments = transformers.TrainingArguments(
        output_dir=Path(run).parent / "out", max_steps=STEPS, save_strategy="no", report_to=[],
        per_device_train_batch_size=GLOBAL_BATCH // ranks(), use_cpu=True, disable_tqdm=True,
        max_grad_norm=0, logging_steps=1,
    )  # fmt: skip
    callback = CheckpointCallback(run, every=EVERY, keep=2)
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=Samples(),
        callbacks=[callback, Die()],
        optimizers=optimizer_and_schedule(model),
    )
    trainer.train(resume_from_checkpoint=callback.resume())
    return torch.cat([one.detach().flatten() for one in model.parameters()])


LIBRARIES = {one.__name__: one for one in (dcp, accelerate, fabric, lightning, hugging_face)}

if __name__ == "__main__":
    name, run, at = sys.argv[1:]
    weights = LIBRARIES[name](run, int(at))
    if rank() == 0:
        torch.save(weights, Path(run).parent / "weights.pt")
