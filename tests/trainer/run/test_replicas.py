"""A rank whose bits differ is named."""

import torch
import torch.distributed as dist

from tests.checkpointing.worlds import run_ranks
from trainer.run.replicas import diverged_ranks


def work(rank):
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(7, 5, generator=generator),
        torch.randn(3, generator=generator).bfloat16(),
        torch.ones(()),
    ]
    found = [diverged_ranks(tensors, dist.group.WORLD)]
    if rank == 1:
        tensors[1].view(torch.int16)[2] ^= 1  # the lowest bit of one number
    found.append(diverged_ranks(tensors, dist.group.WORLD))
    return found


def test_a_rank_with_one_other_bit_is_named_on_all_ranks(tmp_path):
    assert run_ranks(3, work, tmp_path) == [[[], [1]]] * 3
