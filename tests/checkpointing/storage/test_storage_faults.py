"""Real faults of storage: each is named, costs one save, and neither the run nor what was saved."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpointing import CheckpointOptions, SaveFailed, SaveOutcome, TensorCheckpointer
from tests.checkpointing.worlds import same_bits

SIZE = 1 << 20
OPTIONS = CheckpointOptions(keep=0)
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts filesystems, which root may")


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"weight": torch.rand(SIZE // 4, generator=generator)}


def begin(checkpointer: TensorCheckpointer, step: int) -> bool:
    return checkpointer.save(
        step, model=tensors(step), optimizer={}, state={"step": step}, files={}
    )


def save(checkpointer: TensorCheckpointer, step: int) -> SaveOutcome:
    """Save, and wait for the end, good or bad."""
    begin(checkpointer, step)
    deadline = time.monotonic() + 40
    while not (outcomes := checkpointer.outcomes()):
        assert time.monotonic() < deadline, "the save does not end"
        time.sleep(0.01)
    return outcomes[-1]


def newest(checkpointer: TensorCheckpointer) -> int:
    """The step that loads; it must be that step's state to the bit."""
    model = {"weight": torch.zeros(SIZE // 4)}
    step = checkpointer.load(model=model, optimizer={})["step"]
    assert same_bits(model["weight"], tensors(step)["weight"])
    return step


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A tmpfs of 4 MB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", mount], check=True)
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)


@pytest.fixture
def faulty(tmp_path) -> Iterator[tuple[Path, Path]]:
    """(mount point, control file) of a filesystem with faults."""
    if not Path("/dev/fuse").exists() or shutil.which("fusermount3") is None:
        pytest.skip("needs /dev/fuse and fuse3")
    root, mount, control = (tmp_path / name for name in ("root", "mount", "faults.json"))
    root.mkdir()
    mount.mkdir()
    control.write_text("{}")
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.checkpointing.faulty_fs", root, mount, control], cwd=ROOT
    )
    try:
        deadline = time.monotonic() + 10
        while not os.path.ismount(mount):
            assert time.monotonic() < deadline
            assert server.poll() is None
            time.sleep(0.02)
        yield mount, control
    finally:
        subprocess.run(["fusermount3", "-u", "-z", mount], check=False)
        server.kill()
        server.wait()


def set_faults(control: Path, **faults: dict) -> None:
    aside = control.with_suffix(".new")
    aside.write_text(json.dumps(faults))
    aside.replace(control)


def test_a_full_disk(small_disk):
    with TensorCheckpointer(small_disk / "run", OPTIONS, None) as checkpointer:
        assert save(checkpointer, 1).path
        (small_disk / "filler").write_bytes(bytes(5 * SIZE // 2))
        outcome = save(checkpointer, 2)
        assert outcome.errno == errno.ENOSPC
        assert outcome.error.startswith("saving step 2 failed: ")
        assert (
            "model-00001-of-00001.safetensors: No space left on device (ENOSPC); make room"
            in outcome.error
        )
        with pytest.raises(SaveFailed, match="saving step 2 failed"):  # told already or not
            checkpointer.wait()
        assert newest(checkpointer) == 1
        (small_disk / "filler").unlink()
        assert save(checkpointer, 3).path
        checkpointer.wait()
        assert newest(checkpointer) == 3


def test_a_disk_that_turns_read_only(small_disk):
    with TensorCheckpointer(small_disk / "run", OPTIONS, None) as checkpointer:
        assert save(checkpointer, 1).path
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        outcome = save(checkpointer, 2)
        assert outcome.errno == errno.EROFS
        assert str(small_disk) in outcome.error
        assert newest(checkpointer) == 1
        subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
        assert save(checkpointer, 3).path


def test_the_directory_disappears_during_a_save(tmp_path):
    options = CheckpointOptions(keep=0, max_bandwidth="1 MB")
    with TensorCheckpointer(tmp_path / "run", options, None) as checkpointer:
        begin(checkpointer, 1)
        deadline = time.monotonic() + 10
        while not list(tmp_path.glob("run/*.tmp-*/model-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        while (tmp_path / "run").exists():  # files are being made in it
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
        with pytest.raises(Exception, match=r"saving step 1 failed: .*No such file or directory"):
            checkpointer.wait()
        checkpointer.outcomes()
        assert save(checkpointer, 2).path
        assert newest(checkpointer) == 2


def test_an_error_that_passes_is_tried_again_and_one_that_stays_ends_the_save(faulty):
    mount, control = faulty
    with TensorCheckpointer(mount / "run", OPTIONS, None) as checkpointer:
        set_faults(control, write={"errno": "EIO", "times": 2})
        assert save(checkpointer, 1).path
        assert newest(checkpointer) == 1
        set_faults(control, write={"errno": "EDQUOT"})
        outcome = save(checkpointer, 2)
        assert outcome.errno == errno.EDQUOT
        assert "model-00001-of-00001.safetensors: Disk quota exceeded (EDQUOT)" in outcome.error
        set_faults(control, fsync={"errno": "EIO", "times": 1})
        outcome = save(checkpointer, 3)
        assert outcome.errno == errno.EIO, "an fsync that failed must not be tried again"
        set_faults(control)
        assert newest(checkpointer) == 1
        assert save(checkpointer, 4).path
        assert newest(checkpointer) == 4


def test_a_slow_fsync_and_a_slow_disk_do_not_hold_up_training(faulty):
    mount, control = faulty
    with TensorCheckpointer(mount / "run", OPTIONS, None) as checkpointer:
        assert save(checkpointer, 1).path
        for step, fault in (
            (2, {"fsync": {"seconds": 5, "times": 1}}),
            (4, {"write": {"bytes_per_second": 1e6}}),
        ):
            set_faults(control, **fault)
            started = time.monotonic()
            assert begin(checkpointer, step)
            checkpointer.wait_staged()
            held = time.monotonic() - started
            assert not begin(checkpointer, step + 1), "skipped: the one before is being written"
            (outcome,) = checkpointer.outcomes()
            assert f"step {step} is still being saved" in outcome.error
            checkpointer.wait()
            (outcome,) = checkpointer.outcomes()
            assert outcome.step == step
            assert outcome.seconds > max(1, 2 * held)
        assert newest(checkpointer) == 4
