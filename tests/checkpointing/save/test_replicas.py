"""Plain tensors that differ by rank end in an error, not in a mixture; what may differ does."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from checkpointing import Checkpointer
from checkpointing.save.planning import LEAST, STRIDE, sample_digest
from tests.checkpointing.worlds import run_ranks


class Draws:
    """Random numbers, of which each rank has its own."""

    def __init__(self, rank):
        self.generator = torch.Generator().manual_seed(rank)

    def state_dict(self):
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state_dict):
        self.generator.set_state(state_dict["state"])


def build(layers=2):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(600, 16) for _ in range(layers)), nn.BatchNorm1d(16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer}


def one_differs(rank):
    """(state, names that must be told) by case; rank 2 is the odd one."""
    odd = rank == 2
    seeded = build()
    torch.manual_seed(rank)
    nn.init.normal_(seeded["model"][1].weight)
    yield seeded, "1.weight: rank 1 holds other numbers than rank 0"

    row = build()
    with torch.no_grad():
        row["model"][0].weight[7] += odd
    yield row, "0.weight: rank 2 holds other numbers than rank 0"

    moments = build()
    for parameter in moments["model"].parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + odd)
    before = [parameter.detach().clone() for parameter in moments["model"].parameters()]
    moments["optimizer"].step()
    with torch.no_grad():
        for parameter, values in zip(moments["model"].parameters(), before, strict=True):
            parameter.copy_(values)
    yield moments, "0.weight.exp_avg, 0.weight.exp_avg_sq, 0.bias.exp_avg and 9 more: rank 2 holds"

    yield {**build(), "random": Draws(rank).generator.get_state()}, "random: rank 1 holds"

    stages = {"model": nn.ModuleDict({"ab"[min(rank, 1)]: nn.Linear(2, 2)})}
    nn.init.constant_(stages["model"]["ab"[min(rank, 1)]].weight, rank)
    nn.init.zeros_(stages["model"]["ab"[min(rank, 1)]].bias)
    yield stages, "b.weight: rank 2 holds other numbers than rank 1"


def test_tensors_that_differ_by_rank_are_named_on_all_ranks_and_nothing_is_saved(tmp_path):
    def work(rank):
        told = []
        with Checkpointer(tmp_path / "run") as checkpointer:
            for state, expected in one_differs(rank):
                try:
                    checkpointer.save(1, state)
                except ValueError as error:
                    told.append((expected, str(error)))
            checkpointer.save(2, build(), wait=True)
        return told

    for told in run_ranks(3, work, tmp_path / "ranks"):
        assert len(told) == 5
        assert all(error.startswith(expected) for expected, error in told), told
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000002"]


def test_what_may_differ_by_rank_is_saved_and_loaded(tmp_path):
    def work(rank):
        mesh = init_device_mesh("cpu", (3,))
        torch.manual_seed(0)
        sharded = nn.Linear(7, 5)
        fully_shard(sharded)
        state = {
            **build(),
            "sharded": sharded,
            "shards": torch.optim.AdamW(sharded.parameters()),
            "split": distribute_tensor(torch.arange(9.0), mesh, [Shard(0)]),
            "whole": distribute_tensor(torch.arange(9.0), mesh, [Replicate()]),
            "random": Draws(rank),
            "stage": nn.ModuleDict({f"{rank}": nn.Linear(2, 2)}),
        }
        sharded(torch.full((2, 7), 1.0 + rank)).sum().backward()
        state["shards"].step()
        state["model"][2].running_mean.fill_(rank)
        drawn = state["random"].generator.get_state()
        with Checkpointer(tmp_path / "run") as checkpointer:
            checkpointer.save(1, state, wait=True)
            torch.rand(3, generator=state["random"].generator)
            assert checkpointer.load(state) == 1
        return torch.equal(state["random"].generator.get_state(), drawn)

    assert run_ranks(3, work, tmp_path / "ranks") == [True] * 3


def test_a_sample_has_every_dtype_and_shape_and_each_number_in_turn():
    large = torch.zeros(LEAST * STRIDE + 7)
    mixed = {
        "eighth": torch.zeros(5, 3).to(torch.float8_e4m3fn),
        "half": torch.zeros(5, 3, dtype=torch.bfloat16).T,
        "mask": torch.tensor([False, True]),
        "complex": torch.zeros(3, dtype=torch.complex64).conj(),
        "turned": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "one": torch.tensor(2**40),
        "empty": torch.zeros(0, 3),
    }
    first = sample_digest({"large": large, **mixed}, 0)
    assert sample_digest({"large": large.clone(), **mixed}, 0) == first
    for name, value in mixed.items():
        if value.numel():
            other = value.clone()
            other[(0,) * other.ndim] = 1
            assert sample_digest({"large": large, **mixed, name: other}, 0) != first, name
    other = large.clone()
    other[70_001] = 1
    seen = [
        step
        for step in range(STRIDE)
        if sample_digest({"a": other}, step) != sample_digest({"a": large}, step)
    ]
    assert seen == [70_001 % STRIDE]
