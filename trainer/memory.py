"""Bytes of live tensors of this rank, by kind: what `perdure plan` predicts and `compare` measures.

Bytes are those of storages, each counted once, however many tensors look at it. Of a DTensor the
local part counts.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.parallel import ParallelModel


@dataclass(frozen=True)
class StateBytes:
    """Bytes of what lives from step to step on one rank."""

    parameters: int
    """What the model computes with and, under ZeRO-1, the slices that the optimizer updates."""
    gradients: int
    optimizer_state: int
    buffers: int


def measure_state(model: ParallelModel, optimizer: torch.optim.Optimizer) -> StateBytes:
    """What this rank holds now; gradients are there between backward pass and `zero_gradients`."""
    parameters = [*model.parameters.values(), *model.optimized.values()]
    return StateBytes(
        parameters=tensor_bytes(parameters),
        gradients=tensor_bytes(p.grad for p in parameters if p.grad is not None),
        optimizer_state=tensor_bytes(
            value
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ),
        buffers=tensor_bytes(model.module.buffers()),
    )


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors`."""
    return sum({_key(storage): storage.nbytes() for storage in map(_storage, tensors)}.values())


def activation_bytes(
    forward: Callable[[], torch.Tensor], module: nn.Module
) -> tuple[torch.Tensor, int]:
    """Run a forward pass and count what it leaves for the backward pass.

    Args:
        forward: gives the loss, and keeps nothing else.
        module: what it runs; parameters that are gathered at its end are not activations.

    Returns:
        The loss, and the bytes that were made in the pass and are alive after it.
    """
    with LiveTensors() as live:
        loss = forward()
    return loss, live.total(ignored=module.parameters())


class LiveTensors(TorchDispatchMode):
    """Follows the storages that operators make while it is entered, for as long as they live.

    Works on real and on fake tensors. What an operator takes and gives back within itself (the
    workspace of a kernel) is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.label = ""
        """Put on storages that are made from now on."""
        self.alive = 0
        """Bytes after the last operator."""
        self.peak = 0
        """Most bytes after any operator."""
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if operator.namespace == "prim":  # asks for a tensor's device, and the like
            return operator(*args, **(kwargs or {}))
        given = {_key(storage) for storage in _storages((args, kwargs))}
        result = operator(*args, **(kwargs or {}))
        for storage in _storages(result):
            known = self._made.get(_key(storage))
            # A view of what was given is not new, whether or not that was made in here.
            if _key(storage) not in given and (known is None or known[0]() is None):
                self._made[_key(storage)] = (weakref.ref(storage), self.label)
        self.alive = self.total()
        self.peak = max(self.peak, self.alive)
        return result

    def total(self, label: str | None = None, ignored: Iterable[torch.Tensor] = ()) -> int:
        """Bytes alive now: all, or those with a label; without the storages of some tensors."""
        left_out = {_key(_storage(tensor)) for tensor in ignored}
        total = 0
        for key, (reference, made_as) in list(self._made.items()):
            storage = reference()
            if storage is None:
                del self._made[key]
            elif key not in left_out and label in (None, made_as):
                total += storage.nbytes()
        return total


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [_storage(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def _key(storage: torch.UntypedStorage) -> int:
    return storage._cdata
