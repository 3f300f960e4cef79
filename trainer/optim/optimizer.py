"""The optimizer of a recipe, its state, the gradient norm, the loss scale."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from checkpointing.format.tensors import local_tensor
from trainer.optim.formats import Format, format_of, parts_of
from trainer.optim.groups import method_groups, method_of
from trainer.optim.method import Method, MethodOptimizer, stand_in
from trainer.optim.saved_state import own_state
from trainer.recipe import Optimizer


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    options: Optimizer,
    *,
    exact: bool = False,
    compiles: bool = False,
    zeros_like: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like,
) -> torch.optim.Optimizer:
    """The recipe's optimizer over named parameters, with its state. On all ranks.

    Args:
        parameters: by FQN.
        exact: whether updates must not depend in any bit on where shards end.
        compiles: see `MethodOptimizer`.
        zeros_like: creates state in its storage; not used for a factory's optimizer.

    Raises:
        RecipeError: the parameters or the factory do not fit the options.
    """
    if options.factory:
        from trainer.optim.own import build_own  # imported only where the recipe uses it

        return build_own(parameters, options)
    return MethodOptimizer(
        method_groups(parameters, options),
        exact=exact,
        compiles=compiles,
        zeros_like=zeros_like,
        state_dtype=options.state_dtype,
    )


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set each parameter group's rate to its multiple of `lr`; a rate of None, of optimizers that
    find it themselves, stays None."""
    for group in optimizer.param_groups:
        rate, held = lr * group.get("lr_scale", 1.0), group.get("lr")
        if isinstance(held, torch.Tensor):  # in place: compiled code may hold the tensor
            held.fill_(rate)
        elif held is not None:
            group["lr"] = rate


def parameter_groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, float]]:
    """Learning rate and weight decay of each parameter, by FQN."""
    names = {parameter: name for name, parameter in parameters.items()}
    return {
        names[parameter]: {
            key: float(group[key]) for key in ("lr", "weight_decay") if group.get(key) is not None
        }
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@dataclass(frozen=True)
class StateTensor:
    """One state tensor of a parameter."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    block: int
    """Elements of the parameter per number, if sharded like it; 0: counted as whole on every rank,
    although Adafactor's row factors are sharded with the rows."""

    def nbytes(self, elements: int) -> int:
        """Bytes on a rank that holds `elements` of the parameter."""
        count = elements // self.block if self.block else math.prod(self.shape)
        return self.dtype.itemsize * count


def state_of(
    parameters: Mapping[str, torch.Tensor], options: Optimizer
) -> dict[str, tuple[StateTensor, ...]]:
    """State of a recipe's optimizer for each trained parameter, by FQN.

    An optimizer of a factory steps once over small stand-ins. Their dimensions have distinct
    lengths, by which they are recognised in the shapes of the state.

    Args:
        parameters: whole; only shape and dtype count, so they may be on the meta device.

    Raises:
        RecipeError: as `build_optimizer`.
    """
    if not options.factory:
        return {
            name: _stored(parameter, method_of(name, parameter, options), options.state_dtype)
            if parameter.requires_grad
            else ()
            for name, parameter in parameters.items()
        }
    from trainer.optim.own import tried  # imported only where the recipe uses it

    stand_ins = {name: stand_in(parameter) for name, parameter in parameters.items()}
    kept = own_state(tried(stand_ins, options), stand_ins).tensors
    state = {}
    for name, made in stand_ins.items():
        real = dict(zip(made.shape, parameters[name].shape, strict=True))
        state[name] = tuple(
            StateTensor(
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
    parameter: torch.Tensor, method: Method, state_dtype: Format
) -> tuple[StateTensor, ...]:
    """State of a named optimizer for a parameter."""
    how = format_of(parameter, state_dtype)
    parts = [
        part
        for name in method.moments
        for part in parts_of(name, how, square=name in method.squares)
    ]
    steps = [StateTensor("step", torch.float32, (), 0)] if method.counts else []
    *rows, columns = parameter.shape or [1]
    shapes = [(*rows, columns // part.block) if parameter.dim() else () for part in parts]
    return (
        *steps,
        *(
            StateTensor(part.name, part.dtype, shape, part.block)
            for part, shape in zip(parts, shapes, strict=True)
        ),
    )


def square_sum(parameters: Iterable[nn.Parameter], ranks: int) -> torch.Tensor:
    """This rank's term of the squared gradient norm: one float64 number, shape (1,). The sum over
    `ranks` counts every element once, for any meshes and replicas; `exact.square_sums` is the
    slower variant whose bits do not depend on these.

    Raises:
        ValueError: a gradient is Partial: squares of its terms are not the square of their sum.
    """
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
                        "Partial: each rank has a term of it; add them up before the norm"
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
    # On a CPU float64 costs 7x as much as float32, whose sum over a large tensor is off by 1e-5.
    # Rows in float32, then float64, is as fast as float32 and accurate to 1e-9.
    return torch.stack(
        [torch.linalg.vector_norm(t, dim=-1).double().square().sum() for t in tensors if t.numel()]
        or [torch.zeros((), dtype=torch.float64)]
    ).sum()


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scale for fp16 (Micikevicius et al. 2018), a power of two, so that scaling is
    exact. Constantly 1 for other formats."""

    value: float
    good_steps: int = 0

    GROWTH_INTERVAL = 2000

    def after_good_step(self) -> "LossScale":
        """Double the scale once in GROWTH_INTERVAL good steps."""
        if self.good_steps + 1 == self.GROWTH_INTERVAL:
            return LossScale(self.value * 2)
        return LossScale(self.value, self.good_steps + 1)

    def after_overflow(self) -> "LossScale":
        """Halve the scale, down to 1."""
        return LossScale(max(1.0, self.value / 2))
