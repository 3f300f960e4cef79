"""The state of any optimizer as named tensors and JSON.

[Note: optimizer state] Each parameter's state is a tree: dictionaries, lists, numbers and tensors.
Its tensors are saved as `<parameter>.<key>`, such as `layer.weight.exp_avg`, and the tree as JSON,
in which a dtype and a shape replace each tensor. So a load creates exactly the saved state, without
a dummy step of the optimizer. If an optimizer overrides `state_dict` and returns other contents
than torch's, this result is saved, and loaded by its `load_state_dict`."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, empty
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from checkpointing.errors import WrongModel
from checkpointing.format.layout import TensorMeta
from checkpointing.format.tensors import STORED_DTYPES, TORCH_DTYPES, local_tensor
from checkpointing.format.values import from_json, to_json

OWN = "$own"
"""Key of the tree that an overridden `state_dict` returned, in place of names of parameters."""
Parameters = Mapping[str, nn.Parameter]
"""Parameters by FQN."""


@dataclass(frozen=True)
class CheckpointOptimizerState:
    tensors: dict[str, Tensor]
    """Name → tensor of the optimizer, not a copy."""
    trees: dict[str, Any]
    """FQN → tree as JSON, or `OWN` → tree; see [Note: optimizer state]."""


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Parameters
) -> dict[str, Tensor]:
    """Returns an optimizer's live tensors, not copies. Their names are `<fqn>.<key>`: for AdamW
    `<fqn>.exp_avg`, `<fqn>.exp_avg_sq` and `<fqn>.step`. Most optimizers have no tensors before
    their first step. Raises ValueError if part of the state cannot be saved."""
    return optimizer_state(optimizer, parameters).tensors


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Parameters, name: str = "optimizer"
) -> CheckpointOptimizerState:
    """Returns the current state of an optimizer, without making a step. Raises ValueError, which
    says which part of the state cannot be saved and why.

    Args:
        parameters: parameters by FQN, such as `dict(model.named_parameters())`.
        name: name of the optimizer, used as prefix of state that belongs to no parameter.
    """
    kind = type(optimizer).__name__
    names: dict[Tensor, str] = {parameter: fqn for fqn, parameter in parameters.items()}
    own = _own_state(optimizer)
    if own is not None:
        sharded = next((n for n, p in parameters.items() if isinstance(p, DTensor)), None)
        if sharded:
            raise ValueError(
                f"{kind} has a state_dict of its own, which can be saved only if no parameter is "
                f"sharded, but {sharded} is; use another optimizer, or DDP"
            )
        writer = _Writer(kind, names, {})
        tree = writer.write(own, name, None)
        return CheckpointOptimizerState(_sorted(writer.tensors), {OWN: tree})
    kept: dict[str, tuple[Any, Tensor | None]] = {}
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            kept[f"{name}.{parameter}"] = state, None
        elif parameter in names:
            kept[names[parameter]] = state, parameter
        elif state:
            raise ValueError(
                f"{kind} keeps state of a tensor that is not among the given parameters; give all "
                "parameters that it updates"
            )
    tensors: dict[str, Tensor] = {}
    trees = {}
    for fqn in _in_order(kept, parameters):
        state, like = kept[fqn]
        if state or like is None:  # reading the defaultdict `state` leaves an empty entry
            writer = _Writer(kind, names, {})
            trees[fqn] = writer.write(state, fqn, like)
            tensors |= _sorted(writer.tensors)
    return CheckpointOptimizerState(tensors, trees)


def _in_order(names: Mapping[str, Any], parameters: Parameters) -> list[str]:
    """Returns names of parameters in the parameters' order, then other names sorted. Saving and
    loading use the same order, so that a restart recognises the state that was left in memory."""
    first = [fqn for fqn in parameters if fqn in names]
    return [*first, *sorted(name for name in names if name not in parameters)]


def _sorted(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(sorted(tensors.items()))


def has_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer overrides `state_dict` and returns other contents than torch's. Raises
    ValueError if the method fails, or omits the state of an optimizer inside this one."""
    return _own_state(optimizer) is not None


def kept_as_subclass(optimizer: torch.optim.Optimizer) -> str:
    """Returns "KEY as CLASS" for the first state that is a tensor subclass, such as 8-bit blocks;
    "" if there is none."""
    for parameter, kept in optimizer.state.items():
        if isinstance(parameter, Tensor) and isinstance(kept, Mapping):
            for key, value in kept.items():
                wrapped = isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)
                if wrapped and not isinstance(value, DTensor):
                    return f"{key} as {type(value).__name__}"
    return ""


def _own_state(optimizer: torch.optim.Optimizer) -> Any:
    """Returns the result of an overridden `state_dict`; None if it equals torch's, and there are no
    inner optimizers. Raises ValueError if `state_dict` fails or leaves out inner optimizers."""
    kind, torchs = type(optimizer), torch.optim.Optimizer.state_dict
    if getattr(optimizer.state_dict, "__func__", None) is torchs:
        for inner in _inside(optimizer):
            raise ValueError(
                f"{kind.__name__} has an inner {type(inner).__name__}, whose state its state_dict "
                f"leaves out: override state_dict and load_state_dict in {kind.__name__}"
            )
        return None
    try:
        found = optimizer.state_dict()
    except Exception as error:
        why = f"{error}".partition("\n")[0]
        raise ValueError(
            f"{kind.__name__}.state_dict() fails, so that its state cannot be saved: {why}"
        ) from error
    try:
        plain = torchs(optimizer)
    except Exception:  # the optimizer's class may not call torch's __init__
        return found
    return None if not [*_inside(optimizer)] and _same(found, plain) else found


def _inside(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yields optimizers among the attributes of `optimizer` that have separate state."""
    for value in vars(optimizer).values():
        for one in value if isinstance(value, list | tuple) else [value]:
            inner = isinstance(one, torch.optim.Optimizer) and one is not optimizer
            if inner and one.state is not optimizer.state:
                yield one


def _same(one: Any, other: Any) -> bool:
    """Whether two trees are equal and their tensors identical."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        # identity, as a comparison of numbers would wait for the GPU
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    # in Python 1, 1.0 and True are equal
    return type(one) is type(other) and bool(one == other)


@dataclass(frozen=True)
class _Writer:
    """Converts trees to JSON, and collects their tensors by name."""

    kind: str
    names: Mapping[Tensor, str]
    tensors: dict[str, Tensor]

    def write(self, value: Any, name: str, like: Tensor | None) -> Any:
        """Returns a tree as JSON. `like` is the parameter that the state belongs to."""
        # parameters are saved with the model
        if isinstance(value, Tensor) and value in self.names:
            return {"$parameter": self.names[value]}
        if isinstance(value, Tensor):
            return self._tensor(value, name, like)
        if isinstance(value, deque):
            parts = self.write([*value], name, like)
            return {"$deque": [value.maxlen, parts]}
        if isinstance(value, list | tuple):
            parts = [self.write(one, f"{name}.{place}", like) for place, one in enumerate(value)]
            return {"$tuple": parts} if isinstance(value, tuple) else parts
        if isinstance(value, Mapping):
            items = [
                [self._key(key, name), self.write(one, f"{name}.{self._word(key)}", like)]
                for key, one in value.items()
            ]
            if all(type(key) is str and not key.startswith("$") for key in value):
                return dict(items)
            return {"$dict": items}
        try:
            return to_json(value, name)
        except ValueError as error:
            raise ValueError(
                f"{self.kind} keeps {name} as {type(value).__name__}, which cannot be saved; "
                "choose an optimizer that keeps tensors, numbers, lists and dictionaries"
            ) from error

    def _key(self, key: Any, name: str) -> Any:
        if isinstance(key, Tensor):
            return self.write(key, name, None)
        return to_json(key, name)

    def _word(self, key: Any) -> str:
        return self.names.get(key, "tensor") if isinstance(key, Tensor) else f"{key}"

    def _tensor(self, value: Tensor, name: str, like: Tensor | None) -> Any:
        local = local_tensor(value) if isinstance(value, DTensor) else value
        if is_traceable_wrapper_subclass(local):
            if local is not value:
                raise ValueError(
                    f"{self.kind} keeps {name} as {type(local).__name__} of each rank's shard, "
                    "which no other number of ranks could read; use strategy.name=ddp, or another "
                    "optimizer"
                )
            inner, given = value.__tensor_flatten__()
            parts = {key: self.write(getattr(value, key), f"{name}.{key}", None) for key in inner}
            saved = _named(type(value)), to_json(given, name), [*value.shape], [*value.stride()]
            return {"$subclass": [*saved, parts]}
        if value.layout != torch.strided or value.dtype not in STORED_DTYPES:
            raise ValueError(
                f"{self.kind} keeps {name} as {value.layout} of {value.dtype}, which cannot be "
                "saved; use another optimizer"
            )
        if name in self.tensors and self.tensors[name] is not value:
            raise ValueError(
                f"{self.kind} keeps two tensors that would be called {name}; rename a parameter or "
                "use another optimizer"
            )
        self.tensors[name] = value
        # the state of a sharded parameter may be sharded, or whole on each rank
        spread = isinstance(value, DTensor) if isinstance(like, DTensor) else None
        return {"$like": [STORED_DTYPES[value.dtype], [*value.shape], spread]}


@dataclass(frozen=True)
class OptimizerFormatTargets:
    """Tensors to load an optimizer's state into."""

    tensors: dict[str, Tensor]
    """Name → tensor: the optimizer's own tensor if it fits, else a new one."""
    put: Callable[[], None]
    """Function that sets the optimizer's state, called once the tensors are loaded."""


def optimizer_targets(
    optimizer: torch.optim.Optimizer,
    parameters: Parameters,
    trees: Mapping[str, Any] | None,
    metas: Mapping[str, TensorMeta],
    name: str = "optimizer",
) -> OptimizerFormatTargets:
    """Returns tensors for the state in a checkpoint; changes nothing until `put` is called. Raises
    WrongModel if the state is of a tensor subclass that is not imported.

    Args:
        trees: `CheckpointOptimizerState.trees` from the checkpoint; None in old checkpoints.
        metas: dtypes and shapes of the optimizer's tensors in the checkpoint, by name.
    """
    if trees is None:
        trees = _flat(parameters, metas)
    if OWN in trees:
        reader = _Reader(parameters, {})
        like = next(iter(parameters.values()), None)
        own = reader.read(trees[OWN], name, like, None, "")
        return OptimizerFormatTargets(
            _sorted(reader.tensors), lambda: optimizer.load_state_dict(own)
        )
    tensors: dict[str, Tensor] = {}
    found: dict[Any, Any] = {}
    others = {f"{name}.{key}": key for key in optimizer.state if not isinstance(key, Tensor)}
    on_device = {
        id(one)
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for one in group["params"]
    }
    for fqn in _in_order(trees, parameters):
        if fqn not in parameters and not fqn.startswith(f"{name}."):
            # The optimizer has no such parameter; `load` reports its tensors as unexpected.
            continue
        key: Any = parameters.get(fqn, others.get(fqn, fqn.removeprefix(f"{name}.")))
        parameter = parameters.get(fqn)
        reader = _Reader(parameters, {}, id(parameter) in on_device)
        found[key] = reader.read(trees[fqn], fqn, parameter, optimizer.state.get(key), "")
        tensors |= _sorted(reader.tensors)

    def put() -> None:
        # State that was not saved is deleted: the next step must not mix two runs.
        for key in [key for key in optimizer.state if key not in found]:
            del optimizer.state[key]
        for key, kept in found.items():
            optimizer.state[key] = kept

    return OptimizerFormatTargets(tensors, put)


def _flat(parameters: Parameters, metas: Mapping[str, TensorMeta]) -> dict[str, Any]:
    """Returns trees of tensors only, derived from the names of the tensors in the checkpoint."""
    trees: dict[str, Any] = {}
    for name, meta in metas.items():
        fqn, _, key = name.rpartition(".")
        if fqn in parameters:
            trees.setdefault(fqn, {})[key] = {"$like": [meta.dtype, [*meta.shape], None]}
    return trees


@dataclass(frozen=True)
class _Reader:
    parameters: Parameters
    tensors: dict[str, Tensor]
    steps_on_device: bool = False
    """Whether a new `step` lies on the parameter's device."""

    def read(self, tree: Any, name: str, like: Tensor | None, live: Any, key: str) -> Any:
        """Returns the optimizer's state that a saved tree describes, with tensors that are still to
        be filled, and adds these to `tensors`.

        Args:
            tree: result of `_Writer.write`.
            name: name of the tree in the checkpoint, without the keys below it.
            like: the parameter that the state belongs to, or a parameter on the same device.
            live: the optimizer's current state at this place of the tree.
            key: key of the tree in the dictionary that contains it.
        """
        if isinstance(tree, list):
            row = live if isinstance(live, list | tuple | deque) else []
            parts = enumerate(tree)
            return [self.read(one, f"{name}.{at}", like, _at(row, at), key) for at, one in parts]
        if not isinstance(tree, dict):
            return from_json(tree)
        match next(iter(tree.items()), None):
            case ("$parameter", fqn):
                return self.parameters[fqn]
            case ("$like", (_, _, _) as saved):
                self.tensors[name] = found = self._tensor(saved, like, live, key)
                return found
            case ("$subclass", (_, _, _, _, _) as saved):
                return self._subclass(saved, name, like, live)
            case ("$deque", (length, parts)):
                return deque(self.read(parts, name, like, live, key), maxlen=length)
            case ("$tuple", parts):
                return tuple(self.read(parts, name, like, live, key))
            case ("$dict", items):
                pairs = [(self._key(one), value) for one, value in items]
            case (str(first), _) if first.startswith("$"):
                return from_json(tree)
            case _:
                pairs = [*tree.items()]
        lives = live if isinstance(live, Mapping) else {}
        return {
            one: self.read(value, f"{name}.{self._word(one)}", like, lives.get(one), f"{one}")
            for one, value in pairs
        }

    def _key(self, key: Any) -> Any:
        if isinstance(key, dict) and "$parameter" in key:
            return self.parameters[key["$parameter"]]
        return from_json(key)

    def _word(self, key: Any) -> str:
        if not isinstance(key, Tensor):
            return f"{key}"
        return next(fqn for fqn, parameter in self.parameters.items() if parameter is key)

    def _tensor(self, saved: list[Any], like: Tensor | None, live: Any, key: str) -> Tensor:
        dtype, shape, spread = TORCH_DTYPES[saved[0]], tuple(saved[1]), saved[2]
        if isinstance(live, Tensor) and live.dtype == dtype and live.shape == shape:
            return live
        if like is None:
            return torch.empty(shape, dtype=dtype)
        if isinstance(like, DTensor) and (bool(shape) if spread is None else spread):
            if shape == like.shape:
                return torch.empty_like(like, dtype=dtype, requires_grad=False)
            placements = placements_of(shape, like)
            mesh = like.device_mesh
            return empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)
        if shape == like.shape and not isinstance(like, DTensor):
            return torch.empty_like(like, dtype=dtype, requires_grad=False)
        # As in torch: only fused and capturable updates read `step` on the device.
        host = key == "step" and not shape and not self.steps_on_device
        return torch.empty(shape, dtype=dtype, device="cpu" if host else like.device)

    def _subclass(self, saved: list[Any], name: str, like: Tensor | None, live: Any) -> Tensor:
        kind, given, shape, stride, parts = saved
        of = next((one for one in _subclasses(Tensor) if _named(one) == kind), None)
        if of is None or not hasattr(of, "__tensor_unflatten__"):
            raise WrongModel(
                f"{name} was saved as {kind}, but this process has not imported that class; build "
                "the optimizer as it was at the save"
            )
        lives = live if type(live) is of else None
        inner = {
            key: self.read(part, f"{name}.{key}", like, getattr(lives, key, None), key)
            for key, part in parts.items()
        }
        given, size = from_json(given), torch.Size(shape)
        found: Tensor = of.__tensor_unflatten__(inner, given, size, tuple(stride))
        return found


def _named(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _subclasses(kind: type[Tensor]) -> Iterator[type[Tensor]]:
    """Yields all direct and indirect subclasses of `kind` in modules that are imported already.
    Others are not found, because loading a checkpoint must not import code."""
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _at(values: Any, place: int) -> Any:
    return values[place] if place < len(values) else None


def placements_of(shape: tuple[int, ...] | torch.Size, like: DTensor) -> list[Placement]:
    """Returns placements for state of `shape` that belongs to the sharded parameter `like`: sharded
    along dimensions of equal length, unless some ranks hold no part of the parameter; else
    replicated."""
    return [cut if _keeps(cut, shape, like) else Replicate() for cut in like.placements]


def _keeps(cut: Placement, shape: tuple[int, ...] | torch.Size, like: DTensor) -> bool:
    if type(cut) is not Shard or len(shape) != like.dim():
        return False
    return shape[cut.dim] == like.shape[cut.dim] and not has_empty_shards(like)


def has_empty_shards(tensor: DTensor) -> bool:
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return any(isinstance(cut, Shard) and tensor.shape[cut.dim] < ranks for cut, ranks in sizes)
