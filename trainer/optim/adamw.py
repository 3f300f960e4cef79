"""AdamW (Loshchilov & Hutter 2019) on this rank's shards, by torch's fused kernel or exactly."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from checkpointing.format.tensors import local_tensor
from trainer.optim.method import OptimizerMethod, State


def _update(
    parameters: Sequence[nn.Parameter], group: Mapping[str, Any], state: State, exact: bool
) -> Callable[[float], None]:
    if exact:
        return partial(_exact, parameters, group, state)
    states = [state[parameter] for parameter in parameters]
    steps = [entry["step"] for entry in states]
    # Local tensors, because DTensor would check in each new process that the update needs no
    # communication, which takes a sixth of a restart's time.
    weights, means, squares = (
        [local_tensor(one) for one in many]
        for many in (
            parameters,
            (entry["exp_avg"] for entry in states),
            (entry["exp_avg_sq"] for entry in states),
        )
    )

    def update(factor: float) -> None:
        divisor = None
        if factor != 1.0:
            # The kernel divides gradients by this number. It must be finite in float32.
            finite = min(1 / factor, torch.finfo(torch.float32).max)
            divisor = torch.full((), finite, dtype=torch.float32, device=parameters[0].device)
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
    beta1, beta2 = group["betas"]
    # float64, because powers of beta for long runs would be inaccurate in float32.
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
    factor, beta1, rest1, beta2, rest2, eps, decay, rate, root = numbers.unbind()
    gradients = gradients * factor
    mean = moments[0] * beta1 + gradients * rest1
    square = moments[1] * beta2 + gradients * gradients * rest2
    change = rate * mean / (square.sqrt() * root + eps)
    return weights * decay - change, mean, square


def _exact(
    parameters: Sequence[nn.Parameter], group: Mapping[str, Any], state: State, factor: float
) -> None:
    """Update by separate multiplications, additions, divisions and square roots in float32, see
    [Note: exact mode]."""
    lr, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
    states = [state[parameter] for parameter in parameters]
    for entry in states:
        entry["step"] += 1
    # Stacked, so that reading all step numbers synchronises with the GPU only once.
    counts = torch.stack([entry["step"] for entry in states]).tolist()
    for parameter, entry, steps in zip(parameters, states, counts, strict=True):
        assert parameter.grad is not None
        weight, gradient, mean, mean_square = map(
            local_tensor, (parameter, parameter.grad, entry["exp_avg"], entry["exp_avg_sq"])
        )
        gradient.mul_(factor)
        mean.mul_(beta1).add_(gradient.mul(1 - beta1))
        mean_square.mul_(beta2).add_(gradient.mul(gradient).mul_(1 - beta2))
        root = mean_square.sqrt().mul_((1 - beta2**steps) ** -0.5).add_(eps)
        weight.mul_(1 - lr * group["weight_decay"])
        weight.sub_(mean.div(root).mul_(lr / (1 - beta1**steps)))


ADAMW = OptimizerMethod(
    "adamw",
    ("exp_avg", "exp_avg_sq"),
    counts=True,
    update=_update,
    squares=("exp_avg_sq",),
    rows=_rows,
    numbers=_numbers,
)
