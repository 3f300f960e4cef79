"""Which steps stay, and that a committed step is never written again."""

import logging
from pathlib import Path

import pytest
import torch

from checkpointing import Checkpointer, CheckpointOptions, WrongModel
from checkpointing.retention import to_delete


def save(checkpointer, step):
    tensors = {"w": torch.full((3,), float(step))}
    return checkpointer.save(
        step,
        model=tensors,
        optimizer={},
        state={"step": step, "world": {"world_size": 1}},
        files={},
    )


def steps(directory):
    return [int(path.name[5:]) for path in sorted(directory.glob("step-*"))]


@pytest.mark.parametrize(
    ("found", "keep", "deleted"),
    [
        ("5+ 4+ 3+ 2+", 2, "3 2"),
        ("5+ 4- 3+ 2+", 2, "4 2"),
        ("5- 4- 3+", 2, "5 4"),
        ("5- 4-", 1, ""),  # nothing good: nothing is given up
        ("5+ 4- 3+", 0, ""),
        ("5+", 1, ""),
        ("", 1, ""),
    ],
)
def test_good_steps_are_counted_and_damaged_ones_go(found, keep, deleted):
    steps = [(Path(item[:-1]), item[-1] == "+") for item in found.split()]
    assert to_delete(steps, keep) == [Path(item) for item in deleted.split()]


def test_the_newest_stay_and_nothing_else_is_touched(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-00000001").mkdir()  # no commit record: not a checkpoint
    with Checkpointer(tmp_path, CheckpointOptions(keep=2), None) as checkpointer:
        for step in (2, 3, 4, 5):
            save(checkpointer, step)
            assert steps(tmp_path) == [step] if step == 2 else [step - 1, step]
            assert (tmp_path / "latest").read_text() == f"step-{step:08}\n"
    assert (tmp_path / "notes").exists()
    with Checkpointer(tmp_path, CheckpointOptions(keep=0), None) as checkpointer:
        save(checkpointer, 6)
    assert steps(tmp_path) == [4, 5, 6]


def test_a_committed_step_is_not_written_again(tmp_path, caplog):
    with Checkpointer(tmp_path, CheckpointOptions(), None) as checkpointer:
        path = save(checkpointer, 1)
        before = {file: file.stat() for file in (path, *path.rglob("*"))}
        with caplog.at_level(logging.WARNING):
            assert save(checkpointer, 1) == path
        assert "step-00000001 is committed already; not written again" in caplog.text
    assert before == {file: file.stat() for file in (path, *path.rglob("*"))}


def test_another_model_is_an_error_and_no_reason_to_take_an_older_step(tmp_path):
    with Checkpointer(tmp_path, CheckpointOptions(), None) as checkpointer:
        assert checkpointer.load(model={}, optimizer={}) is None
        save(checkpointer, 1)
        save(checkpointer, 2)
        target = {"w": torch.zeros(4)}
        with pytest.raises(
            WrongModel, match=r"2 is of another model: other shapes: w \[4\] \(check"
        ):
            checkpointer.load(model=target, optimizer={})
        optimizer = {f"{name}.exp_avg": torch.zeros(3) for name in "wxyz"}
        with pytest.raises(WrongModel, match=r"has no w.exp_avg, x.exp_avg, y.exp_avg and 1 more"):
            checkpointer.load(model={"w": torch.zeros(3)}, optimizer=optimizer)
