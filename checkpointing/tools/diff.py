"""`perdure ckpt diff`: the differences of two checkpoints. Decodes numbers, so it needs torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from checkpointing.format.layout import (
    BLOCK_BYTES,
    DTYPE_BYTES,
    TRAINER_STATE,
    FileRecord,
    LayoutTensor,
)
from checkpointing.format.tensors import TORCH_DTYPES
from checkpointing.format.untrusted import printable
from checkpointing.storage.place import StoragePlace
from checkpointing.storage.source import StorageCheckpoint, StorageTensorReader, open_source
from checkpointing.tools.inspect import find_source, short, table

PIECE_ELEMENTS = 1 << 17
"""Elements compared at a time, few enough for the processor's cache as float64."""
_SHOWN = 10
"""Largest number of tensors, and of keys, that are printed for each kind of difference."""


@dataclass(frozen=True)
class ValueDifference:
    """A tensor whose bytes differ."""

    name: str
    absolute: float
    """Largest |a - b|. inf: one has NaN or infinity; 0: equal numbers in other bits."""
    relative: float
    """Largest |a - b| / max(|a|, |b|)."""
    elements: int
    """Number of elements with other values (complex numbers count both parts)."""


@dataclass
class CheckpointDifference:
    """The differences of two checkpoints."""

    left: StoragePlace
    right: StoragePlace
    identical: int = 0
    """Number of tensors with the same dtype, shape and bytes."""
    only_left: list[str] = field(default_factory=list)
    only_right: list[str] = field(default_factory=list)
    metas: list[str] = field(default_factory=list)
    """For each tensor whose dtype or shape differs: its name, and both dtypes and shapes."""
    values: list[ValueDifference] = field(default_factory=list)
    """Tensors with other values, the largest relative difference first; dtypes may differ."""
    state: list[str] = field(default_factory=list)
    """Keys of trainer_state.json that differ, with both values."""
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not (self.only_left or self.only_right or self.metas or self.values or self.state)

    def __str__(self) -> str:
        lines = [f"A: {self.left}", f"B: {self.right}", *self.notes]
        counts = f"tensors: {self.identical} identical, {len(self.values)} with other values, "
        counts += f"{len(self.metas)} with other dtypes or shapes, "
        lines.append(counts + f"{len(self.only_left)} only in A, {len(self.only_right)} only in B")
        lines += _listing("only in A", self.only_left)
        lines += _listing("only in B", self.only_right)
        lines += _listing("other dtype or shape (A, B)", self.metas)
        if self.values:
            rows = [
                [f"  {one.name}", f"{one.absolute:.3g}", f"{one.relative:.3g}", f"{one.elements}"]
                for one in self.values[:_SHOWN]
            ]
            header = ["  largest differences", "absolute", "relative", "elements"]
            lines += ["", table([header, *rows])]
        lines += _listing(f"{TRAINER_STATE} (A, B)", self.state)
        return "\n".join(lines)


def _listing(title: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = [f"  … and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return ["", f"{title}:", *(f"  {item}" for item in items[:_SHOWN]), *more]


def diff(left: str | StoragePlace, right: str | StoragePlace) -> CheckpointDifference:
    """Compare two checkpoints, tensor by tensor, in bounded memory. A tensor that both have at the
    same offset of a file, with equal block checksums, counts as identical and is not read; `verify`
    checks whether its bytes match the checksums. All other tensors are read, and checked if the
    checkpoint has checksums. Raises DamagedCheckpoint if a checkpoint is damaged, and StorageError
    if it is missing or cannot be read.

    Args:
        left, right: checkpoints, runs (their newest good ones) or plain Hugging Face directories,
            of which only the model is compared.
    """
    with open_source(find_source(left)) as a, open_source(find_source(right)) as b:
        result = CheckpointDifference(a.path, b.path)
        _compare_tensors(result, a, b, a.model, b.model)
        if a.state is not None and b.state is not None:
            _compare_tensors(result, a, b, a.optimizer, b.optimizer)
            result.state = _compare_states(a.state, b.state)
        else:
            result.notes.append("only the models are compared: one is a plain directory")
    result.values.sort(key=lambda item: (-item.relative, -item.absolute, item.name))
    return result


def _compare_tensors(
    result: CheckpointDifference,
    left: StorageCheckpoint,
    right: StorageCheckpoint,
    ours: Mapping[str, LayoutTensor],
    theirs: Mapping[str, LayoutTensor],
) -> None:
    result.only_left += [name for name in ours if name not in theirs]
    result.only_right += [name for name in theirs if name not in ours]
    both = sorted(ours.keys() & theirs.keys(), key=lambda name: (ours[name].file, ours[name].begin))
    with (
        StorageTensorReader(left.path, left.records) as left_reader,
        StorageTensorReader(right.path, right.records) as right_reader,
    ):
        for name in both:
            a, b = ours[name], theirs[name]
            if a.meta != b.meta:
                result.metas.append(f"{name}: {a.meta}, {b.meta}")
                if a.meta.shape != b.meta.shape:
                    continue
            if a.meta == b.meta and _same_checksums(a, b, left.records, right.records):
                result.identical += 1
                continue
            found = _compare_values(name, a, b, left_reader, right_reader)
            if found is not None:
                result.values.append(found)
            elif a.meta == b.meta:
                result.identical += 1


def _same_checksums(
    a: LayoutTensor,
    b: LayoutTensor,
    left: Mapping[str, FileRecord],
    right: Mapping[str, FileRecord],
) -> bool:
    # Blocks are comparable at equal offsets only.
    if a.begin != b.begin or a.file not in left or b.file not in right:
        return False
    blocks = slice(a.begin // BLOCK_BYTES, -(-(a.begin + a.meta.nbytes) // BLOCK_BYTES))
    return left[a.file].checksums[blocks] == right[b.file].checksums[blocks]


def _compare_values(
    name: str,
    a: LayoutTensor,
    b: LayoutTensor,
    left: StorageTensorReader,
    right: StorageTensorReader,
) -> ValueDifference | None:
    """Returns the difference; None if the bytes are equal or, for different dtypes, the values."""
    differs, absolute, relative, elements = False, 0.0, 0.0, 0
    count = prod(a.meta.shape)
    for start in range(0, count, PIECE_ELEMENTS):
        stop = min(start + PIECE_ELEMENTS, count)
        ours, theirs = _read(left, a, start, stop), _read(right, b, start, stop)
        # Most pieces are equal, and bytes compare faster than numbers.
        if a.meta == b.meta and ours == theirs:
            continue
        apart, share = _apart(_numbers(ours, a.meta.dtype), _numbers(theirs, b.meta.dtype))
        differs |= a.meta == b.meta or bool(apart.any())
        absolute = max(absolute, float(apart.max()))
        relative = max(relative, float(share.max()))
        elements += int(apart.count_nonzero())
    return ValueDifference(name, absolute, relative, elements) if differs else None


def _read(reader: StorageTensorReader, tensor: LayoutTensor, start: int, stop: int) -> bytearray:
    width = DTYPE_BYTES[tensor.meta.dtype]
    data = bytearray((stop - start) * width)
    reader.read(tensor, start * width, memoryview(data))
    return data


def _numbers(data: bytearray, dtype: str) -> Tensor:
    """Returns the numbers as flat float64; a complex number gives its two parts."""
    tensor = torch.frombuffer(data, dtype=TORCH_DTYPES[dtype])
    return (torch.view_as_real(tensor).flatten() if tensor.is_complex() else tensor).double()


def _apart(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the absolute and relative difference of each number: 0 where equal or both NaN, inf
    where one is NaN or infinite."""
    scale = torch.maximum(a.abs(), b.abs()).clamp_min(torch.finfo(a.dtype).tiny)
    absolute = (a - b).abs()
    relative = absolute / scale
    if not absolute.sum().isfinite():  # rare, so that the common case is one pass
        same = (a == b) | (a.isnan() & b.isnan())
        absolute = absolute.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(same, 0.0)
        relative = relative.nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(same, 0.0)
    return absolute, relative


def _compare_states(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    a, b = _flat(left), _flat(right)
    missing = object()

    def text(value: Any) -> str:
        return "(absent)" if value is missing else short(value, 40)

    return [
        f"{printable(key)}: {text(a.get(key, missing))}, {text(b.get(key, missing))}"
        for key in sorted(a.keys() | b.keys())
        if a.get(key, missing) != b.get(key, missing)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested objects as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
