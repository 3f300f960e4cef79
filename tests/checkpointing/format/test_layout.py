"""File layout is safetensors' own; whatever does not fit it is refused."""

import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from checkpointing import CheckpointOptions, DamagedCheckpoint, StorageError
from checkpointing.format.layout import (
    DTYPE_BYTES,
    MODEL,
    CommitRecord,
    FileRecord,
    TensorMeta,
    lay_out,
    parse_header,
    parse_step,
    step_name,
)
from checkpointing.format.tensors import TORCH_DTYPES

# Files with the same tensors as safetensors.torch.save must be equal to the byte.
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
NAMES = st.text(min_size=1, max_size=8).filter(str.isprintable)
METAS = st.builds(TensorMeta, st.sampled_from(list(DTYPE_BYTES)), SHAPES)


@given(st.dictionaries(NAMES, METAS, min_size=1, max_size=6))
def test_headers_are_those_of_safetensors(metas):
    (file,) = lay_out(MODEL, metas, 10**6)
    tensors = {
        name: torch.zeros(meta.shape, dtype=TORCH_DTYPES[meta.dtype])
        for name, meta in metas.items()
    }
    theirs = save(tensors, metadata={"format": "pt"})
    assert theirs[: len(file.header)] == file.header
    assert len(theirs) == file.size
    assert parse_header(file.header, file.name, file.size, "f") == file.tensors


def test_files_are_filled_in_the_order_given():
    metas = {
        name: TensorMeta("U8", (size,))
        for name, size in zip("abcde", (5, 4, 30, 1, 9), strict=True)
    }
    files = lay_out(MODEL, metas, 10)
    assert [sorted(file.tensors) for file in files] == [["a", "b"], ["c"], ["d", "e"]]
    assert files[2].name == "model-00003-of-00003.safetensors"
    assert lay_out(MODEL, {}, 10) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda h: h.pop("b"), "its header describes"),
        (lambda h: h["a"].update(shape=[3]), r"tensor a: F32\[3\] does not take 8 bytes"),
        (lambda h: h["a"].update(dtype="F33"), "F33"),
        (lambda h: h["b"].update(data_offsets=[4, 12]), "overlap or leave a gap at byte 8"),
        (lambda h: h["b"].pop("shape"), "shape"),
    ],
)
def test_a_header_that_does_not_tile_its_file_is_refused(change, says):
    metas = {"a": TensorMeta("F32", (2,)), "b": TensorMeta("F32", (2,))}
    (file,) = lay_out(MODEL, metas, 100)
    header = json.loads(file.header[8:])
    change(header)
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text
    with pytest.raises(DamagedCheckpoint, match=f"^/there: .*{says}"):
        parse_header(data, file.name, len(data) + 16, "/there")


def test_a_commit_record_knows_when_it_was_changed():
    record = CommitRecord(3, {"a": FileRecord(5, (7,)), "ü": FileRecord(0, ())})
    data = record.encode()
    assert CommitRecord.decode(data, "here") == record
    for position in range(len(data) - 1):  # the last byte is a line end
        changed = bytearray(data)
        changed[position] ^= 1
        try:
            different = CommitRecord.decode(bytes(changed), "here") != record
        except (DamagedCheckpoint, StorageError):
            continue
        assert not different, position  # white space between values may differ


def test_step_names():
    assert [step_name(step) for step in (0, 1000, 10**9)] == [
        "step-00000000",
        "step-00001000",
        "step-1000000000",
    ]
    for name in ("step-1", "step-00001000.tmp-x", "step-0000001000", "Step-00001000", "latest"):
        assert parse_step(name) is None
    assert parse_step("step-1000000000") == 10**9


def test_sizes():
    sizes = {"4 GB": 4 * 10**9, "4GiB": 4 << 30, "1.5 mb": 1_500_000, "7": 7, 12: 12}
    for text, size in sizes.items():
        assert CheckpointOptions(max_shard_size=text).max_shard_bytes == size
    for wrong in ("4 GX", "", "-1 GB", "GB", 0):
        with pytest.raises(ValueError, match="max_shard_size"):
            CheckpointOptions(max_shard_size=wrong)
