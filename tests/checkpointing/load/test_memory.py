"""What a killed run left in memory is where the next one starts from, in any world."""

import ctypes
import os
import shutil
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpointing import (
    CheckpointOptions,
    DamagedCheckpoint,
    SaveFailed,
    StorageError,
    TensorCheckpointer,
)
from checkpointing import tensor_checkpointer as checkpointer_module
from checkpointing.load import restore
from checkpointing.load.memory import (
    TOKEN,
    LoadLeftoverSlot,
    check,
    make_token,
    newest_whole,
    token,
)
from checkpointing.save.link import WriterLink
from checkpointing.save.messages import SaveManifest, StagedReport
from checkpointing.save.peers import open_leftover, read_manifest
from checkpointing.storage.folders import (
    SHARED_MEMORY,
    forget,
    hold,
    living_folders,
    run_id,
)
from checkpointing.storage.posix import filesystem
from tests.checkpointing.faults import children, left_in_memory, until
from tests.checkpointing.worlds import local, run_ranks, same_bits, save_now, spread, whole_state
from tests.distributed.jobs import soak

OPTIONS = CheckpointOptions(max_shard_size=700)
SLOW = CheckpointOptions(max_shard_size=700, max_bandwidth=1000)
"""A save of the test's state takes some seconds: it is in memory long before it is committed."""
NEW_HOST_NAMES, NEW_USERS = 0x04000000, 0x10000000
"""Of unshare(2)."""


def parts(step: int, strategy: str) -> dict:
    model, optimizer = (spread(part, strategy) for part in whole_state(seed=step))
    return {"model": model, "optimizer": optimizer, "state": {"step": step}, "files": {}}


def in_memory(run: Path, run_token: str | None = None) -> list[int]:
    """The steps in the slots of the living."""
    run_token = run_token or token(run) or ""
    paths = (path for folder in living_folders(str(run)) for path in folder.glob("*.manifest"))
    return [found.step for path in paths if (found := read_manifest(path, run_token))]


def leave(run: Path, ranks: Path, nodes: int = 1, *, peer_copy: bool = False) -> None:
    """Two ranks commit step 1, have step 2 in memory, and are killed."""

    def work(rank):
        if nodes > 1:
            os.environ["GROUP_RANK"] = str(rank % nodes)
        with TensorCheckpointer(run, OPTIONS, dist.group.WORLD) as checkpointer:
            save_now(checkpointer, 1, **parts(1, "rows-2"))
        slow = replace(SLOW, peer_copy=peer_copy)
        with TensorCheckpointer(run, slow, dist.group.WORLD) as checkpointer:
            checkpointer.load(**{key: parts(0, "rows-2")[key] for key in ("model", "optimizer")})
            checkpointer.save(2, **parts(2, "rows-2"))
            deadline = time.monotonic() + 10
            while (
                in_memory(run) != [2] * (nodes + nodes * peer_copy) and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    assert run_ranks(2, work, ranks) == [None, None]
    assert sorted(path.name for path in run.glob("step-????????")) == ["step-00000001"]


def left_behind(run: Path, nodes: int) -> list[Path]:
    """Memory of so many nodes, once their writers have died, too."""
    deadline = time.monotonic() + 10
    while len(folders := left_in_memory(run)) < nodes and time.monotonic() < deadline:
        time.sleep(0.01)
    return folders


def load(run: Path, ranks: Path, strategy: str, world_size: int) -> list[tuple[int, bool]]:
    """Step and whether it came from memory; it must be that step's state to the bit."""

    def work(rank):
        targets = [
            spread({name: torch.zeros_like(t) for name, t in part.items()}, strategy)
            for part in whole_state()
        ]
        with TensorCheckpointer(run, OPTIONS, dist.group.WORLD) as checkpointer:
            step = checkpointer.load(model=targets[0], optimizer=targets[1])["step"]
            newer = checkpointer.newer_than_storage
        for target, wanted in zip(targets, whole_state(seed=step), strict=True):
            right = spread(wanted, strategy)
            assert all(same_bits(local(target[name]), local(right[name])) for name in right)
        return step, newer

    return run_ranks(world_size, work, ranks)


@pytest.mark.parametrize(
    ("strategy", "world_size", "nodes"),
    [
        ("rows-2", 2, 2),
        ("rows-3", 3, 1),
        ("replicated", 1, 2),
        *(pytest.param(*world, marks=soak) for world in (("rows-2", 2, 1), ("rows-3", 3, 2))),
    ],
)
def test_a_killed_run_goes_on_from_memory_in_any_world(strategy, world_size, nodes, tmp_path):
    leave(tmp_path / "run", tmp_path / "ranks", nodes)
    found = load(tmp_path / "run", tmp_path / "ranks", strategy, world_size)
    assert found == [(2, True)] * world_size


@pytest.mark.parametrize(("nodes", "victim"), [(1, 0), (2, 1)])
def test_a_rank_that_raises_waits_for_nobody_and_keeps_memory(nodes, victim, tmp_path, monkeypatch):
    """The others wait for it in a collective; only its end brings them out of there."""
    monkeypatch.setattr(checkpointer_module, "LEAVE_SECONDS", 0.5)
    run = tmp_path / "run"

    def work(rank):
        os.environ["GROUP_RANK"] = str(rank % nodes)
        with TensorCheckpointer(run, SLOW, dist.group.WORLD) as checkpointer:
            checkpointer.save(2, **parts(2, "rows-2"))
            assert until(lambda: in_memory(run) == [2] * nodes, 10)
            dist.barrier()
            if rank == victim:
                raise ValueError("a batch of this rank")
            dist.barrier()

    results = run_ranks(2, work, tmp_path / "ranks")
    assert str(results[victim]) == "a batch of this rank"
    assert isinstance(results[1 - victim], RuntimeError)
    assert load(run, tmp_path / "ranks", "rows-2", 2) == [(2, True)] * 2


def test_memory_that_storage_does_not_confirm_is_not_used(tmp_path):
    run, ranks = tmp_path / "run", tmp_path / "ranks"
    leave(run, ranks)
    # A bit of it has flipped.
    (folder,) = left_behind(run, 1)
    (slot,) = folder.glob("slot-?.manifest")
    file, ranges = next(iter(read_manifest(slot, token(run)).ranges.items()))
    path = slot.with_suffix("") / file
    data = bytearray(path.read_bytes())
    data[ranges[0][0]] ^= 1
    path.write_bytes(data)
    assert load(run, ranks, "rows-2", 2) == [(1, False)] * 2

    # Somebody has deleted the run meanwhile, and begins anew.
    leave(tmp_path / "again", ranks)
    shutil.rmtree(tmp_path / "again")
    with TensorCheckpointer(tmp_path / "again", OPTIONS, None) as checkpointer:
        model, optimizer = whole_state()
        assert checkpointer.load(model=model, optimizer=optimizer) is None


@pytest.mark.parametrize("peer_copy", [False, True])
def test_a_step_that_was_deleted_does_not_come_back_from_memory(peer_copy, tmp_path):
    """Nor does the one before it, of which only memory knew."""
    run, nodes = tmp_path / "run", 1 + peer_copy
    options = replace(OPTIONS, peer_copy=peer_copy)

    def work(rank):
        os.environ["GROUP_RANK"] = str(rank)
        with TensorCheckpointer(run, options, dist.group.WORLD) as checkpointer:
            for step in (1, 2, 3):
                save_now(checkpointer, step, **parts(step, "replicated"), memory_only=step == 2)
                assert until(lambda step=step: in_memory(run).count(step) == nodes * nodes, 10)
                dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    assert run_ranks(nodes, work, tmp_path / "ranks") == [None] * nodes
    left_behind(run, nodes)
    shutil.rmtree(run / "step-00000003")
    assert load(run, tmp_path / "ranks", "replicated", 1) == [(1, False)]


def test_memory_is_there_for_load_if_slots_are_prepared_before(tmp_path):
    run = tmp_path / "run"
    leave(run, tmp_path / "ranks")

    def work(rank):
        what = parts(0, "rows-2")
        targets = {key: what[key] for key in ("model", "optimizer")}
        with TensorCheckpointer(run, OPTIONS, dist.group.WORLD) as checkpointer:
            note = checkpointer.prepare(**targets)
            assert checkpointer.load(**targets) == {"step": 2}
            assert checkpointer.memory_lasts, "the slots are made"
            assert checkpointer.load(**targets) == {"step": 1}, "the memory is this run's now"
            return note, checkpointer.prepare(**targets)

    for note, later in run_ranks(2, work, tmp_path / "ranks"):
        assert note.startswith("checkpoint slots are made once `load`")
        assert later.startswith("2 checkpoint slot(s) of")


@pytest.mark.parametrize("committed", [False, True])
def test_who_loads_from_memory_and_saves_nothing_leaves_what_storage_lacks(committed, tmp_path):
    run = tmp_path / "run"

    def work(rank):
        with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
            save_now(checkpointer, 1, **parts(1, "replicated"))
            if not committed:
                checkpointer.save(2, **parts(2, "replicated"), memory_only=True)
            assert until(lambda: 2 - committed in in_memory(run), 10)
            os.kill(os.getpid(), signal.SIGKILL)

    run_ranks(1, work, tmp_path / "ranks")
    left_behind(run, 1)
    assert load(run, tmp_path / "ranks", "replicated", 1) == [(2 - committed, not committed)]
    assert [*SHARED_MEMORY.glob(f"perdure-{run_id(str(run))}-*")] == left_behind(run, 0)
    assert len(left_behind(run, 0)) == (0 if committed else 1)


def test_what_a_pause_saves_in_memory_stays_though_storage_had_what_was_loaded(tmp_path):
    run, ranks = tmp_path / "run", tmp_path / "ranks"

    def leave(rank):
        with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
            save_now(checkpointer, 1, **parts(1, "replicated"))
            os.kill(os.getpid(), signal.SIGKILL)

    def pause(rank):
        with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
            targets = {key: parts(0, "replicated")[key] for key in ("model", "optimizer")}
            assert checkpointer.load(**targets) == {"step": 1}
            found = checkpointer.loaded_from, checkpointer.newer_than_storage
            checkpointer.save(2, **parts(2, "replicated"), memory_only=True, wait=True)
            checkpointer.close(keep_memory=True)
        return found

    run_ranks(1, leave, ranks)
    left_behind(run, 1)
    assert run_ranks(1, pause, ranks) == [("memory", False)]
    assert load(run, ranks, "replicated", 1) == [(2, True)]


@pytest.mark.parametrize("committed", [False, True])
def test_memory_that_is_lost_while_it_is_loaded_leaves_no_mixture(committed, tmp_path, monkeypatch):
    run = tmp_path / "run"

    def work(rank):
        with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
            if committed:
                save_now(checkpointer, 1, **parts(1, "replicated"))
            checkpointer.save(2, **parts(2, "replicated"), memory_only=True)
            assert until(lambda: 2 in in_memory(run), 10)
            os.kill(os.getpid(), signal.SIGKILL)

    def check_and_lose(left, *arguments):
        check(left, *arguments)
        Path(left.slot, max(left.manifest.ranges)).unlink()

    assert run_ranks(1, work, tmp_path / "ranks") == [None]
    left_behind(run, 1)
    monkeypatch.setattr(restore, "check", check_and_lose)
    model, optimizer = whole_state()
    with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
        if not committed:
            with pytest.raises(
                DamagedCheckpoint, match=r"lost while .* no checkpoint: start again"
            ):
                checkpointer.load(model=model, optimizer=optimizer)
            return
        assert checkpointer.load(model=model, optimizer=optimizer) == {"step": 1}
    for found, wanted in zip((model, optimizer), whole_state(seed=1), strict=True):
        assert all(same_bits(found[name], wanted[name]) for name in wanted)


def test_a_copy_is_there_for_a_restart_though_it_could_not_be_written(tmp_path):
    """Storage fails at once, long before the copy is whole: the save after it takes the slot that
    holds less. A run that ends by that leaves it, too."""
    run, away = tmp_path / "run", tmp_path / "away"

    def work(rank):
        with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
            save_now(checkpointer, 1, **parts(1, "replicated"))
            key = token(run)
            run.rename(away)
            run.touch()
            for step in (2, 3):
                checkpointer.save(step, **parts(step, "replicated"))
                with pytest.raises(SaveFailed):
                    checkpointer.wait()
                assert until(lambda step=step: step in in_memory(run, key), 10)
            assert sorted(in_memory(run, key)) == [2, 3]
            checkpointer.save(4, **parts(4, "replicated"))
            checkpointer.wait()

    (error,) = run_ranks(1, work, tmp_path / "ranks")
    assert isinstance(error, SaveFailed)
    run.unlink()
    away.rename(run)
    assert load(run, tmp_path / "ranks", "replicated", 1) == [(4, True)]


def test_memory_of_a_removed_run_without_a_checkpoint_is_not_used(tmp_path):
    run = tmp_path / "run"

    def work(rank):
        with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
            checkpointer.save(2, **parts(2, "replicated"), memory_only=True)
            deadline = time.monotonic() + 10
            while not in_memory(run) and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def found() -> dict | None:
        model, optimizer = whole_state()
        with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
            return checkpointer.load(model=model, optimizer=optimizer)

    assert run_ranks(1, work, tmp_path / "ranks") == [None]
    assert found() == {"step": 2}
    shutil.rmtree(run)
    assert found() is None
    run.mkdir()
    make_token(run)
    assert found() is None


def test_memory_that_others_could_have_written_is_neither_read_nor_deleted(tmp_path, caplog):
    """Whoever plants a folder under the run's name owns it, or has left it open."""
    run = tmp_path / "run"
    leave(run, tmp_path / "ranks")
    (folder,) = left_behind(run, 1)
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
    else:
        folder.chmod(0o755)
    assert load(run, tmp_path / "ranks", "rows-2", 2) == [(1, False)] * 2
    assert left_in_memory(run) == []
    assert f"{folder} (of user" in caplog.text
    assert (folder / "shape.json").exists()
    shutil.rmtree(folder)


def test_nodes_are_given_only_slots_of_the_run(tmp_path):
    run = tmp_path / "run"
    leave(run, tmp_path / "ranks")
    (folder,) = left_behind(run, 1)
    (slot,) = (str(path.with_suffix("")) for path in folder.glob("*.manifest"))
    (file, *_) = read_manifest(Path(f"{slot}.manifest"), token(run)).ranges
    assert open_leftover(slot, [file], token(run)).maps[file]
    elsewhere = tmp_path / "perdure-planted"
    shutil.copytree(folder, elsewhere)
    for place, name, key in (
        (slot, file, make_token(tmp_path / "another")),
        (slot, "../shape.json", token(run)),
        (f"{elsewhere}/{Path(slot).name}", file, token(run)),
        (f"{folder}/../../{elsewhere}/{Path(slot).name}", file, token(run)),
    ):
        with pytest.raises(StorageError, match="of this run"):
            open_leftover(place, [name], key)


def become_another_host() -> bool:
    """As a container does; False where that is not allowed."""
    uid, libc = os.geteuid(), ctypes.CDLL(None)
    if libc.unshare(NEW_HOST_NAMES | (NEW_USERS if uid else 0)):
        return False
    if uid:
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    socket.sethostname("a-container-that-is-gone")
    return True


def test_memory_of_a_killed_container_is_found(tmp_path):
    """Its host name and its process ids mean nothing to the next one."""
    run, shut = tmp_path / "run", tmp_path / "shut"

    def work(rank):
        if not become_another_host():
            shut.touch()
            return
        with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
            checkpointer.save(2, **parts(2, "replicated"), memory_only=True)
            assert until(lambda: in_memory(run), 10)
            os.kill(os.getpid(), signal.SIGKILL)

    assert run_ranks(1, work, tmp_path / "ranks") == [None]
    if shut.exists():
        pytest.skip("makes namespaces")
    assert load(run, tmp_path / "ranks", "replicated", 1) == [(2, True)]
    with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
        save_now(checkpointer, 3, **parts(3, "replicated"))
    assert not left_in_memory(run), "it is given back"


def test_a_token_that_a_power_cut_has_emptied_is_replaced(tmp_path, caplog):
    (tmp_path / TOKEN).touch(0o600)
    what = parts(1, "replicated")
    with TensorCheckpointer(tmp_path, OPTIONS, None) as checkpointer:
        checkpointer.prepare(model=what["model"], optimizer=what["optimizer"])
        assert checkpointer.memory_lasts
    assert f"{tmp_path / TOKEN} is replaced: a power cut" in caplog.text
    made = token(tmp_path)
    assert len(made) == 64
    assert (tmp_path / TOKEN).stat().st_mode & 0o777 == 0o600
    (tmp_path / TOKEN).chmod(0o644)
    assert token(tmp_path) is None, "others may have read it"
    assert make_token(tmp_path) != made
    (tmp_path / TOKEN).rename(tmp_path / "elsewhere")
    (tmp_path / TOKEN).symlink_to(tmp_path / "elsewhere")
    assert token(tmp_path) is None


def test_a_linked_directory_is_the_one_that_it_leads_to(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(SHARED_MEMORY)
    assert filesystem(link / "run") == filesystem(SHARED_MEMORY) != filesystem(tmp_path)
    assert run_id(f"{link}/run") == run_id(f"{SHARED_MEMORY}/run") != run_id(f"{tmp_path}/run")
    assert run_id("s3://bucket/run") != run_id("s3://bucket/other")


def test_a_lost_node_is_replaced_by_the_copy_on_its_neighbour(tmp_path):
    leave(tmp_path / "run", tmp_path / "ranks", nodes=2, peer_copy=True)
    lost, _ = left_behind(tmp_path / "run", 2)
    forget(hold(lost))
    assert load(tmp_path / "run", tmp_path / "ranks", "replicated", 1) == [(2, True)]


def test_a_copy_in_memory_ends_with_the_coordinator(tmp_path, monkeypatch):
    """Also for the ranks of other nodes, whose writer is told nothing any more."""

    def send(link, message, send=WriterLink.send):
        if not isinstance(message, StagedReport):  # so that the copy is never whole
            send(link, message)

    def work(rank):
        os.environ["GROUP_RANK"] = str(rank)
        with TensorCheckpointer(tmp_path / "run", OPTIONS, dist.group.WORLD) as checkpointer:
            checkpointer.prepare(**{key: parts(1, "rows-2")[key] for key in ("model", "optimizer")})
            monkeypatch.setattr(WriterLink, "send", send)
            assert checkpointer.save(1, **parts(1, "rows-2"), memory_only=True)
            dist.barrier()
            if rank == 0:
                (writer,) = children(os.getpid())
                os.kill(writer, signal.SIGKILL)
            checkpointer.wait()
            monkeypatch.undo()
            return checkpointer.outcomes()

    assert run_ranks(2, work, tmp_path / "ranks") == [[], []]


def part(
    step: int, node: int, nodes: int, committed: int | None = None, tensors="t", attempt="a", home=0
) -> LoadLeftoverSlot:
    manifest = SaveManifest(attempt, step, committed, tensors, node, nodes, {}, {}, "{}")
    return LoadLeftoverSlot("", home, manifest)


def test_the_newest_step_of_which_all_is_there_is_taken():
    def taken(left, storage, good=..., tensors="t"):
        return newest_whole(left, tensors, storage, storage if good is ... else good)

    both = [part(20, 0, 2, 10), part(20, 1, 2, 10)]
    torn = [*both, part(30, 0, 2, 10)]
    assert taken(torn, 10) == (20, both)
    assert taken([*torn, part(30, 1, 2, 10)], 10)[0] == 30
    assert taken(both, 20)[0] == 20, "storage has the same step"
    assert taken(both, 15) is None, "storage went on without this memory"
    assert taken(both, 30) is None
    assert taken(both, 10, tensors="other") is None
    assert taken(both, None) is None, "the checkpoints were deleted"
    assert taken([part(5, 0, 1)], None)[0] == 5, "the first was never committed"
    both_committed = [part(20, 0, 2, 20), part(20, 1, 2, 20)]
    assert taken(both_committed, 20) == (20, both_committed)
    assert taken(both_committed, 10) is None, "somebody has deleted it"
    assert taken([both[0], both_committed[1]], 10) is None
    older = [part(15, 0, 1, 10)]
    assert taken(older, 10)[0] == 15
    assert taken([*older, both_committed[1]], 10) is None, "a node knows of a step after it"
    assert taken(both, 10, good=5)[0] == 20, "that it went on from was found damaged"
    assert taken(both, 30, good=25) is None
    stale = part(20, 0, 2, 10, attempt="before")
    assert taken([*both, stale], 10) == (20, both), "never of two attempts"
    assert taken([stale, both[1]], 10) is None


def test_of_a_part_and_its_copy_the_one_where_its_ranks_are_is_taken():
    on_both = [part(20, node, 2, home=home) for home in (0, 1) for node in (0, 1)]
    here = [part(20, 0, 2, home=0), part(20, 1, 2, home=1)]
    for left in on_both, on_both[::-1]:
        assert newest_whole(left, "t", 20, 20) == (20, here)
