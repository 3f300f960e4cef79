"""The gradient norm over every mesh that parameters of a model can lie on, beside whole ones."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.checkpointing.worlds import run_ranks
from trainer.optim.optimizer import square_sum

RANKS = 4
SHAPES = (7, 5), (8, 6), (6,), (5, 4, 3), (1, 9), ()


def test_each_element_counts_once_on_whatever_mesh(tmp_path):
    def rank(_):
        line, square = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2))
        layouts = [
            None,
            (line, (Shard(0),)),
            (line, (Replicate(),)),
            (square, (Replicate(), Shard(0))),
            (square, (Shard(0), Replicate())),
            (square, (Shard(0), Shard(1))),
        ]
        parameters, wanted = [], 0.0
        draw = torch.Generator().manual_seed(0)
        for layout in layouts:
            for shape in SHAPES:
                whole = torch.randn(shape, generator=draw)
                wanted += whole.double().square().sum().item()
                most = (
                    max((cut.dim for cut in layout[1] if cut.is_shard()), default=-1)
                    if layout
                    else -1
                )
                laid = layout and most < len(shape)
                parameter = nn.Parameter(distribute_tensor(whole, *layout) if laid else whole)
                parameter.grad = parameter.detach().clone()
                parameters.append(parameter)
        found = square_sum(parameters, RANKS)
        dist.all_reduce(found)
        partial = nn.Parameter(distribute_tensor(torch.zeros(4), line, [Replicate()]))
        partial.grad = DTensor.from_local(torch.ones(4), line, [Partial()])
        with pytest.raises(ValueError, match=r"\(4,\) is Partial: each rank has a term of it"):
            square_sum([partial], RANKS)
        return found.item(), wanted

    for found, wanted in run_ranks(RANKS, rank, tmp_path):
        assert found == pytest.approx(wanted, rel=1e-6)
