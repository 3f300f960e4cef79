"""What a rank contributes to a save: planned once, and again when its tensors are others."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.format.layout import MODEL, Section
from checkpointing.format.plan import Piece, own_files, plan_pieces
from checkpointing.format.sections import (
    PlanInput,
    Specs,
    by_section,
    plan_input,
    stored_by_name,
)
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
