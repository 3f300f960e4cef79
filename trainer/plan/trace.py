"""Traces one forward and backward pass on fake tensors: memory of activations, and work.

If all blocks of a model are equal, only `DEPTH` of them are traced, and all others count like the
first. Fake tensors have shapes and storages but no memory, so a trace needs no GPU, and takes a
fraction of a second for any size of model. CUDA kernels are replaced by functions that keep the
same tensors for backward.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.data.packing import room_for_documents
from trainer.models import attention, loss
from trainer.models.decoder import Decoder
from trainer.parallel.activations import apply_activation_checkpointing
from trainer.parallel.parallelize import cut_layers
from trainer.plan.blueprint import PlannedModel, PlannedStage
from trainer.plan.tape import PlannedPassTrace, PlanTape
from trainer.recipe import RecipeError, StrategySection, strategies
from trainer.tasks.model_blocks import repeated_blocks

USUAL_GPU = 80e9
"""Bytes of GPU memory that are assumed if neither a GPU nor a machine is known."""

Recompute: TypeAlias = Literal["none", "full", "selective"]
WHOLE = StrategySection()
"""Strategy without model parallelism: each rank computes whole micro-batches."""


@cache
def trace(
    blueprint: PlannedModel,
    micro_batch: int,
    recompute: Recompute,
    dtype: torch.dtype,
    autocast: bool,
    device: Literal["cpu", "cuda"],
    flash: bool = True,
    gpu_memory: float = USUAL_GPU,
    keep_gradients: bool | None = None,
    cut: StrategySection = WHOLE,
    stage: PlannedStage | None = None,
    in_two: bool = False,
    compiled: bool = False,
) -> PlannedPassTrace:
    """Trace a pass of a model, or of a pipeline stage, which is derived from a pass of the model.
    Raises RecipeError if the model does not run on fake tensors.

    Args:
        autocast: whether parameters keep their dtype and operators cast them, as under DDP;
            otherwise they have `dtype`, as gathered by FSDP.
        device: device whose kernels for attention and norms are traced.
        flash: whether the GPU has flash attention, as from compute capability 8.0 on.
        gpu_memory: bytes of GPU memory, which determine the chunks of the loss.
        keep_gradients: whether all gradients of a unit stay allocated, as under FSDP; otherwise
            each is freed at once, as DDP's buckets are counted separately. None: if not autocast.
        cut: strategy with only those keys of model parallelism that change a pass.
        in_two: whether gradients of weights are computed after all gradients of activations
            (zero_bubble). In the first stage they never are.
        compiled: whether blocks are compiled. This changes the traced work, but not the memory.
    """
    keep = not autocast if keep_gradients is None else keep_gradients
    gpu = (flash, gpu_memory) if device == "cuda" else None
    in_two = in_two and stage is not None and not stage.first
    # If two stages hold a tied embedding, it counts as two weights with separate gradients.
    untied = stage is not None and not (stage.first and stage.last)
    tape = _taped(
        blueprint, micro_batch, recompute, dtype, autocast, gpu, keep, cut, in_two, untied, compiled
    )
    if stage is None:
        return tape.result(blueprint.block_count, True, True)
    return tape.result(stage.blocks, stage.first, stage.last)


@cache
def _taped(
    blueprint: PlannedModel,
    micro_batch: int,
    recompute: Recompute,
    dtype: torch.dtype,
    autocast: bool,
    gpu: tuple[bool, float] | None,
    keep: bool,
    cut: StrategySection,
    in_two: bool,
    untied: bool,
    compiled: bool,
) -> PlanTape:
    """Record a pass of the whole model, see `trace`. `gpu`: (flash, gpu_memory), or None for a CPU.
    `untied`: whether a tied output head gets a separate weight."""
    # A copy, because hooks, casts and model parallelism change the model.
    model = copy.deepcopy(blueprint.traced)
    if untied and isinstance(model, Decoder) and model.lm_head is None:
        sizes = model.model.architecture
        model.lm_head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False, device="meta")
        model.lm_head.weight.requires_grad_(model.model.embed_tokens.weight.requires_grad)
    blocks = repeated_blocks(model)
    depth = len(blocks)
    tape = PlanTape(depth, blueprint.seq_len, compiled)
    shape = (micro_batch, blueprint.seq_len)
    experts: Sequence[nn.Module] = ()
    call: Callable[..., Any] = lambda inputs: model(**inputs)  # noqa: E731
    imagined: Any = nullcontext()
    if cut != WHOLE:
        # Imported only if the recipe uses it.
        from trainer.parallel.context import ContextParallel
        from trainer.plan.imagined_ranks import PlannedRanks, imagined_ranks, ring_of

        around = strategies.cp.ranks(cut)
        ring = ring_of(*shape, around) if around > 1 else None
        imagined = imagined_ranks(tape.send, ring, gpu is not None)
        if ring:
            call = partial(ContextParallel(ring.group), model)
        with imagined_ranks(tape.send, ring):
            experts = cut_layers(model, cut, lambda name: PlannedRanks(strategies.sizes(cut)[name]))
    if recompute != "none":
        blocks = apply_activation_checkpointing(model, blocks, recompute)
    if not autocast:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    try:
        with ExitStack() as stack:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            # Fake CPU tensors serve for all devices.
            model.to_empty(device="cpu")
            inputs = {
                name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "labels")
            }
            if blueprint.documents == "document_ids":
                inputs["document_ids"] = torch.zeros(shape, dtype=torch.int32)
            elif blueprint.documents == "cu_seqlens":
                ends = room_for_documents(*shape) + 1
                inputs["cu_seqlens"] = torch.zeros(ends, dtype=torch.int32)
            # One pair of answers per sequence is assumed.
            if isinstance(model, Decoder) and model.preference:
                answers = 2 * micro_batch
                inputs["segments"] = torch.zeros(shape, dtype=torch.int64)
                inputs["answer_labels"] = torch.ones(answers, dtype=torch.int64)
                inputs["reference"] = torch.zeros(answers)
            below = model.model.embed_tokens if isinstance(model, Decoder) else None
            tape.follow(
                model, blocks, keep_gradients=keep, in_two=in_two, experts=experts,
                frozen_below=below is not None and not below.weight.requires_grad,
            )  # fmt: skip
            if gpu:
                stack.enter_context(cuda_kernels(*gpu))
            stack.enter_context(imagined)
            stack.enter_context(tape)
            casts = autocast and dtype != torch.float32
            with (
                torch.autocast("cpu", dtype=dtype, cache_enabled=False) if casts else nullcontext()
            ):
                loss = _loss(call(inputs))
            tape.forward_ends()
            if in_two:
                tape.backward_in_two(loss, model)
            else:
                loss.backward()
            tape.backward_ends()
    except Exception as error:  # a user's model may raise anything
        first_line = (str(error).splitlines() or [""])[0]
        raise RecipeError(
            f"model: cannot be traced on fake tensors ({type(error).__name__}: {first_line}), so "
            "its activations are not known; measure them with `perdure compare`"
        ) from error
    return tape


def _loss(result: Any) -> torch.Tensor:
    return result["loss"] if isinstance(result, Mapping) else getattr(result, "loss", result)


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
        max_chunk_logits=lambda _: loss.logits_in(memory),
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
