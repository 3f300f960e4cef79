"""Optimizer state in checkpoints: tensors, and JSON for each parameter. The JSON has the state that
is no tensor, and what steps have changed in the parameter's group."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from checkpointing.format.layout import TensorMeta
from checkpointing.format.optimizers import (
    OWN,
    CheckpointOptimizerState,
    OptimizerFormatTargets,
    optimizer_state,
    optimizer_targets,
)
from checkpointing.format.values import from_json, to_json
from trainer.optim.formats import Format
from trainer.optim.method import MethodOptimizer

RECIPES = "lr", "lr_scale"
"""Entries of a parameter group that the recipe determines, even after a checkpoint is loaded."""


def own_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> CheckpointOptimizerState:
    """Return an optimizer's state: tensors, and JSON `{"state": …, "group": …}` by FQN. The state
    of bundled optimizers consists of tensors only. Raises ValueError if a value cannot be saved."""
    saved = optimizer_state(optimizer, parameters)
    if isinstance(optimizer, MethodOptimizer):
        return CheckpointOptimizerState(saved.tensors, {})
    names = {parameter: name for name, parameter in parameters.items()}
    trees: dict[str, Any] = {name: {"state": tree} for name, tree in saved.trees.items()}
    made = getattr(optimizer, "groups_as_made", [{} for _ in optimizer.param_groups])
    for group, before in zip(optimizer.param_groups, made, strict=True):
        now = settings(group)
        changed = {key: one for key, one in now.items() if before.get(key, object) != one}
        for parameter in group["params"] if changed else ():
            trees.setdefault(names[parameter], {})["group"] = changed
    return CheckpointOptimizerState(saved.tensors, trees)


def own_targets(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    trees: Mapping[str, Any] | None,
    metas: Mapping[str, TensorMeta],
    state_dtype: Format = "fp32",
) -> OptimizerFormatTargets:
    """Return the tensors into which a saved `own_state` is loaded. Then `put` of the result assigns
    the state to the optimizer.

    Args:
        parameters: parameters by FQN.
        trees: the saved JSON by FQN; None in older checkpoints.
        metas: see `optimizer_targets`.
        state_dtype: `optimizer.state_dtype` of the recipe that saved the state, which is converted
            if the present recipe has another.
    """
    if isinstance(optimizer, MethodOptimizer):
        if state_dtype == optimizer.state_dtype:
            return OptimizerFormatTargets(
                optimizer_state(optimizer, parameters).tensors, lambda: None
            )
        state = optimizer.state_in(state_dtype)
        tensors = {
            f"{name}.{key}": tensor
            for name, parameter in parameters.items()
            for key, tensor in sorted(state.get(parameter, {}).items())
        }
        return OptimizerFormatTargets(tensors, lambda: optimizer.take(state, state_dtype))
    states = trees and {name: one["state"] for name, one in trees.items() if "state" in one}
    targets = optimizer_targets(optimizer, parameters, states, metas)
    names = {parameter: name for name, parameter in parameters.items()}

    def put() -> None:
        # `targets.put` restores the saved lr_scale, but that of the present recipe applies.
        scales = [group.get("lr_scale", 1.0) for group in optimizer.param_groups]
        targets.put()
        for group, scale in zip(optimizer.param_groups, scales, strict=True):
            group["lr_scale"] = scale
            known = [trees[names[p]] for p in group["params"] if trees and names[p] in trees]
            changed: Mapping[str, Any] = next((one["group"] for one in known if "group" in one), {})
            if OWN not in (trees or {}):
                _put_settings(group, changed)

    return OptimizerFormatTargets(targets.tensors, put)


def _put_settings(group: dict[str, Any], changed: Mapping[str, Any]) -> None:
    for key, one in changed.items():
        value, held = from_json(one), group.get(key)
        if isinstance(held, torch.Tensor) and held.shape == torch.as_tensor(value).shape:
            # In place, because compiled code may read the tensor.
            held.copy_(torch.as_tensor(value))
        else:
            group[key] = value


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return, as JSON values, the entries of a parameter group that the recipe does not determine.
    Classes and functions, which the factory sets again, are left out."""
    values = {}
    for key, value in group.items():
        with suppress(ValueError):
            if key not in ("params", "param_names", *RECIPES):
                values[key] = to_json(value, key)
    return values
