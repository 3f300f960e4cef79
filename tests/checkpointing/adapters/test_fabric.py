"""Code that was written for Lightning Fabric: its strategies, which save through this engine."""

import os

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from checkpointing import Checkpointer, CheckpointError, WrongModel
from checkpointing.state import unwrapped
from tests.checkpointing.worlds import run_ranks
from tests.late import Late

lightning_fabric, ours = Late("lightning_fabric"), Late("checkpointing.adapters.fabric")
STEPS, GLOBAL_BATCH = 9, 12


def shard(model, mesh):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def strategy(name, ranks):
    if name == "ddp":
        return ours.CheckpointedDDP(checkpoint={"keep": 2})
    return ours.CheckpointedModelParallel(
        shard, data_parallel_size=ranks, tensor_parallel_size=1, checkpoint={"keep": 2}
    )


def train(fabric, directory, steps, path=None):
    """A loop as Fabric's users write it; (losses by step, the state at its end)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))
    if isinstance(fabric.strategy, ours.CheckpointedModelParallel):
        model = fabric.setup_module(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        optimizer = fabric.setup_optimizers(optimizer)
    else:
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, STEPS)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0, "seen": ()}
    if path:
        assert fabric.load(path, state) == {}
    losses = {}
    for step in range(state["step"] + 1, steps + 1):
        x = torch.randn(GLOBAL_BATCH, 5, generator=torch.Generator().manual_seed(step))
        x = x[fabric.global_rank :: fabric.world_size]
        loss = (model(x) - x[:, :3].sin()).square().mean()
        fabric.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses[step] = fabric.all_reduce(loss.detach()).item()
        state["step"], state["seen"] = step, (*state["seen"], step)
        if step % 3 == 0:
            fabric.save(f"{directory}/step-{step:08}", state)
    fabric.strategy.close_checkpoints()
    return losses, state["seen"]


def launched(rank, ranks, name):
    """A Fabric as torchrun would have started it."""
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "none", "RANK": f"{rank}", "LOCAL_RANK": f"{rank}",
        "WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}", "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip
    given = {"accelerator": "cpu", "strategy": strategy(name, ranks), "devices": ranks}
    fabric = lightning_fabric.Fabric(**given)
    fabric.launch()
    assert fabric.world_size == ranks
    return fabric


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    single = ours.CheckpointedSingleDevice(device="cpu")
    return train(lightning_fabric.Fabric(strategy=single), tmp_path_factory.mktemp("whole"), STEPS)


@pytest.mark.parametrize(("first", "second"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_a_fabric_program_goes_on_in_another_world_and_strategy(tmp_path, whole, first, second):
    losses, seen = whole
    before = run_ranks(
        2, lambda rank: train(launched(rank, 2, first), tmp_path / "run", 6)[0], tmp_path / "ranks"
    )
    assert before[0] == pytest.approx({step: losses[step] for step in range(1, 7)}, abs=1e-5)
    at = tmp_path / "run" / "step-00000003"
    after = run_ranks(
        3,
        lambda rank: train(launched(rank, 3, second), tmp_path / "again", STEPS, at),
        tmp_path / "ranks",
    )
    assert after[0][0] == pytest.approx({step: losses[step] for step in range(4, 10)}, abs=1e-5)
    assert after[0][1] == seen
    single = ours.CheckpointedSingleDevice(device="cpu", checkpoint={"keep": 2})
    alone = lightning_fabric.Fabric(strategy=single)
    newest = train(alone, tmp_path / "run", STEPS, tmp_path / "run")
    assert newest[0] == pytest.approx({step: losses[step] for step in range(7, 10)}, abs=1e-5)
    kept = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert kept == ["step-00000006", "step-00000009"]


def test_what_does_not_fit_is_refused(tmp_path):
    fabric = lightning_fabric.Fabric(strategy=ours.CheckpointedSingleDevice(device="cpu"))
    model = fabric.setup(nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="no checkpoint; save one first"):
        fabric.load(tmp_path / "run", {"model": model})
    with pytest.raises(ValueError, match="name it DIRECTORY/step-00000100"):
        fabric.save(tmp_path / "run" / "last.ckpt", {"model": model})
    fabric.save(tmp_path / "run" / "step-00000001", {"model": model, "epoch": 1})
    with pytest.raises(WrongModel, match="has epoch"):
        fabric.load(tmp_path / "run", {"model": model, "era": 1})
    with pytest.raises(ValueError, match="no part of a checkpoint is loaded alone"):
        fabric.load(tmp_path / "run")
    torch.save(model.state_dict(), tmp_path / "raw.pt")
    fabric.load_raw(tmp_path / "raw.pt", model)
    fabric.strategy.close_checkpoints()


class Slow(torch.optim.Optimizer):
    """An optimizer in another with a state of its own, as Lookahead is."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.optimizer, self.param_groups = inner, inner.param_groups


def test_an_optimizer_that_stands_for_another_is_saved_as_that_one(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped = lightning_fabric.Fabric(accelerator="cpu", devices=1).setup_optimizers(optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert unwrapped(wrapped) is optimizer
    for other in Slow(optimizer), schedule, model:
        assert unwrapped(other) is other
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.guard(wrapped)
        model(torch.ones(1, 2)).sum().backward()
        wrapped.step()
        checkpointer.save(1, {"model": model, "optimizer": wrapped}, wait=True)
        moments = optimizer.state[model.weight]["exp_avg"].clone()
        wrapped.step()
        assert checkpointer.load({"model": model, "optimizer": optimizer}) == 1
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], moments)


def test_an_error_of_one_rank_is_one_of_all(tmp_path):
    def work(rank):
        fabric = launched(rank, 2, "ddp")
        state = {"model": fabric.setup(nn.Linear(2, 2)), **({"values": 1} if rank else {})}
        for call in fabric.save, fabric.load:
            with pytest.raises(ValueError, match="rename this key"):
                call(tmp_path / "run" / "step-00000001", state)
        return "told"

    assert run_ranks(2, work, tmp_path / "ranks") == ["told"] * 2
