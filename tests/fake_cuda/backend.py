"""Loads the fake kernels into torch: an entry point of group `torch.backends`, which torch calls at
the end of its own import. What has no CPU kernel under the name that CUDA uses is done here, in
float32: attention by matrix products, the gradient of RMSNorm, products of another dtype."""

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PHILOX = torch.uint64


def load() -> None:
    """In a process that runs on the fake runtime."""
    if "FAKE_CUDA" not in os.environ:
        return
    torch.ops.load_library(Path(os.environ["FAKE_CUDA_LIBRARIES"]) / "libfakekernels.so")
    of_flash = {
        "_scaled_dot_product_flash_attention": flash,
        "_scaled_dot_product_flash_attention_backward": flash_backward,
        "_flash_attention_forward": varlen,
        "_flash_attention_backward": varlen_backward,
    }
    others = {
        "_scaled_dot_product_efficient_attention": efficient,
        "_scaled_dot_product_efficient_attention_backward": efficient_backward,
        "_scaled_dot_product_cudnn_attention": cudnn,
        "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
        "_fused_rms_norm_backward": rms_norm_backward,
        "mm.dtype": wide_mm,
        "mm.dtype_out": wide_mm_out,
        "addmm.dtype": wide_addmm,
        "addmm.dtype_out": wide_addmm_out,
    }
    # As long as the process lives; but torch lets a package take the place of FlashAttention.
    load.libraries = [torch.library.Library("aten", "IMPL") for _ in (of_flash, others)]
    for library, functions in zip(load.libraries, (of_flash, others), strict=True):
        for name, function in functions.items():
            library.impl(name, function, "CUDA", allow_override=True)


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Softmax attention on the host.

    Args:
        q: (B, H, T, D).
        k: (B, K, S, D), for H / K query heads each.
        v: likewise.
        bias: added to the scores, broadcast to (B, H, T, S).
        causal: a query sees keys up to its own number.
        scale: of the scores; None: 1 / √D.

    Returns:
        The output (B, H, T, D) and the logarithm of the sum of exponentials (B, H, T), float32.
    """
    scores = scores_of(q, k, bias, causal, scale)
    return scores.softmax(-1).nan_to_num() @ spread(v, q), scores.logsumexp(-1)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool,
    scale: float | None, out: Tensor | None = None, lse: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k and v, as FlashAttention has them (Dao et al. 2022, appendix B.2).

    Args:
        out, lse: over more keys than these, as `attend` gives them for all; else these are all.
    """
    scores = scores_of(q, k, bias, causal, scale)
    weights = scores.softmax(-1).nan_to_num() if lse is None else (scores - lse[..., None]).exp()
    of_weights = grad.float() @ spread(v, q).transpose(-1, -2)
    mean = (weights * of_weights).sum(-1) if out is None else (grad.float() * out.float()).sum(-1)
    of_scores = weights * (of_weights - mean[..., None])
    of_scores = of_scores * (scale or q.shape[-1] ** -0.5)
    of_k = of_scores.transpose(-1, -2) @ q.float()
    of_v = weights.transpose(-1, -2) @ grad.float()
    shape = (k.shape[0], k.shape[1], -1, *k.shape[2:])
    return [of_scores @ spread(k, q), of_k.view(shape).sum(2), of_v.view(shape).sum(2)]


def scores_of(
    q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    scores = q.float() @ spread(k, q).transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores


def spread(x: Tensor, q: Tensor) -> Tensor:
    """Each key head for its query heads."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


def host(tensor: Tensor | None) -> Any:
    return None if tensor is None else torch.ops.fake_cuda.on_host(tensor.detach())


def like(result: Tensor, tensor: Tensor) -> Tensor:
    """On the device, with dtype and strides of `tensor`, as the kernels do."""
    made = torch.empty_like(tensor)
    host(made).copy_(result)
    return made


def on_device(result: Tensor, device: torch.device) -> Tensor:
    made = torch.empty(result.shape, dtype=result.dtype, device=device)
    host(made).copy_(result)
    return made


def number(device: torch.device) -> Tensor:
    return on_device(torch.zeros(2, dtype=PHILOX), device)


def no_dropout(dropout: float) -> None:
    if dropout:
        raise NotImplementedError("the fake kernels have no dropout in attention")


def flash(q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False,
          return_debug_mask: bool = False, *, scale: float | None = None) -> Any:  # fmt: skip
    no_dropout(dropout_p)
    output, lse = attend(host(q), host(k), host(v), None, is_causal, scale)
    none = on_device(torch.empty(0), q.device)
    return (
        like(output, q), on_device(lse, q.device), None, None, q.shape[2], k.shape[2],
        number(q.device), none, none,
    )  # fmt: skip


def flash_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cum_q: Any, cum_k: Any,
                   max_q: int, max_k: int, dropout_p: float, is_causal: bool, *_: Any,
                   scale: float | None = None) -> Any:  # fmt: skip
    grads = attend_backward(host(grad), host(q), host(k), host(v), None, is_causal, scale)
    return tuple(like(g, x) for g, x in zip(grads, (q, k, v), strict=True))


def efficient(q: Any, k: Any, v: Any, attn_bias: Any, compute_log_sumexp: bool,
              dropout_p: float = 0.0, is_causal: bool = False, *,
              scale: float | None = None) -> Any:  # fmt: skip
    no_dropout(dropout_p)
    output, lse = attend(host(q), host(k), host(v), host(attn_bias), is_causal, scale)
    scalar = on_device(torch.zeros((), dtype=torch.int64), q.device)
    return like(output, q), on_device(lse, q.device), scalar, scalar.clone()


def efficient_backward(grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, seed: Any,
                       offset: Any, dropout_p: float, wanted: Any, is_causal: bool = False, *,
                       scale: float | None = None) -> Any:  # fmt: skip
    if wanted[3]:
        raise NotImplementedError("the fake kernels have no gradient of an attention bias")
    bias = host(bias) if bias is not None and bias.numel() else None
    grads = attend_backward(host(grad), host(q), host(k), host(v), bias, is_causal, scale)
    return (*(like(g, x) for g, x in zip(grads, (q, k, v), strict=True)), None)


def cudnn(q: Any, k: Any, v: Any, attn_bias: Any, compute_log_sumexp: bool, dropout_p: float = 0.0,
          is_causal: bool = False, return_debug_mask: bool = False, *,
          scale: float | None = None) -> Any:  # fmt: skip
    no_dropout(dropout_p)
    output, lse = attend(host(q), host(k), host(v), host(attn_bias), is_causal, scale)
    scalar = on_device(torch.zeros((), dtype=torch.int64), q.device)
    return (
        like(output, q), on_device(lse[..., None], q.device), None, None, q.shape[2], k.shape[2],
        scalar, scalar.clone(), None,
    )  # fmt: skip


def cudnn_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, seed: Any, offset: Any,
                   bias: Any, cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout_p: float,
                   is_causal: bool, *, scale: float | None = None) -> Any:  # fmt: skip
    bias = host(bias) if bias is not None and bias.numel() else None
    grads = attend_backward(host(grad), host(q), host(k), host(v), bias, is_causal, scale)
    return tuple(like(g, x) for g, x in zip(grads, (q, k, v), strict=True))


def ranges(
    cum_q: Any, cum_k: Any, longest: tuple[int, int], of: tuple[Tensor, Tensor], causal: bool
) -> Iterator[tuple[slice, slice]]:
    """The queries and keys of each sequence that has both."""
    names = zip((cum_q, cum_k), longest, of, ("max_q", "max_k"), strict=True)
    both = [documents(host(cum), most, len(x), name) for cum, most, x, name in names]
    for here, there in zip(*both, strict=True):
        if causal and here.stop - here.start != there.stop - there.start:
            raise NotImplementedError("the fake kernels are causal among as many keys alone")
        if here.start < here.stop and there.start < there.stop:
            yield here, there


def documents(cumulative: Tensor, longest: int, total: int, name: str) -> list[slice]:
    """Where each sequence is; what FlashAttention demands of them is checked."""
    if cumulative.dtype != torch.int32 or not cumulative.is_contiguous():
        raise ValueError("cu_seqlens must be contiguous int32")
    ends = cumulative.tolist()
    if ends[0] != 0 or ends[-1] != total or sorted(ends) != ends:
        raise ValueError(f"cu_seqlens {ends} do not go from 0 to {total}")
    for start, stop in pairwise(ends):
        if stop - start > longest:
            raise ValueError(f"a sequence of {stop - start} tokens, but {name} is {longest}")
    return [slice(start, stop) for start, stop in pairwise(ends)]


def batched(part: Tensor) -> Tensor:
    """(T, H, D) → (1, H, T, D)."""
    return part.transpose(0, 1)[None]


def varlen(q: Any, k: Any, v: Any, cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout_p: float,
           is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
           window_size_left: int | None = None, window_size_right: int | None = None,
           seqused_k: Any = None, alibi_slopes: Any = None) -> Any:  # fmt: skip
    no_dropout(dropout_p)
    causal = is_causal or (window_size_left, window_size_right) == (-1, 0)
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"FlashAttention takes float16 and bfloat16, not {q.dtype}")
    device, (q_h, k_h, v_h) = q.device, map(host, (q, k, v))
    output, lse = torch.zeros(q.shape), torch.full((q.shape[1], q.shape[0]), torch.inf)
    for here, there in ranges(cum_q, cum_k, (max_q, max_k), (q, k), causal):
        found, sums = attend(batched(q_h[here]), batched(k_h[there]), batched(v_h[there]), None,
                             causal, scale)  # fmt: skip
        output[here], lse[:, here] = found[0].transpose(0, 1), sums[0]
    none = on_device(torch.empty(0), device)
    return like(output, q), on_device(lse, device), number(device), none, none.clone()


def varlen_backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cum_q: Any, cum_k: Any,
                    max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Any,
                    unused: Any, *, scale: float | None = None,
                    window_size_left: int | None = None,
                    window_size_right: int | None = None) -> Any:  # fmt: skip
    """By the output and the sums that are given: a ring's are those over all of its blocks."""
    causal = is_causal or (window_size_left, window_size_right) == (-1, 0)
    grad_h, q_h, k_h, v_h, out_h, lse_h = map(host, (grad, q, k, v, out, lse))
    grads = [torch.zeros(x.shape) for x in (q, k, v)]
    for here, there in ranges(cum_q, cum_k, (max_q, max_k), (q, k), causal):
        parts = (batched(x) for x in (grad_h[here], q_h[here], k_h[there], v_h[there]))
        found = attend_backward(*parts, None, causal, scale, batched(out_h[here]), lse_h[:, here])
        for made, where, part in zip(grads, (here, there, there), found, strict=True):
            made[where] = part[0].transpose(0, 1)
    return tuple(like(g, x) for g, x in zip(grads, (q, k, v), strict=True))


def rms_norm_backward(grad: Any, x: Any, shape: Any, rstd: Any, weight: Any, wanted: Any) -> Any:
    grad_h, x_h, rstd_h = host(grad).float(), host(x).float(), host(rstd).float()
    normed = x_h * rstd_h
    scaled = grad_h if weight is None else grad_h * host(weight).float()
    dims = tuple(range(-len(shape), 0))
    of_x = rstd_h * (scaled - normed * (scaled * normed).mean(dims, keepdim=True))
    of_weight = None
    if weight is not None and wanted[1]:
        of_weight = like((grad_h * normed).flatten(0, -len(shape) - 1).sum(0), weight)
    return like(of_x, x), of_weight


def wide_mm(left: Any, right: Any, out_dtype: torch.dtype) -> Any:
    narrow = left.dtype in (torch.float16, torch.bfloat16)
    if left.dtype != right.dtype or out_dtype not in (left.dtype, torch.float32):
        raise ValueError(f"no product of {left.dtype} and {right.dtype} gives {out_dtype}")
    if out_dtype != left.dtype and not narrow:
        raise ValueError(f"only float16 and bfloat16 widen, not {left.dtype}")
    product = host(left).to(out_dtype) @ host(right).to(out_dtype)
    return on_device(product, left.device)


def wide_mm_out(left: Any, right: Any, out_dtype: torch.dtype, *, out: Any) -> Any:
    return out.copy_(wide_mm(left, right, out_dtype))


def wide_addmm(start: Any, left: Any, right: Any, out_dtype: torch.dtype, *, beta: float = 1,
               alpha: float = 1) -> Any:  # fmt: skip
    if start.dtype not in (out_dtype, left.dtype):
        raise ValueError(f"{start.dtype} is not added to products of {left.dtype} in {out_dtype}")
    product = wide_mm(left, right, out_dtype)
    return on_device(beta * host(start).to(out_dtype) + alpha * host(product), left.device)


def wide_addmm_out(start: Any, left: Any, right: Any, out_dtype: torch.dtype, *, beta: float = 1,
                   alpha: float = 1, out: Any) -> Any:  # fmt: skip
    return out.copy_(wide_addmm(start, left, right, out_dtype, beta=beta, alpha=alpha))
