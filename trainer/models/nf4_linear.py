"""Products with weights in nf4; see [Note: nf4] in checkpointing/format/nf4.py."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpointing.format.nf4 import BLOCK, BLOCK_BYTES, dequantise


def linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map x (…, in) to its product with an nf4 weight (out, in) plus the bias: (…, out), in the
    dtype of autocast or of x. `packed`: the weight's codes, uint8."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    return _Linear.apply(x, packed, bias)


class _Linear(torch.autograd.Function):
    """Implements `linear`, with a gradient for x only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        # backward dequantises again, so that only the packed bytes stay in memory
        ctx.save_for_backward(packed)
        return F.linear(x, dequantise(packed, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        return gradients[0] @ dequantise(packed, gradients[0].dtype), None, None


def weights_in(parameter: Tensor) -> int:
    """Number of weights in a parameter: its elements or, for uint8, the weights that its bytes
    encode in nf4."""
    count = parameter.numel()
    return count // BLOCK_BYTES * BLOCK if parameter.dtype == torch.uint8 else count
