"""Processes that are killed: a fresh start finds the newest committed step, whole, and nothing of
the dead stays. `SOAK=1` kills at every point and at many more random moments."""

import json
import os
import random
import re
import shutil
import signal
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from checkpointing import CheckpointOptions, SaveFailed, TensorCheckpointer, newest_checkpoint
from checkpointing.format.layout import COMMIT_RECORD
from checkpointing.load.memory import TOKEN
from checkpointing.save import staging
from checkpointing.save.link import WriterLink
from checkpointing.save.messages import SaveRequest, StagedReport
from checkpointing.storage.posix import LOCK_FILE
from checkpointing.tools.inspect import verify
from tests.checkpointing.faults import (
    Job,
    load,
    memory_of,
    names,
    parts,
    plant,
    until,
)
from tests.checkpointing.worlds import save_now
from tests.distributed.jobs import soak

SOAK = bool(os.environ.get("SOAK"))
OPTIONS = CheckpointOptions(keep=1)


def log_of(path: Path) -> list[list[str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- at every system call of the writer ----------------------------------------------------------


@pytest.fixture(scope="session")
def before(tmp_path_factory):
    """A run with step 1."""
    run = tmp_path_factory.mktemp("before") / "run"
    with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
        save_now(checkpointer, 1, **parts(1))
    return run


@pytest.fixture(scope="session")
def points(before, tmp_path_factory):
    """Everything that a writer asks of the system from its start to its end, when step 2 replaces
    step 1: (label, how manieth of that label)."""
    folder = tmp_path_factory.mktemp("points")
    shutil.copytree(before, folder / "run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch, root=str(folder / "run"), log=str(folder / "log"))
        with TensorCheckpointer(folder / "run", OPTIONS, None) as checkpointer:
            save_now(checkpointer, 2, **parts(2))
    labels = [label for label, *_ in log_of(folder / "log")]
    return [(label, labels[: place + 1].count(label)) for place, label in enumerate(labels)]


@pytest.mark.timeout(1800)  # hundreds of kills, one after the other
@pytest.mark.parametrize("who", [pytest.param("writer", marks=soak), "all"])
def test_killed_at_any_system_call_of_the_writer(who, before, points, tmp_path, monkeypatch):
    assert len(points) > 100
    chosen = points if SOAK else points[who == "all" :: len(points) // 5]
    found = Counter()
    for number, point in enumerate(chosen):
        folder = tmp_path / str(number)
        run, once = folder / "run", folder / "killed"
        shutil.copytree(before, run)
        with monkeypatch.context() as patch:
            plant(patch, root=str(run), kill=point, who=who, once=str(once))
            pid = os.fork()
            if pid == 0:
                os._exit(_save_some(run))
            status = os.waitpid(pid, 0)[1]
        if not once.exists():  # threads do not meet alike each time
            found["missed"] += 1
            continue
        assert not verify(run).problems, point
        newest = int(newest_checkpoint(run).name[5:])
        if who == "writer":  # its rank went on to step 4
            assert os.WIFEXITED(status), point
            assert os.WEXITSTATUS(status) <= 1, f"{point}: more than one save was lost"
            assert newest == 4, point
        else:
            assert os.WIFSIGNALED(status), point
        with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
            step = load(checkpointer)
            from_memory = checkpointer.newer_than_storage
            assert step == newest or (from_memory and step == newest + 1), point
            found[f"step {step}" + " from memory" * from_memory] += 1
            save_now(checkpointer, 5, **parts(5))
        assert names(run) == ["latest", "step-00000005"], point
        assert not memory_of(run), point
        shutil.rmtree(folder)
    assert found["missed"] <= len(chosen) // 4
    if who == "writer":
        assert "step 4" in found
    else:  # of few points, some lie before a commit and some after it
        assert len(found.keys() - {"missed"}) > 1, found
        assert not SOAK or {"step 1", "step 2"} <= found.keys(), found


def _save_some(run: Path) -> int:
    """How many saves failed; 9 if anything else went wrong. The last one is tried again: on a busy
    machine a writer deletes an old step, where it is killed, as late as that."""
    failed = 0
    try:
        with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
            for step in (2, 3, 4):
                try:
                    save_now(checkpointer, step, **parts(step))
                except SaveFailed:
                    failed += 1
                    if step == 4:
                        save_now(checkpointer, step, **parts(step))
        return failed
    except BaseException:
        traceback.print_exc()
        return 9


def test_bytes_reach_the_disk_before_the_names_that_lead_to_them(tmp_path, monkeypatch):
    """After a power cut a name may be there without what was not synced before it."""
    plant(monkeypatch, root=str(tmp_path), log=str(tmp_path / "log"))
    run = tmp_path / "new" / "run"
    with TensorCheckpointer(run, CheckpointOptions(max_shard_size=700), None) as checkpointer:
        for step in (1, 2):
            save_now(checkpointer, step, **parts(step))
    unsynced: set[str] = set()
    order: list[str] = []
    for _, call, path, target in log_of(tmp_path / "log"):
        if not path.startswith(str(tmp_path)):  # memory
            continue
        if Path(path).name.startswith(
            (".writer-", TOKEN, LOCK_FILE)
        ):  # a power cut may take them away
            continue
        parent = str(Path(path).parent)
        if call == "create":
            if Path(path).name == COMMIT_RECORD:
                assert not any(
                    name.startswith(f"{parent}/") for name in unsynced - {f"{parent}/optimizer"}
                ), unsynced
            unsynced |= {path, parent}
        elif call in ("pwrite", "ftruncate", "posix_fallocate"):
            unsynced.add(path)
        elif call in ("mkdir", "unlink", "rmdir"):
            unsynced.add(parent)
        elif call == "fsync":
            unsynced.discard(path)
        elif call in ("rename", "replace"):
            left = {name for name in unsynced if f"{name}/".startswith(f"{path}/")}
            assert not left, f"{path} gets its name before these are on the disk: {left}"
            order.append(Path(target).name)
            unsynced |= {parent, str(Path(target).parent)}
            if Path(target).name == "latest":
                assert unsynced <= {str(run)}, "latest names what may be gone"
    assert order == ["step-00000001", "latest", "step-00000002", "latest"]
    assert not unsynced


# --- at every moment of a rank -------------------------------------------------------------------


ALL_COPIED = (2, 0)
"""The place behind the last of two files."""
MOMENTS = {
    "before it asks": (False, SaveRequest),
    "after it has asked": (True, SaveRequest),
    "before the first part is copied": (False, StagedReport),
    "in the middle of copying": (True, StagedReport),
    "before it says that all is copied": (False, StagedReport, ALL_COPIED),
    "after all is copied": (True, StagedReport, ALL_COPIED),
}
"""Around what a rank tells its writer, and whether after it."""


def die_around(after: bool, kind: type, position: tuple[int, int] | None = None) -> None:
    """From now on, SIGKILL to this process when it tells its writer this."""
    send = WriterLink.send

    def watched(self, message):
        due = isinstance(message, kind) and position in (None, getattr(message, "position", None))
        if after or not due:
            send(self, message)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)

    WriterLink.send = watched


WORLDS = [(nodes, victim) for nodes in (1, 2) for victim in (0, 1)]


@pytest.mark.parametrize(("nodes", "victim"), WORLDS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_killed_at_any_moment_of_a_save(moment, nodes, victim, tmp_path, monkeypatch):
    """A node loses a rank, or the world a node, and is killed then, as torchrun does."""
    if nodes == 2 and not SOAK and moment != "after it has asked":
        pytest.skip("with SOAK=1 only: the random kills below meet it too")
    run, strategy = tmp_path / "run", "rows-2"
    monkeypatch.setattr(staging, "PORTION_BYTES", 300)
    monkeypatch.setattr(staging, "REPORT_BYTES", 300)

    def work(rank):
        os.environ["GROUP_RANK"] = str(rank * (nodes - 1))
        with TensorCheckpointer(run, OPTIONS, dist.group.WORLD) as checkpointer:
            save_now(checkpointer, 1, **parts(1, strategy))
            what = parts(2, strategy)
            dist.barrier()
            if rank == victim:
                die_around(*MOMENTS[moment])
            checkpointer.save(2, **what)
            with suppress(SaveFailed):
                checkpointer.wait()
            if rank == victim:
                signal.pause()
            return checkpointer.outcomes()[-1].error

    with Job(2, work, tmp_path / "ranks") as job:
        dead, survivor = job.ranks[victim], job.ranks[1 - victim]
        assert until(lambda: dead not in job.running(), 20)
        knows = (nodes, victim) == (1, 1)  # the writer lives
        answered = until(lambda: survivor not in job.running(), 20 if knows else 1)
        assert answered or not knows
        if answered:
            error = job.result(1 - victim)
            assert error is None or "step 2" in error
    assert not verify(run).problems
    newest = int(newest_checkpoint(run).name[5:])
    with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
        step = load(checkpointer)
        assert step == newest or (checkpointer.newer_than_storage and step == newest + 1)
        save_now(checkpointer, 3, **parts(3))
    assert names(run) == ["latest", "step-00000003"]
    assert not memory_of(run)


def test_who_comes_back_from_the_dead_commits_nothing(tmp_path, capfd):
    """A run that was frozen or cut off while another went on from its checkpoints."""
    run = tmp_path / "run"
    with TensorCheckpointer(run, OPTIONS, None) as frozen:
        save_now(frozen, 1, **parts(1))
        with TensorCheckpointer(run, OPTIONS, None) as other:
            assert load(other) == 1
            save_now(other, 2, **parts(2))
            told = r"taken over from a process that lives, .* \(\S+ saves there since 20.*\)"
            assert len(re.findall(told, capfd.readouterr().err)) == 1
            frozen.save(3, **parts(3))
            with pytest.raises(SaveFailed, match="another process has taken over this run"):
                frozen.wait()
            save_now(other, 4, **parts(4))
        frozen.save(5, **parts(5))
        with pytest.raises(SaveFailed, match="another process has taken over this run"):
            frozen.wait()
        assert until(lambda: names(run) == ["latest", "step-00000004"], 5)
        assert (run / "latest").read_text() == "step-00000004\n"


# --- at random moments ---------------------------------------------------------------------------

BULK = (1 << 24) + 1000
"""Bytes of one tensor more: more than a block."""
STRATEGIES = {1: "replicated", 2: "rows-2"}


def train(run: Path, nodes: int, world_size: int, slots: int, loaded: Path) -> None:
    """A rank that goes on from where the run is, for ever."""
    rank, strategy = dist.get_rank(), STRATEGIES[world_size]
    os.environ["GROUP_RANK"] = str(rank * (nodes - 1))
    options = CheckpointOptions(keep=2, slots=slots, max_shard_size=9_000_000)
    with TensorCheckpointer(run, options, dist.group.WORLD) as checkpointer:
        step = load(checkpointer, strategy, BULK) or 0
        if rank == 0:
            loaded.with_suffix(".part").write_text(f"{step} {checkpointer.newer_than_storage}")
            loaded.with_suffix(".part").rename(loaded)
        while True:
            step += 1
            dist.barrier()  # ranks are in step, as gradients keep them
            checkpointer.save(step, **parts(step, strategy, BULK))
            checkpointer.wait_staged()
            checkpointer.outcomes()


def committed(run: Path) -> int:
    newest = newest_checkpoint(run)
    return int(newest.name[5:]) if newest else 0


@soak
@pytest.mark.parametrize("seed", range(20) if SOAK else [3])
def test_killed_at_random_moments(seed, tmp_path):
    """One run through a dozen lives (fewer in the test command), in changing worlds."""
    draw = random.Random(seed)
    run = tmp_path / "run"
    for life in range(12 if SOAK else 5):
        nodes, world_size = draw.choice([(1, 1), (1, 2), (2, 2)])
        victim = draw.choice(["all", "rank 0", "last rank", "writer"])
        newest, loaded = committed(run), tmp_path / f"loaded-{life}"
        slots = draw.choice([1, 2])
        story = f"life {life} of seed {seed}: {nodes} nodes, {world_size} ranks, {victim}"

        def work(rank, arguments=(nodes, world_size, slots, loaded)):
            train(run, *arguments)

        with Job(world_size, work, tmp_path / "ranks") as job:
            if life % 4:  # else killed while it starts
                assert until(loaded.exists, 20), story
            if victim == "writer":
                assert until(lambda then=newest: committed(run) > then, 20), story
            time.sleep(draw.uniform(0, 1.0))
            before = committed(run)
            if victim == "all":
                job.kill([*job.writers(), *job.ranks])
            elif victim == "writer":  # that costs one save; training goes on
                job.kill([draw.choice(job.writers())])
                assert until(lambda then=before: committed(run) > then + 1, 20), story
            else:
                job.kill([job.ranks[0 if victim == "rank 0" else -1]])
                time.sleep(draw.uniform(0, 0.1))
        wrong = [job.result(rank) for rank in range(world_size)]
        assert not any(isinstance(error, AssertionError) for error in wrong), f"{story}: {wrong}"
        if loaded.exists():
            step, from_memory = loaded.read_text().split()
            assert int(step) > newest if from_memory == "True" else int(step) == newest, story
        problems = verify(run).problems if committed(run) else []
        assert not problems, f"{story}: {problems}"
        assert committed(run) >= before, story
    with TensorCheckpointer(run, OPTIONS, None) as checkpointer:
        step = load(checkpointer, bulk=BULK) or 0
        save_now(checkpointer, step + 1, **parts(step + 1, bulk=BULK))
    assert names(run) == ["latest", f"step-{step + 1:08}"]
    assert not memory_of(run)
