"""What a forward pass is given and returns, whatever strategy it runs in."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

COUNT = "count"
"""Name under which a model returns over how much it has taken its means, where these are not over
samples, or the labels among them: the sum of the weights of a weighted mean."""

Passed = torch.Tensor | tuple[torch.Tensor, ...]
"""What backward begins from: a scalar, or what other ranks go on with: hidden states, and with them
what their blocks have told, see `Decoder.forward`."""

Call = Callable[[Mapping[str, torch.Tensor]], Passed | dict[str, torch.Tensor]]
"""Inputs of a micro-batch → its `means`; or what other ranks go on with."""

Compute = Callable[[int, Mapping[str, torch.Tensor], Call], Passed]
"""(number of a micro-batch, its inputs, what to call with them) → a scalar, or what the call has
returned for other ranks."""


def means(result: Any) -> dict[str, torch.Tensor]:
    """The scalars that a model returns, by name: `loss`, if it is there, what else it wants to be
    recorded, and COUNT, if it says so."""
    if not isinstance(result, dict):
        return {"loss": getattr(result, "loss", result)}
    loss = result.get("loss")
    device = loss.device if isinstance(loss, torch.Tensor) else None
    return {
        name: torch.as_tensor(value, device=device)
        for name, value in result.items()
        if (isinstance(value, torch.Tensor) and value.dim() == 0) or isinstance(value, int | float)
    }


def loss_problem(result: Any) -> str | None:
    """What a model returned instead of a mean loss, and what it should; None if it is one."""
    count = result.get(COUNT) if isinstance(result, dict) else None
    if isinstance(count, torch.Tensor) and count.dim():
        return f"a {COUNT!r} of shape {tuple(count.shape)}; it should be one number"
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", result)
    sizes = (0,) if isinstance(result, dict) else (0, 1)  # others of a dict are not recorded
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.dim() in sizes:
        if loss.requires_grad or not torch.is_grad_enabled():
            return None
        return (
            "a loss that has no gradient: it is detached, or made of a number (.item()), or under "
            "torch.no_grad; it should hang on the parameters"
        )
    found = type(result).__name__
    if isinstance(loss, float | int):
        found = f"the loss as a {type(loss).__name__}, which has no gradient"
    elif isinstance(loss, torch.Tensor):
        found = f"a tensor of shape {tuple(loss.shape)}"
    elif isinstance(result, dict):
        found = f"a dict without a scalar 'loss' (of {', '.join(map(repr, result)) or 'nothing'})"
    return f"{found}; it should be the mean loss, a scalar: alone, as ['loss'], or as .loss"
