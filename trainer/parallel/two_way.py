"""A differentiable operation with a backward of its own, such as a collective on activations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]


class TwoWayMap(torch.autograd.Function):
    """Maps activations by one function, and in backward their gradient by another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of_activations: Map, of_gradient: Map) -> Tensor:
        ctx.of_gradient = of_gradient
        return of_activations(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.of_gradient(gradients[0]), None, None
