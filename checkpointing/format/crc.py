"""Checksums of blocks from the parts that several ranks read.

[Note: parts] CRC-32 is a remainder of polynomials over GF(2), so that of a block is the sum of what
its parts contribute: crc(A B) = crc(A) · x^(8 · len(B)) + crc(B) modulo the CRC's polynomial, as in
zlib's crc32_combine (Mark Adler). A sum is an exclusive or: in any order, over any ranks. So a rank
that holds a few rows of a block reads these alone, and still the whole block is checked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from checkpointing.format.layout import FileRecord

Words: TypeAlias = NDArray[np.uint32]

_POLYNOMIAL = 0xEDB88320
"""The polynomial of CRC-32, the coefficient of x^31 in the lowest bit, as all polynomials here."""
_ONE = 0x80000000
_TABLE = 1 << 13


@dataclass(frozen=True)
class Replica:
    """Which of how many readers of the same bytes; the first of them accounts for the bytes, the
    others must have read the same."""

    index: int
    count: int


ONLY = Replica(0, 1)


class BlockSums:
    """What this rank contributes to the checksums of blocks.

    Args:
        records: of the files; equal on all ranks that sum up together.
        block_bytes: size of a block.
    """

    def __init__(self, records: Mapping[str, FileRecord], block_bytes: int) -> None:
        self._records = records
        self._block_bytes = block_bytes
        self._first: dict[str, int] = {}
        self.blocks = 0
        """Those of all files."""
        for file in sorted(records):
            self._first[file] = self.blocks
            self.blocks += len(records[file].checksums)
        # Parts that are whole, and the one that is being read.
        self._blocks: list[int] = []
        self._rests: list[int] = []
        self._crcs: list[int] = []
        self._replicas: list[Replica] = []
        self._next: tuple[str, int, Replica] | None = None
        self._crc = 0

    def take(self, file: str, offset: int, data: memoryview, replica: Replica) -> None:
        """Account for `data`, read from `offset` on; best a megabyte at a time, while it is in the
        processor's cache."""
        if file not in self._records:
            return
        while data:
            if self._next != (file, offset, replica):
                self._end_part()
            room = self._block_bytes - offset % self._block_bytes
            part, data = data[:room], data[room:]
            self._crc = crc32(part, self._crc)
            offset += len(part)
            self._next = file, offset, replica
            if len(part) == room:
                self._end_part()

    def _end_part(self) -> None:
        if self._next is not None:
            file, stop, replica = self._next
            block = (stop - 1) // self._block_bytes
            end = min((block + 1) * self._block_bytes, self._records[file].size)
            if block < len(self._records[file].checksums):
                self._blocks.append(self._first[file] + block)
                self._rests.append(end - stop)
                self._crcs.append(self._crc)
                self._replicas.append(replica)
        self._next, self._crc = None, 0

    def contribution(self) -> Words:
        """Shape (2, blocks). Added up (exclusive or) over all ranks, the first row is the CRC-32 of
        each block of which every byte was read, and the second is zero where all replicas read the
        same."""
        self._end_part()
        sums = np.zeros((2, self.blocks), np.uint32)
        blocks = np.array(self._blocks, np.int64)
        parts = _shifted(np.array(self._crcs, np.uint32), np.array(self._rests, np.int64))
        kinds = {replica: number for number, replica in enumerate(dict.fromkeys(self._replicas))}
        kind = np.array([kinds[replica] for replica in self._replicas], np.int64)
        for replica, number in kinds.items():
            of_kind = kind == number
            if replica.index == 0:
                np.bitwise_xor.at(sums[0], blocks[of_kind], parts[of_kind])
            if replica.count > 1:
                weighted = _times(parts[of_kind], _weight(replica))
                np.bitwise_xor.at(sums[1], blocks[of_kind], weighted)
        return sums

    def differing(self, sums: Any, checked: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
        """(file, block) of the blocks whose bytes are not those of the record.

        Args:
            sums: contributions of all ranks, added up; array-like of shape (2, blocks).
            checked: blocks by file; every byte of them was read.
        """
        found = np.asarray(sums).astype(np.uint32)
        bad = []
        for file, blocks in checked.items():
            for block in blocks:
                at = self._first[file] + block
                if found[0, at] != self._records[file].checksums[block] or found[1, at]:
                    bad.append((file, block))
        return bad


def _weight(replica: Replica) -> Words:
    """Weights differ from one replica to the next and add up to zero, so that equal parts cancel
    out, and parts of which any differ do not: x^8, x^16, … and for the first the sum of these."""
    if replica.index:
        return _power(np.array(replica.index))
    return np.bitwise_xor.reduce(_power(np.arange(1, replica.count)))


def _shifted(crcs: Words, nbytes: NDArray[np.int64]) -> Words:
    """crcs · x^(8 · nbytes)."""
    return _times(crcs, _power(nbytes))


def _power(exponents: NDArray[Any]) -> Words:
    """x^(8 · exponents), for exponents up to 64 Mi."""
    low, high = _tables()
    return _times(low[exponents % _TABLE], high[exponents // _TABLE])


@cache
def _tables() -> tuple[Words, Words]:
    low = _powers(np.array(_ONE >> 8, np.uint32))
    high = _powers(_times(low[-1:], low[1:2])[0])
    return low, high


def _powers(base: Words) -> Words:
    """base^0, base^1, …, base^(_TABLE - 1)."""
    powers = np.array([_ONE], np.uint32)
    while len(powers) < _TABLE:
        powers = np.concatenate([powers, _times(powers, base)])
        base = _times(base, base)
    return powers


def _times(left: Words, right: Words) -> Words:
    """Product modulo the polynomial, element by element."""
    left, right = np.broadcast_arrays(left, right)
    product, right = np.zeros_like(left), right.copy()
    for bit in range(31, -1, -1):
        product ^= np.where((left >> np.uint32(bit)) & np.uint32(1), right, np.uint32(0))
        right = (right >> np.uint32(1)) ^ np.where(
            right & np.uint32(1), np.uint32(_POLYNOMIAL), np.uint32(0)
        )
    return product
