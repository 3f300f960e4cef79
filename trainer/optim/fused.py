"""Compiled updates of weights and state in fewer bits than float32, for GPUs.

They compute the same as `MethodOptimizer` does eagerly, see [Note: rounding] in formats.py. On an
H200 an update of 10**9 parameters takes 12 ms instead of 84 with bf16 moments, and 30 ms instead of
179 with int8 moments (`speed.update` of benchmarks.gpu).
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from checkpointing.format.tensors import local_tensor
from trainer.optim.formats import MIX1, MIX2, Format, in_float32, rounded_to_bf16, stored

FUSED = 1 << 25
"""Elements updated at a time. A kernel may need ten bytes of temporaries for each."""

Rows = Callable[[Tensor, Tensor, Sequence[Tensor], Tensor], Sequence[Tensor]]
"""(weights, gradients, moments, row of `Method.numbers`) → weights and moments after one
elementwise update, all flat and float32."""


def update_rows(
    weight: Tensor,
    gradient: Tensor,
    moments: Sequence[Sequence[Tensor]],
    places: tuple[Tensor, Tensor],
    key: Tensor,
    numbers: Tensor,
    formats: Sequence[tuple[Format, bool]],
    rows: Rows,
) -> None:
    """Update rows of one parameter and of its moments in their stored formats.

    Args:
        weight, gradient: rows of this rank's shards, (R, C).
        moments: for each moment, its tensors by `parts_of`.
        places: `ElementIndices.rows` and `ElementIndices.columns` of these rows.
        key: hash of the seed and the FQN, 0-d int64.
        formats: for each moment, its format, and whether it is a second moment.
        rows, numbers: the elementwise update, and its argument.
    """
    hashed = (places[0] + key + places[1]).reshape(-1)
    hashed = (hashed ^ (hashed >> 30)) * MIX1
    hashed = (hashed ^ (hashed >> 27)) * MIX2
    # The three upper 16-bit words of the hash, sign-extended.
    drawn = [
        one.to(torch.int32) for one in ((hashed << 32) >> 48, (hashed << 16) >> 48, hashed >> 48)
    ]
    flat = [[part.reshape(-1) for part in parts] for parts in moments]
    held = [
        in_float32(parts, how, square=square)
        for parts, (how, square) in zip(flat, formats, strict=True)
    ]
    made, *kept = rows(weight.reshape(-1).float(), gradient.reshape(-1).float(), held, numbers)
    made = rounded_to_bf16(made, drawn[0]) if weight.dtype == torch.bfloat16 else made
    weight.copy_(made.view(weight.shape))
    for parts, value, (how, square), words in zip(moments, kept, formats, drawn[1:], strict=False):
        for part, new in zip(parts, stored(value, how, words, square=square), strict=True):
            part.copy_(new.view(part.shape))


@cache
def compiled() -> Callable[..., Any]:
    return torch.compile(update_rows, dynamic=True)


def in_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return this rank's shard of a parameter or its state, viewed as (rows, columns)."""
    return local_tensor(tensor).view(rows, -1)


def on_device(values: Sequence[int], device: torch.device) -> Tensor:
    host = torch.tensor(values, dtype=torch.int64)
    # Pinned, so that the copy does not synchronise with the GPU.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
