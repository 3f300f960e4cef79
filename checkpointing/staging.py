"""torch's side of a slot: copies of a rank's pieces, made while training goes on."""

import ctypes
import logging
import math
import mmap
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from checkpointing.plan import Box, Piece
from checkpointing.slots import SlotFiles, Slots, ranges_of
from checkpointing.tensors import TORCH_DTYPES, box_view, local_tensor

logger = logging.getLogger(__name__)


class Staging:
    """This rank's place in the slots of its node.

    Args:
        slots: of the node.
        pieces: what this rank contributes.
        device: where the tensors live.
    """

    def __init__(self, slots: Slots, pieces: Sequence[Piece], device: torch.device) -> None:
        self._pieces = list(pieces)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied = threading.Event()
        self._copied.set()
        self.move(slots)

    def move(self, slots: Slots) -> None:
        """Copy into these slots from now on."""
        self.wait()
        wanted = {piece.stored.file for piece in self._pieces}
        self._files = [
            SlotFiles({file: path for file, path in paths.items() if file in wanted})
            for paths in slots.paths
        ]
        self._views = [[_view(files, piece) for piece in self._pieces] for files in self._files]
        threading.Thread(target=self._touch, args=(self._files,), daemon=True).start()

    def _touch(self, slots: Sequence[SlotFiles]) -> None:
        ranges = ranges_of(self._pieces, mmap.PAGESIZE)
        for files in slots:
            files.touch(ranges)
            if self._stream is not None:
                _pin(files, ranges)

    def copy(self, slot: int, tensors: Mapping[str, Tensor], copied: Any) -> None:
        """Begin to copy this rank's pieces into a slot, in a thread; `copied(error or None)` is
        called there at the end. The tensors must not change before `wait` returns."""
        sources = [box_view(local_tensor(tensors[piece.name]), piece.box) for piece in self._pieces]
        written = torch.cuda.current_stream().record_event() if self._stream is not None else None
        self._copied.clear()
        threading.Thread(target=self._copy, args=(slot, sources, written, copied)).start()

    def _copy(self, slot: int, sources: list[Tensor], written: Any, copied: Any) -> None:
        error: Exception | None = None
        try:
            with torch.no_grad(), torch.cuda.stream(self._stream):
                if self._stream is not None:
                    self._stream.wait_event(written)
                if sources:  # one call for all: it leaves the interpreter to the training thread
                    torch._foreach_copy_(self._views[slot], sources, non_blocking=True)
                if self._stream is not None:
                    self._stream.synchronize()
        except Exception as failure:
            error = failure
        self._copied.set()
        copied(error)

    def wait(self) -> None:
        """Until the tensors may change again."""
        self._copied.wait()


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


def _pin(files: SlotFiles, ranges: Mapping[str, Sequence[tuple[int, int]]]) -> None:
    """Make the pages known to the GPU, so that it copies to them by itself."""
    for name, spans in ranges.items():
        begin = ctypes.addressof(ctypes.c_char.from_buffer(files.maps[name]))
        for start, stop in spans:
            length = min(stop, len(files.maps[name])) - start
            result = torch.cuda.cudart().cudaHostRegister(begin + start, length, 0)
            if int(result) != 0:
                logger.warning("could not pin memory for checkpoints: CUDA error %s", result)
                return
