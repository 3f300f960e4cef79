"""Activation checkpointing: trade computation for memory, block by block.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_EXPENSIVE = {
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten._grouped_mm.default",
    "aten._scaled_mm.default",
    "aten._scaled_mm_v2.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "torch_attn._varlen_attn.default",
    "perdure.varlen_attention.default",
    "flex_attention",
}
"""Matrix products and attention, by name: not every version of torch has them all, and some are
known only once their module is imported."""
_OVERWRITTEN = {"aten._scaled_mm.default", "aten._scaled_mm_v2.default"}
"""What a compiler calls as it is, and may write over: backward does not need the result. It needs
that of attention, and for other products the compiler makes room itself, past these modes."""


def apply_activation_checkpointing(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mode: Literal["full", "selective"],
    compiled: Literal["no", "whole", "pieces"] = "no",
) -> list[nn.Module]:
    """Wrap each block in place; returns the wrapped blocks, in order. They may be `compiled`
    afterwards as a whole; what is in them, in pieces. Of a piece attention alone is kept."""
    contexts: dict[str, Any] = {}
    if mode == "selective":
        contexts["context_fn"] = partial(_selective, compiled)
    replaced: dict[nn.Module, nn.Module] = {
        # Nothing in a step draws random numbers that recomputation would have to replay, unless a
        # user's own model has dropout; torch's default of keeping the RNG state covers both.
        block: checkpoint_wrapper(block, **contexts)
        for block in blocks
    }
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in replaced and parent is not replaced[child]:
                setattr(parent, name, replaced[child])
    return [replaced[block] for block in blocks]


def _selective(compiled: str) -> tuple[TorchDispatchMode, ...]:
    modes: tuple[TorchDispatchMode, ...] = create_selective_checkpoint_contexts(_policy)
    if compiled == "whole":  # a compiler knows torch's
        return modes
    seen = _EXPENSIVE - _OVERWRITTEN if compiled == "pieces" else _EXPENSIVE
    return tuple(_Only(mode, seen) for mode in modes)


class _Only(TorchDispatchMode):
    """Shows one of torch's modes what may be kept, and nothing else. It counts operators, and those
    by which FSDP gathers what lies inside of a block are not as many in recomputation."""

    supports_higher_order_operators = True  # flex_attention is one

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As torch's: what a block calls compiled, such as FlexAttention, stays so."""
        return True

    def __init__(self, mode: Any, seen: Collection[str]) -> None:
        super().__init__()
        self._mode, self._seen = mode, seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in self._seen:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = str(operator) in _EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
