"""Converts a loop's state (modules, optimizers, tensors, Stateful objects) to named tensors and
JSON, and back.

The module under the key `model` keeps its own names, so that Hugging Face opens the checkpoint.
Names of other modules get their key as prefix. Optimizer state is `<parameter>.exp_avg` and so on.
"""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from checkpointing.errors import WrongModel
from checkpointing.format.layout import TensorMeta
from checkpointing.format.optimizers import (
    OptimizerFormatTargets,
    optimizer_state,
    optimizer_targets,
)
from checkpointing.format.tensors import place_of
from checkpointing.format.values import from_json, to_json

OF_VALUES = (torch.optim.LBFGS, torch.optim.SparseAdam)
"""Optimizers with state beyond tensors of parameters: LBFGS keeps search directions over all
parameters, SparseAdam counts steps in Python. Their state is saved as plain values, which are not
sharded over ranks."""

MODEL = "model"
"""Key of the module that keeps its own names."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state_dict has plain values (see `to_json`), such as a learning-rate
    schedule, a data loader or a GradScaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


State = Mapping[str, nn.Module | torch.optim.Optimizer | Tensor | Stateful]


@dataclass(frozen=True)
class StateParts:
    """A state divided into tensors, which are live and not copies, and plain values."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    values: dict[str, Any]
    """Key in the state → JSON of everything but tensors."""
    groups: dict[str, list[list[str]]]
    """Key of the optimizer → names of the parameters in each group."""
    trees: dict[str, dict[str, Any]]
    """Key of the optimizer → `CheckpointOptimizerState.trees`."""
    parameters: dict[str, dict[str, nn.Parameter]]
    """Key of the optimizer → parameters by FQN."""
    kinds: dict[str, str]
    """Key of the optimizer → name of its class."""
    buffers: dict[str, Tensor]
    """Tensors of `model` that are buffers. Each rank that has them holds them whole."""
    trained: frozenset[str]
    """Names in `model` of parameters that require gradients, which must be finite."""
    tied: list[list[str]]
    """For each tensor with several names in `model`: these names."""


def unwrapped(value: Any) -> Any:
    """Returns the optimizer inside a wrapper that shares its groups and state, such as
    accelerate's; other objects are returned unchanged. An optimizer such as Lookahead, which has
    additional state, is not unwrapped."""
    inner = getattr(value, "optimizer", None)
    if (
        isinstance(inner, torch.optim.Optimizer)
        and getattr(value, "param_groups", None) is inner.param_groups
        and getattr(value, "state", None) is inner.state
    ):
        return unwrapped(inner)
    return value


def take_apart(state: State, guarded: Collection[torch.optim.Optimizer] = ()) -> StateParts:
    """Returns the tensors and values of a state. A parameter that no optimizer of `guarded` updates
    is returned detached, no longer an nn.Parameter (a DTensor stays one), so that `save` copies it
    before it returns. Raises ValueError, which says which part of the state cannot be saved and
    why."""
    model: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    groups: dict[str, list[list[str]]] = {}
    buffers: dict[str, Tensor] = {}
    names: dict[Tensor, str] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for key, value in state.items():
        tensors: dict[str, Tensor] = {}
        if isinstance(value, nn.Module):
            tensors, extra = _of_module(key, value)
            buffers |= {
                name: tensor.detach()
                for name, tensor in tensors.items()
                if not isinstance(tensor, nn.Parameter | DTensor) and tensor not in names
            }
            if extra:
                values[key] = to_json(extra, key)
        elif isinstance(value, torch.optim.Optimizer):
            optimizers[key] = value
        elif isinstance(value, Tensor):
            tensors = {key: value}
        elif isinstance(value, Stateful):
            values[key] = to_json(value.state_dict(), key)
        else:
            raise ValueError(
                f"{key} is a {type(value).__name__}: give a module, an optimizer, a tensor, or an "
                "object with state_dict and load_state_dict"
            )
        if twice := sorted(tensors.keys() & model.keys()):
            raise ValueError(f"{key}: there are two tensors called {twice[0]}; rename one of them")
        # a tensor of two modules is saved once, under its first name
        model |= {name: tensor for name, tensor in tensors.items() if tensor not in names}
        names |= {tensor: name for name, tensor in tensors.items() if tensor not in names}
    optimizer: dict[str, Tensor] = {}
    trees: dict[str, dict[str, Any]] = {}
    parameters: dict[str, dict[str, nn.Parameter]] = {}
    kept: set[Tensor] = set()
    for key, value in optimizers.items():
        parameters[key] = _named(key, value, names)
        own, trees[key] = _of_optimizer(key, value, parameters[key])
        if value in guarded:
            kept.update(_parameters(value))
        groups[key] = [[names[one] for one in group["params"]] for group in value.param_groups]
        if isinstance(value, OF_VALUES):
            kind = type(value).__name__
            values[key] = to_json({"type": kind, **value.state_dict()}, key)
            continue
        if twice := sorted(own.keys() & optimizer.keys()):
            raise ValueError(
                f"{key}: another optimizer also has state called {twice[0]}; let only one of them "
                "update that parameter"
            )
        optimizer |= own
        values[key] = to_json(_groups(value), key)
    for name, value in model.items():
        if problem := _not_to_be_held(value):
            raise ValueError(f"{name} {problem}")
    live = {name: value if value in kept else value.detach() for name, value in model.items()}
    kinds = {key: type(value).__name__ for key, value in optimizers.items()}
    trained = frozenset(
        name for name, one in model.items() if isinstance(one, nn.Parameter) and one.requires_grad
    )
    shared: dict[Hashable, list[str]] = {}
    for name, value in model.items():
        shared.setdefault(place_of(value), []).append(name)
    tied = [sorted(names) for names in shared.values() if len(names) > 1]
    return StateParts(
        live, optimizer, values, groups, trees, parameters, kinds, buffers, trained, tied
    )  # fmt: skip


def _not_to_be_held(tensor: Tensor) -> str | None:
    """Returns why a tensor cannot be saved or loaded into; None if it can."""
    if tensor.layout != torch.strided:
        return f"is of {tensor.layout}: only dense tensors are saved; convert it with to_dense()"
    if tensor.is_meta:
        return "is on the meta device, without contents: allocate it first, as with to_empty()"
    if isinstance(tensor, DTensor):
        return None
    if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        return "has elements that share memory, as after expand(): give a clone() of it"
    return None


@runtime_checkable
class _StateChecker(Protocol):
    """An object that can reject a state of another object, without changing itself."""

    def refuse_state(self, state_dict: dict[str, Any], /) -> None: ...


def refuse_values(
    state: State,
    values: Mapping[str, Any],
    groups: Mapping[str, list[list[str]]],
    saved_groups: Mapping[str, list[list[str]]],
    saved_kinds: Mapping[str, str],
) -> None:
    """Raises WrongModel unless saved values belong to the objects of a state, with the same
    parameter groups. `groups` is `StateParts.groups` of `state`; `saved_groups` and `saved_kinds`
    are the fields of StateParts when saved, and empty in old checkpoints."""

    def has_values(key: str, value: Any) -> bool:
        if isinstance(value, nn.Module):
            return bool(_of_module(key, value)[1])
        return not isinstance(value, Tensor)

    expected = {key for key, value in state.items() if has_values(key, value)}
    if expected != values.keys():
        missing, unused = sorted(expected - values.keys()), sorted(values.keys() - expected)
        raise WrongModel(
            f"the checkpoint lacks {', '.join(missing) or 'nothing'}, and this state lacks "
            f"{', '.join(unused) or 'nothing'}: load into the same objects that were saved"
        )
    for key, value in values.items():
        target = state[key]
        if isinstance(target, _StateChecker):
            target.refuse_state(from_json(value))
        if not isinstance(target, torch.optim.Optimizer):
            continue
        if problem := _misfit(target, value, groups[key], saved_groups.get(key, groups[key])):
            raise WrongModel(f"{key} {problem}: make it as it was saved")
        kind = type(target).__name__
        if (there := saved_kinds.get(key, kind)) != kind:
            raise WrongModel(
                f"{key} is {kind}, but the checkpoint has the state of {there}: use {there}, or "
                f"load into {there} and copy to {kind} the part of the state that it should keep"
            )


def refuse_ties(tied: list[list[str]], saved: list[list[str]] | None) -> None:
    """Raises WrongModel if tensors that are tied in a state were not tied when saved, as several
    saved tensors would be loaded into one. `saved` is None in old checkpoints."""
    for names in tied if saved is not None else ():
        if not any({*names} <= {*known} for known in saved or ()):
            raise WrongModel(
                f"the checkpoint is of another model: {' and '.join(names)} are one tensor in this "
                "one, and were saved as several; load into a model in which they are not tied"
            )


def _misfit(
    optimizer: torch.optim.Optimizer, value: Any, own: list[list[str]], saved: list[list[str]]
) -> str | None:
    """Returns why an optimizer's saved values do not fit it; None if they do."""
    kind = type(optimizer).__name__
    of_values = isinstance(optimizer, OF_VALUES)
    found = value.get("type", kind) if isinstance(value, dict) else "another optimizer"
    if of_values != isinstance(value, dict) or (of_values and found != kind):
        return f"is {kind}, but the checkpoint has the state of {found}"
    there = value["param_groups"] if of_values else value
    if len(own) != len(there):
        return f"has {len(own)} parameter groups, and {len(there)} in the checkpoint"
    for number, (names, others) in enumerate(zip(own, saved, strict=False)):
        here = f"parameter group {number}"
        if of_values and len(names) != (size := len(there[number]["params"])):
            return f"has {len(names)} parameters in {here}, and {size} in the checkpoint"
        mine, known = set(names), set(others)
        if odd := [name for name in names if name not in known]:
            return f"has {odd[0]} in {here}, but the checkpoint has it elsewhere or not at all"
        if of_values and names != [name for name in others if name in mine]:
            return f"has the parameters of {here} in another order than in the checkpoint"
    return None


def put_back(state: State, values: Mapping[str, Any]) -> None:
    """Restore all but the tensors of a state's objects. `values`: key in the state → JSON, as in
    `StateParts.values`; `refuse_values` must have accepted them, and the tensors be loaded."""
    for key, value in values.items():
        target, found = state[key], from_json(value)
        if isinstance(target, torch.optim.Optimizer) and not isinstance(target, OF_VALUES):
            _set_groups(target, found)
        elif isinstance(target, nn.Module):
            target.load_state_dict(found, strict=False)  # tensors are loaded already
        else:
            assert isinstance(target, Stateful)  # otherwise `refuse_values` would have raised
            target.load_state_dict(found)


def _of_module(key: str, module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns a module's tensors by their names in a checkpoint, and all other values of its
    state_dict."""
    while True:  # DDP and torch.compile wrap a module, and share its parameters
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):  # torch.compile
            module = inner
        else:
            break
    tensors, extra = {}, {}
    prefix = "" if key == MODEL else f"{key}."
    state = module.state_dict(keep_vars=True)
    live = {*module.parameters(), *module.buffers()}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            extra[name] = value
        elif value in live:
            tensors[prefix + name] = value
        else:
            raise ValueError(
                f"{key}: its state_dict returns a copy of {name}, so nothing can be loaded into "
                "the tensor itself; pass the module that holds it"
            )
    return tensors, extra


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _named(
    key: str, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]
) -> dict[str, nn.Parameter]:
    parameters = _parameters(optimizer)
    if any(parameter not in names for parameter in parameters):
        raise ValueError(
            f"{key} trains a parameter that is in no module of this state: add the module. After "
            "fully_shard or .to(), make the optimizer anew"
        )
    return {names[one]: one for one in parameters}


def _of_optimizer(
    key: str, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if isinstance(optimizer, OF_VALUES):
        if any(isinstance(parameter, DTensor) for parameter in parameters.values()):
            raise ValueError(
                f"{key}: {type(optimizer).__name__} keeps more than tensors, which can be saved "
                "only if no parameter is sharded; use another optimizer, or DDP"
            )
        return {}, {}
    try:
        found = optimizer_state(optimizer, parameters, key)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    return found.tensors, found.trees


def targets_of(
    state: State, parts: StateParts, saved: Mapping[str, Any], metas: Mapping[str, TensorMeta]
) -> dict[str, OptimizerFormatTargets]:
    """Returns key → tensors to load the state of each optimizer into.

    Args:
        parts: result of `take_apart` for `state`.
        saved: key of the optimizer → saved trees.
    """
    return {
        key: optimizer_targets(optimizer, parts.parameters[key], saved.get(key), metas, key)
        for key, optimizer in state.items()
        if isinstance(optimizer, torch.optim.Optimizer) and not isinstance(optimizer, OF_VALUES)
    }


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns the options of each parameter group, such as learning rates."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def _set_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for name, value in saved.items():
            held = group.get(name)
            if isinstance(held, Tensor):  # in place, as compiled code may refer to this tensor
                held.copy_(torch.as_tensor(value))
            else:
                group[name] = value
