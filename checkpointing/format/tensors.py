"""torch's side of the plan: tensors and DTensors → specs, and the bytes of a box."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from checkpointing.format.layout import DTYPE_BYTES, TensorMeta
from checkpointing.format.plan import REPLICATE, Box, Layout, Split, TensorSpec, replicated

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
STORED_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def place_of(tensor: Tensor) -> Hashable:
    """Equal for two tensors that are one: tied weights, which `state_dict` has under each of their
    names. DTensors must be the same object, as a rank may have nothing of them to compare."""
    dense = tensor.layout == torch.strided and not tensor.is_meta
    if isinstance(tensor, DTensor) or not dense or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


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
        if tensor.dtype not in STORED_DTYPES:
            raise ValueError(f"{name}: safetensors does not store {tensor.dtype}")
        meta = TensorMeta(STORED_DTYPES[tensor.dtype], tuple(tensor.shape))
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
        raise ValueError(f"{name}: lives on ranks outside the group that saves or loads")
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
    return _memory(tensor).detach()


def box_view(local: Tensor, box: Box) -> Tensor:
    """A box of a local tensor, as a view."""
    for dim, (start, length) in enumerate(zip(box.local_offset, box.shape, strict=True)):
        if length != local.shape[dim]:
            local = local.narrow(dim, start, length)
    return local


@torch.no_grad()
def tensors_not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors of which this rank's part holds NaN or infinity. Waits for a GPU once."""
    numbers = {
        name: local_tensor(tensor)
        for name, tensor in tensors.items()
        if tensor.is_floating_point() or tensor.is_complex()
    }
    verdicts = [  # torch compares no 8-bit floats
        (local.float() if local.itemsize == 1 else local).isfinite().all().reshape(1)
        for local in numbers.values()
    ]
    if not verdicts:
        return []
    device = next((one.device for one in verdicts if one.is_cuda), torch.device("cpu"))
    finite = torch.cat([one.to(device, non_blocking=True) for one in verdicts]).tolist()
    return [name for name, good in zip(numbers, finite, strict=True) if not good]


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor as a flat uint8 view (any dtype, 0-dim ones too)."""
    return tensor.reshape(-1).view(torch.uint8)


@torch.no_grad()
def broadcast(
    tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Give all ranks of a group what one has in its tensors, in one message. On all of them.

    Args:
        tensors: plain, or DTensors, of which this rank's parts count; as many bytes on each rank.
        source: rank in the group.
        group: None: the default one.
        device: of what the group carries.
    """
    # From large elements to small ones: so each begins at a multiple of its size.
    parts = sorted(map(local_tensor, tensors), key=lambda part: -part.itemsize)
    message = torch.cat([as_bytes(part).to(device) for part in parts])
    dist.broadcast(message, group=group, group_src=source)
    for part, data in zip(parts, message.split([part.nbytes for part in parts]), strict=True):
        part.copy_(data.view(part.dtype).view(part.shape))


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> dict[str, Tensor]:
    """The optimizer's state as `<fqn>.exp_avg`, `<fqn>.exp_avg_sq`, `<fqn>.step` (of AdamW; others
    likewise): the live tensors, not copies.

    State that does not exist yet, because no step was made, is made here, as zeros: so a checkpoint
    can be loaded into it. What is still zero when the optimizer makes its first step, it begins
    itself, as if this had never been called: NAdam begins with a product of 1, Rprop with the
    learning rate, SGD with the first gradient. The tensors returned here then hold that.

    Args:
        optimizer: whose state is tensors alone: of torch's all but LBFGS and SparseAdam.
        parameters: by FQN, such as `dict(model.named_parameters())`.

    Raises:
        ValueError: the optimizer has state that is no tensor, or cannot make any yet; says why.
    """
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if any(p not in optimizer.state for p in trained.values()):
        _make_state(optimizer)
    for name, parameter in trained.items():
        for key, value in optimizer.state[parameter].items():
            if value is not None and not isinstance(value, Tensor):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key} of {name} as {type(value).__name__}: "
                    "only tensors are saved; choose an optimizer whose state is tensors alone"
                )
    return {
        f"{name}.{key}": tensor
        for name, parameter in trained.items()
        for key, tensor in optimizer.state[parameter].items()
        if isinstance(tensor, Tensor)
    }


PORTION_BYTES = 1 << 30
"""Bytes of whole parameters that get their state at once, beyond a single one: meanwhile there are
a copy and a gradient of each."""


@torch.no_grad()
def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its state by a step over nothing, and set it to zero. Parameters,
    gradients and groups stay as they are, whatever that step does to them."""
    if any(optimizer.state.values()):
        raise ValueError(
            "some parameters have optimizer state and some have none; take a step that gives every "
            "trained parameter a gradient, or freeze the others (requires_grad)"
        )
    groups = optimizer.param_groups
    given = groups.copy()
    gradients = {p: p.grad for group in given for p in group["params"]}
    for parameter in gradients:
        parameter.grad = None
    try:
        for portion in _portions(given):
            groups[:] = portion
            _step_over_nothing(optimizer)
    except (RuntimeError, TypeError) as error:
        optimizer.state.clear()
        why = " ".join(str(error).split())  # torch's has several lines
        raise ValueError(
            f"{type(optimizer).__name__} cannot make its state before the first step: {why}; "
            "choose an optimizer that steps by dense gradients alone"
        ) from error
    finally:
        groups[:] = given
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
    made = [tensor for state in optimizer.state.values() for tensor in _tensors(state).values()]
    for tensor in made:
        tensor.zero_()
    if made:
        _begin_at_first_step(optimizer)


def _portions(groups: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Copies of parameter groups, with a learning rate of 0 and the parameters that are trained, in
    portions of about PORTION_BYTES. The same on all ranks, which may have to step together."""
    portion: list[dict[str, Any]] = []
    room = PORTION_BYTES
    for group in groups:
        rate = group["lr"]
        still = {**group, "lr": torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0}
        part: list[torch.nn.Parameter] = []
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            if portion and parameter.nbytes > room:
                yield portion
                portion, room, part = [], PORTION_BYTES, []
            if not part:
                portion.append({**still, "params": part})
            part.append(parameter)
            room -= parameter.nbytes
    if portion:
        yield portion


def _step_over_nothing(optimizer: torch.optim.Optimizer) -> None:
    """A step by gradients of zero, after which the parameters are what they were: not every decay
    of weights is multiplied by the learning rate."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [local_tensor(parameter).clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    finally:
        for parameter, values in zip(parameters, before, strict=True):
            local_tensor(parameter).copy_(values)
            parameter.grad = None


def _begin_at_first_step(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer begin by itself what is still zero when a parameter is first updated: only
    the optimizer knows what it begins with. The tensors stay the same objects, with the memory of
    the new ones: there is never more than one copy of the state."""
    waiting = set(optimizer.state)
    begun: dict[Tensor, dict[str, Tensor]] = {}

    def before(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not waiting:  # a hook cannot remove itself
            return
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in [p for p in stepped if p in waiting and p.grad is not None]:
            waiting.discard(parameter)
            made = _tensors(optimizer.state[parameter])
            if not any(bool(_memory(tensor).any()) for tensor in made.values()):
                begun[parameter] = made
                del optimizer.state[parameter]
                for memory in map(_memory, made.values()):
                    memory.data = memory.new_empty(0)

    @torch.no_grad()
    def after(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        for parameter, made in begun.items():
            state = optimizer.state[parameter]
            for key, tensor in made.items():
                _memory(tensor).data = _memory(state[key])
                state[key] = tensor
        begun.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


@torch.no_grad()  # without gradients DTensor hands out its storage as it is: 50 times faster
def _memory(tensor: Tensor) -> Tensor:
    """What holds this rank's part of a tensor: it may be given other memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor)}
