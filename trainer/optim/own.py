"""Builds the optimizer of `optimizer.factory`. A trial on small parameters shows problems at the
start rather than in the first step or the first restart."""

import inspect
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.compiler import set_stance
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from checkpointing.format.optimizers import (
    Parameters,
    has_empty_shards,
    kept_as_subclass,
    placements_of,
)
from checkpointing.format.tensors import local_tensor
from trainer.optim.method import trial_parameters
from trainer.optim.optimizer import named_groups, set_rate
from trainer.optim.saved_state import own_state, own_targets, settings
from trainer.optim.slices import Build, SliceOptimizer, is_elementwise, like_sharded
from trainer.recipe import OptimizerSection, RecipeError
from trainer.recipe.factory import call_factory, failure, import_factory, refusing

_OF_SHARDS = re.compile(r"DTensor|DeviceMesh|sharding|placement")
"""Matches DTensor's errors for unsupported operations."""
_UNEVEN = re.compile(r"unevenly sharded|redistribute the tensor")
"""Matches DTensor's errors for operations that need even shards or whole tensors."""


def build_own(
    parameters: Mapping[str, nn.Parameter], options: OptimizerSection
) -> torch.optim.Optimizer:
    """Create the optimizer of `optimizer.factory` for parameters by FQN, after a trial on small
    ones. Called on all ranks. For sharded parameters it gets this rank's shards as tensors if its
    update is elementwise; otherwise it gets DTensors, whose operations have the results of whole
    tensors. Raises RecipeError if the optimizer fails, or cannot be saved and resumed."""

    def build(given: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return _build(given, options)

    sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
    by_slices = False
    with _leaving_no_trace():
        _try_steps(parameters, options, build)
        if sharded:
            with _stepping(options):
                by_slices = is_elementwise(parameters, build)

    def place(given: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        return SliceOptimizer(given, build) if by_slices else build(given)

    if sharded:
        with _leaving_no_trace():
            _try_sharded(parameters, options, build, place)
    return place(parameters)


@contextmanager
def _leaving_no_trace() -> Iterator[None]:
    """Context for trials, which compile nothing and do not advance the run's random generators."""
    # fork_rng covers only torch's generators.
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(), set_stance("force_eager"):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def tried(
    parameters: Mapping[str, nn.Parameter], options: OptimizerSection
) -> torch.optim.Optimizer:
    """Build the optimizer for small parameters, and run a step, which creates its state."""
    with _leaving_no_trace():
        optimizer = build_own(parameters, options)
        with _stepping(options):
            _step(optimizer, parameters, 1, options.lr)
    return optimizer


def _step(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], number: int, lr: float
) -> None:
    """Run one step of a trial. Its gradients and random seed are functions of `number`."""
    draw = torch.Generator().manual_seed(number)
    for one in parameters.values():
        gradient = torch.randn(one.shape, generator=draw).to(one.dtype)
        one.grad = like_sharded(gradient, one) if one.requires_grad else None
    torch.manual_seed(number)
    set_rate(optimizer, lr)
    optimizer.step()


STEPS = 6
"""Number of steps of a trial before its state is saved, and after it is loaded."""
SHARDED_STEPS = 3
"""Number of steps of a trial with shards: fewer, because each operation may be a collective."""
ALL = 24
"""Largest number of parameters that all get gradients in a trial with shards. Of more parameters,
only one for each combination of shape and placement gets a gradient."""
ROUNDING = 0.02
"""Largest accepted difference between sharded and whole updates, relative to the largest update."""


def _try_steps(
    parameters: Mapping[str, nn.Parameter], options: OptimizerSection, build: Build
) -> None:
    """Step the optimizer on small parameters, and load its state into a second optimizer. Raises
    RecipeError unless both continue equally."""
    name = options.factory
    trials = trial_parameters(parameters, torch.Generator().manual_seed(0))
    optimizer = build(trials)
    beside: dict[str, list[Any]] = {}
    with _stepping(options):
        for number in range(STEPS):
            _step(optimizer, trials, number, options.lr)
            # Read after the first step, which may create attributes.
            beside = beside or _kept_beside(optimizer)
    try:
        kept = own_state(optimizer, trials)
    except ValueError as error:
        raise RecipeError(f"optimizer.factory: {error}") from error
    copies = {
        fqn: nn.Parameter(one.detach().clone(), requires_grad=one.requires_grad)
        for fqn, one in trials.items()
    }
    other = build(copies)
    with _stepping(options):
        # Through JSON, as in a checkpoint, which changes tuples and integer keys.
        targets = own_targets(other, copies, json.loads(json.dumps(kept.trees)), {})
        for key, tensor in targets.tensors.items():
            tensor.copy_(kept.tensors[key])
        targets.put()
        for number in range(STEPS, 2 * STEPS):
            _step(optimizer, trials, number, options.lr)
            _step(other, copies, number, options.lr)
    for key, value in _kept_beside(optimizer).items():
        if str(beside.get(key)) != str(value) and str(_kept_beside(other).get(key)) != str(value):
            raise RecipeError(
                f"optimizer.factory: a step of {name} changes {key} of the optimizer itself, which "
                "no checkpoint holds; keep it in the parameters' state or in the groups"
            )
    for fqn, one in trials.items():
        if not torch.equal(one.detach().nan_to_num(), copies[fqn].detach().nan_to_num()):
            raise RecipeError(
                f"optimizer.factory: {name} updates parameters otherwise after a checkpoint is "
                f"loaded (seen at {fqn}); keep all in the parameters' state or in the groups, or "
                "let its state_dict return, and its load_state_dict restore, all of its state"
            )


def _try_sharded(
    parameters: Mapping[str, nn.Parameter], options: OptimizerSection, build: Build, place: Build
) -> None:
    """Step the optimizer on small parameters that are sharded as the real ones are, and on the same
    parameters as whole tensors. Called on all ranks. Raises RecipeError if the optimizer fails, has
    state that cannot be saved, or updates sharded parameters to other values than whole ones."""
    name = options.factory
    hint = "; use strategy.name=ddp, which does not shard the parameters"
    whole = trial_parameters(parameters, torch.Generator().manual_seed(0))
    cut = {
        fqn: nn.Parameter(like_sharded(one.detach(), parameters[fqn]), one.requires_grad)
        for fqn, one in whole.items()
    }
    before = {fqn: one.detach().clone() for fqn, one in whole.items()}
    reference, chosen = build(whole), _chosen(whole, parameters)
    with _stepping(options):
        for number in range(SHARDED_STEPS):
            _step(reference, _select(whole, chosen), number, options.lr)
        # Results are not compared if a step draws random numbers, which differ between shards.
        seeded = torch.get_rng_state()
        torch.manual_seed(SHARDED_STEPS - 1)
        draws = not torch.equal(seeded, torch.get_rng_state())
        in_blocks = kept_as_subclass(reference)
    if in_blocks:
        raise RecipeError(
            f"optimizer.factory: {name} keeps {in_blocks} in blocks of numbers, which shards would "
            f"cut{hint}"
        )
    try:
        optimizer = place(cut)
        for number in range(SHARDED_STEPS):
            _step(optimizer, _select(cut, chosen), number, options.lr)
    except Exception as error:
        if not _OF_SHARDS.search(str(error)):
            with _stepping(options):
                raise
        raise RecipeError(
            f"optimizer.factory: the step of {name} {failure(error)}{hint}"
        ) from error
    try:
        kept = own_state(optimizer, cut)
    except ValueError as error:
        raise RecipeError(f"optimizer.factory: {error}{hint}") from error
    for key, tensor in kept.tensors.items():
        if isinstance(tensor, DTensor) and any(one.is_partial() for one in tensor.placements):
            raise RecipeError(
                f"optimizer.factory: {name} keeps {key} as a sum over ranks that is not taken yet "
                f"({tensor.placements}), which no checkpoint holds; use strategy.name=ddp, or "
                "redistribute it in the step"
            )
    if draws or dist.get_backend() == "fake":  # a fake group has no results to compare
        return
    for fqn, one in whole.items():
        updated = cut[fqn].detach()
        updated = updated.full_tensor() if isinstance(updated, DTensor) else updated
        wanted = one.detach().to(updated.device)
        moved = (wanted - before[fqn].to(updated.device)).abs().max().item() if one.numel() else 0.0
        least = ROUNDING * moved + 1e-6 * wanted.abs().max().item()
        if not torch.allclose(updated.float(), wanted.float(), rtol=0, atol=least, equal_nan=True):
            raise RecipeError(
                f"optimizer.factory: {name} updates sharded parameters otherwise than whole ones "
                f"(seen at a small parameter in place of {fqn}){hint}"
            )


def _chosen(whole: Parameters, parameters: Parameters) -> set[str]:
    if len(parameters) <= ALL:
        return {*parameters}
    first = {
        (one.shape, getattr(parameters[fqn], "placements", None)): fqn
        for fqn, one in reversed(list(whole.items()))
    }
    return {*first.values()}


def _select(parameters: Parameters, names: set[str]) -> dict[str, nn.Parameter]:
    return {fqn: one for fqn, one in parameters.items() if fqn in names}


def _stepping(options: OptimizerSection) -> AbstractContextManager[None]:
    return refusing("optimizer.factory", f"the step of {options.factory}")


def _build(
    parameters: Mapping[str, nn.Parameter], options: OptimizerSection
) -> torch.optim.Optimizer:
    name, key = options.factory or "", "optimizer.factory"
    factory = import_factory(key, name)
    if isinstance(factory, type):  # e.g. LBFGS would fail later with a less clear error
        _check_kind(name, factory)
    given = named_groups(parameters, options)
    # The factory's weight decay replaces the recipe's, unless `optimizer.groups` sets one.
    stated = any(rule.weight_decay is not None for rule in options.groups)
    for group in given:
        lr = options.factory_options.get("lr", options.lr)
        group["lr"] = lr * group["lr_scale"] if isinstance(lr, (int, float)) else lr
        if "weight_decay" in options.factory_options and not stated:
            del group["weight_decay"]
    optimizer = call_factory(key, name, options.factory_options, given)
    if isinstance(optimizer, type):
        raise RecipeError(
            f"optimizer.factory: {name} returned the class {optimizer.__name__} itself; return an "
            "optimizer"
        )
    _check_kind(name, type(optimizer))
    names = {parameter: fqn for fqn, parameter in parameters.items() if parameter.requires_grad}
    if any(isinstance(parameter, DTensor) for parameter in names):
        _complete(optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if odd := names.keys() ^ set(held):
        fqn = names.get(next(iter(odd)))
        what = f"leaves out {fqn}" if fqn else "updates a tensor that is no trained parameter"
        raise RecipeError(
            f"optimizer.factory: {name} {what}; give it all parameters of the groups, as they are"
        )
    with refusing(key, f"train() of {name}"):
        # Schedule-free optimizers must be in train mode.
        if callable(train := getattr(optimizer, "train", None)):
            train()
    for group in optimizer.param_groups:
        _take_rate(group, options)
    optimizer.groups_as_made = [settings(group) for group in optimizer.param_groups]
    return optimizer


def _take_rate(group: dict[str, Any], options: OptimizerSection) -> None:
    """Set `lr_scale` of a group so that the schedule multiplies the rate that the factory chose."""
    lr = group.get("lr")
    if isinstance(lr, torch.Tensor):
        lr = lr.item()
    if lr is None or not options.lr:
        group["lr_scale"] = 1.0
    elif lr != options.lr * group.get("lr_scale", 1.0):
        group["lr_scale"] = lr / options.lr


def describe_own(optimizer: torch.optim.Optimizer, options: OptimizerSection) -> str:
    """Return a log line on the learning rates and weight decays of the groups, and their origin."""
    recipes = {0.0, options.weight_decay, *(rule.weight_decay for rule in options.groups)}
    parts = []
    for group in optimizer.param_groups:
        rate = group.get("lr_scale", 1.0) * options.lr
        what = f"lr {rate:g}" if group.get("lr") is not None else "no lr, as it has none"
        if "weight_decay" in group:
            what += f", weight_decay {group['weight_decay']:g}"
            own = optimizer.defaults.get("weight_decay", group["weight_decay"])
            if own != group["weight_decay"] and group["weight_decay"] in recipes:
                what += f" of the recipe instead of its own {own:g}"
        parts.append(f"{len(group['params'])} parameter(s) with {what}")
    return (
        f"optimizer.factory: {options.factory} has {'; '.join(dict.fromkeys(parts))}; "
        "the schedule multiplies these rates"
    )


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


def _kept_beside(optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """Return attribute → its numbers, for the attributes of an optimizer other than its state,
    groups and defaults. Private booleans are left out, because they are torch's flags."""
    known = {id(one) for one in tree_leaves([*optimizer.state.values()])}
    known |= {id(one) for group in optimizer.param_groups for one in group["params"]}
    return {
        key: [
            one.tolist() if isinstance(one, torch.Tensor) else one
            for one in tree_leaves(value)
            if isinstance(one, (torch.Tensor, int, float))
            if not (isinstance(one, torch.Tensor) and id(one) in known)
        ]
        for key, value in vars(optimizer).items()
        if key not in ("state", "param_groups", "defaults", "groups_as_made")
        if not (key.startswith("_") and isinstance(value, bool))
    }


def _complete(optimizer: torch.optim.Optimizer) -> None:
    step = optimizer.step

    def completed(*given: Any) -> None:
        with _CompleteDTensors():
            step(*given)

    optimizer.step = completed  # type: ignore[method-assign, assignment]


class _CompleteDTensors(TorchFunctionMode):
    """Makes DTensors behave as ordinary tensors where DTensor by itself does not. Sums over shards
    are taken at once, not left Partial. New tensors (`new_zeros` and the like) are sharded as their
    source is. In-place operations work on tensors with fewer rows than ranks. Operations that need
    even shards, such as products of stacked matrices, are computed on whole tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        first, given, name = args[0] if args else None, kwargs or {}, getattr(func, "__name__", "")
        if isinstance(first, DTensor) and _in_place(name) and has_empty_shards(first):
            result = getattr(torch.Tensor, name[:-1])(*args, **given)
            local_tensor(first).copy_(local_tensor(_placed(result, first.placements)))
            return first
        try:
            result = func(*args, **given)
        except RuntimeError as error:  # raised on all ranks or none, by shapes and placements
            if _in_place(name) or not _UNEVEN.search(str(error)):
                raise
            result = func(*tree_map_only(DTensor, _whole, args), **given)
        if not isinstance(result, DTensor):
            return result
        if isinstance(first, DTensor) and name.startswith("new_"):
            return _placed(result, placements_of(result.shape, first))
        return _placed(result, [Replicate() if p.is_partial() else p for p in result.placements])


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _whole(tensor: DTensor) -> DTensor:
    return _placed(tensor, [Replicate()] * tensor.device_mesh.ndim)


def _placed(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    return (
        tensor.redistribute(placements=placements)
        if tensor.placements != tuple(placements)
        else tensor
    )
