"""What an optimizer says of itself, and the one class that runs what is said.

[Note: methods] A `Method` is a value: what is kept for each parameter, and how a group of them is
updated. Whoever makes, places, plans or moves optimizer state asks it. A recipe's own optimizer
(`optimizer.factory`) is any torch.optim.Optimizer; it has no method, and is asked for its state.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from checkpointing.format.tensors import local_tensor
from trainer.optim.formats import (
    PORTION,
    Format,
    Opened,
    ParameterRows,
    Places,
    format_of,
    noise,
    opened,
    parts_of,
    placed,
    places_of,
    portions_of,
    zeros_of,
)
from trainer.optim.fused import FUSED, Rows, compiled, in_rows, on_device
from trainer.recipe.seeds import stable_seed

State = Mapping[Any, dict[str, Any]]
"""What an optimizer keeps: parameter → name → tensor."""


@dataclass(frozen=True)
class Method:
    """How the parameters of a group are updated."""

    name: str
    moments: tuple[str, ...]
    """Numbers for each element of a parameter, zero at first; stored as `parts_of` says."""
    counts: bool
    """Whether each parameter has its number of updates as well: `step`, a float32 scalar."""
    update: Callable[
        [Sequence[nn.Parameter], Mapping[str, Any], State, bool], Callable[[float], None]
    ]
    """(parameters with gradients, their group, state, exact): gathers what an update takes. What it
    returns makes the update of this rank's slices, by gradients times a factor; it may change them.
    On all ranks. With `exact` the bits do not depend on where slices end (see exact.py)."""
    squares: tuple[str, ...] = ()
    """Names of the moments that are never negative."""
    whole: bool = False
    """Whether an update takes whole parameters, together with other ranks, and not some rows."""
    rows: Rows | None = None
    """The update of elements by themselves, for compiled kernels; None: it cannot be said so."""
    numbers: Callable[[Mapping[str, Any], torch.Tensor, float], torch.Tensor] | None = None
    """(group, numbers of updates with this one (P,) float32, gradient factor): what `rows` reads,
    (P, K) float32."""

    def state(
        self,
        parameter: torch.Tensor,
        how: Format = "fp32",
        zeros_like: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like,
    ) -> dict[str, torch.Tensor]:
        """What is kept for a parameter, before its first update.

        Args:
            parameter: whose.
            how: its moments are stored.
            zeros_like: makes those that are like the parameter.
        """
        found = {}
        if self.counts:
            found["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in self.moments:
            if how == "fp32" and parameter.dtype != torch.bfloat16:
                found[name] = zeros_like(parameter)
                continue
            for part in parts_of(name, how, square=name in self.squares):
                found[part.name] = zeros_of(parameter, part)
        return found


class MethodOptimizer(torch.optim.Optimizer):
    """Updates each parameter group by the `Method` that stands in it.

    State exists from the start: it can be loaded into, and its memory is known. Gradients are
    multiplied by `gradient_factor` as they are read: a pass over them of its own would take a third
    of AdamW's time again. What is stored in fewer bits than float32 is updated as [Note: rounding]
    of formats.py says, with `seed`, which is to be another one in each step.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        exact: bool = False,
        compiles: bool = False,
        zeros_like: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like,
        state_dtype: Format = "fp32",
    ) -> None:
        """Make the state.

        Args:
            groups: have `params`, pairs of FQN and parameter, `method` and what that reads.
            exact: see `Method.update`.
            compiles: on a GPU, what is rounded is updated by compiled kernels, see fused.py.
            zeros_like: says where state is to live that is like its parameter.
            state_dtype: how moments are stored, where `format_of` agrees.
        """
        super().__init__(groups, {})
        self.exact, self.compiles, self.state_dtype = exact, compiles, state_dtype
        self.gradient_factor, self.seed = 1.0, 0
        self._gathered: list[Callable[[float], None]] = []
        self._names: dict[nn.Parameter, str] = {}
        self._formats: dict[nn.Parameter, Format] = {}
        """How the moments are stored of what is updated in portions."""
        self._places: dict[nn.Parameter, Places] = {}
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                how = format_of(parameter, state_dtype)
                self._names[parameter] = name
                if how != "fp32" or parameter.dtype == torch.bfloat16:
                    self._formats[parameter] = how
                self.state[parameter] = group["method"].state(parameter, how, zeros_like)

    def gather(self) -> None:
        """Gather what the next `step` takes, once backward has given every parameter its gradient.
        On a GPU that is done while it computes them: `step` then only launches kernels."""
        self._gathered = [
            group["method"].update(live, group, self.state, self.exact)
            for group in self.param_groups
            if (live := [one for one in group["params"] if self._is_live(one)])
        ]

    def _is_live(self, parameter: nn.Parameter) -> bool:
        """Whether it is updated as it is stored."""
        return parameter.grad is not None and parameter not in self._formats

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; `closure` must be None. On all ranks."""
        if closure is not None:
            raise ValueError("gradients are computed before the update")
        if not self._gathered:
            self.gather()
        for update in self._gathered:
            update(self.gradient_factor)
        self._gathered = []
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            rounded = {one: self._formats[one] for one in trained if one in self._formats}
            if rounded and self._compiles(group["method"], [*rounded]):
                self._update_compiled([*rounded], group)
                continue
            for how, portion in _portions(rounded, whole=group["method"].whole):
                self._update(portion, how, group)

    def _compiles(self, method: Method, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether compiled kernels update them."""
        able = self.compiles and not self.exact and method.rows is not None
        return able and local_tensor(parameters[0]).is_cuda

    def _update_compiled(
        self, parameters: Sequence[nn.Parameter], group: Mapping[str, Any]
    ) -> None:
        """What `_update` does, without portions of several parameters."""
        method: Method = group["method"]
        assert method.rows is not None
        assert method.numbers is not None
        device, update = local_tensor(parameters[0]).device, compiled()
        steps = [self.state[parameter]["step"] for parameter in parameters]
        torch._foreach_add_(steps, 1.0)
        numbers = method.numbers(group, torch.stack(steps), self.gradient_factor)
        names = [self._names[parameter] for parameter in parameters]
        keys = on_device([stable_seed(self.seed, name) for name in names], device)
        for number, parameter in enumerate(parameters):
            how, places = self._formats[parameter], self._places_of(parameter)
            formats = [(how, name in method.squares) for name in method.moments]
            parts = [
                [self.state[parameter][part.name] for part in parts_of(name, how, square=square)]
                for name, (how, square) in zip(method.moments, formats, strict=True)
            ]
            assert parameter.grad is not None
            gradient = local_tensor(parameter.grad).contiguous()
            rows, columns = len(places.rows), len(places.columns)
            most = max(1, FUSED // max(1, columns))
            for start in range(0, rows * (columns > 0), most):
                few = slice(start, start + most)
                update(
                    in_rows(parameter, rows)[few],
                    in_rows(gradient, rows)[few],
                    [[in_rows(part, rows)[few] for part in moment] for moment in parts],
                    (places.rows[few], places.columns),
                    keys[number],
                    numbers[number],
                    formats,
                    method.rows,
                )

    def _places_of(self, parameter: nn.Parameter) -> Places:
        if parameter not in self._places:
            self._places[parameter] = places_of(parameter)
        return self._places[parameter]

    def _update(
        self, pieces: Sequence[ParameterRows], how: Format, group: Mapping[str, Any]
    ) -> None:
        """Update some rows in float32, and round what is stored in fewer bits."""
        method: Method = group["method"]
        parameters = [piece.parameter for piece in pieces]
        gradients = [local_tensor(p.grad).contiguous() for p in parameters if p.grad is not None]
        of_weights: Format = "bf16" if parameters[0].dtype == torch.bfloat16 else "fp32"
        weights = opened(pieces, [parameters], of_weights)
        slopes = opened(pieces, [gradients], of_weights)
        moments = {
            name: self._moment(pieces, name, how, method, self.state) for name in method.moments
        }
        state: dict[nn.Parameter, dict[str, Any]] = {}
        for place, piece in enumerate(pieces):
            parameter = piece.parameter
            made, slope = weights.values[place], slopes.values[place]
            kept: dict[str, Any] = {name: one.values[place] for name, one in moments.items()}
            if method.whole:
                shape = local_tensor(parameter).shape
                made, slope = (placed(one.view(shape), parameter) for one in (made, slope))
                kept = {name: one.view(shape) for name, one in kept.items()}
            if method.counts:  # rows to come count on from the same number
                step = self.state[parameter]["step"]
                kept["step"] = step if piece.last else step.clone()
            stand_in = nn.Parameter(made, requires_grad=False)
            stand_in.grad = slope
            state[stand_in] = kept
        method.update([*state], group, state, self.exact)(self.gradient_factor)
        drawn = self._noise(pieces)
        for one, words in zip((weights, *moments.values()), drawn, strict=False):
            one.close(words)

    def _moment(
        self, pieces: Sequence[ParameterRows], name: str, how: Format, method: Method, state: State
    ) -> Opened:
        """A moment of some pieces."""
        square = name in method.squares
        parts = parts_of(name, how, square=square)
        tensors = [[state[piece.parameter][part.name] for piece in pieces] for part in parts]
        return opened(pieces, tensors, how, square=square)

    def _noise(self, pieces: Sequence[ParameterRows]) -> torch.Tensor:
        """Drawn for some rows, see `noise`."""
        parameters = dict.fromkeys(piece.parameter for piece in pieces)
        for parameter in parameters:
            self._places_of(parameter)
        keys = {one: stable_seed(self.seed, self._names[one]) for one in parameters}
        return noise(pieces, self._places, keys)

    def state_in(self, state_dtype: Format) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """New state with moments in another format, to load into."""
        return {
            parameter: group["method"].state(parameter, format_of(parameter, state_dtype))
            for group in self.param_groups
            for parameter in group["params"]
        }

    @torch.no_grad()
    def take(self, state: State, state_dtype: Format) -> None:
        """Take over the numbers of a state with moments in another format."""
        for group in self.param_groups:
            method, formats = group["method"], {}
            for parameter in group["params"]:
                here = format_of(parameter, self.state_dtype)
                formats[parameter] = format_of(parameter, state_dtype), here
                if method.counts:
                    self.state[parameter]["step"].copy_(state[parameter]["step"])
            for (there, here), pieces in _portions(formats):
                for name, words in zip(method.moments, self._noise(pieces), strict=False):
                    ours = self._moment(pieces, name, here, method, self.state)
                    theirs = self._moment(pieces, name, there, method, state)
                    torch._foreach_copy_([*ours.values], [*theirs.values])
                    ours.close(words)


Way = TypeVar("Way", bound=Hashable)


def _portions(
    formats: Mapping[nn.Parameter, Way], *, whole: bool = False
) -> Iterator[tuple[Way, list[ParameterRows]]]:
    """Parameters on one device in portions of one format each, see `portions_of`."""
    members: dict[Way, list[nn.Parameter]] = {}
    for parameter, how in formats.items():
        members.setdefault(how, []).append(parameter)
    for how, parameters in members.items():
        on_cpu = local_tensor(parameters[0]).device.type == "cpu"
        most = PORTION["cpu"] * torch.get_num_threads() if on_cpu else PORTION["cuda"]
        for portion in portions_of(parameters, most, whole=whole):
            yield how, portion


def update(
    optimizer: torch.optim.Optimizer,
    portions: Iterable[list[dict[str, Any]]],
    factor: float,
    seed: int = 0,
) -> None:
    """One optimizer step, a portion of the parameter groups at a time. On all ranks.

    Args:
        optimizer: whose.
        portions: of its parameter groups.
        factor: of clipping and of the loss scale, by which gradients are multiplied.
        seed: of this step, for what is drawn in rounding.
    """
    groups = optimizer.param_groups
    if isinstance(optimizer, MethodOptimizer):
        optimizer.gradient_factor, optimizer.seed = factor, seed
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
