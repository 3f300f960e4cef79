"""A rank whose bits differ is named."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from elastic import diverged_ranks, leave_world


def _rank(rank, store, changed, results):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(7, 5, generator=generator),
        torch.randn(3, generator=generator).bfloat16(),
        torch.ones(()),
    ]
    found = [diverged_ranks(tensors, dist.group.WORLD)]
    if rank in changed:
        tensors[1].view(torch.int16)[2] ^= 1  # the lowest bit of one number
    found.append(diverged_ranks(tensors, dist.group.WORLD))
    results.put((rank, found))
    leave_world(0)


def _run(tmp_path, *changed):
    results = mp.get_context("spawn").SimpleQueue()
    store = tmp_path / f"store{len(changed)}"
    mp.spawn(_rank, (store, changed, results), nprocs=3)
    return [results.get()[1] for _ in range(3)]


def test_a_rank_with_one_other_bit_is_named_on_all_ranks(tmp_path):
    assert _run(tmp_path, 1) == [[[], [1]]] * 3
