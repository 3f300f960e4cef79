"""torch tensors and DTensors: their specs for a plan, and the memory of their local parts."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from checkpointing.format.layout import DTYPE_BYTES, TensorMeta
from checkpointing.format.plan import (
    REPLICATE,
    TensorBox,
    TensorLayout,
    TensorSpec,
    TensorSplit,
    replicated,
)

_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16", "U16": "uint16", "F16": "float16",
    "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64",
    "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, _TORCH_NAMES[name]) for name in DTYPE_BYTES
}
"""safetensors' name of a dtype → torch dtype."""
STORED_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def place_of(tensor: Tensor) -> Hashable:
    """Returns a key that is equal for tied weights, which `state_dict` lists under several names.
    DTensors count as tied only if they are the same object, since a rank may hold no memory of them
    to compare."""
    dense = tensor.layout == torch.strided and not tensor.is_meta
    if isinstance(tensor, DTensor) or not dense or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def specs_of(tensors: Mapping[str, Tensor], ranks: Sequence[int]) -> dict[str, TensorSpec]:
    """Returns the spec of each tensor, for a plan of the (global) `ranks`. Every rank holds a plain
    tensor whole; a DTensor may be on any mesh. Raises ValueError if a dtype or placement cannot be
    stored, or a mesh has ranks outside of `ranks`."""
    whole = replicated(ranks)
    known = set(ranks)
    layouts: dict[Any, tuple[TensorLayout, ...]] = {}
    specs = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in STORED_DTYPES:
            raise ValueError(
                f"{name}: safetensors does not store {tensor.dtype}; convert it to another dtype"
            )
        meta = TensorMeta(STORED_DTYPES[tensor.dtype], tuple(tensor.shape))
        spread: tuple[TensorLayout, ...] = (whole,)
        if isinstance(tensor, DTensor):
            # Thousands of tensors share a few layouts, and each layout lists all ranks of its mesh.
            key = id(tensor.device_mesh), tensor.placements
            if key not in layouts:
                layouts[key] = (_layout(name, tensor, known),)
            spread = layouts[key]
        specs[name] = TensorSpec(meta, spread)
    return specs


def _layout(name: str, tensor: DTensor, known: set[int]) -> TensorLayout:
    mesh = tensor.device_mesh
    layout = TensorLayout(
        tuple(mesh.mesh.flatten().tolist()),
        tuple(mesh.shape),
        tuple(_split(name, placement) for placement in tensor.placements),
    )
    if not known.issuperset(layout.ranks):
        raise ValueError(
            f"{name}: lives on ranks outside the group that saves or loads; use a group with all "
            "ranks of its mesh"
        )
    return layout


def _split(name: str, placement: Any) -> TensorSplit:
    if isinstance(placement, Replicate):
        return REPLICATE
    if not hasattr(placement, "dim"):
        raise ValueError(f"{name}: a tensor placed as {placement} cannot be saved; reduce it first")
    # Not isinstance: `_StridedShard` (FSDP over tensor parallelism) is a subclass of Shard only in
    # some versions of torch.
    return TensorSplit(placement.dim, getattr(placement, "split_factor", 1))


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor: its live memory, detached, not a copy."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # to_local is 50 times faster without autograd
            tensor = tensor.to_local()
    return tensor.detach()


def box_view(local: Tensor, box: TensorBox) -> Tensor:
    for dim, (start, length) in enumerate(zip(box.local_offset, box.shape, strict=True)):
        if length != local.shape[dim]:
            local = local.narrow(dim, start, length)
    return local


@torch.no_grad()
def tensors_not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns names of tensors whose local part has NaN or infinity. Synchronises with the GPU
    once."""
    numbers = {
        name: local_tensor(tensor)
        for name, tensor in tensors.items()
        if tensor.is_floating_point() or tensor.is_complex()
    }
    verdicts = [  # torch cannot test 8-bit floats for finiteness
        (local.float() if local.itemsize == 1 else local).isfinite().all().reshape(1)
        for local in numbers.values()
    ]
    if not verdicts:
        return []
    device = next((one.device for one in verdicts if one.is_cuda), torch.device("cpu"))
    finite = torch.cat([one.to(device, non_blocking=True) for one in verdicts]).tolist()
    return [name for name, good in zip(numbers, finite, strict=True) if not good]


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a flat uint8 view of a contiguous tensor of any dtype and dimension."""
    return tensor.reshape(-1).view(torch.uint8)


@torch.no_grad()
def broadcast(
    tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Copy the tensors of rank `source` of a group (None: the default group) to all its ranks, in
    one message. Called on all its ranks. `tensors` are plain, or DTensors, whose local parts are
    copied; their total size is equal on all ranks. The group carries tensors on `device`."""
    # large elements first, so that each part is aligned to its element size
    parts = sorted(map(local_tensor, tensors), key=lambda part: -part.itemsize)
    message = torch.cat([as_bytes(part).to(device) for part in parts])
    dist.broadcast(message, group=group, group_src=source)
    for part, data in zip(parts, message.split([part.nbytes for part in parts]), strict=True):
        part.copy_(data.view(part.dtype).view(part.shape))
