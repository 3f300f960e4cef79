"""Activation checkpointing: trade computation for memory, block by block.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _VersionWrapper,
    create_selective_checkpoint_contexts,
)

from trainer.models.decisions import keeping_decisions

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
    again: bool = False,
    draws: bool = True,
) -> list[nn.Module]:
    """Wrap each block in place; returns the wrapped blocks, in order.

    Args:
        model: that has the blocks.
        blocks: its repeated parts.
        mode: what is recomputed.
        compiled: blocks are compiled afterwards as a whole; or what is in them, in pieces. Of a
            piece attention alone is kept.
        again: a block that is not compiled has several backward passes, and is recomputed in each.
        draws: a block may draw random numbers, and its repetition is to draw them again.
    """
    replaced: dict[nn.Module, nn.Module] = {}
    deciding = bool(getattr(model, "stacks", ()))  # where tokens go
    for block in blocks:
        contexts: dict[str, Any] = {}
        # A compiler knows what changes buffers, and does it once.
        counting = compiled == "no" and bool(_persistent_buffers(block))
        if mode == "selective" or counting or deciding:
            selective = partial(_kept if again else _selective, compiled)
            contexts["context_fn"] = partial(
                _contexts,
                selective if mode == "selective" else None,
                block if counting else None,
                deciding,
            )
        # To keep and set the state of the generators takes the host longer than some blocks.
        replaced[block] = checkpoint_wrapper(block, preserve_rng_state=draws, **contexts)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # one block may have several names
            if child in replaced and parent is not replaced[child]:
                parent._modules[name] = replaced[child]
    return [replaced[block] for block in blocks]


def _contexts(
    selective: Callable[[], Sequence[TorchDispatchMode]] | None,
    counting: nn.Module | None,
    deciding: bool,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of the forward pass and of its repetition. `selective` makes contexts that keep
    results. `counting`: a block whose passes change buffers. `deciding`: see [Note: decisions]."""
    forward: AbstractContextManager[Any] = nullcontext()
    again: AbstractContextManager[Any] = nullcontext()
    if selective:
        forward, again = selective()
    if counting:
        again = _Uncounted(counting, again)
    return keeping_decisions(forward, again) if deciding else (forward, again)


def _persistent_buffers(block: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    return [
        (module, name, buffer)
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


class _Uncounted:
    """Persistent buffers are after a repetition what they were before it: a batch norm counts each
    batch once."""

    def __init__(self, block: nn.Module, inner: AbstractContextManager[Any]) -> None:
        self._block, self._inner = block, inner

    def __enter__(self) -> None:
        self._kept = [(*found, found[-1].clone()) for found in _persistent_buffers(self._block)]
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        for module, name, buffer, before in self._kept:
            module._buffers[name] = buffer
            buffer.data.copy_(before)  # past autograd: backward does not need what it holds
        del self._kept


def _selective(compiled: str) -> tuple[TorchDispatchMode, ...]:
    modes: tuple[TorchDispatchMode, ...] = create_selective_checkpoint_contexts(_policy)
    if compiled == "whole":  # a compiler knows torch's
        return modes
    seen = _EXPENSIVE - _OVERWRITTEN if compiled == "pieces" else _EXPENSIVE
    return tuple(_Only(mode, seen) for mode in modes)


def _kept(_compiled: str) -> tuple[TorchDispatchMode, ...]:
    results: list[Any] = []
    return _Keeping(results), _Repeating(results)


class _Mode(TorchDispatchMode):
    """A mode for what a block does eagerly."""

    supports_higher_order_operators = True  # flex_attention is one

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As torch's: what a block calls compiled, such as FlexAttention, stays so."""
        return True


class _Keeping(_Mode):
    """Keeps the results of expensive operators, in their order."""

    def __init__(self, results: list[Any]) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) in _EXPENSIVE:
            self._results.append(tree_map(lambda x: _VersionWrapper(_detached(x)), result))
        return result


class _Repeating(_Mode):
    """Gives the results that `_Keeping` has kept, in each repetition of a block. torch's own mode
    gives them in one."""

    def __init__(self, results: list[Any]) -> None:
        super().__init__()
        self._results = results

    def __enter__(self) -> Any:
        self._left = iter(self._results)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) not in _EXPENSIVE:
            return func(*args, **(kwargs or {}))
        # Autograd writes to the tensor that it gets, so each repetition has one of its own.
        return tree_map(lambda x: _detached(x.get_val(False)), next(self._left))


def _detached(value: Any) -> Any:
    """A tensor without its history, whose changes are still counted; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    # Beneath a mode this key is off, and a view would count changes of its own.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


class _Only(_Mode):
    """Shows one of torch's modes what may be kept, and nothing else. It counts operators, and those
    by which FSDP gathers what lies inside of a block are not as many in recomputation."""

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
