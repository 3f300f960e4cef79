"""Activation checkpointing: blocks recompute their activations in backward instead of storing them
(Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost")."""

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
"""Matrix products and attention: operators whose results `selective` mode stores. By name, because
not every version of torch has all of them, and some are registered only by an import."""
_OVERWRITTEN = {"aten._scaled_mm.default", "aten._scaled_mm_v2.default"}
"""Operators whose results must not be stored in compiled code, which may overwrite a result that
its backward does not need. Attention's backward needs its result, and other products write into
memory that the compiler has allocated."""


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
        compiled: what is compiled later: "whole": the wrapped blocks; "pieces": modules inside the
            blocks, so results of _OVERWRITTEN operators are not stored.
        again: whether backward of a block runs in several parts, each of which recomputes the block
            (zero_bubble).
        draws: whether a block may draw random numbers, which recomputation must repeat.
    """
    replaced: dict[nn.Module, nn.Module] = {}
    deciding = bool(getattr(model, "stacks", ()))  # a router must choose the same experts again
    for block in blocks:
        contexts: dict[str, Any] = {}
        # A compiled block's graph updates buffers only once.
        counting = compiled == "no" and bool(_persistent_buffers(block))
        if mode == "selective" or counting or deciding:
            contexts["context_fn"] = partial(
                _contexts,
                partial(_selective, compiled, again) if mode == "selective" else None,
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
    """Return contexts for the forward pass of a block, and for its recomputation. `selective`:
    creates a mode that stores results of operators, and a mode that reuses them; `counting`: a
    block whose passes change persistent buffers; `deciding`: see [Note: decisions]."""
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
    """Context around a recomputation, with `inner` in it, that restores persistent buffers
    afterwards, so that a batch norm counts each batch once."""

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


def _selective(compiled: str, again: bool) -> tuple[TorchDispatchMode, ...]:
    if again:
        results: list[Any] = []

        def store(func: Any, _types: Any, args: Any, kwargs: Any) -> Any:
            result = func(*args, **kwargs)
            results.append(tree_map(lambda x: _VersionWrapper(_detached(x)), result))
            return result

        return _OperatorMode(_EXPENSIVE, store), _ReuseResults(results)
    modes: tuple[TorchDispatchMode, ...] = create_selective_checkpoint_contexts(_policy)
    if compiled == "whole":  # torch.compile recognises only torch's own modes
        return modes
    # torch's modes identify operators by counting them. They must not see others, such as FSDP's
    # gathers in a block, whose number differs between forward and recomputation.
    seen = _EXPENSIVE - _OVERWRITTEN if compiled == "pieces" else _EXPENSIVE
    return tuple(_OperatorMode(seen, mode.__torch_dispatch__) for mode in modes)


class _OperatorMode(TorchDispatchMode):
    """Calls `handle` for the operators in `seen`, in a block that runs eagerly."""

    supports_higher_order_operators = True  # such as flex_attention

    def __init__(self, seen: Collection[str], handle: Any) -> None:
        super().__init__()
        self._seen, self._handle = seen, handle

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled parts of a block, such as FlexAttention, stay compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in self._seen:
            return self._handle(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _ReuseResults(_OperatorMode):
    """Returns stored results in several recomputations, where torch's own mode allows only one."""

    def __init__(self, results: list[Any]) -> None:
        super().__init__(_EXPENSIVE, None)
        self._results = results

    def __enter__(self) -> Any:
        # The handler must not refer to this object: in a cycle, results would not be freed at once.
        left = iter(self._results)
        # Each recomputation gets its own tensor, because autograd sets metadata on it.
        self._handle = lambda *_: tree_map(lambda x: _detached(x.get_val(False)), next(left))
        return super().__enter__()


def _detached(value: Any) -> Any:
    """Detach a tensor, which keeps its version counter. Other values are returned unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    # Modes exclude this dispatch key, without which a view would get its own version counter.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = str(operator) in _EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
