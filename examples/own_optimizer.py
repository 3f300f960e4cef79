"""An optimizer and a schedule of one's own: Lion (Chen et al. 2023, "Symbolic Discovery of
Optimization Algorithms"), and a learning rate that falls as one over the root of the step."""

import math

import torch


class Lion(torch.optim.Optimizer):
    """Each weight moves by the sign of a mean of its gradients."""

    def __init__(self, groups, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                direction = state["mean"].lerp(parameter.grad, 1 - first).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(direction, alpha=group["lr"])
                state["mean"].lerp_(parameter.grad, 1 - second)


def lion(groups, **options):
    """`optimizer.factory`: gets the parameter groups and `optimizer.factory_options`."""
    return Lion(groups, **options)


def inverse_root(steps, lr, warmup=10):
    """`schedule.factory`: returns a pure function from the step, 1 to `steps`, to its rate."""

    def rate(step):
        return lr * min(step / warmup, math.sqrt(warmup / step))

    return rate
