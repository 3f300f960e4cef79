"""The memory of a node that saves are copied into, and that outlives the processes that fill it.

[Note: slot] A slot holds what the ranks of a node contribute to one save: sparse files in shared
memory with the names, sizes and offsets of the checkpoint's tensor files. A rank copies its pieces
to where they lie in the finished file; a writer takes whole blocks from there, aligned as direct
I/O wants them; and what a checkpoint's reader can read, it can read from a slot. Pages that hold no
piece of this node take no memory.

    /dev/shm/perdure-<run>-<pid>-<random>/      closed to other users; see folders.py
      slot-0.manifest                   what slot 0 holds; replaced at once, never half written
      peer-1-0/, peer-1-0.manifest      a copy of slot 0 of node 1, if asked for
      shape.json                        for which plan the slots were made
      slot-0/model-00001-of-00004.safetensors …

Memory is made once, touched in the background, and used again by every save. Where shared memory is
small (64 MB in a container by default), the same files are anonymous and end with their writer.

[Note: no slots] With `slots: 0` there is one such anonymous file for each tensor file, and it is
empty between saves. A node that takes part in a save looks first whether there is room; pages come
as ranks copy, and go when the save has ended and all ranks of the node have copied.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from isal.isal_zlib import crc32

from checkpointing.format.plan import Piece, extents_of, merged

_PORTION = 16 << 20
"""Bytes that are touched, copied to another node, or have a checksum of their own."""
Ranges = dict[str, list[tuple[int, int]]]
"""Bytes (start, stop) by file, in order, not touching each other."""


@dataclass(frozen=True)
class Slots:
    """Where a node's slots are; the same for its writer and its ranks."""

    paths: list[dict[str, str]]
    """By slot: path by file name."""
    nbytes: int
    """Memory of one slot."""
    note: str
    """What to tell people about it."""
    lasting: bool
    """Whether they outlive this node's processes."""
    resident: bool = True
    """Whether they are memory that stays, to be touched and pinned before it is used."""
    transient: bool = False
    """Whether they are empty between saves; see [Note: no slots]."""


def portions(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Stretches (start, stop) of a file, cut where they are longer than _PORTION."""
    return [
        (at, min(at + _PORTION, stop))
        for start, stop in spans
        for at in range(start, stop, _PORTION)
    ]


def ranges_of(pieces: Iterable[Piece], page: int = 1) -> Ranges:
    """Where pieces lie in their files, rounded outwards to multiples of `page` bytes."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for piece in pieces:
        of_file = spans.setdefault(piece.stored.file, [])
        for run in extents_of(piece.stored.meta, piece.box):
            start = piece.stored.begin + run.offset
            of_file.append((start // page * page, -(-(start + run.length) // page) * page))
    return {file: merged(of_file) for file, of_file in spans.items()}


class SlotFiles:
    """The files of one slot, mapped into this process.

    Args:
        paths: path by file name.
    """

    def __init__(self, paths: Mapping[str, str], *, writable: bool = True) -> None:
        self.maps: dict[str, mmap.mmap] = {}
        for name, path in paths.items():
            descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            try:
                self.maps[name] = mmap.mmap(descriptor, 0, access=access)
            finally:
                os.close(descriptor)

    def checksums(self, ranges: Ranges, threads: int) -> dict[str, list[int]]:
        """CRC-32 of each of the `portions` of each file, taken by so many threads."""
        with ThreadPoolExecutor(threads) as pool:
            images = {name: memoryview(self.maps[name]) for name in ranges}
            coming = {
                name: pool.map(crc32, [images[name][slice(*one)] for one in portions(spans)])
                for name, spans in ranges.items()
            }
            return {name: list(sums) for name, sums in coming.items()}

    def touch(self, ranges: Ranges, *, rest: float = 0.0) -> None:
        """Have every page of `ranges` at hand, so that the first save finds it as later ones do.
        Takes a second per GB or so, and leaves the interpreter to others.

        Args:
            ranges: by file.
            rest: how many times as long as it has worked this sleeps now and then, to leave the
                core to others, too.
        """
        for name, of_file in ranges.items():
            for start, stop in of_file:
                _populate(self.maps[name], start, stop, rest)


_POPULATE_WRITE = 23


def _populate(region: mmap.mmap, start: int, stop: int, rest: float) -> None:
    """madvise(MADV_POPULATE_WRITE), of Linux 5.14; on older ones the pages come when used."""
    begin = ctypes.addressof(ctypes.c_char.from_buffer(region))
    libc = ctypes.CDLL(None, use_errno=True)
    start, stop = start // mmap.PAGESIZE * mmap.PAGESIZE, min(stop, len(region))
    for portion in range(start, stop, _PORTION):
        began, length = time.monotonic(), min(_PORTION, stop - portion)
        if libc.madvise(ctypes.c_void_p(begin + portion), ctypes.c_size_t(length), _POPULATE_WRITE):
            return
        time.sleep(rest * (time.monotonic() - began))
