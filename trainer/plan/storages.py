"""Counts the bytes of tensors by their storages. A storage counts once and whole, however many
tensors are views of it. A DTensor counts with its local part."""

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch.distributed.tensor import DTensor

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
