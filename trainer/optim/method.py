"""What an optimizer says of itself, and the one class that runs what is said.

[Note: methods] A `Method` is a value: what is kept for each parameter, and how a group of them is
updated. Whoever makes, places, plans or moves optimizer state asks it. A recipe's own optimizer
(`optimizer.factory`) is any torch.optim.Optimizer; it has no method, and is asked for its state.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from checkpointing.format.tensors import local_tensor

State = Mapping[nn.Parameter, dict[str, Any]]
"""What an optimizer keeps: parameter → name → tensor."""


@dataclass(frozen=True)
class Method:
    """How the parameters of a group are updated."""

    name: str
    moments: tuple[str, ...]
    """Tensors for each parameter, with its shape, dtype and placement; zero at first."""
    counts: bool
    """Whether each parameter has its number of updates as well: `step`, a float32 scalar."""
    update: Callable[[Sequence[nn.Parameter], Mapping[str, Any], State, float, bool], None]
    """(parameters with gradients, their group, state, gradient factor, exact): one update of this
    rank's slices, by gradients times the factor, which it may change. On all ranks. With `exact`
    the bits do not depend on where slices end (see exact.py)."""

    def state(
        self, parameter: torch.Tensor, zeros_like: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """What is kept for a parameter, before its first update."""
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments = {name: zeros_like(parameter) for name in self.moments}
        return {"step": step, **moments} if self.counts else moments


class MethodOptimizer(torch.optim.Optimizer):
    """Updates each parameter group by the `Method` that stands in it.

    State exists from the start: it can be loaded into, and its memory is known. Gradients are
    multiplied by `gradient_factor` as they are read: a pass over them of its own would take a third
    of AdamW's time again.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        exact: bool = False,
        zeros_like: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like,
    ) -> None:
        """`groups` have `params`, `method` and what that reads; `zeros_like` says where state is to
        live."""
        super().__init__(groups, {})
        self.exact = exact
        self.gradient_factor = 1.0
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = group["method"].state(parameter, zeros_like)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; `closure` must be None. On all ranks."""
        if closure is not None:
            raise ValueError("gradients are computed before the update")
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                group["method"].update(trained, group, self.state, self.gradient_factor, self.exact)


def update(
    optimizer: torch.optim.Optimizer, portions: Iterable[list[dict[str, Any]]], factor: float
) -> None:
    """One optimizer step, a portion of the parameter groups at a time, with gradients times
    `factor` (of clipping and of the loss scale). On all ranks."""
    groups = optimizer.param_groups
    if isinstance(optimizer, MethodOptimizer):
        optimizer.gradient_factor = factor
    elif factor != 1.0:
        for gradient in (p.grad for group in groups for p in group["params"]):
            if gradient is not None:
                local_tensor(gradient).mul_(factor)
    try:
        for portion in portions:
            if portion is not groups:  # not every class lets them be set
                optimizer.param_groups = portion
            optimizer.step()
    finally:
        if optimizer.param_groups is not groups:
            optimizer.param_groups = groups


def stand_in(parameter: torch.Tensor, draw: torch.Generator | None = None) -> nn.Parameter:
    """A small parameter on the CPU, for asking an optimizer: each dimension has a length of its
    own, but those of one element. Zeros, or numbers that are drawn."""
    lengths = [1 if n == 1 else 3 + 2 * dim for dim, n in enumerate(parameter.shape)]
    made = torch.zeros(lengths, dtype=parameter.dtype)
    if draw:
        made.normal_(generator=draw)
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


TRIED_ELEMENTS = 1 << 14
"""Most elements of a stand-in that is as large as its parameter."""
TRIED_MATRIX = 64, 128
"""Stands for larger matrices: enough for state that is kept in blocks of numbers."""


def trial_parameters(
    parameters: Mapping[str, torch.Tensor], draw: torch.Generator
) -> dict[str, nn.Parameter]:
    """Stand-ins by FQN. That of the largest parameter of each number of dimensions is about as
    large, up to TRIED_ELEMENTS: some optimizers treat small tensors otherwise."""
    largest = {one.dim(): name for name, one in sorted(parameters.items(), key=_elements)}
    found = {}
    for name, parameter in parameters.items():
        if largest[parameter.dim()] != name:
            found[name] = stand_in(parameter, draw)
            continue
        lengths = [*parameter.shape]
        if len(lengths) == 2 and math.prod(lengths) > TRIED_ELEMENTS:
            lengths = [*TRIED_MATRIX]
        while math.prod(lengths) > TRIED_ELEMENTS:
            longest = lengths.index(max(lengths))
            lengths[longest] = -(-lengths[longest] // 2)
        made = torch.randn(lengths, generator=draw).to(parameter.dtype)
        found[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    return found


def _elements(named: tuple[str, torch.Tensor]) -> int:
    return named[1].numel()
