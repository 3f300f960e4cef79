"""torch's side of a slot: copies of a rank's pieces, made while training goes on."""

import ctypes
import logging
import math
import mmap
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from checkpointing.coordinator import Position
from checkpointing.layout import DTYPE_BYTES
from checkpointing.plan import Box, Piece, box_runs
from checkpointing.slots import SlotFiles, Slots, ranges_of
from checkpointing.tensors import TORCH_DTYPES, box_view, local_tensor

logger = logging.getLogger(__name__)


class Staging:
    """This rank's place in the slots of its node.

    Args:
        slots: of the node.
        pieces: what this rank contributes.
        files: names of all files, in their order.
        device: where the tensors live.
    """

    def __init__(
        self,
        slots: Slots,
        pieces: Sequence[Piece],
        files: Sequence[str],
        device: torch.device,
    ) -> None:
        numbers = {name: number for number, name in enumerate(files)}

        def position(piece: Piece) -> Position:
            first = next(box_runs(piece.stored.meta, piece.box)).offset
            return numbers[piece.stored.file], piece.stored.begin + first

        self._pieces = sorted(pieces, key=position)
        self._portions = _portions([_nbytes(piece) for piece in self._pieces])
        starts = [*map(position, self._pieces), (len(files), 0)]
        self._ends = [starts[stop] for _, stop in self._portions]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: threading.Thread | None = None
        """That copies; ends when the last has been told: what is asked next must find it said."""
        self._files: list[SlotFiles] = []
        self._views: list[list[Tensor]] = []
        self._touching: threading.Thread | None = None
        self._pinned: list[int] = []
        """Addresses that the GPU knows."""
        self.move(slots)

    @property
    def has_slots(self) -> bool:
        """Whether there is anywhere to copy to."""
        return bool(self._files)

    def release(self) -> None:
        """Let go of the slots until `move`: while they are mapped their memory is taken, which the
        new ones may need."""
        self.wait()
        self._unpin()
        self._files, self._views = [], []

    def move(self, slots: Slots) -> None:
        """Copy into these slots from now on."""
        self.release()
        wanted = {piece.stored.file for piece in self._pieces}
        self._files = [
            SlotFiles({file: path for file, path in paths.items() if file in wanted})
            for paths in slots.paths
        ]
        self._views = [[_view(files, piece) for piece in self._pieces] for files in self._files]
        if slots.in_memory:
            self._touching = threading.Thread(target=self._touch, args=(self._files,), daemon=True)
            self._touching.start()

    def _touch(self, slots: Sequence[SlotFiles]) -> None:
        ranges = ranges_of(self._pieces, mmap.PAGESIZE)
        for files in slots:
            files.touch(ranges)
            if self._stream is not None:
                with torch.cuda.device(self._stream.device):  # a new thread begins on GPU 0
                    self._pinned += _pin(files, ranges)

    def _unpin(self) -> None:
        """Have the GPU forget pages that are about to be unmapped: where others come to lie at
        their addresses, it would still copy to the old ones."""
        if self._stream is None or self._touching is None:
            return
        self._touching.join()
        # A GPU that has failed copies nothing more.
        with suppress(RuntimeError), torch.cuda.device(self._stream.device):
            for address in self._pinned:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._pinned.clear()

    def copy(
        self,
        slot: int,
        tensors: Mapping[str, Tensor],
        at_once: Collection[str],
        copied: Callable[[Position | Exception], None],
    ) -> None:
        """Begin to copy this rank's pieces into a slot, in a thread, in the order of files;
        `copied` is told there up to where they are, or why they never will be. The tensors must not
        change before `wait` returns, but for those `at_once`: they may on return."""
        sources = [box_view(local_tensor(tensors[piece.name]), piece.box) for piece in self._pieces]
        views = self._views[slot]
        first = [number for number, piece in enumerate(self._pieces) if piece.name in at_once]
        with torch.no_grad():
            for number in first:  # on a GPU before whatever is asked of it next
                views[number].copy_(sources[number], non_blocking=True)
        written = torch.cuda.current_stream().record_event() if self._stream is not None else None
        left = sorted(set(range(len(sources))).difference(first))
        thread = threading.Thread(target=self._copy, args=(views, sources, left, written, copied))
        thread.start()
        self._thread = thread

    def _copy(
        self,
        views: list[Tensor],
        sources: list[Tensor],
        left: list[int],
        written: Any,
        copied: Callable[[Position | Exception], None],
    ) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                if self._stream is not None:
                    self._stream.wait_event(written)
                for (start, stop), end in zip(self._portions, self._ends, strict=True):
                    some = left[bisect_left(left, start) : bisect_left(left, stop)]
                    if some:  # one call for many: it leaves the interpreter to training
                        torch._foreach_copy_(
                            [views[number] for number in some],
                            [sources[number] for number in some],
                            non_blocking=True,
                        )
                    if self._stream is not None:
                        self._stream.synchronize()
                    copied(end)
        except Exception as error:
            copied(error)

    def wait(self) -> None:
        """Until the tensors may change again."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


PORTION_BYTES = 64 << 20
"""Writers hear of the copy's progress about as often as this."""


def _portions(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Pieces in order → (first, stop) of groups of about PORTION_BYTES; at least one group."""
    portions, first, held = [], 0, 0
    for number, size in enumerate(sizes):
        held += size
        if held >= PORTION_BYTES and number + 1 < len(sizes):
            portions.append((first, number + 1))
            first, held = number + 1, 0
    return [*portions, (first, len(sizes))]


def _nbytes(piece: Piece) -> int:
    return math.prod(piece.box.shape) * DTYPE_BYTES[piece.stored.meta.dtype]


def _view(files: SlotFiles, piece: Piece) -> Tensor:
    """Where a piece lies in a slot, as a tensor of the piece's shape."""
    meta, begin = piece.stored.meta, piece.stored.begin
    region = torch.frombuffer(
        files.maps[piece.stored.file],
        dtype=TORCH_DTYPES[meta.dtype],
        count=math.prod(meta.shape),
        offset=begin,
    )
    box = piece.box
    return box_view(region.view(meta.shape), Box(box.offset, box.shape, box.offset))


def _pin(files: SlotFiles, ranges: Mapping[str, Sequence[tuple[int, int]]]) -> list[int]:
    """Make the pages known to the GPU, so that it copies to them by itself; returns where those
    begin that it knows now."""
    pinned: list[int] = []
    for name, spans in ranges.items():
        begin = ctypes.addressof(ctypes.c_char.from_buffer(files.maps[name]))
        for start, stop in spans:
            length = min(stop, len(files.maps[name])) - start
            result = torch.cuda.cudart().cudaHostRegister(begin + start, length, 0)
            if int(result) != 0:
                logger.warning("could not pin memory for checkpoints: CUDA error %s", result)
                return pinned
            pinned.append(begin + start)
    return pinned
