"""A save as its ranks plan it: what each contributes, and whether their replicas are equal.

[Note: sample] A checkpoint holds each plain tensor once, and reads parts of it from several ranks.
From tensors that differ it would assemble a mixture that no rank ever had. Ranks therefore compare
samples, as reading all of every replica takes longer than writing one. A sample has all numbers of
a small tensor, and every STRIDE-th of a large one: at least one of each row of STRIDE numbers. Of
the optimizer's tensors it has STATES, since a difference there appears in a parameter after the
next step. The first number of a sample depends on the step, so later saves compare others.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.format.bits import digest_and_finite
from checkpointing.format.layout import MODEL, Section
from checkpointing.format.plan import Piece, own_files, plan_pieces
from checkpointing.format.sections import (
    PlanInput,
    Specs,
    by_section,
    plan_input,
    stored_by_name,
)
from checkpointing.format.tensors import as_bytes
from checkpointing.ranks import Ranks, specs_digest

Signature = tuple[tuple[Any, ...], tuple[Any, ...]]
Tensors = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
"""Those of a model, and those of its optimizer."""


@dataclass(frozen=True)
class Described:
    """What all ranks hold of the tensors of model and optimizer."""

    signature: Signature
    """By which this rank knows whether its tensors are the same."""
    specs: tuple[Specs, Specs]
    """Equal on all ranks."""
    max_shard_bytes: int
    of_model: Section = MODEL

    @cached_property
    def layout(self) -> PlanInput:
        """Where everything is stored."""
        return plan_input(*self.specs, self.max_shard_bytes, self.of_model)


@dataclass(frozen=True)
class SavePlan:
    """Everything about a save that follows from names, shapes, dtypes and meshes."""

    signature: Signature
    """By which it is known whether the tensors are the same as last time."""
    shared: PlanInput
    """Equal on all ranks."""
    digest: str
    pieces: list[Piece]
    """What this rank contributes."""


class Planner:
    """Plans of saves. Methods are called on all ranks.

    Args:
        ranks: who save.
        max_shard_bytes: most bytes per file.
        of_model: section of the tensors of the model: MODEL, or ADAPTER.
    """

    def __init__(self, ranks: Ranks, max_shard_bytes: int, of_model: Section = MODEL) -> None:
        self._ranks, self._max_shard_bytes, self._of_model = ranks, max_shard_bytes, of_model
        self._described: Described | None = None
        """The tensors that were loaded or planned for last."""

    def describe(self, tensors: Callable[[], Tensors]) -> tuple[Tensors, Described]:
        """The tensors of this rank, and what all ranks hold of them.

        Args:
            tensors: gives those of model and optimizer; called once.

        Raises:
            RankError: `tensors` failed, or one cannot be stored.
        """
        held: list[Tensors] = []

        def hold() -> Tensors:
            held.append(tensors())
            return held[0]

        ours, theirs = self._ranks.specs(hold)
        limits = self._max_shard_bytes, self._of_model
        self._described = Described(signatures(*held[0]), (ours, theirs), *limits)
        return held[0], self._described

    def plan(
        self, signature: Signature, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
    ) -> SavePlan:
        """The plan of a save of these tensors; raises as `describe`."""
        nodes = self._ranks.nodes()
        made: list[SavePlan] = []

        def make() -> bool:
            described = self._described
            if described is None or described.signature != signature:
                return False
            shared = described.layout
            owners = own_files(shared.files, len(nodes))
            near = {file: nodes[node] for file, node in owners.items()}
            stored = stored_by_name(shared.files)
            pieces = plan_pieces(shared.specs, stored, near, self._ranks.rank)
            digest = hashlib.sha256(
                f"{specs_digest(shared.specs)} {shared.tensors} {nodes}".encode()
            ).hexdigest()
            made.append(SavePlan(signature, shared, digest, pieces))
            return True

        # What was loaded is mostly what is saved, and known then.
        if self._described is None or not all(self._ranks.together(make)):
            made.clear()
            self.describe(lambda: (model, optimizer))
            self._ranks.together(make)
        return made[0]


def signatures(
    model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], *, strict: bool = False
) -> Signature:
    """What a plan depends on. Unless `strict`, of what is no tensor that of nothing: all ranks are
    about to look at each other's tensors, and learn of it there."""
    try:
        return _signature(model), _signature(optimizer)
    except Exception:
        if strict:
            raise
        return (), ()


def _signature(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """What a plan depends on, cheap to make and to compare."""
    return tuple(
        (
            name,
            tensor.dtype,
            tensor.shape,
            (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None,
        )
        for name, tensor in tensors.items()
    )


def unguarded(model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> set[str]:
    """What may change before the next optimizer step, such as a batch norm's statistics: whatever
    is neither a parameter nor has state in the optimizer. By the names of `by_section`."""
    trained = {name.rpartition(".")[0] for name in optimizer}
    buffers = {
        name: tensor
        for name, tensor in model.items()
        if name not in trained and not isinstance(tensor, torch.nn.Parameter)
    }
    return set(by_section(buffers, {}))


# --- replicas -------------------------------------------------------------------------------------

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
