"""Follows the bytes that operators allocate while they live."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.plan.storages import storage_of


class LiveTensors(TorchDispatchMode):
    """Follows the storages that operators allocate inside this mode.

    Works on real and on fake tensors, which have storages without memory. Memory that an operator
    allocates and frees within itself, such as a kernel's workspace, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.label = ""
        """Label of storages allocated from now on."""
        self.alive = 0
        """Bytes after the last operator."""
        self.peak = 0
        """Most bytes after any operator."""
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if operator.namespace == "prim":  # queries such as a tensor's device
            return operator(*args, **(kwargs or {}))
        inputs = {_key(storage) for storage in _storages((args, kwargs))}
        result = self.compute(operator, args, kwargs or {})
        for storage in _storages(result):
            known = self._made.get(_key(storage))
            # A view of an input is not a new allocation, wherever the input was allocated.
            if _key(storage) not in inputs and (known is None or known[0]() is None):
                self._made[_key(storage)] = (weakref.ref(storage), self.label)
        self.alive = self.total()
        self.peak = max(self.peak, self.alive)
        return result

    def compute(self, operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run an operator."""
        return operator(*args, **kwargs)

    def total(self, label: str | None = None, ignored: Iterable[torch.Tensor] = ()) -> int:
        """Bytes alive now: all, or those with a label; without the storages of `ignored`."""
        left_out = {_key(storage_of(tensor)) for tensor in ignored}
        total = 0
        for key, (reference, made_as) in list(self._made.items()):
            storage = reference()
            if storage is None:
                del self._made[key]
            elif key not in left_out and label in (None, made_as):
                total += storage.nbytes()
        return total


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [storage_of(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _key(storage: torch.UntypedStorage) -> int:
    return storage._cdata
