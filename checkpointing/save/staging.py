"""Copies of a rank's tensors into the slots of its node, made while training continues."""

import ctypes
import logging
import math
import mmap
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from checkpointing.format.digests import digest_and_finite
from checkpointing.format.layout import DTYPE_BYTES, MODEL
from checkpointing.format.plan import SectionNumbers, TensorBox, TensorPiece, extents_of
from checkpointing.format.tensors import TORCH_DTYPES, as_bytes, box_view, local_tensor
from checkpointing.save.messages import Position
from checkpointing.save.slots import SaveSlotFiles, SaveSlots, ranges_of

logger = logging.getLogger(__name__)


REST = 4.0
"""Value of `rest` for `SaveSlotFiles.touch` while training runs at the same time."""


class SaveStaging:
    """Copies this rank's pieces into the slots of its node, in a thread, while training continues.

    Args:
        files: names of all files, in their order.
    """

    def __init__(
        self,
        slots: SaveSlots,
        pieces: Sequence[TensorPiece],
        files: Sequence[str],
        device: torch.device,
        *,
        hurried: bool = False,
    ) -> None:
        numbers = {name: number for number, name in enumerate(files)}

        def position(part: _Part) -> Position:
            return numbers[part.piece.stored.file], part.start

        self._pieces = sorted(pieces, key=lambda piece: (numbers[piece.stored.file], _begin(piece)))
        # In the order of files, in which the coordinator grants blocks.
        self._parts = sorted((part for piece in pieces for part in _parts(piece)), key=position)
        self._portions = _portions([part.nbytes for part in self._parts])
        starts = [*map(position, self._parts), (len(files), 0)]
        self._ends = [starts[stop] for _, stop in self._portions]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        """Set while the tensors may change."""
        self._copied.set()
        self._files: list[SaveSlotFiles] = []
        self._views: list[list[Tensor]] = []
        self._touching: threading.Thread | None = None
        self._pinned: list[int] = []
        """Addresses of memory that is pinned for the GPU."""
        self._stop_pinning = threading.Event()
        self.move(slots, hurried=hurried)

    @property
    def has_slots(self) -> bool:
        return bool(self._files)

    def release(self) -> None:
        """Unmap the slots until `move`, because mapped memory is not available for new slots."""
        self.finish()
        self._unpin()
        self._files, self._views = [], []

    def move(self, slots: SaveSlots, *, hurried: bool = True) -> None:
        """Copy into `slots` from now on; `hurried`: whether a save already waits for them."""
        self.release()
        wanted = {part.piece.stored.file for part in self._parts}
        self._files = [
            SaveSlotFiles({file: path for file, path in paths.items() if file in wanted})
            for paths in slots.paths
        ]
        self._views = [[part.view(files) for part in self._parts] for files in self._files]
        if slots.resident:
            # a daemon thread, as the program may end while pages are still being faulted in
            self._touching = threading.Thread(target=self._touch, args=(hurried,), daemon=True)
            self._touching.start()

    def _touch(self, hurried: bool) -> None:
        rest = 0.0
        ranges = ranges_of((part.piece for part in self._parts), mmap.PAGESIZE)
        for files in self._files:
            files.touch(ranges, rest=rest)
            # A save may wait for the first slot, but not for the next ones.
            rest = REST if hurried and self._stream is None else 0.0
            if self._stream is not None:
                with torch.cuda.device(self._stream.device):  # a new thread begins on GPU 0
                    _pin(files, ranges, self._pinned, self._stop_pinning)

    def _unpin(self) -> None:
        """Unpin pages before they are unmapped. Else the GPU would copy to the old physical pages
        if new pages get the same addresses."""
        if self._stream is None or self._touching is None:
            return
        self._stop_pinning.set()
        self._touching.join()
        self._stop_pinning.clear()
        # Errors are ignored, as a GPU that has failed makes no more copies.
        with suppress(RuntimeError), torch.cuda.device(self._stream.device):
            for address in self._pinned:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()

    def copy(
        self,
        slot: int,
        tensors: Mapping[str, Tensor],
        at_once: Collection[str],
        finite: Collection[str],
        copied: Callable[[Position | Exception, SectionNumbers | None], None],
    ) -> None:
        """Begin to copy this rank's pieces into a slot, in a thread, in the order of files. The
        tensors must not change before `wait` returns, except those of `at_once`, which may change
        as soon as this method returns.

        Args:
            at_once: names of tensors that are copied, or on a GPU whose copy is queued in the
                current stream, before this method returns.
            finite: names of tensors that must not hold NaN or infinity.
            copied: called in the thread with (position reached, None), at the end with (last
                position, summary of the numbers), or with (exception that ended the copy, None).
        """
        sources = [local_tensor(tensors[part.piece.name]) for part in self._parts]
        views = self._views[slot]
        first = [number for number, part in enumerate(self._parts) if part.piece.name in at_once]
        with torch.no_grad():  # copying into a slot must not extend the autograd graph
            # On a GPU the copies are queued in the current stream, before any later change.
            for number in first:
                views[number].copy_(self._parts[number].of(sources[number]), non_blocking=True)
        written = torch.cuda.current_stream().record_event() if self._stream is not None else None
        left = sorted(set(range(len(sources))).difference(first))
        # Versions of DTensors themselves: an update does not change their local part's version.
        changing = [tensors[self._parts[number].piece.name] for number in left]
        versions = [_version(tensor) for tensor in changing]

        def unchanged() -> None:
            for number, tensor, version in zip(left, changing, versions, strict=True):
                if _version(tensor) != version:
                    raise RuntimeError(
                        f"{self._parts[number].piece.name} was changed while it was being copied; "
                        "guard the optimizer, or call wait_staged before changing it"
                    )

        # Cleared here, not in the thread, as `wait` may be called before the thread begins.
        self._copied.clear()
        numbers = partial(self._numbers, slot, finite)
        work = views, sources, left, written, copied, unchanged, numbers
        thread = threading.Thread(target=self._copy, args=work)
        thread.start()
        self._thread = thread

    def _copy(
        self,
        views: list[Tensor],
        sources: list[Tensor],
        left: list[int],
        written: Any,
        copied: Callable[[Position | Exception, SectionNumbers | None], None],
        unchanged: Callable[[], None],
        numbers: Callable[[], SectionNumbers],
    ) -> None:
        try:
            # With the stream None, torch 2.14 would initialise CUDA, which a fork must not do.
            on_stream = torch.cuda.stream(self._stream) if self._stream else nullcontext()
            with torch.no_grad(), on_stream:
                if self._stream is not None:  # wait for the kernels that write the tensors
                    self._stream.wait_event(written)
                for (start, stop), end in zip(self._portions, self._ends, strict=True):
                    some = left[bisect_left(left, start) : bisect_left(left, stop)]
                    if some:  # one call for many tensors, which releases the GIL to training
                        torch._foreach_copy_(
                            [views[number] for number in some],
                            [self._parts[number].of(sources[number]) for number in some],
                            non_blocking=True,
                        )
                    # A position may be reported only when its bytes are in the slot.
                    if self._stream is not None:
                        self._stream.synchronize()
                    # the last position is reported below, once the numbers are summarised
                    if end is not self._ends[-1]:
                        copied(end, None)
            unchanged()  # before the last report, without which no save is committed
            self._copied.set()  # the optimizer may continue, as the numbers are read from the slot
            copied(self._ends[-1], numbers())  # last, as a reported save may be committed
        except Exception as error:
            copied(error, None)
        finally:
            self._copied.set()  # after an error, too, as the optimizer step must not wait for ever

    def _numbers(self, slot: int, finite: Collection[str]) -> SectionNumbers:
        """Returns the summary of the numbers that this rank has copied into a slot."""
        sums = {True: 0, False: 0}
        bad: list[str] = []
        odd: list[str] = []
        for piece in self._pieces:
            meta, box, name = piece.stored.meta, piece.box, piece.name
            data = _bits(self._files[slot], piece)
            digest, good = digest_and_finite(name, meta.dtype, meta.shape, box.offset, data)
            sums[name.startswith(f"{MODEL.stem}/")] += digest
            if not good:
                (bad if name in finite else odd).append(name)
        return SectionNumbers() + SectionNumbers(sums[True], sums[False], tuple(bad), tuple(odd))

    def wait(self) -> None:
        """Wait until the tensors may change."""
        self._copied.wait()

    def finish(self) -> None:
        """Wait until the copying thread has made its last report."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _version(tensor: Tensor) -> int:
    # the number of in-place changes to a tensor and to views of its memory
    return 0 if tensor.is_inference() else tensor._version


REPORT_BYTES = 64 << 20
"""About how many bytes are copied between two reports of progress."""
PORTION_BYTES = 16 << 20
"""Bytes pinned by one call, in whole pages. Kernel launches wait while memory is pinned."""


@dataclass(frozen=True)
class _Part:
    """Bytes of a piece that one call copies.

    A GPU refuses to copy to memory that was pinned in two calls (CUDA_ERROR_INVALID_VALUE). So a
    contiguous piece is cut wherever `_pin` cuts. Any other piece is gathered in a buffer of its
    own, and the GPU does not write to the slot."""

    piece: TensorPiece
    start: int
    """Offset of the first byte in the file."""
    stop: int | None = None
    """End of the bytes in the file; None: the part is the whole piece, in its shape."""

    @property
    def nbytes(self) -> int:
        if self.stop is not None:
            return self.stop - self.start
        return self.piece.box.nbytes(self.piece.stored.meta)

    def of(self, local: Tensor) -> Tensor:
        """Returns this part's bytes of the local tensor: a view, or a copy if the tensor is not in
        the file's order."""
        tensor = box_view(local, self.piece.box)
        if self.stop is None:
            return tensor
        first, size = self.start - _begin(self.piece), tensor.element_size()
        begin, end = first // size, -(-(first + self.nbytes) // size)
        return as_bytes(_elements(tensor, begin, end))[first - begin * size :][: self.nbytes]

    def view(self, files: SaveSlotFiles) -> Tensor:
        """Returns the memory of this part in a slot, as a tensor of the same shape and dtype."""
        meta, begin, box = self.piece.stored.meta, self.piece.stored.begin, self.piece.box
        region = files.maps[self.piece.stored.file]
        if self.stop is not None:
            return torch.frombuffer(region, dtype=torch.uint8, count=self.nbytes, offset=self.start)
        count, dtype = math.prod(meta.shape), TORCH_DTYPES[meta.dtype]
        whole = torch.frombuffer(region, dtype=dtype, count=count, offset=begin).view(meta.shape)
        return box_view(whole, TensorBox(box.offset, box.shape, box.offset))


def _elements(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Returns elements `start` to `stop` in row-major order, flat, without copying the others."""
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    row = tensor.numel() // len(tensor)
    first, last = -(-start // row), stop // row  # rows that are returned completely
    if first > last:  # the range begins and ends in one row
        return _elements(tensor[last], start - last * row, stop - last * row)
    parts = [tensor[first:last].reshape(-1)]
    if start < first * row:
        parts.insert(0, _elements(tensor[first - 1], start - (first - 1) * row, row))
    if last * row < stop:
        parts.append(_elements(tensor[last], 0, stop - last * row))
    return torch.cat(parts)


def _bits(files: SaveSlotFiles, piece: TensorPiece) -> NDArray[np.generic]:
    """Returns a piece in a slot as unsigned integers in the shape of its box."""
    meta, box = piece.stored.meta, piece.box
    kind, count = np.dtype(f"u{DTYPE_BYTES[meta.dtype]}"), math.prod(meta.shape)
    region = files.maps[piece.stored.file]
    whole = np.frombuffer(region, kind, count, piece.stored.begin).reshape(meta.shape)
    return whole[
        tuple(slice(at, at + length) for at, length in zip(box.offset, box.shape, strict=True))
    ]


def _begin(piece: TensorPiece) -> int:
    """Returns the offset of a piece's first byte in its file."""
    return piece.stored.begin + next(extents_of(piece.stored.meta, piece.box)).offset


def _parts(piece: TensorPiece) -> list[_Part]:
    """Returns a piece that is contiguous in its file in parts, cut where offsets in the file are
    multiples of PORTION_BYTES, and any other piece whole."""
    start, whole = _begin(piece), _Part(piece, _begin(piece))
    cuts = _cut(start, start + whole.nbytes)
    strided = len(list(islice(extents_of(piece.stored.meta, piece.box), 2))) > 1
    return [whole] if strided or len(cuts) == 1 else [_Part(piece, *cut) for cut in cuts]


def _cut(start: int, stop: int) -> list[tuple[int, int]]:
    """Returns the parts of a range of a file, cut at multiples of PORTION_BYTES."""
    inner = range((start // PORTION_BYTES + 1) * PORTION_BYTES, stop, PORTION_BYTES)
    return list(pairwise([start, *inner, stop]))


def _portions(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Group parts of these sizes (bytes) into one or more ranges of about REPORT_BYTES."""
    portions, first, held = [], 0, 0
    for number, size in enumerate(sizes):
        held += size
        if held >= REPORT_BYTES and number + 1 < len(sizes):
            portions.append((first, number + 1))
            first, held = number + 1, 0
    return [*portions, (first, len(sizes))]


def _pin(
    files: SaveSlotFiles,
    ranges: Mapping[str, Sequence[tuple[int, int]]],
    pinned: list[int],
    stopped: threading.Event,
) -> None:
    """Pin pages, so that copies from the GPU are asynchronous, until `stopped` is set. Appends the
    addresses to `pinned`."""
    for name, spans in ranges.items():
        begin = ctypes.addressof(ctypes.c_char.from_buffer(files.maps[name]))
        for start, stop in (cut for span in spans for cut in _cut(*span)):
            if stopped.is_set():
                return
            length = min(stop, len(files.maps[name])) - start
            if error := register(begin + start, length):
                logger.warning("could not pin memory for checkpoints: CUDA error %s", error)
                return
            pinned.append(begin + start)


def register(address: int, nbytes: int) -> int:
    """Pin memory (cudaHostRegister), then sleep as long as that took, as kernel launches would have
    to wait for back-to-back calls. Returns CUDA's error, or 0."""
    began = time.monotonic()
    result = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
    time.sleep(time.monotonic() - began)
    return int(result)
