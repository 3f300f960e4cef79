"""Ranks that pass keys round, and compare with attention over whole sequences."""

from itertools import product

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainer.data.packing import cu_seqlens_of
from trainer.parallel.context import ContextParallelRing

BOUNDS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Relative to the largest element. Seen: 2e-15, 7e-7, 1e-2."""


def compare(group: dist.ProcessGroup, dtype: torch.dtype, length: int, documents: bool) -> None:
    draw = torch.Generator().manual_seed(length)
    q, gradient, k, v = (
        torch.randn(2, length, heads, 16, generator=draw, dtype=torch.float64)
        for heads in (4, 4, 2, 2)
    )
    ids = (torch.rand(2, length, generator=draw) < documents * 4 / length).cumsum(1)
    ring = ContextParallelRing(
        group, cu_seqlens_of(ids) if documents else None, (2, length), q.device
    )
    mine = torch.cat([torch.arange(part.start, part.stop) for part in ring.own])
    given = [x[:, mine].to(dtype).requires_grad_() for x in (q, k, v)]
    found = ring(*given)
    found.backward(gradient[:, mine].to(dtype))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    seen = (ids[:, None, :, None] == ids[:, None, None, :]).tril()
    by_head = (x.transpose(1, 2) for x in whole)
    wanted = F.scaled_dot_product_attention(*by_head, attn_mask=seen, enable_gqa=True)
    wanted = wanted.transpose(1, 2)
    wanted.backward(gradient)
    for ours, theirs in [
        (found, wanted),
        *((a.grad, b.grad) for a, b in zip(given, whole, strict=True)),
    ]:
        assert ours is not None
        assert theirs is not None
        assert ours.dtype == dtype
        error = (ours - theirs[:, mine]).abs().max() / theirs.abs().max()
        assert error <= BOUNDS[dtype], (dtype, length, documents, error)


def compare_all(rank: int) -> int:
    """In rings of two and more ranks, with all dtypes, lengths that do not divide, documents.
    Returns `rank`, as one that has come to the end."""
    for size in range(2, dist.get_world_size() + 1):
        group = dist.new_group([*range(size)])
        if rank < size:
            for case in product(BOUNDS, (13, 48), (False, True)):
                compare(group, *case)  # type: ignore[arg-type]
    return rank
