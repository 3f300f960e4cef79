"""Checksums of blocks, combined from parts that different ranks read; and finiteness and digests of
tensors, from their bytes. Imports no torch.

[Note: digest] The digest of a collection of tensors is a sum modulo 2^64. Each 8-byte word of a row
is multiplied by an odd number, derived from the tensor's name and the row, and added. A row extends
along the last dimension, and begins a new word; a vector has a word per row. So the digests of
parts add up to the digest of the whole, wherever the parts of ranks, nodes or files end. The digest
detects errors, such as a wrong row or a flipped bit, but no forgery.

[Note: parts] CRC-32 is a remainder of polynomials over GF(2). So the CRC of a block is the sum of
contributions of its parts: crc(A B) = crc(A) · x^(8 · len(B)) + crc(B) modulo the CRC's polynomial,
as in zlib's crc32_combine (Mark Adler). The sum is an exclusive or, in any order, over any ranks. A
rank that holds a few rows of a block reads only these, and still the whole block is checked."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from isal.isal_zlib import crc32
from numpy.typing import NDArray

from checkpointing.format.layout import FileRecord

CHUNK_BYTES = 1 << 19
"""Bytes processed at a time, few enough to stay in the processor's cache between passes."""
WORD_BYTES = 8
_MASK = (1 << 64) - 1

_KINDS = {
    "F16": ("2", 0x7C00), "BF16": ("2", 0x7F80), "F32": ("4", 0x7F800000),
    "F64": ("8", 0x7FF0000000000000), "C64": ("4", 0x7F800000),
    "F8_E5M2": ("1", 0x7C), "F8_E4M3": ("1", 0x7F),
}  # fmt: skip
"""dtype → (size in bytes as text, smallest bits of an infinite number or NaN without the sign)."""
_SINGLE = {"F8_E8M0": 0xFF, "F8_E4M3FNUZ": 0x80, "F8_E5M2FNUZ": 0x80}
"""dtype → the only byte that is NaN."""


def may_be_infinite(dtype: str) -> bool:
    return dtype in _KINDS or dtype in _SINGLE


def is_finite(dtype: str, data: NDArray[np.generic]) -> bool:
    """Whether no number is infinite or NaN; always True for integers. `data` has the bits of the
    numbers in any unsigned dtype, contiguous along the last dimension."""
    if dtype in _SINGLE:
        return not (data.view(np.uint8) == _SINGLE[dtype]).any()
    if dtype not in _KINDS or not data.size:
        return True
    size, limit = _KINDS[dtype]
    # Two maxima need no mask in memory. As signed integers the bits of positive numbers are
    # the largest, as unsigned integers the bits of negative numbers.
    sign = 1 << (8 * int(size) - 1)
    largest, lowest = data.view(f"i{size}").max(), data.view(f"u{size}").max()
    return bool(largest < limit and lowest < (sign | limit))


def digest_and_finite(
    name: str,
    dtype: str,
    shape: Sequence[int],
    offset: Sequence[int],
    data: NDArray[np.generic],
) -> tuple[int, bool]:
    """Returns the digest of a box of a tensor, and whether all of its numbers are finite.

    Args:
        name: name of the tensor, which enters the digest.
        shape: shape of the whole tensor.
        offset: index of the box's first element in the whole tensor.
        data: bits of the box, as unsigned integers of the element's size; contiguous along the last
            dimension.
    """
    total, finite = 0, True
    base = crc32(name.encode()) << 32  # so that rows of different tensors get different factors
    if data.ndim < 2:
        first = offset[0] * data.itemsize if offset else 0
        step = CHUNK_BYTES // data.itemsize
        flat = data.reshape(-1)
        for start in range(0, len(flat), step):
            part = flat[start : start + step]
            finite = finite and is_finite(dtype, part)
            at = first + start * data.itemsize
            words = _words(part[None], at % WORD_BYTES)[0]
            rows = np.arange(len(words), dtype=np.uint64) + np.uint64(base + at // WORD_BYTES)
            # odd factors are invertible modulo 2^64: every change of a word changes the digest
            total += int((words * (rows * np.uint64(2) + np.uint64(1))).sum())
        return total & _MASK, finite
    strides = [int(np.prod(shape[dim + 1 : -1], dtype=np.uint64)) for dim in range(len(shape) - 1)]
    first = sum(at * stride for at, stride in zip(offset, strides, strict=False))
    column = offset[-1] * data.itemsize % WORD_BYTES
    for part, rows in _chunks(data, base + first, strides):
        finite = finite and is_finite(dtype, part)
        sums = _words(part, column).sum(axis=1, dtype=np.uint64)
        total += int((sums * (rows * np.uint64(2) + np.uint64(1))).sum())
    return total & _MASK, finite


def _chunks(
    data: NDArray[np.generic], first: int, strides: Sequence[int]
) -> Iterator[tuple[NDArray[np.generic], NDArray[np.uint64]]]:
    """Yields a box as matrices (rows, columns) of about CHUNK_BYTES, each with the numbers of its
    rows in the whole tensor. `first` is the number of the box's first row."""
    if not data.size:
        return
    step = max(1, CHUNK_BYTES * len(data) // data.nbytes)
    for start in range(0, len(data), step):
        part, at = data[start : start + step], first + start * strides[0]
        if part.ndim > 2 and part.nbytes > CHUNK_BYTES:  # one index of dim 0 exceeds CHUNK_BYTES
            yield from _chunks(part[0], at, strides[1:])
            continue
        rows = np.array([at], np.uint64)
        for length, stride in zip(part.shape, strides, strict=False):
            rows = np.add.outer(rows, np.arange(length, dtype=np.uint64) * np.uint64(stride))
        yield part.reshape(-1, part.shape[-1]), rows.reshape(-1)


def _words(part: NDArray[np.generic], lead: int) -> NDArray[np.uint64]:
    """Returns the 8-byte words of each row of a matrix. A row begins at byte `lead` of its first
    word. Bytes of the words outside the row are zero."""
    width = part.shape[1] * part.itemsize
    # the usual case needs no copy
    if lead == 0 and width % WORD_BYTES == 0:
        return part.view(np.uint64)
    padded = np.zeros((len(part), -(-(lead + width) // WORD_BYTES) * WORD_BYTES), np.uint8)
    padded[:, lead : lead + width] = part.view(np.uint8)
    return padded.view(np.uint64)


Words: TypeAlias = NDArray[np.uint32]

_POLYNOMIAL = 0xEDB88320
"""The polynomial of CRC-32. In all polynomials here the lowest bit is the coefficient of x^31."""
_ONE = 0x80000000
_TABLE = 1 << 13


@dataclass(frozen=True)
class CrcReader:
    """Reader number `index` of `count` readers of the same bytes. Only the contribution of reader 0
    enters the CRC-32; the other readers must have read the same bytes."""

    index: int
    count: int


ONLY = CrcReader(0, 1)


class CrcBlockSums:
    """Accumulates this rank's contributions to the checksums of blocks. `records`, file → size and
    checksums, are equal on all ranks whose contributions are combined."""

    def __init__(self, records: Mapping[str, FileRecord], block_bytes: int) -> None:
        self._records = records
        self._block_bytes = block_bytes
        self._first: dict[str, int] = {}
        self.blocks = 0
        for file in sorted(records):
            self._first[file] = self.blocks
            self.blocks += len(records[file].checksums)
        # For each finished part: block, bytes to the block's end, CRC-32, reader.
        self._blocks: list[int] = []
        self._rests: list[int] = []
        self._crcs: list[int] = []
        self._readers: list[CrcReader] = []
        self._next: tuple[str, int, CrcReader] | None = None
        self._crc = 0

    def take(self, file: str, offset: int, data: memoryview, reader: CrcReader) -> None:
        """Add the checksum of `data`, read from `offset` of `file`. Best called with about a
        megabyte, while it is in the processor's cache."""
        if file not in self._records:
            return
        while data:
            if self._next != (file, offset, reader):
                self._end_part()
            room = self._block_bytes - offset % self._block_bytes
            part, data = data[:room], data[room:]
            self._crc = crc32(part, self._crc)
            offset += len(part)
            self._next = file, offset, reader
            if len(part) == room:
                self._end_part()

    def _end_part(self) -> None:
        if self._next is not None:
            file, stop, reader = self._next
            block = (stop - 1) // self._block_bytes
            end = min((block + 1) * self._block_bytes, self._records[file].size)
            if block < len(self._records[file].checksums):
                self._blocks.append(self._first[file] + block)
                self._rests.append(end - stop)
                self._crcs.append(self._crc)
                self._readers.append(reader)
        self._next, self._crc = None, 0

    def contribution(self) -> Words:
        """Returns uint32 of shape (2, blocks). XORed over all ranks, the first row holds the CRC-32
        of every block that was read completely; the second is zero where all replicas read the
        same."""
        self._end_part()
        sums = np.zeros((2, self.blocks), np.uint32)
        blocks = np.array(self._blocks, np.int64)
        parts = _times(np.array(self._crcs, np.uint32), _power(np.array(self._rests, np.int64)))
        kinds = {reader: number for number, reader in enumerate(dict.fromkeys(self._readers))}
        kind = np.array([kinds[reader] for reader in self._readers], np.int64)
        for reader, number in kinds.items():
            of_kind = kind == number
            if reader.index == 0:
                np.bitwise_xor.at(sums[0], blocks[of_kind], parts[of_kind])
            if reader.count > 1:
                weighted = _times(parts[of_kind], _weight(reader))
                np.bitwise_xor.at(sums[1], blocks[of_kind], weighted)
        return sums

    def differing(self, sums: Any, checked: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
        """Returns (file, block) of each block whose bytes differ from the record. `sums` are the
        contributions XORed over all ranks, shape (2, blocks); `checked`: file → blocks that were
        read completely."""
        found = np.asarray(sums).astype(np.uint32)
        bad = []
        for file, blocks in checked.items():
            for block in blocks:
                at = self._first[file] + block
                # the second row is not 0 if replicas have read different bytes
                if found[0, at] != self._records[file].checksums[block] or found[1, at]:
                    bad.append((file, block))
        return bad


def _weight(reader: CrcReader) -> Words:
    """Returns the factor, a polynomial over GF(2), of a reader's CRC in the comparison of replicas
    [Note: parts]: x^8, x^16, …, and for reader 0 their sum. The factors add up to zero: so do equal
    parts, but not those of which one differs."""
    if reader.index:
        return _power(np.array(reader.index))
    return np.bitwise_xor.reduce(_power(np.arange(1, reader.count)))


def _power(exponents: NDArray[Any]) -> Words:
    """Returns x^(8 · exponents), for exponents up to 64 Mi."""
    low, high = _tables()
    return _times(low[exponents % _TABLE], high[exponents // _TABLE])


@cache
def _tables() -> tuple[Words, Words]:
    low = _powers(np.array(_ONE >> 8, np.uint32))
    high = _powers(_times(low[-1:], low[1:2])[0])
    return low, high


def _powers(base: Words) -> Words:
    """Returns base^0, base^1, …, base^(_TABLE - 1)."""
    powers = np.array([_ONE], np.uint32)
    while len(powers) < _TABLE:
        powers = np.concatenate([powers, _times(powers, base)])
        base = _times(base, base)
    return powers


def _times(left: Words, right: Words) -> Words:
    """Returns the elementwise product modulo the polynomial."""
    left, right = np.broadcast_arrays(left, right)
    product, right = np.zeros_like(left), right.copy()
    for bit in range(31, -1, -1):
        product ^= np.where((left >> np.uint32(bit)) & np.uint32(1), right, np.uint32(0))
        right = (right >> np.uint32(1)) ^ np.where(
            right & np.uint32(1), np.uint32(_POLYNOMIAL), np.uint32(0)
        )
    return product
