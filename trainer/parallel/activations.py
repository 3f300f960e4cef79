"""Activation checkpointing: blocks recompute their activations in backward instead of storing them.

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
"""Matrix products and attention: results that `selective` mode stores. By name, because not every
version of torch has all of them, and some are registered only when their module is imported."""
_OVERWRITTEN = {"aten._scaled_mm.default", "aten._scaled_mm_v2.default"}
"""Operators whose result must not be stored where compiled code runs, because that may overwrite a
result which its backward does not need. Of the other operators, attention needs its result in
backward, and products write into memory that the compiler has allocated."""


def apply_activation_checkpointing(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mode: Literal["full", "selective"],
    compiled: Literal["no", "whole", "pieces"] = "no",
    again: bool = False,
    draws: bool = True,
) -> list[nn.Module]:
    """Wrap each block of `model` in place; returns the wrapped blocks, in order.

    Args:
        mode: "full" recomputes all; "selective" stores the results of _EXPENSIVE operators.
        compiled: "whole": the wrapped blocks are compiled later; "pieces": modules inside the
            blocks are compiled later, so results of _OVERWRITTEN operators are not stored; "no":
            nothing is compiled.
        again: whether backward of a block runs in several parts, each of which recomputes the block
            (zero_bubble).
        draws: whether a block may draw random numbers, which recomputation must repeat.
    """
    replaced: dict[nn.Module, nn.Module] = {}
    deciding = bool(getattr(model, "stacks", ()))  # a router must choose the same experts again
    for block in blocks:
        contexts: dict[str, Any] = {}
        # Only without compilation: a compiled block's graph updates buffers once.
        counting = compiled == "no" and bool(_persistent_buffers(block))
        if mode == "selective" or counting or deciding:
            selective = partial(_keeping_modes if again else _selective, compiled)
            contexts["context_fn"] = partial(
                _contexts,
                selective if mode == "selective" else None,
                block if counting else None,
                deciding,
            )
        # The states of random generators are saved only if needed: saving can outlast a block.
        replaced[block] = checkpoint_wrapper(block, preserve_rng_state=draws, **contexts)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # not named_children, which skips second names
            # The wrapper must keep its reference to the block.
            if child in replaced and parent is not replaced[child]:
                parent._modules[name] = replaced[child]
    return [replaced[block] for block in blocks]


def _contexts(
    selective: Callable[[], Sequence[TorchDispatchMode]] | None,
    counting: nn.Module | None,
    deciding: bool,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return a context for the forward pass of a block, and a context for its recomputation.

    Args:
        selective: creates a mode that stores results of operators, and a mode that reuses them;
            None: none is stored.
        counting: a block whose passes change persistent buffers, or None.
        deciding: whether to store routing decisions, see [Note: decisions].
    """
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
    """Context around a recomputation that restores persistent buffers afterwards, so that a batch
    norm counts each batch once. `inner`: a context to enter within."""

    def __init__(self, block: nn.Module, inner: AbstractContextManager[Any]) -> None:
        self._block, self._inner = block, inner

    def __enter__(self) -> None:
        self._kept = [(*found, found[-1].clone()) for found in _persistent_buffers(self._block)]
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        for module, name, buffer, before in self._kept:
            module._buffers[name] = buffer
            # `data` bypasses autograd's version counter, which would make backward fail.
            buffer.data.copy_(before)
        del self._kept


def _selective(compiled: str) -> tuple[TorchDispatchMode, ...]:
    modes: tuple[TorchDispatchMode, ...] = create_selective_checkpoint_contexts(_policy)
    if compiled == "whole":  # torch.compile recognises only torch's own modes
        return modes
    seen = _EXPENSIVE - _OVERWRITTEN if compiled == "pieces" else _EXPENSIVE
    return tuple(_FilterOperators(mode, seen) for mode in modes)


def _keeping_modes(_compiled: str) -> tuple[TorchDispatchMode, ...]:
    results: list[Any] = []
    return _StoreResults(results), _ReuseResults(results)


class _OperatorMode(TorchDispatchMode):
    """Base of the modes that intercept the operators of a block that runs eagerly."""

    supports_higher_order_operators = True  # such as flex_attention

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled parts of a block, such as FlexAttention, stay compiled."""
        return True


class _StoreResults(_OperatorMode):
    """Stores the results of _EXPENSIVE operators in `results`, in order."""

    def __init__(self, results: list[Any]) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) in _EXPENSIVE:
            self._results.append(tree_map(lambda x: _VersionWrapper(_detached(x)), result))
        return result


class _ReuseResults(_OperatorMode):
    """Returns the results stored by `_StoreResults` in any number of recomputations of a block,
    where torch's own mode allows only one."""

    def __init__(self, results: list[Any]) -> None:
        super().__init__()
        self._results = results

    def __enter__(self) -> Any:
        self._left = iter(self._results)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) not in _EXPENSIVE:
            return func(*args, **(kwargs or {}))
        # Each recomputation gets its own tensor, because autograd sets metadata on it.
        return tree_map(lambda x: _detached(x.get_val(False)), next(self._left))


def _detached(value: Any) -> Any:
    """Detach a tensor, which then shares the version counter of `value`. Other values are returned
    unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    # Modes exclude this dispatch key, without which a view would get its own version counter.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


class _FilterOperators(_OperatorMode):
    """Passes only the operators in `seen` on to `mode`, one of torch's. That mode identifies
    operators by counting them, and FSDP's gathers in a block differ in number between forward and
    recomputation."""

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
