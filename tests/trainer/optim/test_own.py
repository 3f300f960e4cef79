"""An optimizer of torch's that looks at whole matrices, given sharded ones."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.checkpointing.worlds import run_ranks
from trainer.optim.own import build_own
from trainer.recipe import Optimizer

SHAPES = (
    *((7, 5), (8, 6), (6,), (5, 4, 3), (1, 9), (4, 1), (2, 6), (1, 1), (2,)),
    *((4, 3, 2, 2), (5, 1, 3, 3), (1, 2, 3, 3)),  # kernels of convolutions
)
"""With fewer rows than ranks, and rows that ranks cannot share evenly."""
FACTORS = Optimizer(factory="torch.optim:Adafactor", lr=0.05)


def trained(place):
    """What parameters of SHAPES are after four steps, whole; with the placements of all state."""
    draw = torch.Generator().manual_seed(0)
    parameters = {
        f"{shape}": nn.Parameter(place(torch.randn(shape, generator=draw))) for shape in SHAPES
    }
    optimizer = build_own(parameters, FACTORS)
    for _ in range(4):
        for parameter in parameters.values():
            parameter.grad = place(torch.randn(parameter.shape, generator=draw))
        optimizer.step()
    ends, kept = {}, {}
    for name, parameter in parameters.items():
        weight = parameter.detach()
        ends[name] = weight.full_tensor() if isinstance(weight, DTensor) else weight
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, DTensor):
                kept[f"{name} {key}"] = tuple(value.placements)
    return ends, kept


@pytest.mark.parametrize(
    ("sizes", "cuts"), [((3,), (Shard(0),)), ((2, 2), (Replicate(), Shard(0)))]
)
def test_factors_of_sharded_matrices_are_those_of_whole_ones(tmp_path, sizes, cuts):
    wanted, _ = trained(torch.Tensor.clone)

    def rank(_):
        mesh = init_device_mesh("cpu", sizes)
        return trained(lambda tensor: distribute_tensor(tensor, mesh, cuts))

    for found, kept in run_ranks(math.prod(sizes), rank, tmp_path):
        for name, whole in wanted.items():
            torch.testing.assert_close(found[name], whole, rtol=1e-5, atol=1e-6, msg=name)
        assert kept["(7, 5) row_var"] == cuts  # with the rows
        assert not any(cut.is_shard() for cut in kept["(7, 5) col_var"])


class Aliases(torch.optim.SGD):
    """Has its parameters, and what it keeps for them, at hand."""

    def __init__(self, groups, lr=1e-3):
        super().__init__(groups, lr=lr)
        self.weights = [one for group in self.param_groups for one in group["params"]]
        self.sums = [torch.zeros_like(one) for one in self.weights]
        for one, total in zip(self.weights, self.sums, strict=True):
            self.state[one]["sum"] = total

    @torch.no_grad()
    def step(self, closure=None):
        for one, total in zip(self.weights, self.sums, strict=True):
            if one.grad is not None:
                one.sub_(total.add_(one.grad), alpha=self.param_groups[0]["lr"])


def test_what_an_optimizer_has_at_hand_is_no_state_of_its_own():
    options = Optimizer(factory=f"{__name__}:Aliases", lr=0.1)
    build_own({"weight": nn.Parameter(torch.randn(4, 3))}, options)
