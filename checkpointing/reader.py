"""Bytes of tensor files → the parts of tensors that this rank holds. Asks no other rank."""

import itertools
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.errors import DamagedCheckpoint, WrongModel
from checkpointing.layout import BLOCK_BYTES, COMMIT_RECORD, MODEL, FileRecord, StoredTensor
from checkpointing.plan import Box, TensorSpec, box_runs, local_boxes
from checkpointing.steps import (
    check_block,
    hugging_face_tensors,
    open_step,
    reading,
    stored_tensors,
)
from checkpointing.storage import block_buffer, opened, read_at
from checkpointing.tensors import TORCH_DTYPES, as_bytes, box_view, local_tensor, specs_of

_NAMED = 3
"""How many differing tensors a message names."""


def load_model(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    *,
    verify: bool = True,
    optional: Collection[str] = (),
) -> None:
    """Load weights into tensors, in place. Each rank reads what it needs, without talking.

    Args:
        path: a checkpoint of ours, or any Hugging Face directory with safetensors.
        tensors: targets by name: plain or DTensor, on any device; floating point numbers are
            converted where a file has another dtype.
        verify: check the checksums of the blocks that are read (checkpoints of ours have them).
        optional: names that a checkpoint may hold besides the targets, such as the second copy of
            a tied weight.

    Raises:
        WrongModel: names the tensors that are missing, unexpected, or of another shape.
        DamagedCheckpoint: names the file.
        StorageError: there is no safetensors model at `path`, or it cannot be read.
    """
    path = Path(path)
    records: Mapping[str, FileRecord] = {}
    if (path / COMMIT_RECORD).exists():
        step = open_step(path)
        stored = stored_tensors(step, MODEL, verify=verify)
        records = step.record.files if verify else {}
    else:
        stored = hugging_face_tensors(path)
    stored = {name: at for name, at in stored.items() if name in tensors or name not in optional}
    ranks = range(dist.get_world_size() if dist.is_initialized() else 1)
    specs = specs_of(tensors, ranks)
    refuse_differences(path, stored, specs)
    rank = dist.get_rank() if dist.is_initialized() else 0
    read_tensors(path, stored, specs, tensors, records, rank)


def refuse_differences(
    path: Path,
    stored: Mapping[str, StoredTensor],
    wanted: Mapping[str, TensorSpec],
    what: str = "model",
) -> None:
    """Require that a checkpoint and a model (or `what` else) have the same tensors.

    Raises:
        WrongModel: names the first differences of each kind.
    """
    problems = [
        *_list(f"the {what} has no", [name for name in stored if name not in wanted]),
        *_list("the checkpoint has no", [name for name in wanted if name not in stored]),
    ]
    both = [(name, stored[name].meta, wanted[name].meta) for name in wanted if name in stored]
    shapes = [
        f"{name} {list(ours.shape)} (checkpoint {list(theirs.shape)})"
        for name, theirs, ours in both
        if theirs.shape != ours.shape
    ]
    dtypes = [
        f"{name} {ours.dtype} (checkpoint {theirs.dtype})"
        for name, theirs, ours in both
        if theirs.dtype != ours.dtype and not (_is_float(theirs.dtype) and _is_float(ours.dtype))
    ]
    problems += _list("other shapes:", shapes)
    problems += _list("dtypes that do not convert:", dtypes)
    if problems:
        raise WrongModel(f"{path} is of another {what}: {'; '.join(problems)}")


def _list(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{what} {', '.join(names[:_NAMED])}{more}"]


def _is_float(dtype: str) -> bool:
    return TORCH_DTYPES[dtype].is_floating_point


@torch.no_grad()
def read_tensors(
    path: Path,
    stored: Mapping[str, StoredTensor],
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, Tensor],
    records: Mapping[str, FileRecord],
    rank: int,
) -> None:
    """Fill this rank's part of each tensor, in the order of files and offsets.

    Args:
        path: the checkpoint directory.
        stored: where each tensor lies.
        specs: how each tensor is spread.
        tensors: the targets.
        records: checksums by file; blocks of files that are not in it are not checked.
        rank: global rank.

    Raises:
        DamagedCheckpoint: a file is missing or short, or a checksum is wrong.
        StorageError: a file cannot be read.
        ValueError: a target's local part is not what its placement says, so that its bytes would
            not be covered exactly once.
    """
    wanted = sorted(tensors, key=lambda name: (stored[name].file, stored[name].begin))
    for file, names in itertools.groupby(wanted, key=lambda name: stored[name].file):
        with reading(path / file), opened(path / file, os.O_RDONLY) as descriptor:
            blocks = _Blocks(descriptor, path / file, records.get(file))
            for name in names:
                local = local_tensor(tensors[name])
                boxes = local_boxes(stored[name].meta.shape, specs[name].layouts, rank)
                if sum(math.prod(box.shape) for box in boxes) != local.numel():
                    raise ValueError(
                        f"{name}: this rank holds {list(local.shape)}, which is not what its "
                        f"placement says: {boxes}"
                    )
                for box in boxes:
                    _read_box(blocks, stored[name], box, box_view(local, box))


def _read_box(blocks: "_Blocks", stored: StoredTensor, box: Box, target: Tensor) -> None:
    dtype = TORCH_DTYPES[stored.meta.dtype]
    direct = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
    staged = target if direct else torch.empty(target.shape, dtype=dtype)
    data = as_bytes(staged).numpy().data
    for run in box_runs(stored.meta, box):
        blocks.read(data[run.box_offset : run.box_offset + run.length], stored.begin + run.offset)
    if not direct:
        target.copy_(staged)


class _Blocks:
    """An open file, read in the order of offsets; with a record, by whole blocks that are checked.

    A block is kept until the next one is asked for, so that the many small runs of one block cost
    one read and one checksum.
    """

    def __init__(self, descriptor: int, file: Path, record: FileRecord | None) -> None:
        self._descriptor, self._file, self._record = descriptor, file, record
        self._buffer = block_buffer(record.size if record else 0)
        self._held: int | None = None
        """The block in the buffer."""

    def read(self, target: memoryview, offset: int) -> None:
        """Fill `target` from `offset` on."""
        if self._record is None:
            if read_at(self._descriptor, target, offset) != len(target):
                raise DamagedCheckpoint(f"{self._file}: ends too early; it was cut short")
            return
        done = 0
        while done < len(target):
            block, start = divmod(offset + done, BLOCK_BYTES)
            if block != self._held:
                self._held = None
                check_block(self._descriptor, self._file, self._record, block, self._buffer)
                self._held = block
            stop = min(len(self._buffer), start + len(target) - done)
            target[done : done + stop - start] = self._buffer[start:stop]
            done += stop - start
