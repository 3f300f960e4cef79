"""Weights that are one parameter under several names."""

from collections.abc import Mapping

from torch import nn


def ties_of(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter → its first."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    found = {name: first.setdefault(parameter, name) for name, parameter in named}
    return {name: known for name, known in found.items() if known != name}


def tie_again(model: nn.Module, ties: Mapping[str, str]) -> None:
    """Make one parameter of those that were one: `nn.Module._apply` makes two of a weight that
    comes from the meta device."""
    for name, first in ties.items():
        parent, _, key = name.rpartition(".")
        module, weight = model.get_submodule(parent), model.get_parameter(first)
        if module._parameters[key] is not weight:
            module.register_parameter(key, weight)
