"""`OptimizerMethod`, the description of an optimizer, and `MethodOptimizer`, which runs it.

[Note: methods] An `OptimizerMethod` describes the state of each parameter, and the update of a
group. A user's optimizer (`optimizer.factory`) is any torch.optim.Optimizer; it has no
`OptimizerMethod`, and its state is inspected.

[Note: fused] On GPUs compiled updates change weights and state in fewer bits than float32. They
compute the same as `MethodOptimizer` does eagerly, see [Note: rounding] in formats.py. On an H200
an update of 10**9 parameters takes 12 ms instead of 84 with bf16 moments, and 30 ms instead of 179
with int8 moments (`speed.update` of benchmarks.gpu).
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from checkpointing.format.tensors import local_tensor
from trainer.optim.formats import (
    MIX1,
    MIX2,
    PORTION,
    DecodedOptimizerRows,
    Format,
    OptimizerIndices,
    OptimizerRows,
    format_of,
    in_float32,
    noise,
    opened,
    parts_of,
    placed,
    places_of,
    portions_of,
    rounded_to_bf16,
    stored,
    zeros_of,
)
from trainer.recipe.seeds import stable_seed

FUSED = 1 << 25
"""Elements updated at a time. A kernel may need ten bytes of temporaries for each."""

Rows = Callable[[Tensor, Tensor, Sequence[Tensor], Tensor], Sequence[Tensor]]
"""(weights, gradients, moments, row of `OptimizerMethod.numbers`) → weights and moments after one
elementwise update, all flat and float32."""


def update_rows(
    weight: Tensor,
    gradient: Tensor,
    moments: Sequence[Sequence[Tensor]],
    places: tuple[Tensor, Tensor],
    key: Tensor,
    numbers: Tensor,
    formats: Sequence[tuple[Format, bool]],
    rows: Rows,
) -> None:
    """Update rows of one parameter and of its moments in their stored formats.

    Args:
        weight, gradient: rows of this rank's shards, (R, C).
        moments: for each moment, its tensors by `parts_of`.
        places: `OptimizerIndices.rows` and `OptimizerIndices.columns` of these rows.
        key: hash of the seed and the FQN, 0-d int64.
        formats: for each moment, its format, and whether it is a second moment.
        rows, numbers: the elementwise update, and its argument.
    """
    hashed = (places[0] + key + places[1]).reshape(-1)
    hashed = (hashed ^ (hashed >> 30)) * MIX1
    hashed = (hashed ^ (hashed >> 27)) * MIX2
    # The three upper 16-bit words of the hash, sign-extended.
    drawn = [
        one.to(torch.int32) for one in ((hashed << 32) >> 48, (hashed << 16) >> 48, hashed >> 48)
    ]
    flat = [[part.reshape(-1) for part in parts] for parts in moments]
    held = [
        in_float32(parts, how, square=square)
        for parts, (how, square) in zip(flat, formats, strict=True)
    ]
    made, *kept = rows(weight.reshape(-1).float(), gradient.reshape(-1).float(), held, numbers)
    made = rounded_to_bf16(made, drawn[0]) if weight.dtype == torch.bfloat16 else made
    weight.copy_(made.view(weight.shape))
    for parts, value, (how, square), words in zip(moments, kept, formats, drawn[1:], strict=False):
        for part, new in zip(parts, stored(value, how, words, square=square), strict=True):
            part.copy_(new.view(part.shape))


@cache
def compiled() -> Callable[..., Any]:
    return torch.compile(update_rows, dynamic=True)


def in_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return this rank's shard of a parameter or its state, viewed as (rows, columns)."""
    return local_tensor(tensor).view(rows, -1)


def on_device(values: Sequence[int], device: torch.device) -> Tensor:
    host = torch.tensor(values, dtype=torch.int64)
    # Pinned, so that the copy does not synchronise with the GPU.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


State = Mapping[Any, dict[str, Any]]
"""Optimizer state: parameter → name → tensor."""


@dataclass(frozen=True)
class OptimizerMethod:
    """Describes an optimizer: the state of a parameter, and the update of a parameter group."""

    name: str
    moments: tuple[str, ...]
    """Names of the moments: state with one number per element, initially zero, see `parts_of`."""
    counts: bool
    """Whether the state also has `step`, the number of updates, a float32 scalar."""
    update: Callable[
        [Sequence[nn.Parameter], Mapping[str, Any], State, bool], Callable[[float], None]
    ]
    """(parameters with gradients, their group, state, exact) → a function that takes a factor for
    the gradients, and updates this rank's shards. It may change the gradients, and is called on all
    ranks. With `exact` the same bits result wherever shards end (see exact.py)."""
    squares: tuple[str, ...] = ()
    """Names of the second moments, which are never negative."""
    whole: bool = False
    """Whether an update needs whole parameters, which it gathers from other ranks."""
    rows: Rows | None = None
    """The elementwise update, for compiled kernels; None: the update is not elementwise."""
    numbers: Callable[[Mapping[str, Any], torch.Tensor, float], torch.Tensor] | None = None
    """(group, number of updates of P parameters, including the present one (P,) float32, factor for
    the gradients) → factors that are equal for all elements of a parameter, (P, K) float32."""

    def state(
        self,
        parameter: torch.Tensor,
        how: Format = "fp32",
        zeros_like: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like,
    ) -> dict[str, torch.Tensor]:
        """Create the initial state of a parameter, which may be sharded, with moments in the format
        `how`. `zeros_like`: creates moments that have the dtype of the parameter."""
        state = {}
        if self.counts:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in self.moments:
            if how == "fp32" and parameter.dtype != torch.bfloat16:
                state[name] = zeros_like(parameter)
                continue
            for part in parts_of(name, how, square=name in self.squares):
                state[part.name] = zeros_of(parameter, part)
        return state


class MethodOptimizer(torch.optim.Optimizer):
    """Updates each parameter group by its `OptimizerMethod`. The state is created with the
    optimizer, so that checkpoints can be loaded into it. State in fewer bits than float32 is
    rounded by [Note: rounding] in formats.py, with `seed`, which must change every step.

    Args:
        groups: see `method_groups`.
        exact: see `OptimizerMethod.update`.
        compiles: whether compiled kernels update rounded state on a GPU, see [Note: fused].
        zeros_like: creates moments that have the dtype of their parameter.
        state_dtype: format of moments; `format_of` may choose another.
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
        super().__init__(groups, {})
        self.exact, self.compiles, self.state_dtype = exact, compiles, state_dtype
        # The update multiplies gradients by this factor. A separate multiplication would add a
        # third to AdamW's time.
        self.gradient_factor, self.seed = 1.0, 0
        self._gathered: list[Callable[[float], None]] = []
        self._names: dict[nn.Parameter, str] = {}
        self._formats: dict[nn.Parameter, Format] = {}
        """Formats of moments, for parameters with weights or moments in fewer bits than float32."""
        self._places: dict[nn.Parameter, OptimizerIndices] = {}
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                how = format_of(parameter, state_dtype)
                self._names[parameter] = name
                if how != "fp32" or parameter.dtype == torch.bfloat16:
                    self._formats[parameter] = how
                self.state[parameter] = group["method"].state(parameter, how, zeros_like)

    def gather(self) -> None:
        """Prepare the next `step`. Called once all gradients exist as tensors, while the GPU still
        computes them, so that `step` only launches kernels."""
        self._gathered = []
        for group in self.param_groups:
            # Parameters with a format are updated in portions, see `step`.
            live = [p for p in group["params"] if p.grad is not None and p not in self._formats]
            if live:
                self._gathered.append(group["method"].update(live, group, self.state, self.exact))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have gradients. Called on all ranks."""
        if closure is not None:
            raise ValueError("closure must be None: compute the gradients before the step")
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

    def _compiles(self, method: OptimizerMethod, parameters: Sequence[nn.Parameter]) -> bool:
        able = self.compiles and not self.exact and method.rows is not None
        return able and local_tensor(parameters[0]).is_cuda

    def _update_compiled(
        self, parameters: Sequence[nn.Parameter], group: Mapping[str, Any]
    ) -> None:
        method: OptimizerMethod = group["method"]
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

    def _places_of(self, parameter: nn.Parameter) -> OptimizerIndices:
        if parameter not in self._places:
            self._places[parameter] = places_of(parameter)
        return self._places[parameter]

    def _update(
        self, pieces: Sequence[OptimizerRows], how: Format, group: Mapping[str, Any]
    ) -> None:
        """Update rows in float32, and round weights and moments to their formats."""
        method: OptimizerMethod = group["method"]
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
            weight, slope = weights.values[place], slopes.values[place]
            kept: dict[str, Any] = {
                name: numbers.values[place] for name, numbers in moments.items()
            }
            if method.whole:
                shape = local_tensor(parameter).shape
                weight, slope = (
                    placed(numbers.view(shape), parameter) for numbers in (weight, slope)
                )
                kept = {name: numbers.view(shape) for name, numbers in kept.items()}
            # A copy except for the last rows, so that all rows begin with the same count.
            if method.counts:
                step = self.state[parameter]["step"]
                kept["step"] = step if piece.last else step.clone()
            # `OptimizerMethod.update` gets this parameter with float32 weights and gradients
            rows_parameter = nn.Parameter(weight, requires_grad=False)
            rows_parameter.grad = slope
            state[rows_parameter] = kept
        method.update([*state], group, state, self.exact)(self.gradient_factor)
        # Three random numbers per element: for the weight and for at most two moments.
        drawn = self._noise(pieces)
        for numbers, words in zip((weights, *moments.values()), drawn, strict=False):
            numbers.close(words)

    def _moment(
        self,
        pieces: Sequence[OptimizerRows],
        name: str,
        how: Format,
        method: OptimizerMethod,
        state: State,
    ) -> DecodedOptimizerRows:
        square = name in method.squares
        parts = parts_of(name, how, square=square)
        tensors = [[state[piece.parameter][part.name] for piece in pieces] for part in parts]
        return opened(pieces, tensors, how, square=square)

    def _noise(self, pieces: Sequence[OptimizerRows]) -> torch.Tensor:
        parameters = dict.fromkeys(piece.parameter for piece in pieces)
        for parameter in parameters:
            self._places_of(parameter)
        keys = {one: stable_seed(self.seed, self._names[one]) for one in parameters}
        return noise(pieces, self._places, keys)

    def state_in(self, state_dtype: Format) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """Create a state with moments in another format, to load a checkpoint into."""
        return {
            parameter: group["method"].state(parameter, format_of(parameter, state_dtype))
            for group in self.param_groups
            for parameter in group["params"]
        }

    @torch.no_grad()
    def take(self, state: State, state_dtype: Format) -> None:
        """Convert a state with moments in the format `state_dtype` to this optimizer's state."""
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
) -> Iterator[tuple[Way, list[OptimizerRows]]]:
    """Yield (format, portion with that format) for parameters on one device, see `portions_of`."""
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
    """Run one optimizer step, a portion of the parameter groups at a time (see
    `ParallelModel.portions`). Called on all ranks. `factor`: factor for the gradients, from
    clipping and the loss scale; `seed`: seed of this step, for stochastic rounding."""
    groups = optimizer.param_groups
    if isinstance(optimizer, MethodOptimizer):
        optimizer.gradient_factor, optimizer.seed = factor, seed
    elif factor != 1.0:
        for gradient in (p.grad for group in groups for p in group["params"]):
            if gradient is not None:
                local_tensor(gradient).mul_(factor)
    try:
        for portion in portions:
            if portion is not groups:  # some optimizers do not allow param_groups to be set
                optimizer.param_groups = portion
            optimizer.step()
    finally:
        if optimizer.param_groups is not groups:
            optimizer.param_groups = groups


def trial_parameter(parameter: torch.Tensor, draw: torch.Generator | None = None) -> nn.Parameter:
    """Create a small parameter on the CPU to try an optimizer on in place of `parameter`.
    Dimensions have distinct lengths, except those of length 1. Values are zeros, or drawn."""
    lengths = [1 if n == 1 else 3 + 2 * dim for dim, n in enumerate(parameter.shape)]
    zeros = torch.zeros(lengths, dtype=parameter.dtype)
    if draw:
        zeros.normal_(generator=draw)
    return nn.Parameter(zeros, requires_grad=parameter.requires_grad)


TRIED_ELEMENTS = 1 << 14
TRIED_MATRIX = 64, 128
"""Shape of the trial parameter for a large matrix, so that blockwise state has several blocks."""


def trial_parameters(
    parameters: Mapping[str, torch.Tensor], draw: torch.Generator
) -> dict[str, nn.Parameter]:
    """Create a random trial parameter in place of each parameter, by FQN. Most are small. For each
    number of dimensions, that of the largest parameter has up to TRIED_ELEMENTS elements, because
    some optimizers treat small tensors differently."""
    by_size = sorted(parameters.items(), key=lambda named: named[1].numel())
    largest = {one.dim(): name for name, one in by_size}
    trials = {}
    for name, parameter in parameters.items():
        if largest[parameter.dim()] != name:
            trials[name] = trial_parameter(parameter, draw)
            continue
        lengths = [*parameter.shape]
        if len(lengths) == 2 and math.prod(lengths) > TRIED_ELEMENTS:
            lengths = [*TRIED_MATRIX]
        while math.prod(lengths) > TRIED_ELEMENTS:
            longest = lengths.index(max(lengths))
            lengths[longest] = -(-lengths[longest] // 2)
        drawn = torch.randn(lengths, generator=draw).to(parameter.dtype)
        trials[name] = nn.Parameter(drawn, requires_grad=parameter.requires_grad)
    return trials
