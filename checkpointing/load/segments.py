"""Reads segments of files into memory: the work of one thread during a load."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from checkpointing.errors import DamagedCheckpoint, reading
from checkpointing.format.digests import CrcBlockSums, CrcReader, is_finite
from checkpointing.format.layout import FileRecord, LayoutTensor
from checkpointing.format.plan import TensorBox
from checkpointing.format.tensors import TORCH_DTYPES, as_bytes, box_view, local_tensor
from checkpointing.load.read_plan import ALIGNMENT, LoadSlab, LoadUnit, intersection
from checkpointing.storage.interface import StorageFile
from checkpointing.storage.place import StoragePlace

_MOST_BUFFERS = 1024
_JOB_STEPS = 16

OpenFile = Callable[[str], AbstractContextManager[StorageFile]]
"""Opens a file of a checkpoint by its name."""


@dataclass(frozen=True)
class LoadFiles:
    """A checkpoint's files: how to open them, positions of the tensors, and checksums."""

    where: StoragePlace
    """Path of the checkpoint, for messages."""
    open: OpenFile
    tensors: Mapping[str, LayoutTensor]
    records: Mapping[str, FileRecord]
    """File → checksums. A file without an entry is not checked."""


class LoadSegment(NamedTuple):
    """Bytes of a file, and their destination."""

    begin: int
    nbytes: int
    data: memoryview | None
    """Destination; None: the reader's own memory, to compute the checksum or to copy `slab`."""
    redundant: CrcReader
    slab: LoadSlab | None = None
    """Slab that is copied from the reader's own memory to the target, no longer than one read;
    None: copy none."""
    unit: LoadUnit | None = None
    """The unit of these bytes if its numbers must be finite, else None."""


class LoadJob(NamedTuple):
    """Segments of one file that a thread reads before it takes another job."""

    file: str
    batches: list[list[LoadSegment]]
    """Batches of segments. The segments of a batch are contiguous in the file, and read by one
    call."""


def jobs(segments: Mapping[str, Iterable[LoadSegment]], step: int) -> Iterator[LoadJob]:
    """Yields jobs that read all segments, file by file in the order of offsets. A batch has at most
    `step` bytes; longer segments are cut."""
    for file, of_file in segments.items():
        batches: list[list[LoadSegment]] = []
        for batch in _batches(of_file, step):
            batches.append(batch)
            # small jobs keep all threads busy until the end
            if len(batches) == _JOB_STEPS:
                yield LoadJob(file, batches)
                batches = []
        if batches:
            yield LoadJob(file, batches)


def _batches(segments: Iterable[LoadSegment], most: int) -> Iterator[list[LoadSegment]]:
    batch: list[LoadSegment] = []
    end, room = -1, 0
    for segment in sorted(segments, key=lambda segment: segment.begin):
        begin, nbytes, data, redundant, slab, unit = segment
        for start in range(0, nbytes, most):
            length = min(most, nbytes - start)
            # a call reads one contiguous range into at most _MOST_BUFFERS buffers
            if begin + start != end or length > room or len(batch) == _MOST_BUFFERS:
                if batch:
                    yield batch
                batch, room = [], most
            part = data[start : start + length] if data is not None else None
            batch.append(LoadSegment(begin + start, length, part, redundant, slab, unit))
            end, room = begin + start + length, room - length
    if batch:
        yield batch


@dataclass(frozen=True)
class LoadTarget:
    """The local part of a tensor, and the boxes of the whole tensor that it holds."""

    local: Tensor
    boxes: Sequence[TensorBox]

    @staticmethod
    def of(name: str, tensor: Tensor, boxes: Sequence[TensorBox]) -> "LoadTarget":
        """Describes the local part of a tensor. Raises ValueError if it contradicts its boxes."""
        local = local_tensor(tensor)
        if sum(math.prod(box.shape) for box in boxes) != local.numel():
            raise ValueError(
                f"{name}: this rank holds a part of shape {list(local.shape)}, but the tensor's "
                f"placements say {list(boxes)}; create the DTensor with the placements that it has"
            )
        return LoadTarget(local, boxes)

    def memory(self, box: TensorBox, dtype: torch.dtype) -> memoryview | None:
        """Returns the bytes of a box if a file with this dtype can be read into them, else None."""
        if box not in self.boxes or self.local.device.type != "cpu" or self.local.dtype != dtype:
            return None
        view = box_view(self.local, box)
        return as_bytes(view).numpy().data if view.is_contiguous() else None


def deliver(slab: LoadSlab, data: Tensor, targets: Mapping[str, LoadTarget]) -> None:
    """Copy the part of a slab that this rank holds to its target."""
    target = targets.get(slab.unit.name)
    if target is None:
        return
    source = data.view(TORCH_DTYPES[slab.unit.stored.meta.dtype]).view(slab.box.shape)
    for box in target.boxes:
        common = intersection(slab.box, box)
        if common:
            there, within = common
            box_view(target.local, there).copy_(box_view(source, within))


class LoadSegmentReader(ExitStack):
    """Reads segments of files in one thread, with its own buffers and open file. A context manager.

    Args:
        sums: collects the checksums of the bytes that are read.
        bad: collects name → file of tensors with forbidden NaN or infinity.
        step: largest number of bytes of a read.
        pinned: whether the buffer is pinned, for asynchronous copies to a GPU.
    """

    def __init__(
        self,
        files: LoadFiles,
        sums: CrcBlockSums,
        bad: dict[str, str],
        targets: Mapping[str, LoadTarget],
        step: int,
        *,
        pinned: bool,
    ) -> None:
        super().__init__()
        self._files, self._targets = files, targets
        self.sums, self._bad = sums, bad
        size = step + _MOST_BUFFERS * ALIGNMENT  # room for a batch, with each segment aligned
        self._arena = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._memory = self._arena.numpy().data
        self._name: str | None = None
        self._file: StorageFile | None = None

    @torch.no_grad()
    def read(self, job: LoadJob) -> None:
        """Read a job, add its checksums, and copy its slabs to their targets. Raises
        DamagedCheckpoint or StorageError if the file is missing, short, or cannot be read."""
        with reading(self._files.where / job.file):
            for batch in job.batches:
                self._read_batch(self._open(job.file), job.file, batch)

    def _open(self, name: str) -> StorageFile:
        if self._file is None or name != self._name:
            self.close()
            self._file, self._name = self.enter_context(self._files.open(name)), name
        return self._file

    def _read_batch(self, file: StorageFile, name: str, batch: list[LoadSegment]) -> None:
        places, end = [], 0
        for segment in batch:
            places.append(end)
            if segment.data is None:
                end += -(-segment.nbytes // ALIGNMENT) * ALIGNMENT
        buffers = [
            self._memory[place : place + segment.nbytes] if segment.data is None else segment.data
            for segment, place in zip(batch, places, strict=True)
        ]
        if file.read_into(buffers, batch[0].begin) != sum(segment.nbytes for segment in batch):
            raise DamagedCheckpoint(f"{self._files.where / name}: ends too early; it was cut short")
        for segment, data, place in zip(batch, buffers, places, strict=True):
            # computed now, while the bytes are in the processor's cache
            self.sums.take(name, segment.begin, data, segment.redundant)
            if (unit := segment.unit) and not is_finite(
                unit.stored.meta.dtype, np.frombuffer(data, np.uint8)
            ):
                self._bad[unit.name] = name
            if segment.slab:
                bytes_read = self._arena[place : place + segment.nbytes]
                deliver(segment.slab, bytes_read, self._targets)
