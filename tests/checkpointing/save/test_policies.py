"""What a run chooses: to skip or to wait, how fast to write, how much memory to take."""

import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing import CheckpointOptions, StorageError, TensorCheckpointer
from checkpointing.save import slots
from checkpointing.save.slots import RESERVE
from checkpointing.storage import folders
from tests.checkpointing.faults import children, load, parts, plant
from tests.checkpointing.worlds import run_ranks, save_now

SLOW = {"max_bandwidth": "10 KB", "max_shard_size": 700}
"""A save of the tests' state, 3.9 kB in five files, takes some tenths of a second."""


def test_a_save_that_comes_too_early_is_skipped_unless_it_is_to_wait(tmp_path):
    with TensorCheckpointer(tmp_path, CheckpointOptions(**SLOW), None) as checkpointer:
        assert checkpointer.save(1, **parts(1))
        assert not checkpointer.save(2, **parts(2))
        (skipped,) = checkpointer.outcomes()
        assert (skipped.step, skipped.path) == (2, None)
        assert skipped.error == "step 2 is not saved: step 1 is still being saved"
        assert checkpointer.save(3, **parts(3), wait=True), "the last save of a run waits"
        (first,) = checkpointer.outcomes()
        assert (first.step, first.error) == (1, None)
        checkpointer.wait()
        (last,) = checkpointer.outcomes()
        assert last.path == str(tmp_path / "step-00000003")
        assert last.nbytes > 3000
        assert load(checkpointer) == 3


@pytest.mark.parametrize("number", [1, 2])
def test_with_when_busy_wait_no_save_is_lost(number, tmp_path):
    options = CheckpointOptions(**SLOW, when_busy="wait", slots=number, keep=0)
    with TensorCheckpointer(tmp_path, options, None) as checkpointer:
        what = parts(1)
        note = checkpointer.prepare(model=what["model"], optimizer=what["optimizer"])
        assert note.startswith(f"{number} checkpoint slot(s) of ")
        assert all(checkpointer.save(step, **parts(step)) for step in (1, 2, 3))
        checkpointer.wait()
        assert [outcome.step for outcome in checkpointer.outcomes() if outcome.path] == [1, 2, 3]
    for step in (3, 2, 1):  # each has its own bytes, though slots were used again
        with TensorCheckpointer(tmp_path, options, None) as checkpointer:
            assert load(checkpointer) == step
        (tmp_path / f"step-{step:08}").rename(tmp_path / f"seen-{step}")


def test_ranks_that_are_not_quite_in_step_hear_the_same_answer(tmp_path):
    """One rank asks for the next save while the other still looks how the one before is going."""

    def work(rank):
        options = CheckpointOptions(**SLOW)
        with TensorCheckpointer(tmp_path / "run", options, dist.group.WORLD) as checkpointer:
            what = parts(2, "rows-2")
            answers = [checkpointer.save(1, **parts(1, "rows-2"))]
            dist.barrier()
            if rank == 1:
                deadline = time.monotonic() + 0.2
                while time.monotonic() < deadline:
                    assert checkpointer.outcomes() == []
            answers.append(checkpointer.save(2, **what))
            checkpointer.wait()
            return answers

    assert run_ranks(2, work, tmp_path / "ranks") == [[True, False]] * 2


def test_a_save_ends_before_its_slots_are_made_anew_for_other_placements(tmp_path):
    run, options = tmp_path / "run", CheckpointOptions(**SLOW, keep=0)

    def work(rank):
        with TensorCheckpointer(run, options, dist.group.WORLD) as checkpointer:
            assert checkpointer.save(1, **parts(1, "rows-2"))
            save_now(checkpointer, 2, **parts(2, "columns-2"))
            return [outcome.error for outcome in checkpointer.outcomes()]

    assert run_ranks(2, work, tmp_path / "ranks") == [[None, None]] * 2
    for step in (2, 1):
        with TensorCheckpointer(run, options, None) as checkpointer:
            assert load(checkpointer) == step
        (run / f"step-{step:08}").rename(run / f"seen-{step}")


def test_bandwidth_is_kept(tmp_path):
    options = CheckpointOptions(max_writers=2, max_shard_size="8 MB")
    model = {name: torch.ones(1_500_000) for name in "abcd"}  # 24 MB

    def saved(name, options):
        with TensorCheckpointer(tmp_path / name, options, None) as checkpointer:
            save_now(checkpointer, 1, model=model, optimizer={}, state={}, files={})
            (outcome,) = checkpointer.outcomes()
        assert outcome.nbytes == pytest.approx(24e6, rel=0.01)
        return outcome.seconds

    kept, free = (
        saved(f"{most}", replace(options, max_bandwidth=most)) for most in (50_000_000, None)
    )
    assert kept >= 24 / 50
    assert kept < 2 * 24 / 50 + max(1, 5 * free), "all writers together take what they may"


# --- memory --------------------------------------------------------------------------------------


@pytest.fixture
def small_memory(tmp_path, monkeypatch) -> Iterator[Path]:
    """64 kB instead of /dev/shm."""
    if os.geteuid() != 0:
        pytest.skip("mounts filesystems, which root may")
    mount = tmp_path / "shm"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", mount], check=True)
    monkeypatch.setattr(folders, "SHARED_MEMORY", mount)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "--lazy", mount], check=True)


def test_shared_memory_as_kubernetes_mounts_it_is_used(tmp_path, monkeypatch):
    """Without a sticky bit anybody could rename what is in it."""
    shared = tmp_path / "shm"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(folders, "SHARED_MEMORY", shared)
    folders.make(str(tmp_path / "run")).close()
    assert shared.stat().st_mode & 0o7777 == 0o1777


def test_little_shared_memory_does_for_one_slot(small_memory, tmp_path, monkeypatch):
    """A slot of the tests' state takes two pages. What a slot holds cannot be said any more, and so
    no restart begins from it; saves do well without."""
    (small_memory / "filler").write_bytes(bytes(48 << 10))
    plant(monkeypatch, shared_memory=str(small_memory))
    with TensorCheckpointer(tmp_path / "run", CheckpointOptions(), None) as checkpointer:
        what = parts(1)
        note = checkpointer.prepare(model=what["model"], optimizer=what["optimizer"])
        assert note.startswith("1 checkpoint slot(s) of ")
        assert note.endswith("; 2 were asked for, but there is no memory for more")
        (small_memory / "more").write_bytes(bytes(4 << 10))
        for step in (1, 2):
            save_now(checkpointer, step, **parts(step))
            assert not list(small_memory.glob("*/slot-0.manifest"))


@pytest.mark.parametrize(
    ("filler", "why"),
    [(60, "less than one slot is free there"), (64, "No space left on device (ENOSPC)")],
)
def test_without_shared_memory_slots_are_anonymous(
    filler, why, small_memory, tmp_path, monkeypatch
):
    (small_memory / "filler").write_bytes(bytes(filler << 10))
    plant(monkeypatch, shared_memory=str(small_memory))

    def work(rank):
        with TensorCheckpointer(
            tmp_path / "run", CheckpointOptions(), dist.group.WORLD
        ) as checkpointer:
            what = parts(1, "rows-2")
            note = checkpointer.prepare(model=what["model"], optimizer=what["optimizer"])
            for step in (1, 2):
                save_now(checkpointer, step, **parts(step, "rows-2"))
            dist.barrier()
            if rank == 0:  # its writer takes the memory with it, and the next brings new
                (writer,) = children(os.getpid())
                os.kill(writer, 9)
            dist.barrier()
            save_now(checkpointer, 3, **parts(3, "rows-2"))
            assert load(checkpointer, "rows-2") == 3
            return note

    for note in run_ranks(2, work, tmp_path / "ranks"):
        assert note.startswith("1 checkpoint slot(s) of ")
        assert f"in anonymous memory, not in {small_memory}: " in note
        assert f"{why}; 2 were asked for" in note
    assert [path.name for path in small_memory.iterdir()] == ["filler"]


def test_slots_may_lie_on_a_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()

    def work(rank):
        options = CheckpointOptions(slot_directory=str(disk))
        what = parts(1, "rows-2")
        with TensorCheckpointer(tmp_path / "run", options, dist.group.WORLD) as checkpointer:
            note = checkpointer.prepare(model=what["model"], optimizer=what["optimizer"])
            for step in (1, 2):
                save_now(checkpointer, step, **parts(step, "rows-2"))
            assert not checkpointer.save(3, **parts(3, "rows-2"), memory_only=True)
            assert load(checkpointer, "rows-2") == 2
        options = CheckpointOptions(slot_directory=str(disk / "absent"))
        with (
            TensorCheckpointer(tmp_path / "run", options, dist.group.WORLD) as checkpointer,
            pytest.raises(StorageError, match=r"slot_directory: .*absent: No such file"),
        ):
            checkpointer.prepare(model=what["model"], optimizer=what["optimizer"])
        return note

    for note in run_ranks(2, work, tmp_path / "ranks"):
        assert re.fullmatch(rf"2 checkpoint slot\(s\) of .* MB in {disk}", note)
    assert not list(disk.iterdir())


@pytest.mark.parametrize("on_disk", [False, True])
def test_without_slots_a_save_takes_room_and_gives_it_back(on_disk, small_memory, tmp_path):
    """A save that finds none is skipped, and costs nothing else."""
    place = str(small_memory) if on_disk else None

    def work(rank):
        options = CheckpointOptions(**SLOW, slots=0, slot_directory=place)
        before = set(children(os.getpid()))
        with TensorCheckpointer(tmp_path / "run", options, dist.group.WORLD) as checkpointer:
            what = parts(1, "rows-2")
            note = checkpointer.prepare(model=what["model"], optimizer=what["optimizer"])
            writers = set(children(os.getpid())) - before
            taken = [_deleted_bytes(writers)]
            for step in (1, 2):
                assert checkpointer.save(step, **parts(step, "rows-2"))
                checkpointer.wait_staged()
                taken.append(_deleted_bytes(writers))
                checkpointer.wait()
                taken.append(_deleted_bytes(writers))
            assert not checkpointer.memory_lasts
            checkpointer.outcomes()
            dist.barrier()
            if on_disk:
                if rank == 0:
                    (small_memory / "filler").write_bytes(bytes(60 << 10))
                dist.barrier()
                assert not checkpointer.save(3, **parts(3, "rows-2"))
                assert f"slot_directory: {place} has " in checkpointer.outcomes()[-1].error
                dist.barrier()
                (small_memory / "filler").unlink(missing_ok=True)
            dist.barrier()
            save_now(checkpointer, 4, **parts(4, "rows-2"))
            assert load(checkpointer, "rows-2") == 4
            return note, taken

    (note, taken), (other, _) = run_ranks(2, work, tmp_path / "ranks")
    assert note == other
    assert note.startswith("no checkpoint slots: each save takes ")
    before, during, after, during_next, after_next = taken
    assert before == after == after_next == 0
    assert min(during, during_next) >= 3900, "the state's bytes"


def _deleted_bytes(processes: Iterable[int]) -> int:
    """What files without a name take that these processes have open."""
    found = 0
    for file in (file for pid in processes for file in Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(FileNotFoundError):  # closed meanwhile
            if "(deleted)" in os.readlink(file):
                found += 512 * file.stat().st_blocks
    return found


@settings(max_examples=30)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 30))
def test_memory_that_is_still_coming_free_is_waited_for(steps, enough):
    """Each look finds a little more, until it grows no more."""
    sizes = [sum(steps[: number + 1]) << 27 for number in range(len(steps))]
    looks = iter([size for size in sizes if size == 0 or size not in sizes[: sizes.index(size)]])
    last = [0]

    def free():
        last[0] = next(looks, last[0])
        return last[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "SETTLE_SECONDS", 0.12)
        found = slots.settled(free, enough << 27)
    assert found == next((size for size in sizes if size >= enough << 27), sizes[-1])


def test_memory_of_which_the_kernel_says_nothing_is_an_error(tmp_path, monkeypatch):
    """And a limit of a control group alone does not count, as the machine may have less."""
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\nMemFree: 8 kB\n")
    monkeypatch.setattr(slots, "Path", lambda path: tmp_path / Path(path).name)
    with pytest.raises(StorageError, match="no MemAvailable"):
        slots.available_bytes()


def test_slots_that_are_made_anew_leave_no_file_open(tmp_path):
    options = CheckpointOptions(slot_directory=str(tmp_path))
    opened, others = [], children(os.getpid())
    with TensorCheckpointer(tmp_path / "run", options, None) as checkpointer:
        for step, bulk in enumerate((0, 5000, 0)):
            save_now(checkpointer, step, **parts(step, bulk=bulk))
            (writer,) = set(children(os.getpid())) - set(others)
            opened.append(deleted_files_open(writer))
    assert opened == [opened[0]] * 3


def deleted_files_open(pid):
    """Of files that the process closes meanwhile, none counts."""
    found = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += "(deleted)" in os.readlink(file)
    return found


def test_slots_that_are_refused_to_a_new_writer_are_asked_for_again(small_memory, tmp_path):
    """There is room for one slot, which is taken as long as a rank maps that of the dead writer."""
    (small_memory / "filler").write_bytes(bytes(52 << 10))

    def work(rank):
        options = CheckpointOptions(slot_directory=str(small_memory))
        with TensorCheckpointer(tmp_path / "run", options, dist.group.WORLD) as checkpointer:
            save_now(checkpointer, 1, **parts(1, "rows-2"))
            checkpointer.outcomes()
            what = parts(2, "rows-2")
            dist.barrier()
            if rank == 0:
                (writer,) = children(os.getpid())
                os.kill(writer, 9)
                assert not checkpointer.save(2, **what)
            dist.barrier()
            if rank == 1:
                assert not checkpointer.save(2, **what)
            dist.barrier()
            save_now(checkpointer, 3, **parts(3, "rows-2"))
            refused, saved = checkpointer.outcomes()
            assert load(checkpointer, "rows-2") == saved.step == 3
            return refused.error

    for error in run_ranks(2, work, tmp_path / "ranks"):
        assert str(error).startswith("step 2 is not saved: slot_directory: ")


def test_too_little_memory_is_an_error_that_says_how_much_it_takes(tmp_path, monkeypatch):
    (tmp_path / "shm").mkdir()
    plant(monkeypatch, shared_memory=str(tmp_path / "shm"), free=RESERVE + 1000)
    what = parts(1)
    with (
        TensorCheckpointer(tmp_path / "run", CheckpointOptions(), None) as checkpointer,
        pytest.raises(StorageError, match=r"takes 0\.00 GB on this node; only 0\.27 GB are free"),
    ):
        checkpointer.prepare(model=what["model"], optimizer=what["optimizer"])
    assert not list((tmp_path / "shm").iterdir())
