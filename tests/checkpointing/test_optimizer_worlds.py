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

ROWS, WIDTH, STEPS, SAVED = 12, 8, 5, 3
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


def loop_of_values(folder, first, last, save_at=None):
    """As `loop`, for LBFGS, which asks for the loss again and again, and SparseAdam, which wants
    sparse gradients: neither knows sharded parameters."""
    torch.manual_seed(0)
    model, table = nn.Linear(WIDTH, WIDTH), nn.Embedding(ROWS, WIDTH, sparse=True)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    sparse = torch.optim.SparseAdam(table.parameters(), lr=0.01)
    state = {"model": model, "table": table, "lbfgs": lbfgs, "sparse": sparse}
    rank, ranks, losses = dist.get_rank(), dist.get_world_size(), {}

    def mean(loss):
        loss.backward()
        for parameter in (*model.parameters(), *table.parameters()):
            if parameter.grad is not None:
                sparse_layout, grad = parameter.grad.is_sparse, parameter.grad.to_dense() / ranks
                dist.all_reduce(grad)
                parameter.grad = grad.to_sparse(1) if sparse_layout else grad
        everywhere = loss.detach() / ranks
        dist.all_reduce(everywhere)
        return everywhere

    with Checkpointer(folder) as checkpointer:
        if first > 1:
            assert checkpointer.load(state) == first - 1
        for step in range(first, last + 1):
            rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step))[rank::ranks]
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))[rows]

            def closure(x=x):
                lbfgs.zero_grad()
                return mean((model(x) - x.sin()).square().mean())

            losses["LBFGS", step] = lbfgs.step(closure).item()
            sparse.zero_grad()
            losses["SparseAdam", step] = mean((table(rows) - x).square().mean()).item()
            sparse.step()
            if step == save_at:
                checkpointer.save(step, state, wait=True)
    return losses


def test_those_with_a_state_of_values_go_on_in_another_world(tmp_path):
    run = tmp_path / "run"
    (whole, _) = run_ranks(2, lambda _: loop_of_values(run, 1, STEPS, save_at=SAVED), tmp_path)
    assert isinstance(whole, dict), whole
    for found in run_ranks(3, lambda _: loop_of_values(run, SAVED + 1, STEPS), tmp_path):
        assert isinstance(found, dict), found
        assert len(found) == 2 * (STEPS - SAVED)
        for key, loss in found.items():
            assert loss == pytest.approx(whole[key], rel=1e-5), key
