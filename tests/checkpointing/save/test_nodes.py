"""Eight ranks as four nodes on one machine: who writes what, when, and with whose help."""

import json
import os
import signal
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Listener
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from benchmarks.support.trace import at_once, read_trace, writes
from checkpointing import CheckpointOptions, SaveFailed, StorageError, TensorCheckpointer
from checkpointing.save import peers
from checkpointing.save.channel import welcome
from checkpointing.save.messages import SlotInUse
from checkpointing.save.peers import SavePuller, serve_pulls
from checkpointing.storage.posix_storage import NewPosixStep, PosixWriter
from tests.checkpointing.faults import FOLDER
from tests.checkpointing.stored import digests
from tests.checkpointing.worlds import run_ranks, save_now, whole_state
from tests.distributed.jobs import soak

RANKS, PER_NODE, WRITERS = 8, 2, 2
OPTIONS = CheckpointOptions(
    max_writers=WRITERS, max_shard_size=500_000, max_bandwidth="12 MB", trace=True, keep=0
)
"""Slow enough for writers to meet if they may."""
MESHES = {
    "FULL_SHARD": ((8,), (Shard(0),)),
    "HSDP": ((4, 2), (Replicate(), Shard(0))),
    "replicated": None,
}
METADATA = {"create", "ftruncate", "posix_fallocate", "mkdir", "rename", "replace", "unlink"}


def whole(step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """About 8 MB: a file for each large tensor, of a number of rows that nothing divides."""
    model, optimizer = whole_state(seed=step)
    for number in range(13):
        values = torch.arange(77 * 1001, dtype=torch.float32).reshape(77, 1001)
        model[f"layers.{number}.large"] = values * step + number
        optimizer[f"layers.{number}.large.exp_avg"] = values * step - number
    return model, optimizer


def parts(step: int, strategy: str) -> dict:
    """What a rank saves."""
    mesh, placements = MESHES[strategy] or (None, None)
    device_mesh = init_device_mesh("cpu", mesh) if mesh else None

    def place(tensor: Tensor) -> Tensor:
        if device_mesh is None or tensor.ndim == 0:
            return tensor
        return distribute_tensor(tensor, device_mesh, placements, src_data_rank=None)

    model, optimizer = (
        {name: place(tensor) for name, tensor in part.items()} for part in whole(step)
    )
    return {"model": model, "optimizer": optimizer, "state": {"step": step}, "files": {}}


def live_on_node(rank: int, run: Path) -> None:
    """Ranks with the same GROUP_RANK are a node; each node's writer logs what it asks of the
    system."""
    os.environ["GROUP_RANK"] = str(rank // PER_NODE)
    log = str(run.parent / f"calls-{rank // PER_NODE}")
    os.environ["WRITER_FAULTS"] = json.dumps({"root": f"{run}/", "log": log})


def collectives() -> int:
    """How many there were on all groups of this process, as gloo itself counts them."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


@pytest.fixture(scope="session")
def by_one_rank(tmp_path_factory):
    """Steps 1 and 3 as one process saves them."""
    folder = tmp_path_factory.mktemp("one")

    def work(rank):
        with TensorCheckpointer(folder / "run", OPTIONS, dist.group.WORLD) as checkpointer:
            return {
                step: digests(save_now(checkpointer, step, **parts(step, "replicated")))
                for step in (1, 3)
            }

    (saved,) = run_ranks(1, work, folder / "ranks")
    return saved


@pytest.mark.parametrize(
    "strategy", [pytest.param(one, marks=[soak] * (one != "FULL_SHARD")) for one in MESHES]
)
def test_two_writers_at_a_time_one_for_each_file_and_no_collective(
    strategy, by_one_rank, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(FOLDER))
    run = tmp_path / "run"

    def work(rank):
        live_on_node(rank, run)
        step = parts(1, strategy)
        with TensorCheckpointer(run, OPTIONS, dist.group.WORLD) as checkpointer:
            checkpointer.prepare(model=step["model"], optimizer=step["optimizer"])
            before = collectives()
            save_now(checkpointer, 1, **step)
            return before, collectives() - before

    for before, during in run_ranks(RANKS, work, tmp_path / "ranks"):
        assert before > 0, "they are counted"
        assert during == 0
    assert digests(run / "step-00000001") == by_one_rank[1]

    spans = read_trace(run / "trace.jsonl", 1)
    written = writes(spans)
    assert max(count for _, count in at_once(written)) == WRITERS
    owners = {(span.file, span.node) for span in written}
    assert len(owners) == len({file for file, _ in owners}) > 20, "each file has one node"
    assert {node for _, node in owners} == {0, 1, 2, 3}
    first, *between, last = spans
    assert (first.kind, last.kind) == ("begin", "commit")
    assert {span.kind for span in between} == {"write"}
    assert between[0].start >= first.stop
    assert last.start >= max(span.stop for span in written)

    # Creating, sizing, renaming, deleting: one process alone asks it of the file system.
    calls = {
        node: {
            call
            for label, call, path, _ in map(
                json.loads, (tmp_path / f"calls-{node}").read_text().splitlines()
            )
            if path.startswith(str(run)) and not path.endswith("trace.jsonl")
        }
        for node in range(RANKS // PER_NODE)
    }
    assert {"create", "mkdir", "rename"} <= calls[0]
    for node in (1, 2, 3):
        assert {"open", "pwrite", "fsync"} <= calls[node]
        assert not calls[node] & METADATA


def children_of_this() -> list[int]:
    """Processes that this one has started: its node's writer, and a spare one."""
    found = list[int]()
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, children.read_text().split())
    return found


def kill_processes(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_node_whose_writer_is_killed_fails_that_save_alone(by_one_rank, tmp_path):
    run, victim = tmp_path / "run", 2

    def work(rank):
        os.environ["GROUP_RANK"] = str(rank // PER_NODE)
        step = parts(3, "FULL_SHARD")
        tensors = (*step["model"].values(), *step["optimizer"].values())
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        slow = replace(OPTIONS, max_bandwidth=nbytes)  # a second for each save, to be killed in
        with TensorCheckpointer(run, slow, dist.group.WORLD) as checkpointer:
            save_now(checkpointer, 1, **step)
            dist.barrier()
            assert checkpointer.save(2, **step)
            dist.barrier()  # else the writer may die before all have asked
            if rank == victim * PER_NODE:
                kill_processes(children_of_this())
            with pytest.raises(SaveFailed) as failed:
                checkpointer.wait()
            checkpointer.outcomes()
            left = sorted(path.name for path in run.glob("step-*[0-9]"))
            dist.barrier()
            save_now(checkpointer, 3, **step)
            return str(failed.value), left

    results = run_ranks(RANKS, work, tmp_path / "ranks")
    for rank, result in enumerate(results):
        assert not isinstance(result, BaseException), result
        message, left = result
        assert message.startswith("saving step 2 failed")
        if rank // PER_NODE == victim:
            assert "the checkpoint writer process of this node died" in message
        else:  # whichever is noticed first
            assert (
                "on node 2: its writer process is gone" in message
                or "node 2 does not send its part of" in message
            )
        assert "step-00000002" not in left
        assert "step-00000001" in left
    assert digests(run / "step-00000003") == by_one_rank[3]
    assert not list(run.glob("step-00000002*"))
    assert max(count for _, count in at_once(writes(read_trace(run / "trace.jsonl", 3)))) == WRITERS


def test_writers_of_two_nodes_are_lost_one_after_the_other(tmp_path):
    """Rank 1 has asked, rank 0 has not. Had the loss of the first writer been rank 1's answer, it
    would wait for rank 0 in its next collective, and rank 0 for the writer that rank 1 does not
    know to be lost."""
    run = tmp_path / "run"

    def work(rank):
        os.environ["GROUP_RANK"] = str(rank)
        step = parts(2, "replicated")
        with TensorCheckpointer(run, CheckpointOptions(), dist.group.WORLD) as checkpointer:
            save_now(checkpointer, 1, **step)
            writers = [None, None]
            dist.all_gather_object(writers, children_of_this())
            began = time.monotonic()
            if rank == 0:
                time.sleep(0.2)
                kill_processes(writers[0])
                time.sleep(0.1)
                kill_processes(writers[1])
            checkpointer.save(2, **step)
            dist.barrier()
            seconds = time.monotonic() - began
            try:
                checkpointer.wait()
            except SaveFailed:  # a writer was lost after rank 1 had requested the save
                save_now(checkpointer, 3, **step)
                return seconds, 3
            return seconds, 2

    (first, saved), (second, also_saved) = run_ranks(2, work, tmp_path / "ranks")
    assert max(first, second) < 15
    assert saved == also_saved
    assert (run / f"step-0000000{saved}").is_dir()


@pytest.mark.parametrize("bundle", [1, 5, 100])
def test_bytes_of_another_save_are_not_sent(bundle, monkeypatch):
    """A writer that was started again in the middle of a save has its ranks' slot, but not what
    that save is to hold. Who asks for it goes on with others, and who has taken only a part of what
    it asked for never meets the rest."""
    monkeypatch.setattr(peers, "BUNDLE_BYTES", bundle)
    secret, mine = b"secret", (7, 1)
    listener = Listener(("127.0.0.1", 0))

    def slot(number, key):
        if key not in (None, mine):
            raise EOFError
        return SimpleNamespace(maps={"file": b"abcdefgh"})

    def serve():
        for _ in range(3):
            with listener.accept() as connection, suppress(EOFError, OSError):
                channel, who = welcome(connection, secret, 5)
                assert who.kind == "pull"
                serve_pulls(channel, slot, "")

    server = threading.Thread(target=serve)
    server.start()
    pull = SavePuller([listener.address], secret)
    with closing(pull(0, SlotInUse(0, mine), "file", [(2, 3), (3, 4)])) as coming:
        assert next(coming) == b"c"
    ranges = [(0, 2), (4, 7), (7, 7), (1, 2)]
    assert list(pull(0, SlotInUse(0, mine), "file", ranges)) == [b"ab", b"efg", b"", b"b"]
    with pytest.raises(StorageError, match="node 0 does not send its part of file"):
        list(pull(0, SlotInUse(0, (7, 2)), "file", [(0, 2)]))
    server.join(5)
    assert not server.is_alive()
    listener.close()


def test_a_save_that_is_tried_again_gets_a_new_place(tmp_path):
    final = tmp_path / "step-00000001"
    assert NewPosixStep.of(final).tmp != NewPosixStep.of(final).tmp


def test_a_file_that_cannot_be_opened_again_is_closed_once(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    writer = PosixWriter(tmp_path, "file", 0)

    def vanished(*_):
        raise FileNotFoundError

    monkeypatch.setattr(writer, "_again", vanished)
    with pytest.raises(FileNotFoundError), writer:
        writer._buffered()
