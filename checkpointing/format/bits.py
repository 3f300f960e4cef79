"""Finiteness and digests of tensors, from their bytes. Imports no torch.

[Note: digest] The digest of a collection of tensors is a sum modulo 2^64. Each 8-byte word of a row
is multiplied by an odd number, derived from the tensor's name and the row, and added. A row extends
along the last dimension, and begins a new word; a vector has a word per row. So the digests of
parts add up to the digest of the whole, wherever the parts of ranks, nodes or files end. The digest
detects errors, such as a wrong row or a flipped bit, but no forgery."""

from collections.abc import Iterator, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

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
        if part.ndim > 2 and part.nbytes > CHUNK_BYTES:  # the step is 1, so len(part) is 1
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
