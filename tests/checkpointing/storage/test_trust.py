"""Whose steps are loaded, kept and deleted in a directory that a group may write to."""

import os
import shutil

import pytest
import torch

from checkpointing import CheckpointOptions, DamagedCheckpoint, StorageError, TensorCheckpointer
from checkpointing.storage import ownership
from checkpointing.storage.steps import open_step
from checkpointing.tools.inspect import verify
from tests.checkpointing.stored import digests, write_checkpoint
from tests.checkpointing.worlds import save_now

STRANGER = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="other users' files take root to make")


@pytest.fixture(autouse=True)
def no_rules_are_left(monkeypatch):
    monkeypatch.setattr(ownership, "_rules", {})


def step(directory, number, owner=0, value=0.0):
    path = directory / f"step-{number:08}"
    tensors = {"a": torch.full((4,), value)}
    write_checkpoint(path, number, tensors, state={"recipe": {}})
    give(path, owner)
    return path


def give(path, owner):
    for one in (path, *path.rglob("*")):
        os.chown(one, owner, -1)


def load(directory, *names):
    """(state, tensor) of what a run loads."""
    target = torch.zeros(4)
    with TensorCheckpointer(directory, CheckpointOptions(trust=names), None) as checkpointer:
        state = checkpointer.load(model={"a": target}, optimizer={})
    return state["step"], target[0].item()


def everything(path):
    give(path, STRANGER)


def only_the_folder(path):
    os.chown(path, STRANGER, -1)


def only_a_file(name):
    return lambda path: os.chown(path / name, STRANGER, -1)


def by_a_link(path):
    real = path.rename(path.with_name("elsewhere"))
    path.symlink_to(real)


def a_linked_file(path):
    file = path / "model-00001-of-00001.safetensors"
    file.rename(path.parent / "weights")
    file.symlink_to(path.parent / "weights")


PLANTED = {
    "all": everything,
    "folder": only_the_folder,
    "record": only_a_file("index.json"),
    "state": only_a_file("trainer_state.json"),
    "weights": only_a_file("model-00001-of-00001.safetensors"),
    "optimizer folder": only_a_file("optimizer"),
    "optimizer": only_a_file("optimizer/optimizer.safetensors.index.json"),
    "link": by_a_link,
    "linked file": a_linked_file,
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_step_in_which_another_user_has_a_part_is_passed_over(tmp_path, planted, caplog):
    step(tmp_path, 1, value=1.0)
    PLANTED[planted](step(tmp_path, 2, value=2.0))
    assert load(tmp_path) == (1, 1.0)
    assert "step 2" in caplog.text
    if "link" not in planted:
        assert "nobody (uid 65534)" in caplog.text
        assert "checkpoint.trust: [nobody]" in caplog.text


@pytest.mark.parametrize("name", ["nobody", STRANGER, "group"])
def test_who_is_trusted_is_loaded_from(tmp_path, name):
    step(tmp_path, 1, value=1.0)
    step(tmp_path, 2, STRANGER, value=2.0)
    os.chown(tmp_path, 0, STRANGER)
    assert load(tmp_path) == (1, 1.0)
    assert load(tmp_path, name) == (2, 2.0)
    os.chown(tmp_path, 0, 0)
    if name == "group":  # of which he is no member
        assert load(tmp_path, name) == (1, 1.0)


def test_a_run_with_nothing_but_others_steps_does_not_begin_afresh(tmp_path):
    step(tmp_path, 2, STRANGER)
    with pytest.raises(
        DamagedCheckpoint, match=r"written by nobody .* checkpoint.trust: \[nobody\]"
    ):
        load(tmp_path)


def test_a_directory_that_another_user_has_led_elsewhere_is_not_entered(tmp_path):
    step(tmp_path / "other", 1, value=1.0)
    link = tmp_path / "checkpoints"
    link.symlink_to(tmp_path / "other")
    assert load(link) == (1, 1.0)  # one's own link, as to a larger disk
    os.chown(link, STRANGER, -1, follow_symlinks=False)
    with pytest.raises(StorageError, match="a link of nobody"):
        load(link)


def test_retention_neither_counts_nor_deletes_what_is_not_ours(tmp_path):
    """Steps of others do not push out the run's own; what has the name of a step that is due is
    put aside whole."""
    theirs = [step(tmp_path, number, STRANGER) for number in (2, 90, 91)]
    home = step(tmp_path / "home", 7)
    (tmp_path / "step-00000080").symlink_to(home)
    before = [digests(path) for path in (*theirs[1:], home)]
    planted = digests(theirs[0])
    model = {"a": torch.ones(4)}
    with TensorCheckpointer(tmp_path, CheckpointOptions(keep=2), None) as checkpointer:
        for number in (1, 2, 3):
            state = {"step": number, "recipe": {}}
            save_now(checkpointer, number, model=model, optimizer={}, state=state, files={})
    assert load(tmp_path) == (3, 1.0)
    assert [digests(path) for path in (*theirs[1:], home)] == before
    (aside,) = tmp_path.glob("foreign-2-*")
    assert digests(aside) == planted
    names = {path.name for path in tmp_path.glob("step-*")}
    assert names == {f"step-{number:08}" for number in (2, 3, 80, 90, 91)}


def test_a_group_cannot_change_what_is_or_was_written_unless_it_is_trusted(tmp_path):
    umask = os.umask(0o002)
    try:
        for names, closed in (((), True), (("group",), False)):
            directory = tmp_path / f"{closed}"
            directory.mkdir()
            directory.chmod(0o2775)
            options = CheckpointOptions(trust=names)
            with TensorCheckpointer(directory, options, None) as checkpointer:
                save_now(
                    checkpointer,
                    1,
                    model={"a": torch.ones(4)},
                    optimizer={},
                    state={},
                    files={"x": b"x"},
                )
            (path,) = directory.glob("step-*")
            modes = {one.stat().st_mode & 0o020 for one in (path, *path.rglob("*"))}
            assert modes == ({0} if closed else {0o020})
    finally:
        os.umask(umask)


def test_what_is_named_to_be_read_has_no_rule(tmp_path):
    path = step(tmp_path, 1, STRANGER)
    assert open_step(path).record.step == 1
    assert not verify(tmp_path).problems


def test_the_pointer_is_no_link_pipe_or_large_file(tmp_path):
    step(tmp_path, 1)
    secret = tmp_path / "secret"
    secret.write_text("precious")
    pointer = tmp_path / "latest"
    for put in (
        lambda: pointer.symlink_to(secret),
        lambda: pointer.symlink_to(tmp_path / "nowhere"),
        lambda: os.mkfifo(pointer),
        lambda: (pointer.touch(), os.truncate(pointer, 10 << 30)),
        pointer.mkdir,
    ):
        put()
        (problem,) = verify(tmp_path).problems
        assert str(pointer) in str(problem)
        assert "precious" not in str(problem)
        shutil.rmtree(pointer) if pointer.is_dir() else pointer.unlink()
