"""Cross-entropy of next tokens, without ever holding the logits of a whole micro-batch.

With a vocabulary of 151,936 the logits of 2,048 tokens take 0.6 GB in bf16, and their float32 copy,
softmax and gradient 1.2 GB each: more than all other activations of a 0.6 B model. The loss needs
only a few rows of them at a time.

Shapes: N tokens, D hidden, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED_LABEL = -100
"""Positions with this label are not part of the loss."""
CHUNK = 1 << 27
"""Most logits at a time: 0.5 GB in float32. Smaller chunks would add to the gradient of the head,
which is as large as the head, more often."""

ROWS_ON_CPU = 128
"""Logits that go through the loss together on a CPU: few enough to stay in its cache, which takes
a fifth off the time of head and loss of the quickstart. A GPU is faster with all at once."""


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean in nats over the labels that are not -100; 0, with zero gradients, if there are none.

    Args:
        logits: (..., V), any floating dtype; the softmax is float32.
        labels: (...) int64.
    """
    rows = ROWS_ON_CPU if logits.device.type == "cpu" else labels.numel()
    total = logits.new_zeros((), dtype=torch.float32)
    for some, label in zip(
        logits.flatten(0, -2).split(rows), labels.flatten().split(rows), strict=True
    ):
        total = total + F.cross_entropy(
            some.float(), label, ignore_index=IGNORED_LABEL, reduction="sum"
        )
    return total / _counted(labels)


def head_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int = CHUNK
) -> Tensor:
    """`mean_cross_entropy` of the logits that the output head would give, a float32 scalar.

    Beyond `chunk` logits they are computed, used for loss and gradients, and dropped, rows by rows.

    Args:
        hidden: (..., D).
        weight: (V, D), of the head.
        labels: (...) int64.
        chunk: most logits at a time; at least one row.
    """
    if labels.numel() * weight.shape[0] <= chunk:
        return mean_cross_entropy(F.linear(hidden, weight), labels)
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype
    chunks = -(-labels.numel() // max(1, chunk // weight.shape[0]))
    rows = -(-labels.numel() // chunks)
    total = _ChunkedLoss.apply(
        hidden.flatten(0, -2).to(dtype),
        weight.to(dtype),
        labels.flatten(),
        rows,
        torch.is_grad_enabled(),
    )
    return total / _counted(labels)


def _counted(labels: Tensor) -> Tensor:
    return (labels != IGNORED_LABEL).sum().clamp(min=1)


class _ChunkedLoss(torch.autograd.Function):
    """Sum of the cross-entropies; hidden (N, D), weight (V, D), labels (N).

    Forward also computes the gradients, as the logits are at hand; so there are three matrix
    products, as many as without chunks (FusedLinearCrossEntropy of Hsu et al. 2024, "Liger
    Kernel").
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, with_gradients: bool
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        to_hidden = torch.empty_like(hidden) if with_gradients else None
        # In float32 whatever the dtype: it is a sum over chunks.
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if with_gradients else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(labels), rows):
                part = slice(start, start + rows)
                label, counts = labels[part, None], labels[part, None] != IGNORED_LABEL
                label = label.clamp(min=0)
                # Named for what it is first; the same memory then holds softmax and gradient.
                log_softmax = F.log_softmax(hidden[part] @ weight.T, 1, dtype=torch.float32)
                total -= (log_softmax.gather(1, label) * counts).sum()
                if to_hidden is None or to_weight is None:
                    continue
                softmax = log_softmax.exp_()
                gradient = softmax.scatter_add_(1, label, -counts.float()).to(hidden.dtype)
                torch.mm(gradient, weight, out=to_hidden[part]).mul_(counts)
                to_weight += gradient.T @ (hidden[part] * counts)
        ctx.save_for_backward(to_hidden, to_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_weight = ctx.saved_tensors
        scaled = (to_hidden.float() * gradients[0], to_weight * gradients[0])
        return *(gradient.to(ctx.dtype) for gradient in scaled), None, None, None
