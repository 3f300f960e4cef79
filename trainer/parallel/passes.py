"""What all strategies share of a pass: the forward pass of a micro-batch, what a model returns from
it, the time that work takes on a device, and operations with a backward of their own."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

COUNT = "count"
"""Key under which a model may return the number that its means were divided by, such as the sum of
weights. Needed if this number is neither that of samples nor that of labels."""

Passed = torch.Tensor | tuple[torch.Tensor, ...]
"""Tensors that backward starts from: a scalar loss; or, for the next pipeline stage, hidden states
and statistics of blocks, see `Decoder.forward`."""

Call = Callable[[Mapping[str, torch.Tensor]], Passed | dict[str, torch.Tensor]]
"""Maps a micro-batch to the model's `means`, or to the outputs for the next pipeline stage."""


@dataclass
class ParallelForwardPass:
    """A forward pass, yielded by `ParallelModel.run` and called by the training loop."""

    number: int
    """Index of the micro-batch."""
    call: Call | None
    """The model, or a stage of a pipeline; None once backward has begun."""
    root: Passed = ()
    """Tensors from which backward starts. The training loop sets it to the loss. In a pipeline
    stage before the last, calling the pass sets it to the stage's outputs."""

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> Passed | dict[str, torch.Tensor]:
        """Compute the `means` of the micro-batch, or the outputs for the next pipeline stage."""
        assert self.call
        result = self.call(inputs)
        if not isinstance(result, dict):
            self.root = result
        return result

    def take_root(self) -> Passed:
        """Return `root`, and drop this object's references to the graph and the model, because the
        training loop holds the object while the next pass allocates memory."""
        root, self.root, self.call = self.root, (), None
        return root


def means(result: Any) -> dict[str, torch.Tensor]:
    """Return the scalars in a model's result, by name: `loss`, scalars to record, and COUNT if the
    model returns it. Tensors with dimensions are left out."""
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
    """Return what a model's result has in place of a valid mean loss, and what is expected; None if
    the loss is valid."""
    count = result.get(COUNT) if isinstance(result, dict) else None
    if isinstance(count, torch.Tensor) and count.dim():
        return f"a {COUNT!r} of shape {tuple(count.shape)}; it should be one number"
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", result)
    sizes = (0,) if isinstance(result, dict) else (0, 1)  # `means` takes only 0-d tensors of a dict
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.dim() in sizes:
        if loss.requires_grad or not torch.is_grad_enabled():
            return None
        return (
            "a loss that has no gradient: it is detached, or made of a number (.item()), or under "
            "torch.no_grad; it should depend on the parameters"
        )
    kind = type(result).__name__
    if isinstance(loss, float | int):
        kind = f"the loss as a {type(loss).__name__}, which has no gradient"
    elif isinstance(loss, torch.Tensor):
        kind = f"a tensor of shape {tuple(loss.shape)}"
    elif isinstance(result, dict):
        kind = f"a dict without a scalar 'loss' (of {', '.join(map(repr, result)) or 'nothing'})"
    return f"{kind}; it should be the mean loss, a scalar: alone, as ['loss'], or as .loss"


def mark(device: torch.device) -> Any:
    """Mark the present point in the device's work without waiting for it: a CUDA event or, on a
    CPU, the host's clock in seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def reached(moment: Any) -> bool:
    return isinstance(moment, float) or bool(moment.query())


def seconds_between(began: Any, ended: Any) -> float:
    """Return the seconds between two marks, which the device must have reached."""
    if isinstance(began, float):
        return float(ended - began)
    return float(began.elapsed_time(ended)) / 1000


Map = Callable[[Tensor], Tensor]


class ParallelActivationMap(torch.autograd.Function):
    """Maps activations by one function, and in backward their gradient by another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of_activations: Map, of_gradient: Map) -> Tensor:
        ctx.of_gradient = of_gradient
        return of_activations(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.of_gradient(gradients[0]), None, None
