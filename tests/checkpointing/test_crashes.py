"""Saves that are killed, refused by the storage, or retried: what was committed stays."""

import errno
import itertools
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpointing import Checkpointer, CheckpointOptions, SaveFailed
from checkpointing.layout import MODEL
from checkpointing.retention import owner
from checkpointing.storage import TRANSIENT
from tests.checkpointing.worlds import local, run_ranks, same_bits, save_now, spread, whole_state

OPTIONS = CheckpointOptions(keep=1)
CALLS = ("open", "pwrite", "fsync", "ftruncate", "mkdir", "rename", "replace", "unlink", "rmdir")
"""Everything that a save asks of the system."""


def save(checkpointer: Checkpointer, step: int, strategy: str = "replicated") -> Path:
    model, optimizer = (spread(part, strategy) for part in whole_state(seed=step))
    files = {"config.json": b"{}\n"}
    return save_now(
        checkpointer, step, model=model, optimizer=optimizer, state={"step": step}, files=files
    )


def load(checkpointer: Checkpointer, strategy: str = "replicated") -> int:
    """The newest step; it must be that step's state to the bit."""
    targets = [
        spread({name: torch.zeros_like(t) for name, t in part.items()}, strategy)
        for part in whole_state()
    ]
    step = checkpointer.load(model=targets[0], optimizer=targets[1])["step"]
    for target, wanted in zip(targets, whole_state(seed=step), strict=True):
        right = spread(wanted, strategy)
        assert all(same_bits(local(target[name]), local(right[name])) for name in right)
    return step


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def kill_at(call: int, torn: bool) -> None:
    """From now on, SIGKILL to this process at its system call number `call`; a write that is torn
    has written half its bytes by then."""
    count = 0

    def watched(original):
        def wrapper(*arguments, **keywords):
            nonlocal count
            count += 1
            if count == call:
                if torn and original is pwrite:
                    data = arguments[1]
                    pwrite(arguments[0], data[: len(data) // 2], arguments[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **keywords)

        return wrapper

    pwrite = os.pwrite
    for name in CALLS:
        setattr(os, name, watched(getattr(os, name)))


def test_killed_at_every_system_call_of_a_save(tmp_path):
    """Afterwards the newest step is the old one or the new one, whole; at the next start, what the
    dead process left is gone."""
    with Checkpointer(tmp_path / "before", OPTIONS, None) as checkpointer:
        save(checkpointer, 1)
    outcomes: list[int] = []
    for call in itertools.count(1):
        run = tmp_path / str(call)
        shutil.copytree(tmp_path / "before", run)
        pid = os.fork()
        if pid == 0:
            try:
                with Checkpointer(run, OPTIONS, None) as checkpointer:
                    kill_at(call, torn=call % 2 == 0)
                    save(checkpointer, 2)
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        with Checkpointer(run, OPTIONS, None) as checkpointer:
            outcomes.append(load(checkpointer))
        assert not [name for name in names(run) if ".tmp-" in name or ".trash-" in name]
        if status == 0:
            break
    # Until the commit the old step, from then on the new one: never neither, never a mixture.
    assert outcomes == sorted(outcomes)
    assert outcomes.count(1) > 50
    assert outcomes.count(2) > 10, "kills after the commit, while the old step is deleted"
    assert names(run) == ["latest", "step-00000002"]


def test_bytes_reach_the_disk_before_the_names_that_lead_to_them(tmp_path, monkeypatch):
    """After a power cut a name may be there without what was not synced before it."""
    unsynced: set[str] = set()
    where: dict[int, str] = {}
    steps: list[str] = []

    def watch(name, before):
        original = getattr(os, name)

        def wrapper(*arguments, **keywords):
            before(*arguments)
            result = original(*arguments, **keywords)
            if name == "open":
                where[result] = str(arguments[0])
                if arguments[1] & os.O_CREAT:
                    unsynced.update((where[result], str(Path(arguments[0]).parent)))
            return result

        monkeypatch.setattr(os, name, wrapper)

    def renamed(source, target):
        steps.append(f"{Path(source).name.split('.')[0]} → {Path(target).name}")
        # The directory that holds both names follows right after.
        assert unsynced <= {str(tmp_path)}, "renamed before everything in it was on the disk"
        unsynced.add(str(Path(target).parent))

    def synced(descriptor):
        unsynced.discard(where[descriptor])
        if where[descriptor] == str(tmp_path):
            steps.append("synced")

    watch("open", lambda *_: None)
    watch("pwrite", lambda descriptor, *_: unsynced.add(where[descriptor]))
    watch("fsync", synced)
    watch("rename", renamed)
    watch("replace", renamed)
    with Checkpointer(tmp_path, OPTIONS, None) as checkpointer:
        save(checkpointer, 1)
    assert steps == ["step-00000001 → step-00000001", "synced", " → latest", "synced"]
    assert not unsynced


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_writing(victim, tmp_path):
    def work(rank):
        with Checkpointer(tmp_path / "run", OPTIONS, dist.group.WORLD) as checkpointer:
            save(checkpointer, 1, "rows-2")
            if rank == victim:
                kill_at(30 if rank == 0 else 3, torn=True)
            save(checkpointer, 2, "rows-2")

    results = run_ranks(2, work, tmp_path / "ranks")
    assert results[victim] is None
    assert isinstance(results[1 - victim], RuntimeError)
    assert any(".tmp-" in name for name in names(tmp_path / "run"))

    def again(rank):
        with Checkpointer(tmp_path / "run", OPTIONS, dist.group.WORLD) as checkpointer:
            step = load(checkpointer, "rows-2")
            save(checkpointer, 2, "rows-2")
            return step, load(checkpointer, "rows-2")

    assert run_ranks(2, again, tmp_path / "ranks") == [(1, 2), (1, 2)]
    assert names(tmp_path / "run") == ["latest", "step-00000002"]


def test_a_rank_that_may_not_write_fails_the_save_on_all(tmp_path):
    """The system itself refuses rank 1's bytes, as it does on a full disk."""

    def work(rank):
        with Checkpointer(tmp_path / "run", OPTIONS, dist.group.WORLD) as checkpointer:
            save(checkpointer, 1, "rows-2")
            unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
            if rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (64, unlimited[1]))
            with pytest.raises(SaveFailed) as failed:
                save(checkpointer, 2, "rows-2")
            left = names(tmp_path / "run")
            step = load(checkpointer, "rows-2")
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
            save(checkpointer, 3, "rows-2")
            error = failed.value
            return str(error), error.rank, error.path, error.errno, left, step

    one, other = run_ranks(2, work, tmp_path / "ranks")
    assert one == other
    message, rank, path, number, left, step = one
    assert (rank, number, step) == (1, errno.EFBIG, 1)
    assert path.endswith(MODEL.file(1, 1))
    assert message.startswith("saving step 2 failed on rank 1: ")
    assert f"{path}: File too large (EFBIG); earlier checkpoints are untouched" in message
    assert left == ["latest", "step-00000001"]
    assert names(tmp_path / "run") == ["latest", "step-00000003"]


@pytest.mark.parametrize(
    ("call", "number", "failures", "saved"),
    [
        ("pwrite", errno.EIO, 2, True),
        ("open", errno.ESTALE, 2, True),
        ("pwrite", errno.ENOSPC, 1, False),
        ("mkdir", errno.EROFS, 1, False),
        ("fsync", errno.EIO, 1, False),  # a second fsync would succeed without the data
    ],
)
def test_only_errors_that_pass_are_tried_again(
    call, number, failures, saved, tmp_path, monkeypatch
):
    assert (number in TRANSIENT) or not saved
    original, left = getattr(os, call), failures

    def failing(*arguments, **keywords):
        nonlocal left
        if left:
            left -= 1
            raise OSError(number, os.strerror(number))
        return original(*arguments, **keywords)

    with Checkpointer(tmp_path, OPTIONS, None) as checkpointer:
        save(checkpointer, 1)
        monkeypatch.setattr(os, call, failing)
        if saved:
            save(checkpointer, 2)
        else:
            with pytest.raises(SaveFailed) as failed:
                save(checkpointer, 2)
            assert failed.value.errno == number
        assert left == 0
        assert load(checkpointer) == (2 if saved else 1)
    assert names(tmp_path) == ["latest", f"step-{2 if saved else 1:08}"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(mask, tmp_path):
    before = os.umask(mask)
    try:
        with Checkpointer(tmp_path / "run", OPTIONS, None) as checkpointer:
            save(checkpointer, 1)
    finally:
        os.umask(before)
    for path in (tmp_path / "run").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~mask, path


def test_what_the_living_are_writing_stays(tmp_path):
    host, machine, pid, start = owner().rsplit("-", 3)
    living = [f"step-00000009.tmp-{owner()}", f"step-00000008.tmp-elsewhere-00000000-{pid}-{start}"]
    dead = [
        f"step-00000009.tmp-{host}-{machine}-{pid}-{int(start) - 1}",  # the id was given again
        f"step-00000007.trash-{host}-{machine}-999999999-{start}",
        f"step-00000006.tmp-elsewhere-00000000-{pid}-{start}",
    ]
    others = ["step-00000009.tmp", "step-00000009.backup", "my-step-00000001", "notes"]
    for name in (*living, *dead, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    long_ago = 10_000
    for path in (tmp_path / dead[2], tmp_path / dead[2] / "file"):
        os.utime(path, (long_ago, long_ago))
    with Checkpointer(tmp_path, OPTIONS, None):
        assert names(tmp_path) == sorted([*living, *others])
