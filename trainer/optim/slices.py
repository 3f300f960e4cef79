"""An optimizer that takes each element by itself runs on this rank's slices, as plain tensors.

Nobody needs to say so: it is tried on small stand-ins, whole and cut. Operations on DTensors would
ask for each what it means for the other ranks, and some of torch.optim's they do not know.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from checkpointing import optimizer_tensors
from checkpointing.format.tensors import local_tensor
from trainer.optim.method import stand_in

Build = Callable[[Mapping[str, nn.Parameter]], torch.optim.Optimizer]
"""Parameters by FQN → an optimizer of them, with its state."""


class SliceOptimizer(torch.optim.Optimizer):
    """What `build` makes of this rank's slices, seen as an optimizer of the sharded parameters: its
    groups and its state are theirs, and share memory with those of the slices."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], build: Build) -> None:
        slices = {
            name: nn.Parameter(local_tensor(p), requires_grad=p.requires_grad)
            for name, p in parameters.items()
        }
        whole: dict[Any, nn.Parameter] = {slices[name]: p for name, p in parameters.items()}
        self._inner = build(slices)
        self._slices = {parameter: cut for cut, parameter in whole.items()}
        groups = [
            {
                **{key: value for key, value in group.items() if key != "param_names"},
                "params": [whole[cut] for cut in group["params"]],
            }
            for group in self._inner.param_groups
        ]
        super().__init__(groups, {})
        for cut, kept in self._inner.state.items():
            self.state[whole[cut]] = {key: _like(whole[cut], value) for key, value in kept.items()}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; `closure` must be None."""
        if closure is not None:
            raise ValueError("gradients are computed before the update")
        for parameter, cut in self._slices.items():
            cut.data = local_tensor(parameter)
            cut.grad = None if parameter.grad is None else local_tensor(parameter.grad)
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner["lr"] = group["lr"]
        self._inner.step()
        for cut in self._slices.values():
            cut.grad = None


def _like(parameter: nn.Parameter, kept: Any) -> Any:
    """State of a slice as state of the parameter; the local part stays the same tensor."""
    sliced = isinstance(kept, torch.Tensor) and kept.shape == local_tensor(parameter).shape
    if not sliced or not isinstance(parameter, DTensor):
        return kept
    # Not from_local, which makes another tensor of the same memory.
    return DTensor(kept, parameter._spec, requires_grad=False)


SCALES = 1e-3, 1.0, 1e3
"""Scales of the gradients that stand-ins get: elements may depend on each other beyond a threshold
alone. One that these do not cross is not seen."""


def is_elementwise(parameters: Mapping[str, nn.Parameter], build: Build) -> bool:
    """Whether parameters may be cut into rows: stand-ins of them, whole and cut, are the same after
    some steps, and all of their state is like them or one number."""
    for scale in SCALES:
        whole, cut = (
            _ends(parameters, build, scale, cuts)
            for cuts in ([slice(None)], [slice(0, 1), slice(1, None)])
        )
        if whole is None or cut is None:
            return False
        # What is rounded otherwise at the end of a row differs by 1e-7.
        least = 1e-7 * min(scale, 1)
        pairs = zip(whole, cut, strict=True)
        if not all(torch.allclose(*pair, rtol=1e-6, atol=least) for pair in pairs):
            return False
    return True


def _ends(
    parameters: Mapping[str, nn.Parameter], build: Build, scale: float, cuts: Sequence[slice]
) -> list[torch.Tensor] | None:
    """What stand-ins are after three steps, in which an optimizer has each part of their rows; None
    if it keeps something that is neither like a part nor one number."""
    draw = torch.Generator().manual_seed(0)
    # In float32, and small where gradients are: else updates would be lost in rounding.
    whole = {
        name: stand_in(p, draw).detach().float() * min(scale, 1) for name, p in parameters.items()
    }
    gradients = [
        {name: scale * torch.randn(p.shape, generator=draw) for name, p in whole.items()}
        for _ in range(3)
    ]
    ends = []
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
        for name, part in parts.items():
            tensors = optimizer_tensors(optimizer, {name: part}).values()
            if any(t.dim() and t.shape != part.shape for t in tensors):
                return None
        ends.append(parts)
    return [
        torch.cat([part[name].detach() for part in ends]) if p.dim() else ends[0][name].detach()
        for name, p in whole.items()
    ]


def _rows(tensor: torch.Tensor, cut: slice) -> torch.Tensor:
    return tensor.detach()[cut] if tensor.dim() else tensor.detach()
