"""Optimizers of users. Ranks import this module: it needs nothing but torch."""

import torch


class Distinct(torch.optim.SGD):
    """Does with gradients what torch cannot do with sharded ones."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and parameter.dim() == 2:
                parameter.sub_(parameter.grad / parameter.grad.unique().norm())


class Counting(torch.optim.SGD):
    """Counts its steps where no checkpoint looks."""

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        super().step()


class Wandering(torch.optim.SGD):
    """Adds noise to each matrix as a whole, less and less; takes no closure. Counts in its groups,
    and keeps a list and an int for each parameter."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                noise, kept = torch.randn_like(parameter), self.state[parameter]
                kept["calls"] = kept.get("calls", 0) + 1
                kept.setdefault("noises", []).append(noise.mean())
                less = kept["calls"] * group["steps"]
                parameter.add_(noise - sum(kept["noises"]), alpha=group["lr"] / less)
        super().step()
