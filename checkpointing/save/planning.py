"""A save as its ranks plan it: what each contributes, and whether their replicas are equal.

[Note: sample] Every rank has a replica of a plain tensor. A checkpoint holds that tensor once, put
together from parts of several replicas. If replicas differ, the checkpoint would be a mixture that
no rank ever had. Ranks therefore compare samples, as reading every replica completely takes longer
than writing one. A sample has all numbers of a small tensor, and every STRIDE-th of a large one: at
least one of each row of STRIDE numbers. Of the optimizer's tensors only about STATES are compared,
since a difference in them appears in a parameter after the next step. The first number of a sample
depends on the step, so that later saves compare other numbers."""

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

from checkpointing.format.digests import digest_and_finite
from checkpointing.format.layout import MODEL, FileLayoutPart
from checkpointing.format.plan import (
    SavePlanInput,
    Specs,
    TensorPiece,
    assign_files,
    by_section,
    plan_input,
    plan_pieces,
    stored_by_name,
)
from checkpointing.format.tensors import as_bytes
from checkpointing.format.untrusted import listed
from checkpointing.ranks import RankGroup, specs_digest

Signature = tuple[tuple[Any, ...], tuple[Any, ...]]
StateTensors = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
"""Tensors of a model, and tensors of its optimizer."""


@dataclass(frozen=True)
class SaveTensors:
    """Specs of the tensors of model and optimizer, merged over all ranks."""

    signature: Signature
    """Names, dtypes, shapes and placements of this rank's tensors, to detect changes."""
    specs: tuple[Specs, Specs]
    """(specs of the model, specs of the optimizer), equal on all ranks."""
    max_shard_bytes: int
    of_model: FileLayoutPart = MODEL

    @cached_property
    def layout(self) -> SavePlanInput:
        """The file and position in which each tensor is stored."""
        return plan_input(*self.specs, self.max_shard_bytes, self.of_model)


@dataclass(frozen=True)
class SavePlan:
    """The part of a save that depends only on names, shapes, dtypes and meshes."""

    signature: Signature
    shared: SavePlanInput
    """The part of the plan that is equal on all ranks."""
    digest: str
    pieces: list[TensorPiece]
    """Pieces that this rank contributes."""


class SavePlanner:
    """Plans saves, and reuses the plan while the tensors stay the same. Methods are called on all
    ranks. `max_shard_bytes` is the largest size of a file, `of_model` the section of the model's
    tensors: MODEL, or ADAPTER."""

    def __init__(
        self, ranks: RankGroup, max_shard_bytes: int, of_model: FileLayoutPart = MODEL
    ) -> None:
        self._ranks, self._max_shard_bytes, self._of_model = ranks, max_shard_bytes, of_model
        self._described: SaveTensors | None = None
        """The tensors of the last load or plan."""

    def describe(self, tensors: Callable[[], StateTensors]) -> tuple[StateTensors, SaveTensors]:
        """Calls `tensors` once; returns (this rank's tensors of model and optimizer, their specs
        merged over all ranks). Raises RankError if `tensors` failed, or a tensor cannot be stored.
        """
        held: list[StateTensors] = []

        def hold() -> StateTensors:
            held.append(tensors())
            return held[0]

        ours, theirs = self._ranks.specs(hold)
        limits = self._max_shard_bytes, self._of_model
        self._described = SaveTensors(signatures(*held[0]), (ours, theirs), *limits)
        return held[0], self._described

    def plan(
        self, signature: Signature, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
    ) -> SavePlan:
        """Returns the plan of a save of these tensors. Raises the errors of `describe`."""
        nodes = self._ranks.nodes()
        # appended to by `make`, as `together` would send a plan, which is large, to all ranks
        plans: list[SavePlan] = []

        def make() -> bool:
            described = self._described
            if described is None or described.signature != signature:
                return False
            shared = described.layout
            owners = assign_files(shared.files, len(nodes))
            near = {file: nodes[node] for file, node in owners.items()}
            stored = stored_by_name(shared.files)
            pieces = plan_pieces(shared.specs, stored, near, self._ranks.rank)
            digest = hashlib.sha256(
                f"{specs_digest(shared.specs)} {shared.tensors} {nodes}".encode()
            ).hexdigest()
            plans.append(SavePlan(signature, shared, digest, pieces))
            return True

        # a save often follows a load of the same tensors, whose specs are known
        if self._described is None or not all(self._ranks.together(make)):
            plans.clear()
            self.describe(lambda: (model, optimizer))
            self._ranks.together(make)
        return plans[0]


def signatures(
    model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], *, strict: bool = False
) -> Signature:
    """Returns names, dtypes, shapes and placements, on which a plan depends. Unless `strict`,
    values that are no tensors give an empty signature instead of an error. The ranks then make a
    plan, and raise the error together."""
    try:
        return _signature(model), _signature(optimizer)
    except Exception:
        if strict:
            raise
        return (), ()


def _signature(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    def placed(tensor: Tensor) -> Any:
        # not the spec, which would be built for each tensor at each save
        return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None

    return tuple((name, one.dtype, one.shape, placed(one)) for name, one in tensors.items())


def unguarded(model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> set[str]:
    """Returns the joint names of tensors that may change before the next optimizer step, because
    they are no parameters and have no optimizer state, such as a batch norm's statistics."""
    trained = {name.rpartition(".")[0] for name in optimizer}
    buffers = {
        name: tensor
        for name, tensor in model.items()
        if name not in trained and not isinstance(tensor, torch.nn.Parameter)
    }
    return set(by_section(buffers, {}))


# --- replicas ------------------------------------------------------------------------------------

STRIDE = 1021
"""Distance of compared numbers; prime, so that samples of a matrix cover all columns."""
LEAST = 256
"""Fewest numbers that are compared of a tensor, if it has as many."""
STATES = 64
"""Fewest tensors of optimizer state that are compared, if there are as many."""

SampleDigest = tuple[bytes, int]
"""(digest of the names of a rank's tensors, digest of the sample of their numbers)."""


def replicas_to_compare(
    model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], step: int
) -> dict[str, Tensor]:
    """Returns the plain tensors to compare: all of the model, and about STATES of the optimizer,
    which `step` selects."""
    plain = {name: one for name, one in model.items() if not isinstance(one, DTensor)}
    states = [name for name, one in optimizer.items() if not isinstance(one, DTensor)]
    stride = len(states) // STATES or 1
    return plain | {name: optimizer[name] for name in states[step % stride :: stride]}


def sample_digest(tensors: Mapping[str, Tensor], step: int) -> SampleDigest:
    """Returns this rank's digests for `require_equal`. Synchronises with a GPU. `step` decides
    which numbers of the plain `tensors` are compared; it must be equal on all ranks."""
    names = hashlib.blake2b("\n".join(tensors).encode(), digest_size=8).digest()
    samples = [as_bytes(data).numpy() for _, _, data in _samples(tensors, step)]
    return names, sum(_digest(f"{place}", data) for place, data in enumerate(samples)) % (1 << 64)


def require_equal(
    ranks: RankGroup, tensors: Mapping[str, Tensor], step: int, digests: Sequence[SampleDigest]
) -> None:
    """Require equal numbers in tensors of the same name; else raise ValueError, which names the
    tensors, on all ranks. Called on all ranks, with the results of `sample_digest` of all."""
    if len(set(digests)) == 1:  # the usual case needs no other exchange
        return
    first: dict[str, tuple[int, int]] = {}
    differing: dict[str, tuple[int, int]] = {}
    everyone = ranks.together(lambda: _by_name(tensors, step))
    for rank, by_name in zip(ranks.all, everyone, strict=True):
        for name, digest in by_name.items():
            holder, theirs = first.setdefault(name, (rank, digest))
            if digest != theirs:
                differing.setdefault(name, (holder, rank))
    if not differing:  # ranks hold tensors with different names, such as stages of a pipeline
        return
    one, other = next(iter(differing.values()))
    raise ValueError(
        f"{listed([*differing])}: rank {other} holds other numbers than rank {one}, but a "
        "checkpoint has one tensor of each name. Keep replicas equal, as DistributedDataParallel "
        "does, or shard with DTensor, or put what differs between ranks into an object with "
        "state_dict"
    )


def _by_name(tensors: Mapping[str, Tensor], step: int) -> dict[str, int]:
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
    """Yields (names, count of compared numbers of each, these numbers on the CPU) for each device
    and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        group = groups.setdefault((tensor.device, tensor.dtype), {})
        group[name] = _sample(tensor, tensor.numel(), step)
    for group in groups.values():
        parts = list(group.values())
        # concatenated first: a single copy from a GPU, and a single synchronisation
        yield list(group), [len(part) for part in parts], torch.cat(parts).cpu()


def _sample(tensor: Tensor, size: int, step: int) -> Tensor:
    """Returns the sample of a tensor of `size` numbers, flat; see [Note: sample]."""
    # with at most one call of torch, as there may be thousands of tensors
    stride = min(STRIDE, size // LEAST)
    if stride < 2:
        return tensor if tensor.ndim == 1 else tensor.reshape(-1)
    begin = step % stride
    if tensor.is_contiguous():
        count = (size - begin + stride - 1) // stride
        return tensor.as_strided((count,), (stride,), tensor.storage_offset() + begin)
    return tensor.reshape(-1)[begin::stride]
