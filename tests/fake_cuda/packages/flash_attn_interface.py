"""Stands for the package of FlashAttention-3 on the fake CUDA runtime: its two operators, as torch
calls them for sequences of many lengths, done on the host. No kernel of it is here."""

from typing import Any

import torch

from tests.fake_cuda.backend import host, load, varlen, varlen_backward

load.libraries[0]._destroy()  # torch overrides what C++ has registered, but no kernel of Python
_LIBRARY = torch.library.Library("flash_attn_3", "DEF")
_LIBRARY.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float? softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "int attention_chunk, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, "
    "int num_splits, bool? pack_gqa, int sm_margin) -> (Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, "
    "float? softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool deterministic, int sm_margin) -> Tensor"
)


def forward(q: Any, k: Any, v: Any, *more: Any) -> Any:
    """(output, log-sum-exp, two that are for splits)."""
    _, _, _, _, cum_q, cum_k, _, _, _, max_q, max_k, *_ = more
    scale, causal, left, right = more[20:24]
    out, lse, *_ = varlen(
        q, k, v, cum_q, cum_k, max_q, max_k, 0.0, causal, False, scale=scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out, lse, q.new_empty(0), q.new_empty(0)


def backward(grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *more: Any) -> Any:
    """Writes the gradients where it is told to."""
    *rooms, cum_q, cum_k, _, _, max_q, max_k, scale, causal, left, right = more[:13]
    found = varlen_backward(
        grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, None, None, scale=scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    for room, gradient in zip(rooms, found, strict=True):
        host(room).copy_(host(gradient))
    return lse.clone()


_LIBRARY.impl("fwd", forward, "CUDA")
_LIBRARY.impl("bwd", backward, "CUDA")
