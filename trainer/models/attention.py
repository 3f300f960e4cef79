"""Causal attention inside documents, where possible without a (T, T) matrix, and rotary positions.

[Note: documents] Several documents are packed into one sequence. A kernel that knows where each
document begins skips the pairs of tokens that a (T, T) mask would hide. `locate` prepares one of
three ways:

- *varlen*: the offsets of documents (`cu_seqlens`, see `trainer.data.packing`). On CUDA they go
  to the variable-length form of FlashAttention (Dao 2023). On a CPU torch's flash kernel is called
  once per document.
- *flex*: a `BlockMask` for FlexAttention (Dong et al. 2024), for dtypes, heads and GPUs that
  *varlen* does not support. On CUDA only: torch 2.13 cannot compute its backward pass on a CPU.
- *sdpa*: one additive mask for torch's `scaled_dot_product_attention` (SDPA), which works
  everywhere. On a CPU it is faster than *varlen* for short sequences in bf16.

Without documents SDPA computes causal attention, without a mask. With a sliding window of W a token
sees the last W tokens of its document, itself included. In *varlen* the window is an argument of
the CUDA kernel. In *flex* and *sdpa* it is part of the mask.

[Note: sinks] An attention sink is a learned score of each head that takes part in the softmax of
every query and carries no value (Agarwal et al. 2025, "gpt-oss-120b & gpt-oss-20b Model Card"), so
a token may attend to nothing. In *flex* the kernel also returns the logarithm of the softmax sum;
its output times sigmoid(logarithm - sink) is attention with the sink. In *sdpa* there is one more
key, whose value is 0, and each head has more elements. The first of these is the sink times √H in a
query, 1 in the new key, and 0 in all other keys. *varlen* has no sinks, because its kernels return
no logarithm with a gradient.

Shapes: B batch, T sequence, N query heads, K key/value heads, N a multiple of K, H head dim. Head n
of the queries uses head n // (N / K) of the keys.
R is the number of elements of H that rotate (`rotary_size`).
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.models.versions import varlen_asks_for_groups
from trainer.recipe.architecture import Architecture, RopeScalingSection

Rope: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary angles, each (T, R / 2) float32."""


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate each pair of elements (i, i + R / 2) of the heads in x (B, T, heads, H) by its angle
    at the position. Elements from R on are unchanged."""
    cos, sin = rope
    x = x.transpose(1, 2)
    size, rest = 2 * cos.shape[-1], None
    if size < x.shape[-1]:
        x, rest = x.tensor_split([size], dim=-1)
    low, high = x.chunk(2, dim=-1)
    parts = low * cos - high * sin, high * cos + low * sin
    rotated = torch.cat(parts if rest is None else (*parts, rest.to(parts[0].dtype)), dim=-1)
    return rotated.type_as(x).transpose(1, 2)


def rope_table(architecture: Architecture, positions: Tensor, theta: float | None = None) -> Rope:
    """Compute the cosines and sines of the rotary angles (Su et al. 2021) at positions (T,).
    `theta`: base of the wavelengths, without scaling; None: base and scaling of the architecture.
    Raises ValueError for a sequence that is too long for rope_type dynamic."""
    # No buffer holds the table. It would have to be refilled after `to_empty`, kept out of
    # `.to(bfloat16)`, and sized for the longest context.
    size, scaling = architecture.rotary_size, None if theta else architecture.rope_scaling
    exponents = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
    powers = (theta or architecture.rope_theta) ** exponents
    if scaling is None:
        frequencies = 1.0 / powers
    elif scaling.rope_type == "llama3":
        frequencies = stretch(1.0 / powers, scaling)
    elif scaling.rope_type == "yarn":
        frequencies = _yarn(powers, architecture.rope_theta, scaling)
    elif scaling.rope_type == "longrope":
        long = len(positions) > scaling.original_max_position_embeddings
        factors = scaling.long_factor if long else scaling.short_factor
        of_pairs = torch.tensor(factors, dtype=torch.float32, device=positions.device)
        frequencies = 1.0 / (of_pairs * powers)  # Ding et al. 2024, "LongRoPE"
    elif scaling.rope_type == "linear":
        frequencies = 1.0 / powers / scaling.factor
    else:  # dynamic: no scaling up to the trained context
        limit = architecture.max_position_embeddings
        if len(positions) > limit:
            raise ValueError(
                f"rope_type dynamic: a sequence of {len(positions)} tokens is longer than "
                f"max_position_embeddings={limit}, beyond which the wavelengths depend on the "
                "length; use shorter sequences"
            )
        frequencies = 1.0 / powers
    angles = positions.float()[:, None] * frequencies
    factor = attention_factor(scaling) if scaling else 1.0
    if factor == 1.0:
        return angles.cos(), angles.sin()
    return angles.cos() * factor, angles.sin() * factor


def stretch(frequencies: Tensor, scaling: RopeScalingSection) -> Tensor:
    """Scale frequencies as Llama 3.1 does: low ones are divided by `factor`, high ones are kept,
    those in between are blended."""
    turns = frequencies * scaling.original_max_position_embeddings / (2 * torch.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = blend.clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(powers: Tensor, theta: float, scaling: RopeScalingSection) -> Tensor:
    """Return the frequencies of YaRN (Peng et al. 2023, "YaRN: Efficient Context Window Extension
    of Large Language Models"). As in `stretch`, low frequencies are divided by `factor`, but YaRN's
    blend is linear in the index of a pair. `powers`: inverse of each unscaled frequency, (R / 2);
    `theta`: base of the wavelengths."""
    size, original = 2 * len(powers), scaling.original_max_position_embeddings

    def pair_that_turns(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 if low == high else 0  # avoids a division by 0
    pairs = torch.arange(len(powers), dtype=torch.float32, device=powers.device)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + 1.0 / powers * kept


def attention_factor(scaling: RopeScalingSection) -> float:
    """Return the factor by which cosines and sines are multiplied, so that attention is sharper."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    factor = scaling.factor
    if factor <= 1 or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.rope_type == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(scaling.original_max_position_embeddings))
    if scaling.mscale and scaling.mscale_all_dim:
        one, all_dims = (_magnitude(factor, m) for m in (scaling.mscale, scaling.mscale_all_dim))
        return one / all_dims
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


Way: TypeAlias = Literal["varlen", "flex", "sdpa"]
Requested: TypeAlias = Literal["auto"] | Way
Capability: TypeAlias = tuple[int, int]
Function = TypeVar("Function", bound=Callable[..., Any])

MASKED_ON_CPU = 256
"""Longest sequence, in tokens, for which on a CPU one masked call in bf16 is faster than a call per
document (`python -m benchmarks.attention_memory grid`)."""


class AttentionDocuments(NamedTuple):
    """Boundaries of the documents in a micro-batch, see [Note: documents]."""

    way: Way | Literal["ring"]
    where: Any
    """The boundaries. For varlen: cu_seqlens. For flex: a BlockMask. For sdpa: an additive mask (B,
    1, T, T), with sinks (B, 1, T, T + 1). For ring: the function of (q, k, v) that computes
    attention, see `trainer.parallel.context`."""
    window: int | None = None
    """Number of tokens that each token sees, itself included; None: all tokens before it."""


def choose_attention(
    requested: Requested,
    dtype: torch.dtype,
    head_dim: int,
    capability: Capability | None,
    length: int,
    window: bool = False,
    sinks: bool = False,
) -> Way:
    """Choose how attention separates documents: the fastest way that works, or the requested one.
    Raises ValueError if the requested way does not work.

    Args:
        requested: `model.attention` of the recipe.
        dtype: dtype of queries, keys and values.
        head_dim: H.
        capability: compute capability of the GPU; None on the CPU.
        length: T.
        window: whether a sliding window limits what a token sees.
        sinks: whether heads have attention sinks, see [Note: sinks].
    """
    hindrances = hindrances_of(dtype, head_dim, capability, window, sinks)
    if requested != "auto":
        if requested in hindrances:
            raise ValueError(f"{requested} cannot work: {hindrances[requested]}; use auto")
        return requested
    if capability is None and dtype == torch.bfloat16 and length <= MASKED_ON_CPU:
        return "sdpa"
    ways: tuple[Way, ...] = ("varlen", "flex", "sdpa")
    return next(way for way in ways if way not in hindrances)


def hindrances_of(
    dtype: torch.dtype,
    head_dim: int,
    capability: Capability | None,
    window: bool = False,
    sinks: bool = False,
) -> dict[Way, str]:
    """Return the ways that do not work, each with the reason. Arguments: see `choose_attention`."""
    hindrances: dict[Way, str] = {}
    if capability is None:
        hindrances["flex"] = "FlexAttention has no backward pass on the CPU"
        if window:
            hindrances["varlen"] = "the CPU's kernel has no sliding window"
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
    if sinks:
        hindrances["varlen"] = "its kernels have no attention sinks"
    return hindrances


def locate(
    cu_seqlens: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    head_dim: int,
    requested: Requested,
    window: int | None = None,
    sinks: bool = False,
) -> AttentionDocuments:
    """Compute the boundaries of documents once per pass, for all layers. The host does not wait for
    the GPU, and changed boundaries cause no new compilation. Raises ValueError if the requested way
    does not work.

    Args:
        cu_seqlens: see `trainer.data.packing`.
        shape: (B, T).
        dtype, head_dim, requested, sinks: see `choose_attention`.
        window: number of tokens that each token sees, itself included; None: all before it.
    """
    rows, length = shape
    slides = window is not None
    way = choose_attention(
        requested, dtype, head_dim, capability(cu_seqlens.device), length, slides, sinks
    )
    if way == "varlen":
        return AttentionDocuments(way, cu_seqlens, window)
    tokens = torch.arange(rows * length, dtype=torch.int32, device=cu_seqlens.device)
    # A document's number is the number of offsets up to its tokens.
    ids = torch.searchsorted(cu_seqlens, tokens, right=True).view(rows, length)
    if way == "sdpa":
        seen = (ids[:, None, :, None] == ids[:, None, None, :]).tril()
        seen = seen if window is None else seen.triu(1 - window)
        mask = torch.where(seen, 0.0, -torch.inf).to(dtype)
        # every query sees the additional key of the sink
        return AttentionDocuments(way, F.pad(mask, (0, 1)) if sinks else mask, window)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        before = (query >= key) & (ids[row, query] == ids[row, key])
        return before if window is None else before & (query - key < window)

    _, create_block_mask = flex_kernels()
    return AttentionDocuments(
        way, create_block_mask(sees, rows, None, length, length, ids.device), window
    )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: AttentionDocuments | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal scaled dot-product attention (B, T, N, H), inside documents if there are any.
    Raises ValueError for sinks without documents, or with documents in a way without sinks.

    Args:
        q: (B, T, N, H).
        k, v: (B, T, K, H).
        documents: from `locate`.
        sinks: the sink of each query head (N), see [Note: sinks]; None: no sinks.
    """
    if sinks is not None and (documents is None or documents.way not in ("flex", "sdpa")):
        raise ValueError("attention sinks need documents from locate(…, sinks=True)")
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
        mixed = _flex(q, k, v, documents.where, sinks)
        return mixed.transpose(1, 2)
    size, scale = q.shape[-1], None
    if sinks is not None:
        scale = size**-0.5  # that of the heads before they get more elements
        q, k, v = _with_key_of_sink(q, k, v, sinks)
    # Not every supported torch and GPU has a kernel that takes fewer key heads than query heads
    # together with masks or float32. Without one SDPA would build the (T, T) matrix.
    if grouped and not _groups_in_kernel(q, documents):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    mixed = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=documents.where if documents else None,
        is_causal=documents is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return (mixed if sinks is None else mixed[..., :size]).transpose(1, 2)


def _flex(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, sinks: Tensor | None) -> Tensor:
    """Return FlexAttention of q (B, N, T, H), k and v (B, K, T, H), with sinks (N) unless None."""
    flex_attention, _ = flex_kernels()
    given: dict[str, Any] = {"block_mask": block_mask, "enable_gqa": q.shape[1] != k.shape[1]}
    if sinks is None:
        return flex_attention(q, k, v, **given)
    from torch.nn.attention.flex_attention import AuxRequest

    mixed, more = flex_attention(q, k, v, **given, return_aux=AuxRequest(lse=True))
    kept: Tensor = (more.lse - sinks[:, None]).sigmoid()  # (B, N, T)
    return mixed * kept[..., None].type_as(mixed)


def _with_key_of_sink(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (B, N, T, H), k and v (B, K, T, H) with more elements per head, and with one more
    key, whose score is the query head's sink (N) and whose value is 0. See [Note: sinks]."""
    size = q.shape[-1]
    more = 8 - size % 8  # kernels of GPUs are slow for sizes that are no multiple of 8
    # times √H, because SDPA divides scores by it
    held = (sinks * size**0.5).to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
    q = F.pad(torch.cat([q, held], dim=-1), (0, more - 1))
    last = (torch.arange(size + more, device=k.device) == size).to(k.dtype)
    k = torch.cat([F.pad(k, (0, more)), last.expand(*k.shape[:2], 1, -1)], dim=2)
    return q, k, F.pad(v, (0, more, 0, 1))


def _groups_in_kernel(q: Tensor, documents: AttentionDocuments | None) -> bool:
    gpu = capability(q.device)
    if gpu is None:
        return True
    # `gpu >= (8, 0)` would fail: torch 2.11 compiles no comparison of tuples.
    return documents is None and q.dtype != torch.float32 and gpu[0] >= 8


def _constant(function: Function) -> Function:
    """Make the compiler call a function only once, and insert its result as a constant."""
    # torch.compiler.assume_constant_result does only this, but imports the compiler: over a second.
    function.__dict__["_dynamo_marked_constant"] = True
    return function


@_constant
def capability(device: torch.device) -> Capability | None:
    return None if device.type == "cpu" else torch.cuda.get_device_capability(device)


@cache
def flex_kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return (flex_attention, create_block_mask), compiled so that they build no (T, T) matrix."""
    # imported here, because it takes over a second
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention), torch.compile(create_block_mask)


def _varlen_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, length: int, window: int | None
) -> Tensor:
    from torch.nn.attention import varlen  # imported here, because it imports the compiler

    function: Any = varlen.varlen_attn
    # (tokens before, tokens after). Unlike `window` it does not count the token itself.
    options: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if _asks_for_groups():
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    return function(q, k, v, cu_seqlens, cu_seqlens, length, length, **options)


_asks_for_groups = _constant(varlen_asks_for_groups)


# --- varlen on the CPU -----------------------------------------------------------------------
# A custom operator, into which neither the compiler nor the tracer of the plan looks: its loop
# depends on the values in cu_seqlens. (The decorator torch.library.custom_op would import the
# compiler.)

_LIBRARY = torch.library.Library("perdure", "DEF")
_LIBRARY.define(
    "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor ends) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "varlen_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, "
    "Tensor ends, Tensor out, Tensor sums) -> (Tensor, Tensor, Tensor)"
)


def _results(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:2], dtype=sums)


def _per_document(ends: Tensor, *tensors: Tensor) -> list[list[Tensor]]:
    """Cut tensors (tokens, heads, …) into views (1, heads, length, …) for each document."""
    places = [pair for pair in pairwise(ends.tolist()) if pair[0] < pair[1]]
    return [[x[a:b].transpose(0, 1)[None] for x in tensors] for a, b in places]


def _forward(q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    out, sums = _results(q, k, v, ends)
    contiguous = (x.contiguous() for x in (q, k, v))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for *inputs, out_here, sums_here in _per_document(ends, *contiguous, out, sums):
        mixed, logarithms = kernel(*inputs, 0.0, True)
        out_here.copy_(mixed)
        sums_here.copy_(logarithms)
    return out, sums


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    contiguous = [x.contiguous() for x in (gradient, q, k, v, out, sums)]
    gradients = _gradients(gradient, q, k, v, ends, out, sums)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for part in _per_document(ends, *contiguous, *gradients):
        for target, value in zip(part[6:], kernel(*part[:6], 0.0, True), strict=True):
            target.copy_(value)
    return gradients


def _gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    empty = partial(torch.empty_like, memory_format=torch.contiguous_format)
    return empty(q), empty(k), empty(v)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    # Only backward uses the logarithms of the softmax sums.
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
