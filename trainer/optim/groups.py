"""Which parameters are updated how: groups by shape and by name."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from trainer.optim.adamw import ADAMW
from trainer.optim.method import Method
from trainer.optim.muon import MUON
from trainer.recipe import Muon, Optimizer, ParameterGroup, RecipeError

NamedGroup = dict[str, Any]
"""`params`, a list of (FQN, parameter), and `lr`, `lr_scale` and `weight_decay` of these."""


def named_groups(parameters: Mapping[str, nn.Parameter], options: Optimizer) -> list[NamedGroup]:
    """The trained parameters in groups of one learning rate and weight decay. Unless a group of the
    recipe says otherwise, matrices and embeddings decay, vectors (norms, biases) do not."""
    found: dict[tuple[float, float], NamedGroup] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        rules = [rule for rule in options.groups if fnmatchcase(name, rule.match)]
        decay = options.weight_decay if parameter.dim() >= 2 else 0.0
        rule = rules[0] if rules else ParameterGroup(match="*")
        if rule.weight_decay is not None:
            decay = rule.weight_decay
        group = {"lr": options.lr, "lr_scale": rule.lr_scale, "weight_decay": decay, "params": []}
        found.setdefault((rule.lr_scale, decay), group)["params"].append((name, parameter))
    return list(found.values())


def check_patterns(names: Sequence[str], options: Optimizer) -> None:
    """Refuse rules for nothing.

    Args:
        names: FQNs of all parameters; a rank of a pipeline has some of them.
        options: of the recipe, without what a family adds: it need not match in each model.

    Raises:
        RecipeError: a pattern of `optimizer.groups` matches no name.
    """
    for number, rule in enumerate(options.groups):
        if not any(fnmatchcase(name, rule.match) for name in names):
            shown = ", ".join(names[:3])
            raise RecipeError(
                f"optimizer.groups.{number}.match: no parameter is called {rule.match}; they are "
                f"called {shown} and so on"
            )


def method_groups(parameters: Mapping[str, nn.Parameter], options: Optimizer) -> list[NamedGroup]:
    """The trained parameters in groups of one learning rate, weight decay and `Method`, with what
    the method reads."""
    muon = options.muon or Muon()
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
        by_method: dict[Method, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in group["params"]:
            method = method_of(name, parameter, options)
            by_method.setdefault(method, []).append((name, parameter))
        for method, members in by_method.items():
            groups.append({**group, "params": members, "method": method, **settings[method]})
    return groups


def method_of(name: str, parameter: torch.Tensor, options: Optimizer) -> Method:
    """How a parameter is updated, by a named optimizer."""
    if options.name == "adamw" or parameter.dim() != 2:
        return ADAMW
    kept = (options.muon or Muon()).adamw
    return ADAMW if any(fnmatchcase(name, pattern) for pattern in kept) else MUON


def moments(options: Optimizer) -> tuple[str, ...] | None:
    """Names of what is kept for each element of a parameter, in float32, if nothing else is kept
    and an element's update depends on no other; else None."""
    if options.factory or options.name != "adamw" or options.state_dtype != "fp32":
        return None
    return ADAMW.moments
