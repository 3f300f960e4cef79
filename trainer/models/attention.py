"""Causal attention that stays inside documents, without a (T, T) matrix.

[Note: documents] Several documents are packed into one sequence. Kernels that know where each of
them begins skip what a mask would only hide: less work, and nothing of T x T to hold. What they
know it from is made once per pass (`locate`) and shared by all layers:

- *varlen*: `cu_seqlens`, see `trainer.data.documents`. On CUDA the varlen form of FlashAttention
  (Dao 2023); on the CPU one call of its flash kernel per document.
- *flex*: a `BlockMask` for FlexAttention (Dong et al. 2024), for dtypes, heads and GPUs that varlen
  does not take. On CUDA only: torch has no backward pass of it for the CPU (2.13).
- *sdpa*: one additive mask for `scaled_dot_product_attention`, which works everywhere. On the CPU
  short sequences in bf16 are faster with it.

Where no documents are told apart, attention is SDPA's own causal one.

With a sliding window a token sees the last so many tokens of its document, itself included. Kernels
that skip what is further back take the window, too; on the CPU the additive mask has it.

Shapes: B batch, T sequence, N query heads, K key/value heads, N a multiple of K, H head dim. Head n
of the queries looks at head n // (N / K).
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.models.versions import varlen_asks_for_groups

Way: TypeAlias = Literal["varlen", "flex", "sdpa"]
Asked: TypeAlias = Literal["auto"] | Way
Capability: TypeAlias = tuple[int, int]
Function = TypeVar("Function", bound=Callable[..., Any])

MASKED_ON_CPU = 256
"""Tokens of a sequence up to which one masked call in bf16 is faster than one for each document. At
512 it is slower, and so it is in float32 and fp16 (`python -m benchmarks.attention_memory grid`).
"""


class Documents(NamedTuple):
    """Where to look, made once per pass; see [Note: documents]."""

    way: Way | Literal["ring"]
    where: Any
    """cu_seqlens, a BlockMask, or a (B, 1, T, T) additive mask; a ring is a function of (q, k, v)
    that other ranks take part in, see `trainer.parallel.context`."""
    window: int | None = None
    """How many tokens each token sees, itself included; None: all that come before it."""


def choose_attention(
    asked: Asked,
    dtype: torch.dtype,
    head_dim: int,
    capability: Capability | None,
    length: int,
    window: bool = False,
) -> Way:
    """How documents are told apart: the fastest way that works, or the one that is asked for.

    Args:
        asked: `model.attention` of the recipe.
        dtype: of the computation.
        head_dim: H.
        capability: of the GPU; None on the CPU.
        length: T.
        window: a token sees only some of those before it.

    Raises:
        ValueError: what is asked for cannot work; says why, and what to do.
    """
    hindrances = hindrances_of(dtype, head_dim, capability, window)
    if asked != "auto":
        if asked in hindrances:
            raise ValueError(f"{asked} cannot work: {hindrances[asked]}; take auto")
        return asked
    if capability is None and dtype == torch.bfloat16 and length <= MASKED_ON_CPU:
        return "sdpa"
    ways: tuple[Way, ...] = ("varlen", "flex", "sdpa")
    return next(way for way in ways if way not in hindrances)


def hindrances_of(
    dtype: torch.dtype, head_dim: int, capability: Capability | None, window: bool = False
) -> dict[Way, str]:
    """Why some ways do not work; arguments as of `choose_attention`."""
    hindrances: dict[Way, str] = {}
    if capability is None:
        hindrances["flex"] = "FlexAttention has no backward pass on the CPU"
        if window:
            hindrances["varlen"] = "the kernel of the CPU has no sliding window"
    else:
        if dtype not in (torch.bfloat16, torch.float16):
            hindrances["varlen"] = f"FlashAttention takes bf16 and fp16, not {dtype}"
        elif head_dim % 8 or head_dim > 256:
            hindrances["varlen"] = (
                f"FlashAttention takes a head_dim of 8, 16, … 256, but it is {head_dim}"
            )
        elif capability < (8, 0):
            hindrances["varlen"] = (
                "FlashAttention needs a GPU of compute capability 8.0, but this one has "
                f"{capability[0]}.{capability[1]}"
            )
        if capability < (7, 0):
            hindrances["flex"] = "FlexAttention needs a GPU of compute capability 7.0"
    return hindrances


def locate(
    cu_seqlens: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    head_dim: int,
    asked: Asked,
    window: int | None = None,
) -> Documents:
    """What attention needs to know of documents. Neither waits for a GPU, nor compiles anew.

    Args:
        cu_seqlens: see `trainer.data.documents`.
        shape: (B, T).
        dtype: of the computation.
        head_dim: H.
        asked: see `choose_attention`, which may raise ValueError.
        window: how many tokens each token sees, itself included; None: all that come before it.
    """
    rows, length = shape
    slides = window is not None
    way = choose_attention(asked, dtype, head_dim, capability(cu_seqlens.device), length, slides)
    if way == "varlen":
        return Documents(way, cu_seqlens, window)
    tokens = torch.arange(rows * length, dtype=torch.int32, device=cu_seqlens.device)
    ids = torch.searchsorted(cu_seqlens, tokens, right=True).view(rows, length)
    if way == "sdpa":
        seen = (ids[:, None, :, None] == ids[:, None, None, :]).tril()
        seen = seen if window is None else seen.triu(1 - window)
        return Documents(way, torch.where(seen, 0.0, -torch.inf).to(dtype), window)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        before = (query >= key) & (ids[row, query] == ids[row, key])
        return before if window is None else before & (query - key < window)

    _, create_block_mask = flex_kernels()
    return Documents(way, create_block_mask(sees, rows, None, length, length, ids.device), window)


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
    """Scaled dot-product attention, causal, and inside documents if there are any.

    Args:
        q: (B, T, N, H).
        k, v: (B, T, K, H).
        documents: from `locate`.

    Returns:
        (B, T, N, H)
    """
    if documents and documents.way == "ring":
        whole: Tensor = documents.where(q, k, v)
        return whole
    if documents and documents.way == "varlen":
        packed = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        if capability(q.device) is None:
            mixed, _ = torch.ops.perdure.varlen_attention(*packed, documents.where)
        else:
            mixed = _varlen_on_cuda(*packed, documents.where, q.shape[1], documents.window)
        return mixed.view(q.shape)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if documents and documents.way == "flex":
        flex_attention, _ = flex_kernels()
        mixed = flex_attention(q, k, v, block_mask=documents.where, enable_gqa=grouped)
        return mixed.transpose(1, 2)
    # On CUDA only flash attention takes fewer key heads than query heads, and it takes neither
    # masks nor float32; without repeated heads SDPA would fall back to the whole (T, T) matrix.
    if grouped and not _groups_in_kernel(q, documents):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    mixed = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=documents.where if documents else None,
        is_causal=documents is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return mixed.transpose(1, 2)


def _groups_in_kernel(q: Tensor, documents: Documents | None) -> bool:
    gpu = capability(q.device)
    if gpu is None:
        return True
    # torch 2.11 compiles no comparison of tuples.
    return documents is None and q.dtype != torch.float32 and gpu[0] >= 8


def _constant(function: Function) -> Function:
    """Have the compiler call a function as it is, and take the result for a constant.
    torch.compiler.assume_constant_result does no more, but imports the compiler: over a second."""
    function.__dict__["_dynamo_marked_constant"] = True
    return function


@_constant
def capability(device: torch.device) -> Capability | None:
    """Compute capability of a GPU; None for the CPU."""
    return None if device.type == "cpu" else torch.cuda.get_device_capability(device)


@cache
def flex_kernels() -> tuple[Callable[..., Tensor], Callable[..., Any]]:
    """(flex_attention, create_block_mask), each one kernel: as they are, they would build what
    this module avoids. Importing them takes over a second."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention), torch.compile(create_block_mask)


def _varlen_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, length: int, window: int | None
) -> Tensor:
    from torch.nn.attention import varlen  # imports the compiler

    function: Any = varlen.varlen_attn
    # Causal; its window does not count the token itself.
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if _asks_for_groups():
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    return function(q, k, v, cu_seqlens, cu_seqlens, length, length, **options)


_asks_for_groups = _constant(varlen_asks_for_groups)


# --- varlen on the CPU -----------------------------------------------------------------------
# An operator of its own, so that the compiler and the plan take it as it is: what it does depends
# on numbers in cu_seqlens. (The decorator torch.library.custom_op imports the compiler.)

_LIBRARY = torch.library.Library("perdure", "DEF")
_LIBRARY.define(
    "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor ends) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "varlen_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, "
    "Tensor ends, Tensor out, Tensor sums) -> (Tensor, Tensor, Tensor)"
)


def _results(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the output (tokens, N, H), and for the logarithms of sums (tokens, N)."""
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:2], dtype=sums)


def _per_document(ends: Tensor, *tensors: Tensor) -> list[list[Tensor]]:
    """The part (1, heads, length, H) of each tensor (tokens, heads, H) that each document has; of
    (tokens, heads) likewise (1, heads, length)."""
    places = [pair for pair in pairwise(ends.tolist()) if pair[0] < pair[1]]
    return [[x[a:b].transpose(0, 1)[None] for x in tensors] for a, b in places]


def _forward(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    out, sums = _results(q, k, v, ends)
    given = (x.contiguous() for x in (q, k, v))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for *inputs, out_here, sums_here in _per_document(ends, *given, out, sums):
        mixed, logarithms = kernel(*inputs, 0.0, True)
        out_here.copy_(mixed)
        sums_here.copy_(logarithms)
    return out, sums


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    given = [x.contiguous() for x in (gradient, q, k, v, out, sums)]
    made = _gradients(gradient, q, k, v, ends, out, sums)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for part in _per_document(ends, *given, *made):
        for room, found in zip(part[6:], kernel(*part[:6], 0.0, True), strict=True):
            room.copy_(found)
    return made


def _gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Room for them."""
    room = partial(torch.empty_like, memory_format=torch.contiguous_format)
    return room(q), room(k), room(v)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.perdure.varlen_attention_backward(gradient, *ctx.saved_tensors), None


for _name, _kernel, _shapes in (
    ("varlen_attention", _forward, _results),
    ("varlen_attention_backward", _backward, _gradients),
):
    _LIBRARY.impl(_name, _kernel, "CPU")
    torch.library.register_fake(f"perdure::{_name}", _shapes, lib=_LIBRARY)
torch.library.register_autograd(
    "perdure::varlen_attention", _differentiate, setup_context=_keep, lib=_LIBRARY
)
