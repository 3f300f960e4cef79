"""Every kind of damage is found and named, and the checkpoint before is loaded instead."""

import json
import logging
import random
import shutil

import pytest
import torch

from checkpointing import (
    CheckpointOptions,
    DamagedCheckpoint,
    StorageError,
    TensorCheckpointer,
    newest_checkpoint,
    read_state,
    tensor_checkpointer,
)
from checkpointing.load import memory
from checkpointing.load.restore import load_step
from checkpointing.tools.inspect import verify
from tests.checkpointing.worlds import same_bits, save_now, whole_state
from tests.distributed.jobs import SOAK

OPTIONS = CheckpointOptions(max_shard_size=700)
MODEL_2 = "model-00002-of-00002.safetensors"


def save(directory, step):
    model, optimizer = whole_state(seed=step)
    files = {"config.json": b'{"a": 1}\n'}
    with TensorCheckpointer(directory, OPTIONS, None) as checkpointer:
        return save_now(
            checkpointer,
            step,
            model=model,
            optimizer=optimizer,
            state={"step": step, "name": "x"},
            files=files,
        )


def load(checkpointer):
    """Load; the state returned must be that of the step it names, to the bit."""
    targets = [{name: torch.zeros_like(t) for name, t in part.items()} for part in whole_state()]
    state = checkpointer.load(model=targets[0], optimizer=targets[1])
    for target, wanted in zip(targets, whole_state(seed=state["step"]), strict=True):
        assert all(same_bits(target[name], wanted[name]) for name in wanted)
    return state["step"]


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Steps 1 and 2."""
    run = tmp_path_factory.mktemp("saved") / "run"
    for step in (1, 2):
        save(run, step)
    with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
        assert load(checkpointer) == 2
    assert not verify(run).problems
    return run


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << 3
    path.write_bytes(data)


def swap(one, other):
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def edit_state(path):
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "step": 9}))


DAMAGES = {
    "header": (MODEL_2, lambda p: flip(p, 30)),
    "header length": (MODEL_2, lambda p: flip(p, 0)),
    "first byte of data": (MODEL_2, lambda p: flip(p, p.read_bytes().index(b"}}") + 9)),
    "last byte": (MODEL_2, lambda p: flip(p, -1)),
    "optimizer": ("optimizer/optimizer-00001-of-00003.safetensors", lambda p: flip(p, -40)),
    "index": ("model.safetensors.index.json", lambda p: flip(p, 40)),
    "optimizer index": ("optimizer/optimizer.safetensors.index.json", lambda p: flip(p, -9)),
    "commit record": ("index.json", lambda p: flip(p, 60)),
    "checksum of the commit record": ("index.json", lambda p: flip(p, -10)),
    "config": ("config.json", lambda p: flip(p, 2)),
    "edited state": ("trainer_state.json", edit_state),
    "cut": (MODEL_2, lambda p: p.write_bytes(p.read_bytes()[:-1])),
    "emptied": (MODEL_2, lambda p: p.write_bytes(b"")),
    "grown": (MODEL_2, lambda p: p.write_bytes(p.read_bytes() + b"\0")),
    "cut state": ("trainer_state.json", lambda p: p.write_bytes(p.read_bytes()[:9])),
    "cut commit record": ("index.json", lambda p: p.write_bytes(p.read_bytes()[:99])),
    "missing file": (MODEL_2, lambda p: p.unlink()),
    "missing state": ("trainer_state.json", lambda p: p.unlink()),
    "missing index": ("model.safetensors.index.json", lambda p: p.unlink()),
    "missing commit record": ("index.json", lambda p: p.unlink()),
    "a directory instead": ("config.json", lambda p: (p.unlink(), p.mkdir())),
    "swapped files": (
        "model-00001-of-00002.safetensors",
        lambda p: swap(p, p.with_name(MODEL_2)),
    ),
    "swapped with an optimizer file": (
        "model-00001-of-00002.safetensors",
        lambda p: swap(p, p.with_name("optimizer") / "optimizer-00001-of-00003.safetensors"),
    ),
    "stale file": (
        MODEL_2,
        lambda p: shutil.copy(p.parents[1] / "step-00000001" / MODEL_2, p),
    ),
    "stale commit record": (
        "index.json",
        lambda p: shutil.copy(p.parents[1] / "step-00000001" / "index.json", p),
    ),
}


REPLACED = DAMAGES if SOAK else (
    "header", "a directory instead", "missing file", "cut commit record", "missing commit record",
)  # fmt: skip
"""Damages after which the step is saved once more. A writer sees some by itself, and knows others
from the ranks."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_is_loaded(damage, run, caplog):
    name, change = DAMAGES[damage]
    change(run / "step-00000002" / name)
    assert any(name in problem.message for problem in verify(run).problems)
    with TensorCheckpointer(run, OPTIONS, None) as checkpointer, caplog.at_level(logging.WARNING):
        assert load(checkpointer) == 1
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("the checkpoint of step 2 is damaged and passed over: ")
        assert name in line
        if damage not in REPLACED:
            return
        # The run trains on, and comes to the damaged step again.
        model, optimizer = whole_state(seed=2)
        state = {"step": 2}
        save_now(checkpointer, 2, model=model, optimizer=optimizer, state=state, files={})
        assert load(checkpointer) == 2
    assert not verify(run).problems


def test_a_pointer_to_nowhere_is_named_and_nobody_follows_it(run):
    (run / "latest").write_text("step-00000009\n")
    (problem,) = verify(run).problems
    assert problem.message == f"{run / 'latest'}: names 'step-00000009', which is no checkpoint"
    with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
        assert load(checkpointer) == 2
    (run / "latest").write_text("")
    assert "latest" in verify(run).problems[0].message


def test_a_flipped_bit_anywhere_is_found(run):
    files = [path for path in (run / "step-00000002").rglob("*") if path.is_file()]
    choose = random.Random(0)
    for path in files * (10 if SOAK else 1):
        whole = path.read_bytes()
        position = choose.randrange(len(whole))
        changed = bytearray(whole)
        changed[position] ^= 1 << choose.randrange(8)
        if path.name == "index.json" and position == len(whole) - 1:
            continue  # the line end
        path.write_bytes(changed)
        with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
            assert load(checkpointer) == 1, (path, position)
        path.write_bytes(whole)
    with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
        assert load(checkpointer) == 2


def test_no_good_checkpoint_left_is_an_error_and_not_a_fresh_start(run):
    for step in run.glob("step-*"):
        flip(step / MODEL_2, -1)
    with (
        TensorCheckpointer(run, OPTIONS, None) as checkpointer,
        pytest.raises(DamagedCheckpoint, match=f"no checkpoint can be loaded.*2/{MODEL_2}: checks"),
    ):
        load(checkpointer)


def go_on(run, step):
    """As another run does with keep=1: save a step, then delete those before."""
    model, optimizer = whole_state(seed=step)
    before = list(run.glob("step-*"))
    with TensorCheckpointer(run, OPTIONS, None) as other:
        save_now(other, step, model=model, optimizer=optimizer, state={"step": step}, files={})
    for path in before:
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("times", [1, tensor_checkpointer.LOOKS])
def test_a_step_that_another_run_deletes_is_not_damaged(times, run, caplog, monkeypatch):
    """It has a newer one by then, which is loaded; unless that goes on for ever."""
    steps = iter(range(3, 3 + times))

    def load_late(ranks, path, *arguments):
        if step := next(steps, None):
            go_on(run, step)
        return load_step(ranks, path, *arguments)

    monkeypatch.setattr(tensor_checkpointer, "load_step", load_late)
    with TensorCheckpointer(run, OPTIONS, None) as checkpointer, caplog.at_level(logging.WARNING):
        if times == 1:
            assert load(checkpointer) == 3
        else:
            with pytest.raises(StorageError, match="another run deletes checkpoints before they"):
                load(checkpointer)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == times
    assert told[0].startswith("the checkpoint of step 2 was deleted before it could be read: ")


def test_a_run_that_lives_and_saves_is_waited_for_before_storage_is_looked_at(
    run, caplog, monkeypatch
):
    """Its memory is: as the writer of a killed rank dies a moment after it."""

    def living(directory):
        monkeypatch.undo()
        go_on(run, 3)
        return []

    monkeypatch.setattr(memory, "living_folders", living)
    with TensorCheckpointer(run, OPTIONS, None) as checkpointer, caplog.at_level(logging.WARNING):
        assert load(checkpointer) == 3
    assert not caplog.records


def test_a_cheap_look_finds_the_newest_step_whose_small_files_are_good(run):
    assert newest_checkpoint(run) == run / "step-00000002"
    assert read_state(run / "step-00000002") == {"step": 2, "name": "x"}
    edit_state(run / "step-00000002" / "trainer_state.json")
    assert newest_checkpoint(run) == run / "step-00000001"
    with pytest.raises(DamagedCheckpoint, match=r"trainer_state.json: "):
        read_state(run / "step-00000002")
    assert newest_checkpoint(run / "nowhere") is None


def test_without_verify_only_the_bytes_of_tensors_go_unchecked(run):
    options = CheckpointOptions(verify=False)
    flip(run / "step-00000002" / MODEL_2, -1)
    targets = [{name: torch.zeros_like(t) for name, t in part.items()} for part in whole_state()]
    with TensorCheckpointer(run, options, None) as checkpointer:
        assert checkpointer.load(model=targets[0], optimizer=targets[1])["step"] == 2
        (run / "step-00000002" / MODEL_2).unlink()
        assert checkpointer.load(model=targets[0], optimizer=targets[1])["step"] == 1
