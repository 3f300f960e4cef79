"""Counts the bytes of tensors by their storages. A storage counts once and whole, however many
tensors are views of it. A DTensor counts with its local part. `PlanLiveTensors` measures what
operators allocate and have not freed."""

import weakref
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Storages: TypeAlias = dict[int, int]


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, or of a DTensor's local part."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def storages(tensors: Iterable[torch.Tensor], device: torch.device) -> Storages:
    """Return the non-empty storages of tensors that are on a device of the type of `device`."""
    sizes: Storages = {}
    for storage in map(storage_of, tensors):
        if storage.device.type == device.type and storage.nbytes():
            sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def nbytes(sizes: Storages) -> int:
    return sum(sizes.values())


class PlanLiveTensors(TorchDispatchMode):
    """Mode that measures the bytes of storages that operators allocate, until they are freed. The
    storages of fake tensors have a size, too, but no memory. Memory that an operator frees before
    it returns, such as a kernel's workspace, is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.label = ""
        self.alive = 0
        """Bytes that were allocated, and not freed, when the last operator returned."""
        self.peak = 0
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if operator.namespace == "prim":  # queries such as a tensor's device
            return operator(*args, **(kwargs or {}))
        inputs = {storage._cdata for storage in _storages((args, kwargs))}
        result = self.compute(operator, args, kwargs or {})
        for storage in _storages(result):
            known = self._made.get(storage._cdata)
            # A result that shares an input's storage is not a new allocation.
            if storage._cdata not in inputs and (known is None or known[0]() is None):
                self._made[storage._cdata] = (weakref.ref(storage), self.label)
        self.alive = self.total()
        self.peak = max(self.peak, self.alive)
        return result

    def compute(self, operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    def total(self, label: str | None = None, ignored: Iterable[torch.Tensor] = ()) -> int:
        """Return the bytes that are allocated now. With `label`, count only storages with that
        label. Never count the storages of `ignored`."""
        left_out = {storage_of(tensor)._cdata for tensor in ignored}
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
