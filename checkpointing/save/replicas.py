"""Whether plain tensors are equal on all ranks. A checkpoint holds each once, and takes parts of it
from several ranks: of tensors that differ it would hold a mixture, which no rank ever had.

[Note: sample] Ranks compare samples, as to read all of every replica would take longer than to
write one. A sample has all numbers of a small tensor, and every STRIDE-th of a large one, so at
least one of each row of STRIDE numbers. Of many tensors of optimizer state it has STATES: what
differs there differs in a parameter after the next step. Where a sample begins moves on with the
step, so that later saves look elsewhere.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.format.bits import digest_and_finite
from checkpointing.format.tensors import as_bytes
from checkpointing.ranks import Ranks

STRIDE = 1021
"""A prime: in a matrix it does not come to the same columns again and again."""
LEAST = 256
"""Numbers of a tensor that are compared at least, if it has as many."""
STATES = 64
"""Tensors of optimizer state that are compared at least, if there are as many."""
SHOWN = 3
"""Names in an error."""

Told = tuple[bytes, int]
"""What a rank tells of its tensors: digests of their names and of their sample."""


def replicas(
    model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], step: int
) -> dict[str, Tensor]:
    """The tensors to compare: plain ones; of optimizer state some, as the step decides."""
    plain = {name: one for name, one in model.items() if not isinstance(one, DTensor)}
    states = [name for name, one in optimizer.items() if not isinstance(one, DTensor)]
    stride = len(states) // STATES or 1
    return plain | {name: optimizer[name] for name in states[step % stride :: stride]}


def tell(tensors: Mapping[str, Tensor], step: int) -> Told:
    """Digests by which ranks know whether they hold the same tensors. Waits for a GPU.

    Args:
        tensors: plain ones.
        step: decides which numbers are compared; equal on all ranks.
    """
    names = hashlib.blake2b("\n".join(tensors).encode(), digest_size=8).digest()
    samples = [as_bytes(data).numpy() for _, _, data in _samples(tensors, step)]
    return names, sum(_digest(f"{place}", data) for place, data in enumerate(samples)) % (1 << 64)


def refuse_different(
    ranks: Ranks, tensors: Mapping[str, Tensor], step: int, told: Sequence[Told]
) -> None:
    """Require that ranks which hold a tensor of the same name hold the same numbers. On all ranks.

    Args:
        ranks: who save.
        tensors: those of this rank that it has told of.
        step: as for `tell`.
        told: by all ranks, in order.

    Raises:
        ValueError: names the tensors that differ, on all ranks alike.
    """
    if len(set(told)) == 1:
        return
    first: dict[str, tuple[int, int]] = {}
    differing: dict[str, tuple[int, int]] = {}
    everyone = ranks.together(lambda: _by_name(tensors, step))
    for rank, digests in zip(ranks.all, everyone, strict=True):
        for name, digest in digests.items():
            holder, theirs = first.setdefault(name, (rank, digest))
            if digest != theirs:
                differing.setdefault(name, (holder, rank))
    if not differing:  # they hold different tensors, such as stages of a pipeline
        return
    shown = ", ".join(list(differing)[:SHOWN])
    more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
    one, other = next(iter(differing.values()))
    raise ValueError(
        f"{shown}{more}: rank {other} holds other numbers than rank {one}, and a checkpoint has "
        "one tensor of a name. Keep replicas equal, as DistributedDataParallel does; shard by "
        "DTensor; what each rank has for itself belongs in an object with state_dict"
    )


def _by_name(tensors: Mapping[str, Tensor], step: int) -> dict[str, int]:
    """Digest of the sample of each tensor."""
    return {
        name: _digest(name, as_bytes(part).numpy())
        for names, sizes, data in _samples(tensors, step)
        for name, part in zip(names, data.split(sizes), strict=True)
    }


def _digest(name: str, data: NDArray[np.uint8]) -> int:
    return digest_and_finite(name, "U8", data.shape, (0,), data)[0]


@torch.no_grad()
def _samples(
    tensors: Mapping[str, Tensor], step: int
) -> Iterator[tuple[list[str], list[int], Tensor]]:
    """Samples of tensors: (names, how many numbers of each, the numbers on the CPU) for each device
    and dtype. One copy from a GPU fetches many."""
    groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group = groups.setdefault((tensor.device, tensor.dtype), {})
        group[name] = _sample(tensor, tensor.numel(), step)
    for group in groups.values():
        parts = list(group.values())
        yield list(group), [len(part) for part in parts], torch.cat(parts).cpu()


def _sample(tensor: Tensor, size: int, step: int) -> Tensor:
    """Some numbers of a tensor of `size` numbers, flat; see [Note: sample]."""
    # There may be thousands of tensors: one call to torch for each, or none.
    stride = min(STRIDE, size // LEAST)
    if stride < 2:
        return tensor if tensor.ndim == 1 else tensor.reshape(-1)
    begin = step % stride
    if tensor.is_contiguous():
        count = (size - begin + stride - 1) // stride
        return tensor.as_strided((count,), (stride,), tensor.storage_offset() + begin)
    return tensor.reshape(-1)[begin::stride]
