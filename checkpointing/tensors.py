"""torch's side of the plan: tensors and DTensors → specs, and the bytes of a box."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from checkpointing.layout import DTYPE_BYTES, TensorMeta
from checkpointing.plan import REPLICATE, Box, Layout, Split, TensorSpec, replicated

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
"""torch dtype by safetensors' name."""
_STORED_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def specs_of(tensors: Mapping[str, Tensor], ranks: Sequence[int]) -> dict[str, TensorSpec]:
    """What the plan needs to know of each tensor.

    Args:
        tensors: plain tensors, which every rank holds whole, or DTensors on any mesh.
        ranks: global ranks of the group that saves or loads.

    Raises:
        ValueError: a dtype or placement that cannot be stored, or a mesh with other ranks.
    """
    whole = replicated(ranks)
    known = set(ranks)
    layouts: dict[Any, tuple[Layout, ...]] = {}
    specs = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in _STORED_DTYPES:
            raise ValueError(f"{name}: safetensors does not store {tensor.dtype}")
        meta = TensorMeta(_STORED_DTYPES[tensor.dtype], tuple(tensor.shape))
        spread: tuple[Layout, ...] = (whole,)
        if isinstance(tensor, DTensor):
            key = id(tensor.device_mesh), tensor.placements
            if key not in layouts:
                layouts[key] = (_layout(name, tensor, known),)
            spread = layouts[key]
        specs[name] = TensorSpec(meta, spread)
    return specs


def _layout(name: str, tensor: DTensor, known: set[int]) -> Layout:
    mesh = tensor.device_mesh
    layout = Layout(
        tuple(mesh.mesh.flatten().tolist()),
        tuple(mesh.shape),
        tuple(_split(name, placement) for placement in tensor.placements),
    )
    if not known.issuperset(layout.ranks):
        raise ValueError(f"{name}: lives on ranks outside the group of this Checkpointer")
    return layout


def _split(name: str, placement: Any) -> Split:
    if isinstance(placement, Replicate):
        return REPLICATE
    if not hasattr(placement, "dim"):
        raise ValueError(f"{name}: a tensor placed as {placement} cannot be saved; reduce it first")
    # `_StridedShard` (FSDP over tensor parallelism) is a Shard in some versions of torch, in
    # others not; what tells it is its factor.
    return Split(placement.dim, getattr(placement, "split_factor", 1))


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, detached: the live storage, not a copy."""
    with (
        torch.no_grad()
    ):  # without gradients DTensor hands out its storage as it is: 50 times faster
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def box_view(local: Tensor, box: Box) -> Tensor:
    """A box of a local tensor, as a view."""
    for dim, (start, length) in enumerate(zip(box.local_offset, box.shape, strict=True)):
        local = local.narrow(dim, start, length)
    return local


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor as a flat uint8 view (any dtype, 0-dim ones too)."""
    return tensor.reshape(-1).view(torch.uint8)
