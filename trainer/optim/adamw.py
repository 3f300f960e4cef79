"""AdamW (Loshchilov & Hutter 2019) on this rank's slices: torch's fused kernel, or exact."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from checkpointing.format.tensors import local_tensor
from trainer.optim.method import Method, State


def update_adamw(
    parameters: Sequence[nn.Parameter],
    group: Mapping[str, Any],
    state: State,
    exact: bool,
) -> Callable[[float], None]:
    """See `Method.update`."""
    if exact:
        return partial(_exact, parameters, group, state)
    return _fused(parameters, group, state)


def _fused(
    parameters: Sequence[nn.Parameter], group: Mapping[str, Any], state: State
) -> Callable[[float], None]:
    """Update the local parts. For each DTensor torch would find out in every new process that an
    update needs no other rank: a sixth of a restart."""
    states = [state[parameter] for parameter in parameters]
    steps = [of_one["step"] for of_one in states]
    weights, means, squares = (
        [local_tensor(one) for one in many]
        for many in (
            parameters,
            (of_one["exp_avg"] for of_one in states),
            (of_one["exp_avg_sq"] for of_one in states),
        )
    )

    def update(factor: float) -> None:
        divisor = None
        if factor != 1.0:
            divisor = torch.full(
                (),
                min(1 / factor, torch.finfo(torch.float32).max),
                dtype=torch.float32,
                device=parameters[0].device,
            )
        beta1, beta2 = group["betas"]
        adamw(
            weights,
            [local_tensor(one.grad) for one in parameters if one.grad is not None],
            means,
            squares,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            grad_scale=divisor,
        )

    return update


def _numbers(group: Mapping[str, Any], steps: torch.Tensor, factor: float) -> torch.Tensor:
    """See `Method.numbers`: what depends on no element."""
    beta1, beta2 = group["betas"]
    counts = steps.double()
    decay = torch.full_like(counts, 1 - group["lr"] * group["weight_decay"])
    rate = group["lr"] / (1 - beta1**counts)
    root = (1 - beta2**counts).rsqrt()
    same = (factor, beta1, 1 - beta1, beta2, 1 - beta2, group["eps"])
    constant = [torch.full_like(counts, one) for one in same]
    return torch.stack([*constant, decay, rate, root], dim=1).float()


def _rows(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    moments: Sequence[torch.Tensor],
    numbers: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """See `Method.rows`."""
    factor, beta1, rest1, beta2, rest2, eps, decay, rate, root = numbers.unbind()
    gradients = gradients * factor
    mean = moments[0] * beta1 + gradients * rest1
    square = moments[1] * beta2 + gradients * gradients * rest2
    change = rate * mean / (square.sqrt() * root + eps)
    return weights * decay - change, mean, square


def _exact(
    parameters: Sequence[nn.Parameter], group: Mapping[str, Any], state: State, factor: float
) -> None:
    """Every operation is one multiplication, addition, division or square root of float32 elements.
    IEEE 754 defines these to the last bit, so how a tensor is cut, and which kernel computes it,
    does not show."""
    lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
    states = [state[parameter] for parameter in parameters]
    for of_one in states:
        of_one["step"] += 1
    counts = torch.stack([of_one["step"] for of_one in states]).tolist()  # one wait for a GPU
    for parameter, of_one, steps in zip(parameters, states, counts, strict=True):
        assert parameter.grad is not None
        weight, gradient, mean, mean_square = map(
            local_tensor, (parameter, parameter.grad, of_one["exp_avg"], of_one["exp_avg_sq"])
        )
        gradient.mul_(factor)
        mean.mul_(beta1).add_(gradient.mul(1 - beta1))
        mean_square.mul_(beta2).add_(gradient.mul(gradient).mul_(1 - beta2))
        root = mean_square.sqrt().mul_((1 - beta2**steps) ** -0.5).add_(eps)
        weight.mul_(1 - lr * group["weight_decay"])
        weight.sub_(mean.div(root).mul_(lr / (1 - beta1**steps)))


ADAMW = Method(
    "adamw",
    ("exp_avg", "exp_avg_sq"),
    counts=True,
    update=update_adamw,
    squares=("exp_avg_sq",),
    rows=_rows,
    numbers=_numbers,
)
