"""What people are told about checkpoints."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpointing import DamagedCheckpoint, StorageError
from checkpointing.tools.inspect import find_checkpoint, human_bytes, ls, show, verify
from tests.checkpointing.stored import write_checkpoint

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path):
    for step in (1, 2):
        write_checkpoint(
            tmp_path / "checkpoints" / f"step-{step:08}",
            step,
            model={"b": torch.ones(2, 3), "a": torch.ones(4).bfloat16()},
            optimizer={"b.step": torch.tensor(1.0)},
            state={
                "tokens": 1000 * step,
                "validation_loss": 1.25,
                "world": {"world_size": 4, "sharding": "FULL_SHARD"},
                "recipe": {"long": "x" * 500},
            },
            files={"config.json": b"{}"},
        )
    return tmp_path


def test_a_run_its_checkpoints_and_one_checkpoint_can_be_named(run):
    second = run / "checkpoints" / "step-00000002"
    for path in (run, run / "checkpoints", second, str(run)):
        assert find_checkpoint(path) == second
        assert show(path).record.step == 2
    assert [row.path.name for row in ls(run).rows] == ["step-00000002", "step-00000001"]
    assert len(verify(run).checked) == 2
    assert verify(second).checked == [second]
    with pytest.raises(StorageError, match="holds no checkpoints; give a run directory"):
        ls(run / "elsewhere")


def test_ls_is_a_table(run):
    (run / "checkpoints" / "step-00000001" / "config.json").unlink()
    header, second, first = str(ls(run)).splitlines()
    assert header.split() == [
        "checkpoint",
        "saved",
        "tokens",
        "val",
        "loss",
        "size",
        "files",
        "ranks",
    ]
    assert second.split()[0] == "step-00000002"
    assert second.split()[3:5] == ["2,000", "1.2500"]
    assert second.split()[-4:] == ["6", "4", "FULL_SHARD", "best"]
    assert first.split()[:2] == ["step-00000001", "DAMAGED:"]
    assert first.endswith("step-00000001/config.json: is missing")


def test_show_names_tensors_and_state(run):
    text = str(show(run))
    assert "model: 2 tensors, 10 elements, 32 B, 1 BF16, 1 F32" in text
    assert "optimizer: 1 tensors, 1 elements, 4 B, 1 F32" in text
    assert ["b", "F32", "[2,", "3]", "model-00001-of-00001.safetensors"] in [
        line.split() for line in text.splitlines()
    ]
    assert "tokens: 2000" in text
    assert "(512 characters)" in text
    (run / "checkpoints" / "step-00000002" / "config.json").unlink()
    assert show(run).record.step == 1
    with pytest.raises(DamagedCheckpoint, match=r"config\.json: is missing"):
        show(run / "checkpoints" / "step-00000002")


def test_verify_names_every_problem(run):
    step = run / "checkpoints" / "step-00000002"
    good = verify(run)
    assert str(good).endswith("2 checkpoint(s), 2.6 kB: 0 problem(s)")
    tensors = step / "model-00001-of-00001.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    (step / "config.json").unlink()
    found = verify(run)
    assert [problem.checkpoint for problem in found.problems] == [step, step]
    text = str(found)
    assert f"step-00000002: {tensors}: checksum of block 0 (from byte 0 on) is wrong" in text
    assert f"step-00000002: {step / 'config.json'}: is missing" in text
    assert "step-00000002: DAMAGED\nstep-00000001: good" in text


def test_looking_needs_no_torch(run):
    program = (
        "import sys; from checkpointing import newest_checkpoint, read_state, CheckpointOptions;"
        "from checkpointing.tools.inspect import ls, show, verify;"
        f"ls({str(run)!r}); show({str(run)!r}); assert 'numpy' not in sys.modules;"
        f"verify({str(run)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_sizes_for_people():
    sizes = {999: "999 B", 1000: "1.0 kB", 4_200_000: "4.2 MB", 5e12: "5.0 TB", 5e15: "5000.0 TB"}
    assert {size: human_bytes(size) for size in sizes} == sizes
