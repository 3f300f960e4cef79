"""Runs an elementwise optimizer on this rank's shards as plain tensors (slices). Operations on
DTensors would be slow to dispatch, and some that torch.optim uses are missing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_iter, tree_map_only

from checkpointing.format.optimizers import has_own_state_dict
from checkpointing.format.tensors import local_tensor
from trainer.optim.method import trial_parameters

Build = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
"""Parameters by FQN → a new optimizer for them."""


@dataclass(frozen=True)
class _InnerOptimizer:
    optimizer: torch.optim.Optimizer
    slices: dict[nn.Parameter, nn.Parameter]
    """Sharded parameter → this rank's slice of it, a plain tensor."""


class SliceOptimizer(torch.optim.Optimizer):
    """An optimizer of sharded parameters that runs an inner optimizer, created by `build`, on this
    rank's slices. Its state has the sharded parameters as keys, and DTensors that share memory with
    the inner optimizer's state."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], build: Build) -> None:
        slices = {
            name: nn.Parameter(local_tensor(p), requires_grad=p.requires_grad)
            for name, p in parameters.items()
        }
        whole: dict[Any, nn.Parameter] = {slices[name]: p for name, p in parameters.items()}
        inner = build(slices)
        self._of = _InnerOptimizer(inner, {parameter: cut for cut, parameter in whole.items()})
        groups = [
            {**_entries(group), "params": [whole[cut] for cut in group["params"]]}
            for group in inner.param_groups
        ]
        super().__init__(groups, inner.defaults)
        self.groups_as_made = getattr(inner, "groups_as_made", [])
        self._shown: dict[nn.Parameter, dict[Any, Any]] = {}
        """The state after the last step, to notice when a checkpoint replaces it."""
        self._show()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients."""
        if closure is not None:
            raise ValueError("closure must be None: compute the gradients before the step")
        inner, slices = self._of.optimizer, self._of.slices
        for parameter, cut in slices.items():
            cut.data = local_tensor(parameter)
            cut.grad = None if parameter.grad is None else local_tensor(parameter.grad)
            state = self.state.get(parameter)
            if state is not self._shown.get(parameter):  # a checkpoint was loaded
                inner.state.pop(cut, None)
                if state:
                    inner.state[cut] = tree_map_only(DTensor, local_tensor, state)
        for group, mine in zip(self.param_groups, inner.param_groups, strict=True):
            mine.update(_entries(group))
        inner.step()
        for group, mine in zip(self.param_groups, inner.param_groups, strict=True):
            group.update(_entries(mine))
        for cut in slices.values():
            cut.grad = None
        self._show()

    def _show(self) -> None:
        """Set the state of the sharded parameters from the state of their slices."""
        for parameter, cut in self._of.slices.items():
            kept, before = self._of.optimizer.state.get(cut), self._shown.get(parameter, {})
            if not kept:
                continue
            shown = {
                key: before[key]
                if isinstance(value, torch.Tensor) and _wraps(before.get(key), value)
                else _like(parameter, value)
                for key, value in kept.items()
            }
            self.state[parameter] = self._shown[parameter] = shown


def _entries(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: one for key, one in group.items() if key not in ("params", "param_names")}


def _wraps(shown: Any, kept: torch.Tensor) -> bool:
    return shown is kept or (isinstance(shown, DTensor) and shown._local_tensor is kept)


def _like(parameter: nn.Parameter, kept: Any) -> Any:
    """Wrap state tensors of a slice's shape as DTensors, which share the memory."""
    if not isinstance(parameter, DTensor):
        return kept
    shape, spec = local_tensor(parameter).shape, parameter._spec

    def placed(value: torch.Tensor) -> torch.Tensor:
        if value.shape == shape:
            # DTensor.from_local would create another tensor object for the same memory, which
            # `_wraps` would not recognise.
            return DTensor(value, spec, requires_grad=False)
        if value.dim():
            raise ValueError(
                f"the optimizer keeps a tensor of shape {[*value.shape]} for a slice of shape "
                f"{[*shape]}, with which another number of ranks could not resume; use "
                "strategy.name=ddp"
            )
        return value

    return tree_map_only(torch.Tensor, placed, kept)


def like_sharded(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Shard a tensor, equal on all ranks, as a parameter is, on its device. Called on all ranks."""
    local = local_tensor(parameter)
    if not isinstance(parameter, DTensor):
        return whole.to(local.device)
    mesh, cuts = parameter.device_mesh, parameter.placements
    made = distribute_tensor(whole.to(mesh.device_type), mesh, cuts, src_data_rank=None)
    if local.device.type == mesh.device_type:
        return made
    return DTensor(made.to_local().to(local.device), made._spec, requires_grad=False)


SCALES = 1e-3, 1.0, 1e3
"""Scales of the gradients in trials, because elements may depend on each other only above a
threshold, for instance by clipping."""


def is_elementwise(parameters: Mapping[str, nn.Parameter], build: Build) -> bool:
    """Return whether an optimizer may update rows of parameters separately. Steps are tried on
    small random parameters, whole and cut in two: no operation may reduce many numbers to fewer,
    both must give the same parameters and state, and state must lie as `_results_by_part` asks."""
    halves = [slice(0, 1), slice(1, None)]
    for scale in SCALES:
        watched = _DetectReductions()
        with watched:
            whole = _results_by_part(parameters, build, scale, [slice(None)])
        if whole is None or watched.seen:
            return False
        cut = _results_by_part(parameters, build, scale, halves)
        if cut is None or whole.keys() != cut.keys():
            return False
        if not all(_parts_match(*whole[name], *cut[name]) for name in whole):
            return False
    return True


def _parts_match(whole: Any, *parts: Any) -> bool:
    """Return whether tensors `parts`, joined, equal the tensor `whole` up to rounding. A number
    must be equal in all parts."""
    if not isinstance(whole, torch.Tensor):
        return all(_close(whole, part) for part in parts)
    if not whole.dim():
        return all(isinstance(p, torch.Tensor) and _close(whole.item(), p.item()) for p in parts)
    joined = torch.cat([*parts])
    if joined.shape != whole.shape or joined.dtype != whole.dtype:
        return False
    if not whole.is_floating_point():
        return torch.equal(joined, whole)
    # Vectorised kernels may round the last elements differently, by 1e-7.
    least = 1e-6 * whole.float().abs().max().item()
    return torch.allclose(joined.float(), whole.float(), rtol=1e-5, atol=least, equal_nan=True)


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) <= 1e-6 * max(abs(one), abs(other))
    return bool(type(one) is type(other) and one == other)


class _DetectReductions(TorchDispatchMode):
    """Detects operations that reduce many numbers to fewer, such as sums, norms and maxima. They
    show that elements depend on each other, even if the results of the trial do not."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        given, made = _sizes((args, kwargs)), _sizes(output)
        is_view = any(
            one.alias_info and not one.alias_info.is_write for one in func._schema.returns
        )
        reads = func is torch.ops.aten._local_scalar_dense.default
        if made and given and not is_view and not reads and max(made) < max(given):
            self.seen = True
        return output


def _sizes(tree: Any) -> list[int]:
    return [one.numel() for one in tree_iter(tree) if isinstance(one, torch.Tensor)]


def _results_by_part(
    parameters: Mapping[str, nn.Parameter], build: Build, scale: float, cuts: Sequence[slice]
) -> dict[str, list[Any]] | None:
    """Run four steps of a new optimizer on each of `cuts`, slices of the rows of small random
    parameters, with gradients of size `scale`. Return name of an update, state or setting → its
    value for each part; or None if the optimizer cannot run on slices: it has a state_dict of its
    own, state that belongs to no parameter, a setting with several elements, or a state tensor that
    is of a subclass, or has neither the shape of its parameter nor a single element."""
    draw = torch.Generator().manual_seed(0)
    # In float32, and small if gradients are small, so that updates are not lost in rounding.
    whole = {
        name: one.detach().float() * min(scale, 1)
        for name, one in trial_parameters(parameters, draw).items()
    }
    gradients = [
        {name: scale * torch.randn(p.shape, generator=draw) for name, p in whole.items()}
        for _ in range(4)
    ]
    ends: dict[str, list[Any]] = {}
    for cut in cuts:
        parts = {
            name: nn.Parameter(_rows(p, cut).clone(), requires_grad=parameters[name].requires_grad)
            for name, p in whole.items()
        }
        optimizer = build(parts)
        for given in gradients:
            for name, part in parts.items():
                part.grad = _rows(given[name], cut).clone() if part.requires_grad else None
            optimizer.step()
        if has_own_state_dict(optimizer) or optimizer.state.keys() - {*parts.values()}:
            return None
        results: dict[str, Any] = {}
        for name, part in parts.items():
            results[name] = part.detach() - _rows(whole[name], cut)
            for key, kept in _leaves(optimizer.state.get(part, {})):
                if isinstance(kept, torch.Tensor) and type(kept) is not torch.Tensor:
                    return None
                if isinstance(kept, torch.Tensor) and kept.dim() and kept.shape != part.shape:
                    return None
                results[f"{name} {key}"] = kept
        for place, group in enumerate(optimizer.param_groups):
            for key, one in _leaves(_entries(group)):
                if isinstance(one, torch.Tensor) and one.dim():
                    return None
                results[f"group {place} {key}"] = one
        for name, one in results.items():
            ends.setdefault(name, []).append(one)
    return ends


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(f"{path}", leaf) for path, leaf in tree_flatten_with_path(tree)[0]]


def _rows(tensor: torch.Tensor, cut: slice) -> torch.Tensor:
    return tensor.detach()[cut] if tensor.dim() else tensor.detach()
