"""Slice 1: the kernels of rings and experts against float64, forward and backward; and their speed.

The ranks of a ring are threads here, on one device: what they compute is that of ranks, and what
they send is handed over.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.machine import seconds
from benchmarks.gpu.setting import Setting
from trainer.data.packing import cu_seqlens_of
from trainer.models.families.qwen3_moe import swiglu
from trainer.parallel import context
from trainer.parallel.context import ContextParallelRing

RINGS = (1, 2, 4)
"""Ranks. In a ring of one each document sees itself, by the kernel for many lengths."""
LONGEST = 60.0
"""Seconds that a message may take."""


class Near(ContextParallelRing):
    """A ring whose ranks are threads."""

    boxes: Sequence[Sequence[SimpleQueue[Tensor]]]
    """By tag, of each rank."""

    def pass_on(self, x: Tensor, tokens: int, tag: int) -> Callable[[], Tensor]:
        """See ContextParallelRing."""
        self.boxes[tag][(self.rank + 1) % self.size].put(x)
        return lambda: self.boxes[tag][self.rank].get(timeout=LONGEST)


def rings_of(size: int, cu_seqlens: Tensor, rows: int, length: int) -> list[Near]:
    """Its ranks, in order."""
    boxes = [[SimpleQueue[Tensor]() for _ in range(size)] for _ in range(2)]
    found: list[Near] = []
    nobody: Any = None
    for rank in range(size):
        world = patch.multiple(
            context.dist,
            get_rank=lambda _, rank=rank: rank,
            get_world_size=lambda _: size,
        )
        with world:
            ring = Near(nobody, cu_seqlens, (rows, length), cu_seqlens.device)
        ring.boxes = boxes
        found.append(ring)
    return found


class Kept:
    """What autograd would keep: it runs all backward passes of a device in one thread, where they
    would wait for each other."""

    saved_tensors: tuple[Tensor, ...]
    ring: ContextParallelRing
    rows: int

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


def pass_of(
    ring: ContextParallelRing, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor
) -> tuple[Tensor, ...]:
    """What attention gives, and the gradients of q, k and v, on one rank."""
    kept = Kept()
    with torch.no_grad():
        out = context._RingAttention.forward(kept, q, k, v, ring)
        gradients = context._RingAttention.backward(kept, gradient)
    return out, *(x for x in gradients if x is not None)


def relative(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, by the largest number."""
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def ring(setting: Setting) -> dict[str, Any]:
    """Attention of 1, 2 and 4 ranks in bf16, with documents, against one dense mask in float64; and
    the time of a rank of 4 at 32k tokens, by a quarter of that of all of them in one kernel."""
    rows, length, width = (2, 61, 16) if setting.toy else (2, 2000, 128)
    device, draw = setting.place(), torch.Generator().manual_seed(0)
    ids = (torch.rand(rows, length, generator=draw) < 8 / length).cumsum(1).to(device)
    whole = [
        torch.randn(rows, length, heads, width, generator=draw).to(device).bfloat16()
        for heads in (16, 8, 8, 16)
    ]
    precise = [x.double().requires_grad_() for x in whole[:3]]
    seen = (ids[:, None, :, None] == ids[:, None, None, :]).tril()
    q, k, v = (x.transpose(1, 2) for x in precise)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    wanted = wanted.transpose(1, 2)
    wanted.backward(whole[3].double())
    reference = [wanted.detach(), *(x.grad for x in precise if x.grad is not None)]
    figures = {}
    for size in RINGS:
        ranks = rings_of(size, cu_seqlens_of(ids), rows, length)
        places = [torch.cat([torch.arange(p.start, p.stop) for p in one.own]) for one in ranks]
        with ThreadPoolExecutor(size) as pool:
            given = [[x[:, place.to(device)] for x in whole] for place in places]
            found = [*pool.map(lambda one, xs: pass_of(one, *xs), ranks, given)]
        figures[f"ranks_{size}"] = max(
            relative(ours.double(), theirs[:, place.to(device)])
            for place, of_rank in zip(places, found, strict=True)
            for ours, theirs in zip(of_rank, reference, strict=True)
        )
    return {"error": max(figures.values()), **figures, **ring_seconds(setting)}


def ring_seconds(setting: Setting) -> dict[str, Any]:
    """What a pass without documents takes, of a rank of 4 and of one kernel, there and back."""
    length, device = (256 if setting.toy else 32768), setting.place()
    none = torch.tensor([0, length], dtype=torch.int32, device=device)
    alone, of_four = rings_of(1, none, 1, length)[0], rings_of(4, none, 1, length)[0]

    def timed(one: Near) -> float:
        tokens = one.tokens[0]
        q, k, v, gradient = (
            torch.randn(1, tokens, heads, 128, device=device, dtype=torch.bfloat16)
            for heads in (16, 8, 8, 16)
        )
        # What comes is what was sent: only that it is there counts.
        one.boxes = [[one.boxes[tag][one.rank]] * one.size for tag in range(2)]
        return seconds(lambda: pass_of(one, q, k, v, gradient))

    whole, quarter = timed(alone), timed(of_four)
    return {"one_kernel_ms": whole * 1e3, "rank_ms": quarter * 1e3, "of_share": 4 * quarter / whole}


def experts(setting: Setting) -> dict[str, Any]:
    """Grouped products of 64 experts in bf16 with uneven rows against one expert after the other in
    float64; and their TFLOP/s, by those of one dense product of the same work."""
    count, hidden, width = (4, 32, 16) if setting.toy else (64, 2048, 768)
    tokens, device = count * (16 if setting.toy else 512), setting.place()
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        numbers = torch.randn(*shape, generator=draw) / shape[-1] ** 0.5
        return numbers.to(device).bfloat16()

    rows, weights = drawn(tokens, hidden), [drawn(count, width, hidden) for _ in range(2)]
    given = [rows, *weights, drawn(count, hidden, width)]
    shares = torch.rand(count, generator=draw)
    shares[0] = 0  # nobody likes the first one
    counts = (shares / shares.sum() * tokens).floor().long()
    counts[-1] += tokens - counts.sum()
    gradient = drawn(tokens, hidden)

    def one_by_one(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        parts = x.split(counts.tolist())
        through = zip(parts, gate, up, down, strict=True)
        return torch.cat([(F.silu(x @ g.T) * (x @ u.T)) @ d.T for x, g, u, d in through])

    def with_gradients(work: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in given]
        out = work(*leaves)
        out.backward(gradient.to(dtype))
        return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]

    there = counts.to(device)
    found = with_gradients(lambda x, *rest: swiglu(x, there, *rest), torch.bfloat16)
    wanted = with_gradients(one_by_one, torch.float64)
    errors = [relative(a.double(), b) for a, b in zip(found, wanted, strict=True)]
    work = 6 * tokens * hidden * width
    leaves = [x.requires_grad_() for x in given]
    square = [drawn(tokens, hidden), drawn(3 * width, hidden)]

    def grouped_pass() -> object:
        out = swiglu(leaves[0], there, *leaves[1:])
        return torch.autograd.grad(out, leaves, gradient)

    grouped = 3 * work / seconds(grouped_pass)
    dense = work / seconds(lambda: square[0] @ square[1].T)
    return {"error": max(errors), "tflops": grouped / 1e12, "of_dense": grouped / dense}
