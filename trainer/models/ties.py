"""Tied weights: one parameter with several names."""

from collections.abc import Mapping

from torch import nn


def ties_of(model: nn.Module) -> dict[str, str]:
    """Return for each further name of a tied parameter its first name."""
    first: dict[nn.Parameter, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    first_names = {name: first.setdefault(parameter, name) for name, parameter in named}
    return {name: known for name, known in first_names.items() if known != name}


def tie_again(model: nn.Module, ties: Mapping[str, str]) -> None:
    """Tie parameters again that `nn.Module._apply` has separated, as it does when it moves weights
    off the meta device. `ties`: see `ties_of`."""
    for name, first in ties.items():
        parent, _, key = name.rpartition(".")
        module, weight = model.get_submodule(parent), model.get_parameter(first)
        if module._parameters[key] is not weight:
            module.register_parameter(key, weight)
