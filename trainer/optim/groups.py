"""Divides parameters into groups of equal learning rate, weight decay and method."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from trainer.optim.adamw import ADAMW
from trainer.optim.method import Method
from trainer.optim.muon import MUON
from trainer.recipe import MuonSection, Optimizer, ParameterGroup, RecipeError

NamedGroup = dict[str, Any]
"""A parameter group of torch.optim, with pairs of FQN and parameter in `params`."""


def named_groups(parameters: Mapping[str, nn.Parameter], options: Optimizer) -> list[NamedGroup]:
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


def check_patterns(names: Sequence[str], options: Optimizer) -> None:
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


def method_groups(parameters: Mapping[str, nn.Parameter], options: Optimizer) -> list[NamedGroup]:
    """Divide the trained parameters into groups of equal learning rate, weight decay and `Method`,
    with the settings of the method."""
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
        by_method: dict[Method, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in group["params"]:
            method = method_of(name, parameter, options)
            by_method.setdefault(method, []).append((name, parameter))
        for method, members in by_method.items():
            groups.append({**group, "params": members, "method": method, **settings[method]})
    return groups


def method_of(name: str, parameter: torch.Tensor, options: Optimizer) -> Method:
    """Return the method by which a recipe with `optimizer.name` updates a parameter."""
    if options.name == "adamw" or parameter.dim() != 2:
        return ADAMW
    kept = (options.muon or MuonSection()).adamw
    return ADAMW if any(fnmatchcase(name, pattern) for pattern in kept) else MUON


def moments(options: Optimizer) -> tuple[str, ...] | None:
    """Return the names of the optimizer's moments, if its updates are elementwise and its state
    consists of float32 moments and a number of steps; else None."""
    if options.factory or options.name != "adamw" or options.state_dtype != "fp32":
        return None
    return ADAMW.moments
