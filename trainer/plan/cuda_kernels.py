"""Replacements for CUDA kernels in traces on a CPU, which keep the same tensors for backward."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from trainer.models import attention, loss


@contextmanager
def cuda_kernels(flash: bool, memory: float) -> Iterator[None]:
    """Context in which attention and RMSNorm allocate memory as on CUDA, and the loss as on a GPU
    with `memory` bytes. `flash`: whether that GPU has compute capability 8.0 or above. (Fake CUDA
    tensors would need a CUDA build of torch.)"""
    attend = partial(_attend, flash)
    # Functions are patched, because a TorchFunctionMode is off in backward, which recomputes
    # blocks.
    kernels = patch.multiple(F, scaled_dot_product_attention=attend, rms_norm=_normalise)
    choice = patch.multiple(
        attention,
        capability=lambda _: (8, 0) if flash else (7, 0),
        flex_kernels=lambda: (_flex_attention, lambda *_: None),
    )
    of_loss = patch.multiple(
        loss,
        on_gpu=lambda _: True,
        most_logits=lambda _: loss.logits_in(memory),
        add_product=_add_product,
    )
    with kernels, choice, of_loss:
        yield


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Replaces `trainer.models.loss.add_product`, with the same allocations as on a GPU."""
    # torch 2.11 does not support addmm's argument `out_dtype` for fake tensors.
    wide = [x.new_zeros((), dtype=total.dtype).expand(x.shape) for x in (left, right)]
    torch.addmm(total, *wide, out=total)


def _flex_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_mask: None,
    enable_gqa: bool,
    return_aux: Any = None,
) -> Any:
    """Replaces FlexAttention by flash attention, which keeps the same tensors for backward. Eager
    FlexAttention would keep every intermediate."""
    out, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    return out if return_aux is None else (out, SimpleNamespace(lse=sums))


def _attend(
    flash: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Replaces SDPA by the kernel that it selects on CUDA: flash attention if possible, else the
    memory-efficient kernel, else matrix products. Flash attention, and bf16 in the memory-efficient
    kernel, need compute capability 8.0."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if flash and attn_mask is None and q.dtype != torch.float32:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return kernel(q, k, v, dropout_p, is_causal, scale=scale)[0]
    groups = q.shape[1] // k.shape[1]
    if groups > 1:  # `attend` repeats keys and values for these kernels on CUDA
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    if not flash and q.dtype == torch.bfloat16:
        products = torch.ops.aten._scaled_dot_product_attention_math
        with torch.autocast("cpu", enabled=False):  # autocast does not reach the operators inside
            return products(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)[0]
    bias = None
    if attn_mask is not None:
        bias = attn_mask
        if attn_mask.dtype == torch.bool:
            bias = torch.where(attn_mask, 0.0, -torch.inf).to(q.dtype)
        bias = bias.expand(*q.shape[:3], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]


def _normalise(
    input: torch.Tensor,
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    if weight is None:
        weight = input.new_ones(normalized_shape)
    return _FusedRMSNorm.apply(input, weight)


class _FusedRMSNorm(torch.autograd.Function):
    """RMSNorm that keeps for backward its input and one number per row, as the fused kernel
    does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        row_norms = x.new_empty(x.shape[: -weight.dim()], dtype=torch.float32)
        ctx.save_for_backward(x, weight, row_norms)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return gradient + x, torch.empty_like(weight)
