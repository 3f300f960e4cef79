"""Digests add up wherever tensors are cut, and no bits that are no number go unseen."""

from zlib import crc32

import numpy as np
import pytest
import torch

from checkpointing.format import digests as looks
from checkpointing.format.digests import digest_and_finite, is_finite
from checkpointing.format.tensors import TORCH_DTYPES


def by_definition(name, array):
    """Sum of 8-byte words, each times the odd number of its row."""
    rows = [array.tobytes()[start:][:8] for start in range(0, array.nbytes, 8)]
    if array.ndim > 1:
        rows = [row.tobytes() for row in array.reshape(-1, array.shape[-1])]
    first, total = crc32(name.encode()) << 32, 0
    for number, row in enumerate(rows, start=first):
        words = [row[start : start + 8] for start in range(0, len(row), 8)]
        total += sum(int.from_bytes(word, "little") for word in words) * (2 * number + 1)
    return total % 2**64


def test_parts_add_up_to_the_whole(monkeypatch):
    draw = np.random.default_rng(0)
    for _ in range(300):
        monkeypatch.setattr(looks, "CHUNK_BYTES", int(draw.choice([8, 64, 1 << 19])))
        shape = tuple(map(int, draw.integers(1, 7, draw.integers(0, 5))))
        size = int(draw.choice([1, 2, 4, 8]))
        whole = draw.integers(0, 256, (*shape, size), np.uint8).view(f"u{size}").reshape(shape)
        origin = (0,) * len(shape)
        expected = by_definition("w", whole)
        assert digest_and_finite("w", "I8", shape, origin, whole)[0] == expected
        for dim, length in enumerate(shape):
            cut = int(draw.integers(0, length + 1))
            parts = [slice(0, cut), slice(cut, length)]
            found = 0
            for part in parts:
                box = (*[slice(None)] * dim, part)
                offset = (*origin[:dim], part.start, *origin[dim + 1 :])
                found += digest_and_finite("w", "I8", shape, offset, whole[box])[0]
            assert found % 2**64 == expected, (shape, size, dim, cut)


def test_rows_that_change_places_change_the_digest():
    whole = np.arange(12, dtype=np.uint32).reshape(3, 4)
    origin = (0, 0)
    found = {
        digest_and_finite(name, "U32", whole.shape, origin, array)[0]
        for name, array in (("w", whole), ("w", whole[[1, 0, 2]]), ("v", whole))
    }
    assert len(found) == 3


@pytest.mark.parametrize(
    "dtype", ["F64", "F32", "BF16", "F16", *(f for f in TORCH_DTYPES if f[:2] == "F8")]
)
def test_all_that_is_no_number_is_seen(dtype):
    kind = TORCH_DTYPES[dtype]
    bits = np.random.default_rng(0).integers(0, 256, (4096, kind.itemsize), np.uint8)
    if kind.itemsize == 1:
        bits[:256, 0] = np.arange(256)
    else:  # of both signs, with every exponent
        bits[:, -1], bits[:, -2] = (
            np.repeat(np.arange(256), 16),
            np.tile(np.arange(0, 256, 16), 256),
        )
    words = bits.reshape(-1).view(f"u{kind.itemsize}")
    numbers_there = torch.from_numpy(bits.reshape(-1)).view(kind).double().isfinite()
    assert not numbers_there.all()
    for word, expected in zip(words, numbers_there.tolist(), strict=True):
        assert is_finite(dtype, np.array([word])) == expected, hex(word)
