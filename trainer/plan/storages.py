"""Storages, the memory behind tensors: what is counted wherever bytes are counted.

Views of one storage count once, and a storage counts whole, whatever part of it a tensor shows. Of
a DTensor the local part counts.
"""

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch.distributed.tensor import DTensor

Storages: TypeAlias = dict[int, int]
"""Address of a storage → its bytes."""


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage that a tensor, or this rank's part of it, lies in."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()


def storages(tensors: Iterable[torch.Tensor], device: torch.device) -> Storages:
    """The storages of tensors that lie on a kind of device; empty ones are left out."""
    found: Storages = {}
    for storage in map(storage_of, tensors):
        if storage.device.type == device.type and storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def nbytes(found: Storages) -> int:
    """Bytes of all of them together."""
    return sum(found.values())
