"""An optimizer of the user's, or of torch.optim: checked when it is made, not at its first step."""

import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from checkpointing import optimizer_tensors
from checkpointing.format.tensors import local_tensor
from trainer.optim.groups import named_groups
from trainer.optim.method import stand_in
from trainer.optim.slices import SliceOptimizer, is_elementwise
from trainer.recipe import Optimizer, RecipeError
from trainer.recipe.factory import call_factory, failure, import_factory, place_in, refusing

_OF_SHARDS = re.compile(r"DTensor|DeviceMesh|sharding|placement")
"""What DTensor's errors speak of: operations that it does not know."""
_UNEVEN = re.compile(r"unevenly sharded|redistribute the tensor")
"""What they say of operations that it knows of evenly cut or whole tensors alone."""


def build_own(parameters: Mapping[str, nn.Parameter], options: Optimizer) -> torch.optim.Optimizer:
    """What `optimizer.factory` returns, with its state. On all ranks.

    If parameters are sharded, it gets this rank's slices, where an element's update depends on no
    other; else DTensors, whose operations are those of whole tensors.

    Args:
        parameters: by FQN.
        options: of the recipe.

    Raises:
        RecipeError: it is no optimizer that a run can save and resume; says why.
    """

    def build(given: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return _called(given, options)

    _try_steps(parameters, options)
    if not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        return build(parameters)
    with _stepping(options):
        by_slices = is_elementwise(parameters, build)
    return SliceOptimizer(parameters, build) if by_slices else build(parameters)


def _try_steps(parameters: Mapping[str, nn.Parameter], options: Optimizer) -> None:
    """Let the optimizer make a few steps with small stand-ins of its parameters.

    Raises:
        RecipeError: as `build_own`; a step fails for what is wrong, with the user's line; or it
            keeps something in its parameter groups or in itself.
    """
    draw = torch.Generator().manual_seed(0)
    tried = {name: stand_in(parameter, draw) for name, parameter in parameters.items()}
    optimizer = _called(tried, options)
    before = [_settings(group) for group in optimizer.param_groups]
    beside = _kept_beside(optimizer)
    with _stepping(options):
        for _ in range(3):
            for one in tried.values():
                one.grad = torch.randn(one.shape, generator=draw).to(one.dtype)
            optimizer.step()
    for group, settings in zip(optimizer.param_groups, before, strict=True):
        changed = [key for key, value in _settings(group).items() if settings.get(key) != value]
        if changed:
            raise RecipeError(
                f"optimizer.factory: a step of {options.factory} changes {changed[0]} of its "
                "parameter groups, which no checkpoint holds; keep it in the parameters' state"
            )
    for key, value in _kept_beside(optimizer).items():
        if str(beside.get(key)) != str(value):
            raise RecipeError(
                f"optimizer.factory: a step of {options.factory} changes {key} of the optimizer "
                "itself, which no checkpoint holds; keep it in the parameters' state, as a tensor"
            )


def _stepping(options: Optimizer) -> AbstractContextManager[None]:
    return refusing("optimizer.factory", f"the step of {options.factory}")


def _called(parameters: Mapping[str, nn.Parameter], options: Optimizer) -> torch.optim.Optimizer:
    name = options.factory or ""
    factory = import_factory("optimizer.factory", name)
    if isinstance(factory, type):  # LBFGS would complain of other things first
        _check_kind(name, factory)
    optimizer = call_factory(
        "optimizer.factory", name, options.factory_options, named_groups(parameters, options)
    )
    if isinstance(optimizer, type):
        raise RecipeError(
            f"optimizer.factory: {name} returned the class {optimizer.__name__} itself; call it"
        )
    _check_kind(name, type(optimizer))
    names = {parameter: fqn for fqn, parameter in parameters.items() if parameter.requires_grad}
    if any(isinstance(parameter, DTensor) for parameter in names):
        _complete(optimizer)
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if odd := names.keys() ^ set(given):
        fqn = names.get(next(iter(odd)))
        what = f"leaves out {fqn}" if fqn else "updates a tensor that is no trained parameter"
        raise RecipeError(
            f"optimizer.factory: {name} {what}; give it all parameters of the groups, as they are"
        )
    try:
        tensors = optimizer_tensors(optimizer, parameters)
    except Exception as error:
        failed = error.__cause__ or error
        sharded = any(isinstance(parameter, DTensor) for parameter in given)
        hint = "; the parameters are sharded: strategy.name=ddp shards none" if sharded else ""
        if sharded and _OF_SHARDS.search(str(failed)):
            raise RecipeError(
                f"optimizer.factory: the step of {name} {failure(failed)}{hint}"
            ) from error
        with _stepping(options):
            if place_in(failed):  # in the user's step
                raise failed from None
        if not isinstance(error, (ValueError, NotImplementedError)):
            raise
        raise RecipeError(f"optimizer.factory: {error}{hint}") from error
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor) and any(place.is_partial() for place in tensor.placements):
            raise RecipeError(
                f"optimizer.factory: {name} keeps {key} as a sum that is not taken yet "
                f"({tensor.placements}), which no checkpoint holds; use strategy.name=ddp, or have "
                "it redistributed"
            )
    return optimizer


def _check_kind(name: str, kind: type) -> None:
    if not issubclass(kind, torch.optim.Optimizer):
        raise RecipeError(
            f"optimizer.factory: {name} returned {kind.__name__}, not a torch.optim.Optimizer"
        )
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure and closure.default is inspect.Parameter.empty:
        raise RecipeError(
            f"optimizer.factory: {kind.__name__} computes losses of its own in each step (step "
            "needs a closure), but a step here has one loss and one gradient; choose another"
        )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in group.items()
        if key not in ("params", "param_names", "lr") and not isinstance(value, torch.Tensor)
    }


def _kept_beside(optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """Numbers that it holds beside its parameters, its state and its groups, by attribute; flags of
    torch aside."""
    known = {id(one) for one in tree_leaves([*map(dict, optimizer.state.values())])}
    known |= {id(one) for group in optimizer.param_groups for one in group["params"]}
    return {
        key: [
            one.tolist() if isinstance(one, torch.Tensor) else one
            for one in tree_leaves(value)
            if isinstance(one, (torch.Tensor, int, float))
            if not (isinstance(one, torch.Tensor) and id(one) in known)
        ]
        for key, value in vars(optimizer).items()
        if key not in ("state", "param_groups", "defaults")
        if not (key.startswith("_") and isinstance(value, bool))
    }


def _complete(optimizer: torch.optim.Optimizer) -> None:
    """Have each step of an optimizer of DTensors run under `_Completed`."""
    step = optimizer.step

    def completed(*given: Any) -> None:
        with _Completed():
            step(*given)

    optimizer.step = completed  # type: ignore[method-assign, assignment]


class _Completed(TorchFunctionMode):
    """Operations on DTensors as code for tensors expects them. DTensor leaves sums over shards
    untaken, which cannot be worked with in place; makes new tensors whole; changes nothing in place
    that has fewer rows than ranks; and refuses products of stacks of matrices, such as kernels of a
    convolution, whose rows ranks cannot share evenly: these are computed whole."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first, given, name = args[0] if args else None, kwargs or {}, getattr(func, "__name__", "")
        if isinstance(first, DTensor) and _in_place(name) and _few(first):
            found = getattr(torch.Tensor, name[:-1])(*args, **given)
            local_tensor(first).copy_(local_tensor(_placed(found, first.placements)))
            return first
        try:
            found = func(*args, **given)
        except RuntimeError as error:  # alike on all ranks: shapes and placements tell
            if _in_place(name) or not _UNEVEN.search(str(error)):
                raise
            found = func(*tree_map_only(DTensor, _whole, args), **given)
        if not isinstance(found, DTensor):
            return found
        if isinstance(first, DTensor) and name.startswith("new_"):
            kept = [cut if _keeps(cut, found, first) else Replicate() for cut in first.placements]
            return _placed(found, kept)
        return _placed(found, [Replicate() if p.is_partial() else p for p in found.placements])


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _few(tensor: DTensor) -> bool:
    """Whether some ranks have no part of it."""
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return any(isinstance(cut, Shard) and tensor.shape[cut.dim] < ranks for cut, ranks in sizes)


def _keeps(cut: Placement, made: DTensor, like: DTensor) -> bool:
    """Whether a new tensor can be cut as the one that it was made from."""
    if type(cut) is not Shard or made.dim() != like.dim():
        return False
    return made.shape[cut.dim] == like.shape[cut.dim] and not _few(like)


def _whole(tensor: DTensor) -> DTensor:
    return _placed(tensor, [Replicate()] * tensor.device_mesh.ndim)


def _placed(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    return (
        tensor.redistribute(placements=placements)
        if tensor.placements != tuple(placements)
        else tensor
    )
