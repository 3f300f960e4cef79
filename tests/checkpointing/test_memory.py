"""What a killed run left in memory is where the next one starts from, in any world."""

import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from checkpointing import Checkpointer, CheckpointOptions
from checkpointing import checkpointer as checkpointer_module
from checkpointing.link import Link
from checkpointing.memory import Left, make_token, newest_whole
from checkpointing.slots import Manifest, dead_folders, forget, living_folders, read_manifest
from tests.checkpointing.faults import children, until
from tests.checkpointing.worlds import local, run_ranks, same_bits, save_now, spread, whole_state

OPTIONS = CheckpointOptions(max_shard_size=700)
SLOW = CheckpointOptions(max_shard_size=700, max_bandwidth=1000)
"""A save of the test's state takes some seconds: it is in memory long before it is committed."""


def parts(step: int, strategy: str) -> dict:
    model, optimizer = (spread(part, strategy) for part in whole_state(seed=step))
    return {"model": model, "optimizer": optimizer, "state": {"step": step}, "files": {}}


def in_memory(run: Path) -> list[int]:
    """The steps in the slots of the living."""
    paths = (path for folder in living_folders(str(run)) for path in folder.glob("*-?.json"))
    return [manifest.step for path in paths if (manifest := read_manifest(path))]


def leave(run: Path, ranks: Path, nodes: int = 1, *, peer_copy: bool = False) -> None:
    """Two ranks commit step 1, have step 2 in memory, and are killed."""

    def work(rank):
        if nodes > 1:
            os.environ["GROUP_RANK"] = str(rank % nodes)
        with Checkpointer(run, OPTIONS, dist.group.WORLD) as checkpointer:
            save_now(checkpointer, 1, **parts(1, "rows-2"))
        slow = replace(SLOW, peer_copy=peer_copy)
        with Checkpointer(run, slow, dist.group.WORLD) as checkpointer:
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
    while len(folders := dead_folders(str(run))) < nodes and time.monotonic() < deadline:
        time.sleep(0.01)
    return folders


def load(run: Path, ranks: Path, strategy: str, world_size: int) -> list[tuple[int, bool]]:
    """Step and whether it came from memory; it must be that step's state to the bit."""

    def work(rank):
        targets = [
            spread({name: torch.zeros_like(t) for name, t in part.items()}, strategy)
            for part in whole_state()
        ]
        with Checkpointer(run, OPTIONS, dist.group.WORLD) as checkpointer:
            step = checkpointer.load(model=targets[0], optimizer=targets[1])["step"]
            newer = checkpointer.newer_than_storage
        for target, wanted in zip(targets, whole_state(seed=step), strict=True):
            right = spread(wanted, strategy)
            assert all(same_bits(local(target[name]), local(right[name])) for name in right)
        return step, newer

    return run_ranks(world_size, work, ranks)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    ("strategy", "world_size"), [("rows-2", 2), ("rows-3", 3), ("replicated", 1)]
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
        with Checkpointer(run, SLOW, dist.group.WORLD) as checkpointer:
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
    manifest = read_manifest(folder / "slot-0.json") or read_manifest(folder / "slot-1.json")
    file, ranges = next(iter(manifest.ranges.items()))
    (path,) = [
        p for p in folder.glob(f"slot-?/{file}") if read_manifest(p.parents[0].with_suffix(".json"))
    ]
    data = bytearray(path.read_bytes())
    data[ranges[0][0]] ^= 1
    path.write_bytes(data)
    assert load(run, ranks, "rows-2", 2) == [(1, False)] * 2

    # Somebody has deleted the run meanwhile, and begins anew.
    leave(tmp_path / "again", ranks)
    shutil.rmtree(tmp_path / "again")
    with Checkpointer(tmp_path / "again", OPTIONS, None) as checkpointer:
        model, optimizer = whole_state()
        assert checkpointer.load(model=model, optimizer=optimizer) is None


def test_memory_of_a_removed_run_without_a_checkpoint_is_not_used(tmp_path):
    run = tmp_path / "run"

    def work(rank):
        with Checkpointer(run, OPTIONS, None) as checkpointer:
            checkpointer.save(2, **parts(2, "replicated"), memory_only=True)
            deadline = time.monotonic() + 10
            while not in_memory(run) and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def found() -> dict | None:
        model, optimizer = whole_state()
        with Checkpointer(run, OPTIONS, None) as checkpointer:
            return checkpointer.load(model=model, optimizer=optimizer)

    assert run_ranks(1, work, tmp_path / "ranks") == [None]
    assert found() == {"step": 2}
    shutil.rmtree(run)
    assert found() is None
    run.mkdir()
    make_token(run)
    assert found() is None


def test_a_lost_node_is_replaced_by_the_copy_on_its_neighbour(tmp_path):
    leave(tmp_path / "run", tmp_path / "ranks", nodes=2, peer_copy=True)
    lost, _ = left_behind(tmp_path / "run", 2)
    forget(lost)
    assert load(tmp_path / "run", tmp_path / "ranks", "replicated", 1) == [(2, True)]


def test_a_copy_in_memory_ends_with_the_coordinator(tmp_path, monkeypatch):
    """Also for the ranks of other nodes, whose writer is told nothing any more."""

    def send(link, message, send=Link.send):
        if message[0] != "staged":  # so that the copy is never whole
            send(link, message)

    def work(rank):
        os.environ["GROUP_RANK"] = str(rank)
        with Checkpointer(tmp_path / "run", OPTIONS, dist.group.WORLD) as checkpointer:
            checkpointer.prepare(**{key: parts(1, "rows-2")[key] for key in ("model", "optimizer")})
            monkeypatch.setattr(Link, "send", send)
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
    step: int, node: int, nodes: int, previous: int | None = None, tensors="t", attempt="a"
) -> Left:
    return Left("", 0, Manifest("run", attempt, step, previous, tensors, node, nodes, {}, {}, "{}"))


def test_the_newest_step_of_which_all_is_there_is_taken():
    both = [part(20, 0, 2, 10), part(20, 1, 2, 10)]
    torn = [*both, part(30, 0, 2, 10)]
    assert newest_whole(torn, "run", "t", 10) == (20, both)
    assert newest_whole([*torn, part(30, 1, 2, 10)], "run", "t", 10)[0] == 30
    assert newest_whole(both, "run", "t", 20)[0] == 20, "storage has the same step"
    assert newest_whole(both, "run", "t", 15) is None, "storage went on without this memory"
    assert newest_whole(both, "run", "t", 30) is None
    assert newest_whole(both, "run", "other", 10) is None
    assert newest_whole(both, "run", "t", None) is None, "the checkpoints were deleted"
    assert newest_whole([part(5, 0, 1)], "run", "t", None)[0] == 5, "the first was never committed"
    assert newest_whole(both, "another", "t", 10) is None, "this memory is of another run"
    stale = part(20, 0, 2, 10, attempt="before")
    assert newest_whole([*both, stale], "run", "t", 10) == (20, both), "never of two attempts"
    assert newest_whole([stale, both[1]], "run", "t", 10) is None
