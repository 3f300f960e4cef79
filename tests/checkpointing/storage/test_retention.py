"""Which steps stay, that deletions are whole or resumed, and that nothing that is read goes."""

import errno
import fcntl
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointing import (
    CheckpointOptions,
    DamagedCheckpoint,
    TensorCheckpointer,
    WrongModel,
    newest_checkpoint,
)
from checkpointing.save.commit import hold
from checkpointing.storage import posix
from checkpointing.storage.ownership import owner
from checkpointing.storage.posix import lock_file
from checkpointing.storage.posix_storage import PosixStorage
from checkpointing.storage.retention import (
    StorageRetentionStep,
    StorageRetentionVerdicts,
    decide,
    inspect_steps,
    prune,
)
from checkpointing.storage.steps import reading_lock
from checkpointing.tools.inspect import pruned
from tests.checkpointing.faults import plant
from tests.checkpointing.stored import flip, write_checkpoint
from tests.checkpointing.worlds import save_now

ROOT = Path(__file__).parents[3]
STORAGE = PosixStorage()


def options(keep=3, keep_every=0, keep_best=0, best_by="validation_loss"):
    return CheckpointOptions(keep=keep, keep_every=keep_every, keep_best=keep_best, best_by=best_by)


def save(directory, step, **state):
    return write_checkpoint(
        directory / f"step-{step:08}", step, {"w": torch.full((3,), float(step))}, state=state
    )


def prune_read(directory, rules, damaged=()):
    """Prune when every byte that is not known to be damaged was read and found right."""
    right = {path.name for path in directory.glob("step-*")} - set(damaged)
    return prune(directory, rules, StorageRetentionVerdicts(damaged=damaged, verified=right))


def steps(directory):
    return [int(path.name[5:]) for path in sorted(directory.glob("step-*"))]


# --- the decision ----------------------------------------------------------------------------


def found(text):
    """Steps as words: 5 is good, 5=0.5 has a value, 5- is damaged, 5? unreadable, 5* was not read
    yet."""
    items = []
    for word in text.split():
        step, value, mark = re.fullmatch(r"(\d+)=?([a-z0-9.]*)([-?*]?)", word).groups()
        damage, unreadable = "torn" * (mark == "-") or None, "no" * (mark == "?") or None
        number = float(value) if value else None
        items.append(
            StorageRetentionStep(Path(step), int(step), number, 0, damage, unreadable, not mark)
        )
    return items


@pytest.mark.parametrize(
    ("there", "rules", "goes"),
    [
        ("5 4 3 2", options(2), "3 2"),
        ("5 4- 3 2", options(2), "4 2"),
        ("5- 4- 3 2-", options(2), "2"),  # no newer good one replaces 5 and 4 yet
        ("5- 4-", options(1), ""),  # nothing good: nothing is given up
        ("5 4- 3", options(0), ""),
        ("5 4? 3 2?", options(1), "3"),
        ("5", options(1), ""),
        ("", options(1), ""),
        ("50 40 30 20 10", options(1, keep_every=20), "30 10"),
        ("5=3 4=1 3=2 2=4 1=9", options(1, keep_best=2), "2 1"),
        ("5=3 4=nan 3=inf 2 1=4", options(1, keep_best=2), "4 3 2"),
        # 4 and 3 carry on the value that 2 was given: they were not judged themselves.
        ("5=3 4=1 3=1 2=1 1=2", options(1, keep_best=2), "4 3"),
        ("5 4=1- 3=2", options(1, keep_best=1), "4"),
        # What was written is not yet what can be read.
        ("5* 4 3 2", options(1), "3 2"),
        ("5* 4* 3 2", options(2), "2"),
        ("5* 4* 3* 2*", options(1), ""),
        ("5* 4- 3* 2", options(1), "4 3"),
    ],
)
def test_what_goes(there, rules, goes):
    decisions = decide(found(there), rules)
    assert [item.path for item in decisions] == [item.path for item in found(there)]
    assert [str(item.path) for item in decisions if not item.stays] == goes.split()


def test_every_decision_has_its_reason():
    there = [
        StorageRetentionStep(Path("70"), 70),
        StorageRetentionStep(Path("60"), 60, 3.0, verified=True),
        StorageRetentionStep(Path("50"), 50, damage="x is missing"),
        StorageRetentionStep(Path("40"), 40, 5.0),
        StorageRetentionStep(Path("30"), 30, 1.0),
        StorageRetentionStep(Path("20"), 20, 9.0),
        StorageRetentionStep(Path("10"), 10, unreadable="permission denied"),
    ]
    assert [(item.stays, item.reason) for item in decide(there, options(1, 40, 1))] == [
        (True, "among the newest 1"),
        (True, "the newest that was read and found right"),
        (False, "damaged: x is missing"),
        (True, "a multiple of 40"),
        (True, "validation_loss 1 is among the 1 best"),
        (False, "older than the newest 1"),
        (True, "cannot be read: permission denied"),
    ]


FOUND = st.lists(
    st.builds(
        StorageRetentionStep,
        path=st.just(Path()),
        step=st.integers(0, 60),
        value=st.none() | st.sampled_from([0.5, 1.0, 2.0]) | st.floats(),
        damage=st.none() | st.just("torn"),
        unreadable=st.none() | st.none() | st.just("no"),
        verified=st.booleans(),
    ),
    unique_by=lambda item: item.step,
    max_size=12,
).map(
    lambda items: [
        replace(item, path=Path(str(item.step)))
        for item in sorted(items, key=lambda item: -item.step)
    ]
)
RULES = st.builds(options, st.integers(0, 5), st.integers(0, 20), st.integers(0, 4))


@given(FOUND, RULES)
def test_whatever_is_there_what_must_stay_stays(there, rules):
    decisions = decide(there, rules)
    stays = {item.path for item in decisions if item.stays}
    good = [item for item in there if item.damage is None and item.unreadable is None]
    assert {item.path for item in good[: rules.keep or None]} <= stays
    assert {item.path for item in there if item.unreadable} <= stays
    if rules.keep_every:
        assert {item.path for item in good if item.step % rules.keep_every == 0} <= stays
    values = sorted({item.value for item in good if math.isfinite(item.value or 0)} - {None})
    for value in values[: rules.keep_best]:
        assert stays & {item.path for item in good if item.value == value}
    right = [item.path for item in good if item.verified]
    assert set(right[:1]) <= stays
    assert right or {item.path for item in good} <= stays
    newest = max((item.step for item in good), default=-1)
    assert all(item.path in stays for item in there if item.step >= newest)
    assert bool(stays) == bool(there)
    # What stayed stays: deciding again gives nothing up.
    again = decide([item for item in there if item.path in stays], rules)
    assert all(item.stays for item in again)
    # Nobody is worse off under a more generous rule.
    more = options((rules.keep + 1) * bool(rules.keep), rules.keep_every, rules.keep_best + 1)
    assert stays <= {item.path for item in decide(there, more) if item.stays}


# --- on disk ---------------------------------------------------------------------------------


def test_rules_on_real_checkpoints(tmp_path):
    losses = {1: 5.0, 2: 2.0, 3: 3.0, 4: None, 5: float("nan"), 6: 4.0, 7: True}
    for step, loss in losses.items():
        save(tmp_path, step, **({} if loss is None else {"validation_loss": loss}))
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-00000000").mkdir()  # no commit record: not a checkpoint
    found = inspect_steps(tmp_path, "validation_loss", StorageRetentionVerdicts())
    assert [item.value for item in found][:2] == [
        None,
        4.0,
    ]
    decisions = prune_read(tmp_path, options(2, keep_every=5, keep_best=1))
    assert steps(tmp_path) == [2, 5, 6, 7]
    assert [item.path.name[-1] for item in decisions if not item.stays] == ["4", "3", "1", "0"]
    assert "index.json: is missing" in decisions[-1].reason
    assert decisions[0].size > 100
    assert (tmp_path / "notes").exists()
    prune_read(tmp_path, options(2))
    assert steps(tmp_path) == [6, 7]


def test_what_a_commit_is_about_to_part_with_stays_until_it_has(tmp_path):
    """It gives the step its name, and then has `latest` name it; it may be killed in between."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "latest").write_text("step-00000002\n")
    decisions = prune_read(tmp_path, options(1))
    assert decisions[1].reason == "latest names it"
    assert steps(tmp_path) == [2, 3]
    (tmp_path / "latest").write_text("step-00000003\n")
    prune_read(tmp_path, options(1))
    assert steps(tmp_path) == [3]


def test_a_step_known_to_be_damaged_does_not_count_as_good(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    prune_read(tmp_path, options(1), {"step-00000003"})
    assert steps(tmp_path) == [2, 3]
    save(tmp_path, 4)
    prune_read(tmp_path, options(2), {"step-00000003"})
    assert steps(tmp_path) == [2, 4]


def test_what_cannot_be_read_at_the_moment_is_not_deleted(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, step)
    original = os.open

    def failing(path, *arguments, **keywords):
        if "step-00000001/index.json" in str(path):
            raise OSError(5, "Input/output error", str(path))
        return original(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", failing)
    monkeypatch.setattr("checkpointing.storage.posix.TRANSIENT", frozenset())
    decisions = prune_read(tmp_path, options(1))
    assert steps(tmp_path) == [1, 3]
    assert decisions[-1].reason.startswith("cannot be read: ")


def test_a_step_that_could_not_be_loaded_is_not_deleted(tmp_path, monkeypatch):
    """Its tensors could not be read for a while: the run goes on from the step before."""
    model = {"weight": torch.ones(3)}

    def save(checkpointer, step):
        state = {"step": step}
        save_now(checkpointer, step, model=model, optimizer={}, state=state, files={})

    def failing(storage, path, opened=PosixStorage.open):
        if "step-00000002" in str(path) and path.suffix == ".safetensors":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(storage, path)

    with TensorCheckpointer(tmp_path, options(keep=0), None) as checkpointer:
        for step in (1, 2):
            save(checkpointer, step)
    with TensorCheckpointer(tmp_path, options(keep=2), None) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(PosixStorage, "open", failing)
            assert checkpointer.load(model=model, optimizer={}) == {"step": 1}
        save(checkpointer, 3)
    left = sorted(path.name for path in tmp_path.glob("step-*"))
    assert left == ["step-00000002", "step-00000003"]


def test_a_step_that_another_process_reads_stays_until_it_is_done(tmp_path):
    with lock_file(tmp_path, make=True):  # as the first save does
        pass
    old = save(tmp_path, 1)
    save(tmp_path, 2)
    program = (
        "import sys; from pathlib import Path\n"
        "from checkpointing.storage.steps import reading_lock\n"
        "with reading_lock(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(old)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as reader:
        assert reader.stdout.readline() == "held\n"
        with reading_lock(old):  # many may read
            pass
        decisions = prune_read(tmp_path, options(1))
        assert [item.reason for item in decisions] == [
            "among the newest 1",
            "being read at this moment",
        ]
        assert steps(tmp_path) == [1, 2]
        reader.kill()  # the kernel drops its lock
    prune_read(tmp_path, options(1))
    assert steps(tmp_path) == [2]


def test_a_reader_that_comes_too_late_is_told(tmp_path, monkeypatch):
    old, newer = save(tmp_path, 1), save(tmp_path, 2)
    save(tmp_path, 3)
    with lock_file(tmp_path, make=True):  # as the first save does
        pass
    told = []

    def read(path):
        try:
            with reading_lock(path):
                told.append("read")
        except DamagedCheckpoint as error:
            told.append(str(error).removeprefix(str(path)))

    rename, lock = os.rename, fcntl.fcntl
    monkeypatch.setattr(posix, "LOCK_SECONDS", 0.1)
    with monkeypatch.context() as patch:  # retention holds the step: no lock makes it damaged
        patch.setattr(os, "rename", lambda *names: (read(old), rename(*names)))
        prune_read(tmp_path, options(2))
    with monkeypatch.context() as patch:  # deleted between looking and locking
        patch.setattr(
            fcntl, "fcntl", lambda *call: (patch.undo(), STORAGE.delete_step(newer), lock(*call))
        )
        read(newer)
    read(newer)
    assert told == ["read", ": was removed while it was opened", "/index.json: is missing"]
    assert steps(tmp_path) == [3]


def test_who_may_only_read_holds_nothing_up_by_a_lock(tmp_path):
    old, newer = save(tmp_path, 1), save(tmp_path, 2)
    for path in old, newer:
        os.chmod(path, 0o755)
    held = [os.open(path / "index.json", os.O_RDONLY) for path in (old, newer)]
    for descriptor in held:  # as any reader can
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    began = time.monotonic()
    with reading_lock(newer):
        pass
    prune_read(tmp_path, options(1))
    assert steps(tmp_path) == [2]
    assert time.monotonic() - began < posix.LOCK_SECONDS
    assert (tmp_path / ".reading").stat().st_mode & 0o777 == 0o600
    for descriptor in held:
        os.close(descriptor)


def test_a_lock_file_whose_owner_is_unknown_is_not_used(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ESTALE, "as NFS says")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail)
        with lock_file(tmp_path, make=True) as descriptor:
            pass
    assert descriptor is None


def delete_and_die(path, calls):
    """delete(path) in a process that is killed at its next system call after `calls`, if it gets
    there; whether it was."""
    pid = os.fork()
    if pid == 0:
        left = iter(range(calls))

        def watched(call):
            def counted(*arguments, **keywords):
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **keywords)

            return counted

        for name in ("rename", "unlink", "rmdir"):
            setattr(os, name, watched(getattr(os, name)))
        try:
            STORAGE.delete_step(path)
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1] != 0


def test_a_deletion_that_is_killed_anywhere_is_finished_later(tmp_path):
    path = save(tmp_path, 1)
    assert delete_and_die(path, 0)
    assert newest_checkpoint(tmp_path) == path  # nothing has happened to it
    for calls in itertools.count(1):
        killed = delete_and_die(path, calls)
        assert newest_checkpoint(tmp_path) is None
        assert len(list(tmp_path.iterdir())) == killed
        STORAGE.collect(tmp_path)
        assert not list(tmp_path.iterdir())
        if not killed:
            break
        save(tmp_path, 1)
    assert calls > 6


def test_a_deletion_that_failed_is_tried_again_by_the_same_process(tmp_path, monkeypatch, caplog):
    path = save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", os.rmdir)  # which refuses files
        STORAGE.delete_step(path)
    assert "could not delete all of" in caplog.text
    assert [entry.name for entry in tmp_path.iterdir()] == [f"step-00000001.trash-{owner()}"]
    other = tmp_path / "step-00000002.tmp-elsewhere-00000000-1-1"
    other.mkdir()  # of another machine, and new: perhaps somebody writes it
    STORAGE.collect(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [other.name]
    os.utime(other, (0, 0))
    STORAGE.collect(tmp_path)
    assert not list(tmp_path.iterdir())


def test_who_claims_a_directory_removes_what_the_one_before_was_writing(tmp_path):
    """A container that was killed, say, whose process ids mean nothing here."""
    (tmp_path / ".writer-000001").write_text("gone-00000000-1-1 1790000000.000\n")
    theirs = tmp_path / "step-00000002.tmp-1-gone-00000000-1-1"
    other = tmp_path / "step-00000003.tmp-elsewhere-00000000-2-2"  # an import, perhaps
    for path in (theirs, other):
        path.mkdir()
        (path / "model.safetensors").touch()
    mine = hold(tmp_path, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [mine.name, other.name]


# --- by the engine ---------------------------------------------------------------------------


def engine_save(checkpointer, step, **state):
    tensors = {"w": torch.full((3,), float(step))}
    state = {"step": step, **state}
    return save_now(checkpointer, step, model=tensors, optimizer={}, state=state, files={})


def test_an_engine_that_saves_also_deletes(tmp_path):
    with TensorCheckpointer(tmp_path, options(1, keep_best=1), None) as checkpointer:
        for step, loss in ((1, 0.5), (2, 0.25), (3, 1.0), (4, 2.0)):
            engine_save(checkpointer, step, validation_loss=loss)
    assert steps(tmp_path) == [2, 4]
    assert (tmp_path / "latest").read_text() == "step-00000004\n"


def test_a_step_goes_only_when_a_later_one_was_read_back_and_found_right(tmp_path, monkeypatch):
    """The disk changes what is written to it, from step 2 on; so step 1 stays."""
    with monkeypatch.context() as patch:
        plant(patch, root=str(tmp_path), flip=["step-00000002", "step-00000003"])
        with TensorCheckpointer(tmp_path, options(1), None) as checkpointer:
            for step in (1, 2, 3):
                engine_save(checkpointer, step)
    assert {1, 3} <= set(steps(tmp_path))  # 2 goes if 3 came before it was looked at
    with TensorCheckpointer(tmp_path, options(1), None) as checkpointer:
        target = {"w": torch.zeros(3)}
        assert checkpointer.load(model=target, optimizer={}) == {"step": 1}
        engine_save(checkpointer, 4)
    assert steps(tmp_path) == [4]


def test_prune_reads_what_it_relies_upon(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tensors,) = (tmp_path / "step-00000004").glob("model-*.safetensors")
    flip(tensors, -1)
    before = steps(tmp_path)
    planned = pruned(tmp_path, options(1), dry_run=True)
    assert steps(tmp_path) == before
    done = pruned(tmp_path, options(1), dry_run=False)
    assert [item.stays for item in planned.decisions] == [item.stays for item in done.decisions]
    assert steps(tmp_path) == [3, 4]
    text = str(done)
    assert f"{tensors}: checksum of block 0" in text
    assert "every byte read and found right: step-00000003" in text
    assert pruned(tmp_path, options(2), dry_run=False).verification.checked == []  # nothing goes


def written(path):
    """When each file below was written, and which it is; reading one changes neither."""
    stats = {file: file.stat() for file in (path, *path.rglob("*"))}
    return {file: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for file, stat in stats.items()}


def test_a_committed_step_is_not_written_again(tmp_path):
    with TensorCheckpointer(tmp_path, options(), None) as checkpointer:
        path = engine_save(checkpointer, 1)
        before = written(path)
        engine_save(checkpointer, 1)
    assert before == written(path)


def test_another_model_is_an_error_and_no_reason_to_take_an_older_step(tmp_path):
    with TensorCheckpointer(tmp_path, options(), None) as checkpointer:
        assert checkpointer.load(model={}, optimizer={}) is None
        engine_save(checkpointer, 1)
        engine_save(checkpointer, 2)
        target = {"w": torch.zeros(4)}
        with pytest.raises(
            WrongModel, match=r"2 is of another model: other shapes: w \[4\] \(check"
        ):
            checkpointer.load(model=target, optimizer={})
        optimizer = {f"{name}.exp_avg": torch.zeros(3) for name in "wxyz"}
        with pytest.raises(WrongModel, match=r"has no w.exp_avg, x.exp_avg, y.exp_avg and 1 more"):
            checkpointer.load(model={"w": torch.zeros(3)}, optimizer=optimizer)
