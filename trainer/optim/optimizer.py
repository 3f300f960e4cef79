"""Builds a recipe's optimizer, divides parameters into groups of equal learning rate, weight decay
and method, and describes the state; gradient norm and loss scale. The learning rate is a pure
function of the step, with no state to save."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from checkpointing.format.tensors import local_tensor
from trainer.optim.adamw import ADAMW
from trainer.optim.formats import Format, format_of, parts_of
from trainer.optim.method import MethodOptimizer, OptimizerMethod, trial_parameter
from trainer.optim.muon import MUON
from trainer.optim.saved_state import own_state
from trainer.recipe import (
    MuonSection,
    OptimizerSection,
    ParameterGroup,
    Recipe,
    RecipeError,
    ScheduleSection,
)
from trainer.recipe.factory import call_factory, refusing


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    options: OptimizerSection,
    *,
    exact: bool = False,
    compiles: bool = False,
    zeros_like: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like,
) -> torch.optim.Optimizer:
    """Create the recipe's optimizer of parameters by FQN. Called on all ranks. Raises RecipeError
    if the parameters or the factory do not fit the options."""
    if options.factory:
        from trainer.optim.own import build_own  # imported only if the recipe uses it

        return build_own(parameters, options)
    return MethodOptimizer(
        method_groups(parameters, options),
        exact=exact,
        compiles=compiles,
        zeros_like=zeros_like,
        state_dtype=options.state_dtype,
    )


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of each parameter group to `lr` times its `lr_scale`, unless it is
    None: then the optimizer determines the rate itself."""
    for group in optimizer.param_groups:
        rate, held = lr * group.get("lr_scale", 1.0), group.get("lr")
        if isinstance(held, torch.Tensor):  # in place, because compiled code may read the tensor
            held.fill_(rate)
        elif held is not None:
            group["lr"] = rate


def parameter_groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, float]]:
    """Return the learning rate and weight decay of each parameter, by FQN."""
    names = {parameter: name for name, parameter in parameters.items()}
    return {
        names[parameter]: {
            key: float(group[key]) for key in ("lr", "weight_decay") if group.get(key) is not None
        }
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@dataclass(frozen=True)
class OptimizerStateTensor:
    """Describes one tensor of a parameter's optimizer state."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    block: int
    """Elements of the parameter for each number of this tensor, if the tensor is sharded as the
    parameter is. 0: it is counted as whole on every rank."""

    def nbytes(self, elements: int) -> int:
        """Return the bytes on a rank that holds `elements` elements of the parameter."""
        count = elements // self.block if self.block else math.prod(self.shape)
        return self.dtype.itemsize * count


def state_of(
    parameters: Mapping[str, torch.Tensor], options: OptimizerSection
) -> dict[str, tuple[OptimizerStateTensor, ...]]:
    """Return the state of the recipe's optimizer for each of `parameters`, which may be on the meta
    device, by FQN; () for frozen ones. Raises RecipeError if the optimizer cannot be built."""
    if not options.factory:
        return {
            name: _stored(parameter, method_of(name, parameter, options), options.state_dtype)
            if parameter.requires_grad
            else ()
            for name, parameter in parameters.items()
        }
    from trainer.optim.own import tried  # imported only if the recipe uses it

    # Dimensions of trial parameters have distinct lengths, by which they are recognised in the
    # shapes of the state.
    trials = {name: trial_parameter(parameter) for name, parameter in parameters.items()}
    kept = own_state(tried(trials, options), trials).tensors
    state = {}
    for name, made in trials.items():
        real = dict(zip(made.shape, parameters[name].shape, strict=True))
        state[name] = tuple(
            OptimizerStateTensor(
                key.removeprefix(f"{name}."),
                value.dtype,
                tuple(real.get(length, length) for length in value.shape),
                int(value.shape == made.shape),
            )
            for key, value in kept.items()
            if key.startswith(f"{name}.")
        )
    return state


def _stored(
    parameter: torch.Tensor, method: OptimizerMethod, state_dtype: Format
) -> tuple[OptimizerStateTensor, ...]:
    how = format_of(parameter, state_dtype)
    parts = [
        part
        for name in method.moments
        for part in parts_of(name, how, square=name in method.squares)
    ]
    steps = [OptimizerStateTensor("step", torch.float32, (), 0)] if method.counts else []
    *rows, columns = parameter.shape or [1]
    shapes = [(*rows, columns // part.block) if parameter.dim() else () for part in parts]
    return (
        *steps,
        *(
            OptimizerStateTensor(part.name, part.dtype, shape, part.block)
            for part, shape in zip(parts, shapes, strict=True)
        ),
    )


def square_sum(parameters: Iterable[nn.Parameter], ranks: int) -> torch.Tensor:
    """Return this rank's term of the squared gradient norm, float64 (1,). The sum of the terms of
    all `ranks` ranks has each element once, for any meshes and replicas. In exact mode
    `exact.square_sums` is used instead. Raises ValueError if the placement of a gradient is
    Partial."""
    by_copies: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        shards = 1
        if isinstance(gradient, DTensor):
            for size, placement in zip(
                gradient.device_mesh.shape, gradient.placements, strict=True
            ):
                if placement.is_partial():
                    raise ValueError(
                        f"the gradient of a parameter of shape {tuple(parameter.shape)} is "
                        "Partial: each rank has a term of its sum; reduce it before the norm"
                    )
                shards *= 1 if placement.is_replicate() else size
            gradient = local_tensor(gradient)
        gradient = gradient.reshape(1) if gradient.dim() == 0 else gradient
        by_copies.setdefault(ranks // shards, []).append(gradient)
    total: torch.Tensor | None = None
    for copies, gradients in by_copies.items():
        part = _squares(gradients) / copies
        total = part if total is None else total + part
    return total.reshape(1) if total is not None else torch.zeros(1, dtype=torch.float64)


def _squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    if tensors[0].is_cuda:
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64)).square().sum()
    # On a CPU sums in float64 take 7 times as long as in float32, whose relative error for a large
    # tensor is 1e-5. Rows in float32 and their sum in float64 are as fast, with an error of 1e-9.
    return torch.stack(
        [torch.linalg.vector_norm(t, dim=-1).double().square().sum() for t in tensors if t.numel()]
        or [torch.zeros((), dtype=torch.float64)]
    ).sum()


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scale for fp16 (Micikevicius et al. 2018); always 1 for other dtypes. It
    changes by factors of two. A power of two as the first scale rounds no gradient."""

    value: float
    good_steps: int = 0

    GROWTH_INTERVAL = 2000

    def after_good_step(self) -> "LossScale":
        """Return the scale for the next step: doubled after GROWTH_INTERVAL good steps in a row."""
        if self.good_steps + 1 == self.GROWTH_INTERVAL:
            return LossScale(self.value * 2)
        return LossScale(self.value, self.good_steps + 1)

    def after_overflow(self) -> "LossScale":
        """Return the scale for the next step: halved, but at least 1."""
        return LossScale(max(1.0, self.value / 2))


NamedGroup = dict[str, Any]
"""A parameter group of torch.optim, with pairs of FQN and parameter in `params`."""


def named_groups(
    parameters: Mapping[str, nn.Parameter], options: OptimizerSection
) -> list[NamedGroup]:
    """Divide the trained parameters into groups of equal learning rate and weight decay. Matrices
    and embeddings decay, vectors do not, unless `optimizer.groups` says otherwise."""
    groups: dict[tuple[float, float], NamedGroup] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        rules = [rule for rule in options.groups if fnmatchcase(name, rule.match)]
        decay = options.weight_decay if parameter.dim() >= 2 else 0.0
        rule = rules[0] if rules else ParameterGroup(match="*")
        if rule.weight_decay is not None:
            decay = rule.weight_decay
        group = {"lr": options.lr, "lr_scale": rule.lr_scale, "weight_decay": decay, "params": []}
        groups.setdefault((rule.lr_scale, decay), group)["params"].append((name, parameter))
    return list(groups.values())


def check_patterns(names: Sequence[str], options: OptimizerSection) -> None:
    """Raise RecipeError if a pattern of `optimizer.groups` matches no parameter. `names`: FQNs of
    all parameters, not only of one pipeline stage; `options`: section of the recipe, without groups
    of the model's family, which need not match."""
    for number, rule in enumerate(options.groups):
        if not any(fnmatchcase(name, rule.match) for name in names):
            shown = ", ".join(names[:3])
            raise RecipeError(
                f"optimizer.groups.{number}.match: no parameter is called {rule.match}; write it "
                f"for names such as {shown}"
            )


def method_groups(
    parameters: Mapping[str, nn.Parameter], options: OptimizerSection
) -> list[NamedGroup]:
    """Divide the trained parameters into groups of equal learning rate, weight decay and
    `OptimizerMethod`, with the settings of the method."""
    muon = options.muon or MuonSection()
    settings = {
        ADAMW: {"betas": options.betas, "eps": options.eps},
        MUON: {
            "momentum": muon.momentum,
            "nesterov": muon.nesterov,
            "ns_steps": muon.ns_steps,
            "ns_coefficients": muon.ns_coefficients,
            "ns_eps": muon.eps,
            "adjust_lr": muon.adjust_lr,
        },
    }
    groups = []
    for group in named_groups(parameters, options):
        by_method: dict[OptimizerMethod, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in group["params"]:
            method = method_of(name, parameter, options)
            by_method.setdefault(method, []).append((name, parameter))
        for method, members in by_method.items():
            groups.append({**group, "params": members, "method": method, **settings[method]})
    return groups


def method_of(name: str, parameter: torch.Tensor, options: OptimizerSection) -> OptimizerMethod:
    """Return the method by which a recipe with `optimizer.name` updates a parameter."""
    if options.name == "adamw" or parameter.dim() != 2:
        return ADAMW
    kept = (options.muon or MuonSection()).adamw
    return ADAMW if any(fnmatchcase(name, pattern) for pattern in kept) else MUON


def moments(options: OptimizerSection) -> tuple[str, ...] | None:
    """Return the names of the optimizer's moments, if its updates are elementwise and its state
    consists of float32 moments and a number of steps; else None."""
    if options.factory or options.name != "adamw" or options.state_dtype != "fp32":
        return None
    return ADAMW.moments


Rate = Callable[[int], float]


def build_schedule(recipe: Recipe, tried: int = 3) -> Rate:
    """Return the recipe's schedule. Raises RecipeError if `schedule.factory` returned no function,
    or an invalid rate for one of about `tried` steps, which include the first and the last. The
    schedule raises it at other steps with an invalid rate."""
    steps, lr, options = recipe.run.steps, recipe.optimizer.lr, recipe.schedule
    if not options.factory:
        return lambda step: learning_rate(step, steps, lr, options)
    name = options.factory
    given = {"steps": steps, "lr": lr, **options.factory_options}
    rate = call_factory("schedule.factory", name, given)
    if not callable(rate):
        raise RecipeError(
            f"schedule.factory: {name} returned {type(rate).__name__}, not a function from a step "
            "to its learning rate"
        )

    def checked(step: int) -> float:
        with refusing("schedule.factory", f"the rate of step {step} by {name}"):
            raw = rate(step)
        # Tensors are refused (they are not Real), because reading one could wait for a GPU.
        value = float(raw) if isinstance(raw, Real) else math.nan
        if math.isfinite(value) and value >= 0:
            return value
        raise RecipeError(
            f"schedule.factory: {name} gives {raw!r} as the learning rate of step {step}; it "
            "must be a finite number, no tensor, and at least 0"
        )

    for step in {*range(1, steps, max(1, steps // tried)), steps}:
        checked(step)
    return checked


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleSection) -> float:
    """Return the learning rate of `step` (from 1) in a run of `steps` steps."""
    warmup, decay = schedule.lengths(steps)
    floor = peak * schedule.min_lr_ratio
    if step <= warmup:
        return peak * step / warmup
    decay = decay if schedule.name == "wsd" else steps - warmup
    progress = min(1.0, max(0.0, (step - (steps - decay)) / decay))
    match schedule.name:
        case "cosine":
            return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        case "linear" | "wsd":
            return peak + (floor - peak) * progress
        case "constant":
            return peak
