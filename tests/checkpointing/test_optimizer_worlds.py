"""Every optimizer of torch.optim in a loop of one's own, and on from its save in another world."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from checkpointing import Checkpointer
from tests.checkpointing.test_optimizers import OPTIMIZERS, TENSORS_ALONE
from tests.checkpointing.worlds import run_ranks

ROWS, WIDTH, STEPS, SAVED = 12, 8, 8, 4
WHOLE = "Adafactor", "Rprop"
"""Of these torch 2.13 has operations that DTensor refuses."""
TOLERANCE = {"Muon": 1e-3}
"""torch's Newton-Schulz iteration in bfloat16 enlarges the rounding of gradients: 2.5e-4 seen."""


def build(name, sharded):
    """torch's Muon takes matrices alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
    if sharded and name not in WHOLE:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    parameters = [p for p in model.parameters() if name != "Muon" or p.dim() == 2]
    return model, OPTIMIZERS[name](parameters, lr=0.01)


def train_step(model, optimizer, step):
    """The mean loss of all ranks before the update."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))[rank::ranks]
    loss = (model(x) - x.sin()).square().mean()
    loss.backward()
    if not hasattr(model, "unshard"):  # FSDP2 averages by itself
        for parameter in model.parameters():
            parameter.grad /= ranks
            dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    return mean.item()


def loop(folder, first, last, sharded, save_at=None):
    """Losses by name and step; loads before the first step, if it is not step 1."""
    made = {name: build(name, sharded) for name in TENSORS_ALONE}
    state = {f"model of {name}": model for name, (model, _) in made.items()}
    state |= {f"{name}": optimizer for name, (_, optimizer) in made.items()}
    losses = {}
    with Checkpointer(folder) as checkpointer:
        if first > 1:
            assert checkpointer.load(state) == first - 1
        for step in range(first, last + 1):
            for name, (model, optimizer) in made.items():
                losses[name, step] = train_step(model, optimizer, step)
            if step == save_at:
                checkpointer.save(step, state, wait=True)
    return losses


def test_each_goes_on_in_another_world_and_layout(tmp_path):
    run = tmp_path / "run"
    (whole, _) = run_ranks(2, lambda _: loop(run, 1, STEPS, True, save_at=SAVED), tmp_path)
    wanted = {key: loss for key, loss in whole.items() if key[1] > SAVED}
    assert len(wanted) == len(TENSORS_ALONE) * (STEPS - SAVED)
    for ranks, sharded in (3, True), (2, False):
        found, *_ = run_ranks(ranks, lambda _, s=sharded: loop(run, SAVED + 1, STEPS, s), tmp_path)
        assert isinstance(found, dict), found
        assert found.keys() == wanted.keys()
        for (name, step), loss in found.items():
            tolerance = TOLERANCE.get(name, 1e-5)
            assert loss == pytest.approx(wanted[name, step], rel=tolerance), (name, step)
