"""AdamW over named parameters, the learning-rate schedule, the gradient norm, the loss scale."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from checkpointing.format.tensors import local_tensor
from trainer.optim.exact import ExactAdamW, ScaledAdamW
from trainer.recipe import Optimizer, Schedule


class FusedAdamW(ScaledAdamW):
    """torch's fused AdamW on this rank's slices. Of DTensors torch would find out, in every new
    process and for each of them, that an update needs no other rank: a sixth of a restart."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update; `closure` must be None."""
        if closure is not None:
            raise ValueError("gradients are computed before the update")
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not trained:
                continue
            states = [self.state[parameter] for parameter in trained]
            beta1, beta2 = group["betas"]
            divisor = None
            if self.gradient_factor != 1.0:
                divisor = torch.full(
                    (),
                    min(1 / self.gradient_factor, torch.finfo(torch.float32).max),
                    dtype=torch.float32,
                    device=trained[0].device,
                )
            adamw(
                [local_tensor(parameter) for parameter in trained],
                [local_tensor(parameter.grad) for parameter in trained],
                [local_tensor(state["exp_avg"]) for state in states],
                [local_tensor(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
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


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    options: Optimizer,
    *,
    exact: bool = False,
    zeros_like: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like,
) -> ScaledAdamW:
    """AdamW (Loshchilov & Hutter 2019) whose state exists from the start: fused, or exact.

    State tensors are made here rather than at the first step, so that they can be loaded into and
    their memory is known; `zeros_like` says where.
    """
    kind = ExactAdamW if exact else FusedAdamW
    groups = decay_groups(parameters, options)
    optimizer = kind(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=not exact)
    for parameter in (parameter for group in groups for parameter in group["params"]):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": zeros_like(parameter),
            "exp_avg_sq": zeros_like(parameter),
        }
    return optimizer


def decay_groups(
    parameters: Mapping[str, nn.Parameter], options: Optimizer
) -> list[dict[str, Any]]:
    """The trained parameters as AdamW's groups: matrices and embeddings decay, vectors (norms,
    biases) do not."""
    trainable = [p for p in parameters.values() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": options.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def parameter_groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, float]]:
    """What AdamW applies to each parameter, by FQN."""
    names = {parameter: name for name, parameter in parameters.items()}
    return {
        names[parameter]: {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def learning_rate(step: int, steps: int, peak: float, schedule: Schedule) -> float:
    """Learning rate of `step` (from 1) in a run of `steps`. Pure: nothing to save or restore."""
    warmup, floor = schedule.warmup_steps, peak * schedule.min_lr_ratio
    if step <= warmup:
        return peak * step / warmup
    decay = schedule.decay_steps if schedule.name == "wsd" else steps - warmup
    progress = min(1.0, max(0.0, (step - (steps - decay)) / decay))
    match schedule.name:
        case "cosine":
            return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        case "linear" | "wsd":
            return peak + (floor - peak) * progress
        case "constant":
            return peak


def square_sum(parameters: Iterable[nn.Parameter], ranks: int) -> torch.Tensor:
    """This rank's share of the squared gradient norm: one float64 number, shape (1,), whose sum
    over so many `ranks` counts every element once, whatever the meshes and replicas.
    `exact.square_sums` is the slower variant whose result depends on neither."""
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
    # On the CPU float64 costs 7x as much as float32, whose sum over a large tensor is off by 1e-5.
    # Rows in float32, then float64, is as fast as the one and within 1e-9 of the other.
    return torch.stack(
        [torch.linalg.vector_norm(t, dim=-1).double().square().sum() for t in tensors if t.numel()]
        or [torch.zeros((), dtype=torch.float64)]
    ).sum()


def update(optimizer: ScaledAdamW, portions: Iterable[list[dict[str, Any]]], factor: float) -> None:
    """One optimizer step, a portion of the parameter groups at a time, with gradients times
    `factor` (of clipping and of the loss scale)."""
    optimizer.gradient_factor = factor
    groups = optimizer.param_groups
    try:
        for portion in portions:
            optimizer.param_groups = portion
            optimizer.step()
    finally:
        optimizer.param_groups = groups


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scale for fp16 (Micikevicius et al. 2018): powers of two, so that scaling is
    exact. For other formats 1, and never moved."""

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
