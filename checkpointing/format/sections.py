"""The two sections of a checkpoint, model and optimizer, under joint names.

In a collection of both sections, the joint name of a tensor is model/<name> or optimizer/<name>.
This module does not import numpy, with which a writer process would take 0.1 s longer to start."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from checkpointing.format import layout
from checkpointing.format.plan import TensorSpec

T = TypeVar("T")


Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True)
class SavePlanInput:
    """Specs and files from which every rank and every writer derives the same plan."""

    specs: Specs
    files: Sequence[layout.TensorFile]
    indexes: Mapping[str, bytes]
    tensors: str
    """Digest of names, dtypes, shapes and files."""


def by_section(model: Mapping[str, T], optimizer: Mapping[str, T]) -> dict[str, T]:
    """Returns the values of both sections in one dictionary, as model/<name> and
    optimizer/<name>."""
    return {**_prefixed(layout.MODEL.stem, model), **_prefixed(layout.OPTIMIZER.stem, optimizer)}


def _prefixed(section: str, values: Mapping[str, T]) -> dict[str, T]:
    return {f"{section}/{name}": value for name, value in values.items()}


def plan_input(
    model: Specs,
    optimizer: Specs,
    max_shard_bytes: int,
    of_model: layout.LayoutSection = layout.MODEL,
) -> SavePlanInput:
    """Decide in which file and where each tensor is stored, from names, dtypes and shapes alone.
    `of_model` is MODEL or ADAPTER."""
    files: list[layout.TensorFile] = []
    indexes: dict[str, bytes] = {}
    sections = (layout.MODEL.stem, of_model), (layout.OPTIMIZER.stem, layout.OPTIMIZER)
    for (prefix, section), specs in zip(sections, (model, optimizer), strict=True):
        metas = {name: spec.meta for name, spec in specs.items()}
        of_section = layout.lay_out(section, metas, max_shard_bytes)
        indexes[section.index] = layout.index_json(of_section)
        files += [replace(file, tensors=_prefixed(prefix, file.tensors)) for file in of_section]
    digest = hashlib.sha256(b"".join(file.header for file in files)).hexdigest()
    return SavePlanInput(by_section(model, optimizer), files, indexes, digest)


def stored_by_name(files: Sequence[layout.TensorFile]) -> dict[str, layout.StoredTensor]:
    return {name: tensor for file in files for name, tensor in file.tensors.items()}


_MASK = (1 << 64) - 1


def not_finite(names: Sequence[str]) -> str:
    """Returns the message about tensors that hold NaN or infinity and must not."""
    more = " and other tensors" if len(names) > 1 else ""
    return f"NaN or infinity in {names[0]}{more}"


@dataclass(frozen=True)
class SectionNumbers:
    """Digests and non-finite tensors of a step or of a part of it. Summaries can be added."""

    weights: int = 0
    """Digest of the model's tensors; see bits.py [Note: digest]."""
    moments: int = 0
    """Digest of the optimizer's tensors."""
    bad: tuple[str, ...] = ()
    """The first two tensors that hold NaN or infinity although they must be finite."""
    odd: tuple[str, ...] = ()
    """All tensors that hold NaN or infinity and need not be finite."""

    def __add__(self, other: "SectionNumbers") -> "SectionNumbers":
        return SectionNumbers(
            (self.weights + other.weights) & _MASK,
            (self.moments + other.moments) & _MASK,
            # the message names one tensor, and says whether there are others
            tuple(dict.fromkeys(self.bad + other.bad))[:2],
            tuple(dict.fromkeys(self.odd + other.odd)),
        )
