"""Storages, the memory behind tensors, for counting bytes.

Views of one storage count once. A storage counts as a whole, whatever part of it a tensor shows. A
DTensor counts by its local part.
"""

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch.distributed.tensor import DTensor

Storages: TypeAlias = dict[int, int]
"""Address of a storage → its bytes."""


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a tensor, or of a DTensor's local part."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def storages(tensors: Iterable[torch.Tensor], device: torch.device) -> Storages:
    """Non-empty storages of tensors on a kind of device."""
    sizes: Storages = {}
    for storage in map(storage_of, tensors):
        if storage.device.type == device.type and storage.nbytes():
            sizes[storage.data_ptr()] = storage.nbytes()
    return sizes


def nbytes(sizes: Storages) -> int:
    """Sum of bytes."""
    return sum(sizes.values())
