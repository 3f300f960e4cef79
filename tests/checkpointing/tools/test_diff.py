"""In what two checkpoints differ."""

import pytest
import torch

from checkpointing import DamagedCheckpoint, StorageError
from checkpointing.format.layout import BLOCK_BYTES, FileRecord, LayoutTensor, TensorMeta
from checkpointing.format.tensors import TORCH_DTYPES
from checkpointing.storage.source import StorageTensorReader
from checkpointing.tools import diff
from checkpointing.tools.convert import export
from checkpointing.tools.diff import CheckpointDifference, ValueDifference
from tests.checkpointing.stored import flip, write_checkpoint

MODEL = {
    "a.weight": torch.arange(6.0).reshape(2, 3),
    "b.weight": torch.randn(40, 30).bfloat16(),
    "c": torch.arange(5),
    "d": torch.tensor(2.0),
    "empty": torch.zeros(0, 3),
}
OPTIMIZER = {"a.weight.exp_avg": torch.ones(2, 3)}
STATE = {"tokens": 10, "data": {"seq_len": 8, "name": "x"}, "versions": {}}


@pytest.fixture
def compare(tmp_path):
    """diff() of the checkpoint above and one with other things."""
    left = write_checkpoint(tmp_path / "left" / "step-00000001", 1, MODEL, OPTIMIZER, STATE)

    def compared(model=MODEL, optimizer=OPTIMIZER, state=STATE, **options):
        path = tmp_path / "right" / "checkpoints" / "step-00000001"
        write_checkpoint(path, 1, model, optimizer, state, **options)
        return diff.diff(left, tmp_path / "right")

    return compared


def changed(name, index, value):
    tensor = MODEL[name].clone()
    tensor[index] = value
    return {**MODEL, name: tensor}


def test_equal_files_are_not_read(compare, monkeypatch):
    monkeypatch.setattr(StorageTensorReader, "read", None)
    found = compare()
    assert found.equal
    assert found.identical == 6
    assert "tensors: 6 identical, 0 with other values" in str(found)


def test_equal_tensors_in_other_files_are_equal(compare, monkeypatch):
    monkeypatch.setattr(diff, "PIECE_ELEMENTS", 7)
    found = compare(max_bytes=50)
    assert found.equal
    assert found.identical == 6


def test_equal_blocks_count_only_for_tensors_at_the_same_place():
    """Two tensors that changed places: other headers, and from the second block on equal bytes."""
    here, there = (LayoutTensor("f", BLOCK_BYTES + at, TensorMeta("U8", (4,))) for at in (8, 12))
    a, b = ({"f": FileRecord(2 * BLOCK_BYTES, (first, 7))} for first in (1, 2))
    assert diff._same_checksums(here, here, a, b)
    assert not diff._same_checksums(here, there, a, b)
    assert not diff._same_checksums(here, here, a, {})
    across = LayoutTensor("f", BLOCK_BYTES - 1, TensorMeta("U8", (4,)))
    assert not diff._same_checksums(across, across, a, b)


def test_values(compare, monkeypatch):
    monkeypatch.setattr(diff, "PIECE_ELEMENTS", 4)
    model = changed("a.weight", (1, 2), 4.0)
    model["b.weight"] = MODEL["b.weight"].clone()
    model["b.weight"][3] += 1
    found = compare(model, {"a.weight.exp_avg": torch.full((2, 3), 1.5)})
    assert not found.equal
    assert found.identical == 3
    by_name = {item.name: item for item in found.values}
    assert by_name["a.weight"] == ValueDifference("a.weight", 1.0, 0.2, 1)
    assert by_name["a.weight.exp_avg"] == ValueDifference("a.weight.exp_avg", 0.5, 0.5 / 1.5, 6)
    b = by_name["b.weight"]
    a, c = MODEL["b.weight"][3].double(), model["b.weight"][3].double()
    assert b.absolute == (a - c).abs().max().item()
    assert b.relative == ((a - c).abs() / torch.maximum(a.abs(), c.abs())).max().item()
    assert [item.relative for item in found.values] == sorted(
        (item.relative for item in found.values), reverse=True
    )
    text = str(found)
    assert "3 identical, 3 with other values" in text
    assert ["a.weight", "1", "0.2", "1"] in [line.split() for line in text.splitlines()]


@pytest.mark.parametrize(
    ("ours", "theirs", "absolute", "relative", "elements"),
    [
        ([0.0, 1.0], [-0.0, 1.0], 0, 0, 0),  # other bits, equal numbers
        ([float("nan"), 1.0], [1.0, 1.0], float("inf"), float("inf"), 1),
        ([float("inf"), 1.0], [float("inf"), 2.0], 1, 0.5, 1),
        ([float("inf"), 1.0], [-float("inf"), 1.0], float("inf"), float("inf"), 1),
        ([0.0, 0.0], [0.0, 1e-30], pytest.approx(1e-30), 1, 1),
    ],
)
def test_numbers_that_are_not_quite_numbers(tmp_path, ours, theirs, absolute, relative, elements):
    a = write_checkpoint(tmp_path / "a", 1, {"w": torch.tensor(ours)})
    b = write_checkpoint(tmp_path / "b", 1, {"w": torch.tensor(theirs)})
    assert diff.diff(a, b).values == [ValueDifference("w", absolute, relative, elements)]


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=TORCH_DTYPES)
def test_every_dtype(tmp_path, dtype):
    data = bytearray(32)
    ours = torch.frombuffer(bytearray(data), dtype=dtype)
    data[9] = 1
    theirs = torch.frombuffer(data, dtype=dtype)
    a = write_checkpoint(tmp_path / "a", 1, {"w": ours})
    b = write_checkpoint(tmp_path / "b", 1, {"w": theirs})
    assert diff.diff(a, a).equal
    (found,) = diff.diff(a, b).values
    assert found.elements == 1
    assert found.absolute > 0


def test_names_shapes_dtypes_and_state(compare):
    model = {**MODEL, "d": torch.ones(2), "e": torch.ones(1), "a.weight": MODEL["a.weight"].half()}
    del model["c"]
    state = {"tokens": 11, "data": {"seq_len": 8, "name": "x" * 99}, "versions": {}, "new": None}
    found = compare(model, {}, state)
    assert found.only_left == ["c", "a.weight.exp_avg"]
    assert found.only_right == ["e"]
    assert found.metas == ["a.weight: F32[2, 3], F16[2, 3]", "d: F32[], F32[2]"]
    assert found.values == []  # halves are exact here
    assert [line.split(":")[0] for line in found.state] == ["data.name", "new", "tokens"]
    assert found.state[1:] == ["new: (absent), null", "tokens: 10, 11"]
    assert not found.equal


def test_an_export_is_the_model_but_for_rounding(tmp_path):
    path = write_checkpoint(tmp_path / "a", 1, {"w": torch.tensor([1.0, 1 + 2**-8])}, OPTIMIZER)
    export(path, tmp_path / "out", dtype="bf16")
    found = diff.diff(path, tmp_path / "out")
    assert found.metas == ["w: F32[2], BF16[2]"]
    assert found.values == [ValueDifference("w", 2**-8, 2**-8 / (1 + 2**-8), 1)]
    assert "only the models are compared" in str(found)


def test_damage_is_no_difference(tmp_path):
    a = write_checkpoint(tmp_path / "step-00000001", 1, MODEL)
    b = write_checkpoint(tmp_path / "step-00000002", 2, changed("a.weight", (0, 0), 9.0))
    flip(a / "model-00001-of-00001.safetensors", -1)
    with pytest.raises(DamagedCheckpoint, match="checksum of block 0"):
        diff.diff(a, b)
    (b / "index.json").unlink()
    with pytest.raises(DamagedCheckpoint, match=r"index\.json: is missing"):
        diff.diff(b, b)
    with pytest.raises(StorageError, match="holds no checkpoints"):
        diff.diff(tmp_path / "x", a)


def test_a_long_report_is_cut():
    found = CheckpointDifference(left="a", right="b")
    found.only_left = [f"layer.{number}" for number in range(25)]
    found.values = [ValueDifference(f"w{number}", 1.0, 1.0, 1) for number in range(25)]
    text = str(found)
    assert "  … and 15 more" in text
    assert text.count("layer.") == 10
    assert text.count("\n  w") == 10
