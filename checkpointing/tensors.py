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
        if length != local.shape[dim]:
            local = local.narrow(dim, start, length)
    return local


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor as a flat uint8 view (any dtype, 0-dim ones too)."""
    return tensor.reshape(-1).view(torch.uint8)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, Tensor]:
    """The optimizer's state as `<fqn>.exp_avg`, `<fqn>.exp_avg_sq`, `<fqn>.step` (of AdamW; others
    likewise): the live tensors, not copies.

    State that does not exist yet, because no step was made, is made here, as zeros: so a checkpoint
    can be loaded into it.

    Args:
        optimizer: whose state is tensors, as that of all optimizers of torch.
        parameters: by FQN, such as `dict(model.named_parameters())`.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if any(p not in optimizer.state for p in trained.values()):
        _make_state(optimizer)
    return {
        f"{name}.{key}": tensor
        for name, parameter in trained.items()
        for key, tensor in optimizer.state[parameter].items()
        if isinstance(tensor, Tensor)
    }


@torch.no_grad()
def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its state by a step that changes nothing, and set it to zero."""
    if any(optimizer.state.values()):
        raise ValueError(
            "some parameters have optimizer state and some have none; take a step that gives every "
            "trained parameter a gradient, or freeze the others (requires_grad)"
        )
    rates = [(group, group["lr"]) for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.grad is not None for p in parameters):
        raise ValueError("ask for the optimizer's tensors before the first backward pass")
    for group, _ in rates:
        group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], Tensor) else 0.0
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in rates:
        group["lr"] = rate
    for state in optimizer.state.values():
        for tensor in state.values():
            if isinstance(tensor, Tensor):
                tensor.zero_()
