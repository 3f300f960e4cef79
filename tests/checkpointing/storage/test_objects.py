"""Checkpoints in an object store: a real S3 server process, behind a proxy that can fail."""

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from checkpointing import CheckpointOptions, TensorCheckpointer
from checkpointing.errors import SaveFailed, StorageError
from checkpointing.format.layout import (
    BLOCK_BYTES,
    MODEL,
    OPTIMIZER,
    TRAINER_STATE,
    CommitRecord,
    FileRecord,
    TensorFile,
    TensorMeta,
    block_checksums,
    index_json,
    json_bytes,
    lay_out,
)
from checkpointing.save.commit import hold
from checkpointing.storage.object_storage import NewObjectStep, ObjectStorage, store_of
from checkpointing.storage.place import ObjectPath, location
from checkpointing.storage.steps import (
    list_steps,
    newest_checkpoint,
    open_step,
    read_state,
    stored_tensors,
)
from checkpointing.tools import inspect
from tests.checkpointing.worlds import local, run_ranks, same_bits, spread, whole_state
from tests.distributed.jobs import soak
from tests.s3 import Handler, Proxy

STORAGE = ObjectStorage()

_folders = count()


@pytest.fixture
def directory(store: Proxy) -> ObjectPath:
    """A directory of checkpoints that is not there yet."""
    return location(f"s3://bucket/run-{next(_folders)}/checkpoints")


# --- one checkpoint ------------------------------------------------------------------------------


def tensor_files(width: int) -> list[TensorFile]:
    """Two of the model, of which one holds `width` bytes, and one of the optimizer."""
    metas = {"wide": TensorMeta("U8", (width,)), "narrow": TensorMeta("F32", (3,))}
    return [*lay_out(MODEL, metas, 4), *lay_out(OPTIMIZER, {"momentum": metas["narrow"]}, 4)]


SMALL = tensor_files(1000)
LARGE = tensor_files(BLOCK_BYTES + 5_000_000)
"""With a file of two parts."""


def image(file: TensorFile, seed: int) -> bytes:
    """The bytes of a tensor file."""
    return file.header + bytes([seed]) * (file.size - len(file.header))


def write(target: NewObjectStep, file: TensorFile, seed: int) -> None:
    """What a writer does with one file."""
    data = memoryview(image(file, seed))
    with target.writer(file.name, file.size) as out:
        for start in range(0, file.size, BLOCK_BYTES):
            block = bytearray(data[start : start + BLOCK_BYTES])
            out.write(memoryview(block), start)
            block[:] = bytes(len(block))  # the writer may use its memory again
        out.finish()


def commit(
    target: NewObjectStep, seed: int, step: int, files: Sequence[TensorFile] = SMALL
) -> None:
    """What the coordinator does at the end."""
    count = sum(file.name.startswith("model") for file in files)
    small = {
        TRAINER_STATE: json_bytes({"step": step, "seed": seed}),
        MODEL.index: index_json(files[:count]),
        OPTIMIZER.index: index_json(files[count:]),
    }
    contents = {file.name: image(file, seed) for file in files} | small
    records = {
        name: FileRecord(len(data), block_checksums(data)) for name, data in contents.items()
    }
    target.commit(files, small, CommitRecord(step, records).encode())


def begin(directory: ObjectPath, step: int, files: Sequence[TensorFile] = SMALL) -> NewObjectStep:
    """A target that has begun."""
    place = directory / f"step-{step:08}"
    target = NewObjectStep.of(place)
    target.begin(files)
    return target


def save(directory: ObjectPath, step: int, files: Sequence[TensorFile] = SMALL) -> ObjectPath:
    """A committed step."""
    target = begin(directory, step, files)
    for file in files:
        write(target, file, 1)
    commit(target, 1, step, files)
    return target.final


def fork(work: Callable[[], Any]) -> int:
    """Process id of a child that does some work and ends; 0 exits well."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def objects_below(directory: ObjectPath) -> list[str]:
    """Names of all objects, and of all uploads under way."""
    store = store_of(directory)
    return [*store.walk(directory), *(upload.path.name for upload in store.uploads(directory))]


# --- tests ---------------------------------------------------------------------------------------


def test_a_request_whose_client_dies_stores_nothing(directory, store):
    """As in S3, and unlike the server behind the proxy."""
    place = directory / "half"
    head = f"PUT /{place.bucket}/{place.key} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf"
    with socket.create_connection(("127.0.0.1", store.server_port)) as client:
        client.sendall(head.encode())
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""
    assert store_of(directory).find(place) is None


@soak
def test_processes_write_and_all_readers_read(directory: ObjectPath) -> None:
    files = LARGE
    target = pickle.dumps(begin(directory, 7, files))
    children = [
        fork(lambda half=half: [write(pickle.loads(target), file, 3) for file in half])
        for half in (files[::2], files[1::2])
    ]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert list_steps(directory) == []  # all is there but the commit record
    commit(pickle.loads(target), 3, 7, files)

    step = newest_checkpoint(directory)
    assert list_steps(directory) == [step] == [directory / "step-00000007"]
    assert read_state(step) == {"step": 7, "seed": 3}
    assert STORAGE.read(directory / "latest") == b"step-00000007\n"
    model = stored_tensors(open_step(step), MODEL, verify=True)
    assert model["wide"].meta.shape == (BLOCK_BYTES + 5_000_000,)
    with STORAGE.open(step / files[0].name) as file:
        expected = image(files[0], 3)
        assert file.size == len(expected)
        buffers = [bytearray(size) for size in (7, 0, 17 << 20, 9 << 20)]  # longer than the file
        done = file.read_into([memoryview(buffer) for buffer in buffers], 90)
        assert b"".join(buffers)[:done] == expected[90:]
        assert file.read_into([memoryview(bytearray(1))], file.size) == 0
    verification = inspect.verify(str(directory))
    assert (verification.problems, verification.checked) == ([], [step])
    assert [row.problem for row in inspect.ls(str(directory.parent)).rows] == [None]
    assert "narrow" in str(inspect.show(str(directory)))


def test_one_of_two_coordinators_commits(directory: ObjectPath) -> None:
    first = begin(directory, 7)
    for file in SMALL:
        write(first, file, 1)
    second = pickle.loads(pickle.dumps(first))
    commit(first, 1, 7)
    store_of(first.final).write(first.marker, b"")  # as if both were between check and commit
    with pytest.raises(StorageError, match="taken over"):
        commit(second, 2, 7)
    second.abort()
    assert inspect.verify(str(directory)).problems == []
    assert read_state(directory / "step-00000007")["seed"] == 1
    with pytest.raises(StorageError, match="has just committed this step"):
        begin(directory, 7)


def test_a_killed_save_is_never_offered_and_is_collected(directory: ObjectPath) -> None:
    save(directory, 5)

    def die() -> None:
        target = begin(directory, 6)
        write(target, SMALL[0], 1)
        store_of(target.final).write(target.final / TRAINER_STATE, b"{}")
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.waitpid(fork(die), 0)[1] == signal.SIGKILL
    assert [path.name for path in list_steps(directory)] == ["step-00000005"]
    assert any("step-00000006" in name for name in objects_below(directory))
    STORAGE.collect(directory)
    assert {name.partition("/")[0] for name in objects_below(directory)} == {
        "step-00000005",
        "latest",
    }
    assert inspect.verify(str(directory)).problems == []


def test_who_is_taken_over_changes_nothing(directory: ObjectPath, tmp_path: Path) -> None:
    """A writer that was thought dead goes on while another run saves the same step."""

    def start() -> None:
        target = begin(directory, 7)
        write(target, SMALL[0], 1)
        (tmp_path / "target").write_bytes(pickle.dumps(target))

    assert os.waitpid(fork(start), 0)[1] == 0
    old = pickle.loads((tmp_path / "target").read_bytes())
    new = begin(directory, 7)
    for file in SMALL:
        write(new, file, 2)
    with pytest.raises(StorageError, match="its upload is gone"):
        write(old, SMALL[-1], 1)
    with pytest.raises(StorageError, match="taken over"):
        commit(old, 1, 7)
    old.abort()
    commit(new, 2, 7)
    assert inspect.verify(str(directory)).problems == []
    assert read_state(new.final)["seed"] == 2


def test_a_living_process_is_not_taken_over(directory: ObjectPath) -> None:
    target = begin(directory, 7)

    def intrude() -> None:
        with pytest.raises(StorageError, match="another process of this machine"):
            begin(directory, 7)
        STORAGE.collect(directory)

    assert os.waitpid(fork(intrude), 0)[1] == 0
    for file in SMALL:
        write(target, file, 1)
    commit(target, 1, 7)
    assert inspect.verify(str(directory)).problems == []


def test_who_claims_a_directory_removes_what_was_being_written(directory: ObjectPath) -> None:
    """Also of a process that lives, perhaps in another container: it commits nothing any more."""
    first = hold(directory, None)
    target = begin(directory, 7)
    write(target, SMALL[0], 1)

    def claim() -> None:
        second = hold(directory, None)
        assert objects_below(directory) == [second.name]

    assert os.waitpid(fork(claim), 0)[1] == 0
    with pytest.raises(StorageError, match="another process has taken over this run"):
        hold(directory, first)
    with pytest.raises(StorageError):
        write(target, SMALL[0], 1)


def test_abort_leaves_nothing(directory: ObjectPath) -> None:
    target = begin(directory, 7)
    write(target, SMALL[0], 1)
    target.abort()
    assert objects_below(directory) == []


def test_a_deletion_that_fails_is_finished_later(directory: ObjectPath, store: Proxy) -> None:
    save(directory, 5)
    step = save(directory, 6)
    store.fault = lambda method, path: (
        "403 AccessDenied" if method == "DELETE" and "safetensors" in path else None
    )
    with pytest.raises(StorageError, match="gives no access"):
        STORAGE.delete_step(step)
    deleted = [path for method, path in store.requests if method == "DELETE"]
    first = next(path for path in deleted if "step-00000006/" in path)
    assert first.endswith("step-00000006/index.json")
    store.fault = lambda method, path: None
    assert [path.name for path in list_steps(directory)] == ["step-00000005"]
    STORAGE.collect(directory)
    assert not any("step-00000006" in name for name in objects_below(directory))
    (problem,) = inspect.verify(str(directory)).problems  # retention never deletes the newest
    assert "names 'step-00000006', which is no checkpoint" in problem.message


@soak
@pytest.mark.parametrize("files", [SMALL, LARGE], ids=["small", "large"])
def test_what_passes_is_tried_again(
    directory: ObjectPath, store: Proxy, files: list[TensorFile]
) -> None:
    seen: dict[tuple[str, str], int] = {}

    def flaky(method: str, path: str) -> str | None:
        """Every second request fails, in turn in another way."""
        seen[method, path] = seen.get((method, path), 0) + 1
        if seen[method, path] % 2:
            return ["503 SlowDown", "500 InternalError", "reset", "cut"][len(seen) % 4]
        return None

    store.fault = flaky
    step = save(directory, 7, files)
    assert list_steps(directory) == [step]
    assert inspect.verify(str(directory)).problems == []


def test_a_lost_answer_is_no_conflict(directory: ObjectPath, store: Proxy) -> None:
    """The store does what is asked, but the answer does not come back."""
    original = Handler._answer
    lost: set[str] = set()

    def lose(
        self: Handler, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False
    ) -> None:
        if self.path not in lost and self.command in ("PUT", "POST") and "uploads" not in self.path:
            lost.add(self.path)
            self.close_connection = True
            return
        original(self, status, headers, body)

    def finished(method: str, path: str) -> str | None:
        return "404 NoSuchUpload" if method == "POST" and path in lost else None

    store.fault = finished
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handler, "_answer", lose)
        save(directory, 7)
    assert any("index.json" in path for path in lost)
    assert inspect.verify(str(directory)).problems == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("403 AccessDenied", "s3://bucket/.*gives no access .AccessDenied.; check AWS_ACCESS_KEY"),
        ("404 NoSuchBucket", "has no bucket 'bucket'; create it"),
    ],
)
def test_what_does_not_pass_is_not_tried_again(
    directory: ObjectPath, store: Proxy, fault: str, message: str
) -> None:
    store.fault = lambda method, path: fault
    for work in (list_steps, newest_checkpoint, STORAGE.collect):
        store.requests.clear()
        with pytest.raises(StorageError, match=message):
            work(directory)
        assert len(store.requests) == 1


def test_a_store_that_fails_is_not_empty(
    directory: ObjectPath, store: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(directory, 7)
    monkeypatch.setattr("checkpointing.storage.s3.ATTEMPTS", 3)
    store.fault = lambda method, path: "503 SlowDown"
    for work in (list_steps, newest_checkpoint, STORAGE.exists):
        store.requests.clear()
        with pytest.raises(StorageError, match=r"3 requests to .*(SlowDown|503)"):
            work(directory)
        assert len(store.requests) == 3


def test_other_stores_through_fsspec() -> None:
    directory = location("memory://bucket/run/checkpoints")
    assert list_steps(directory) == []
    step = save(directory, 5, LARGE)
    assert list_steps(directory) == [step]
    assert inspect.verify(str(directory)).problems == []
    aborted = begin(directory, 6)
    write(aborted, SMALL[0], 1)
    with aborted.writer(SMALL[1].name, SMALL[1].size) as out:
        out.write(memoryview(b"some"), 0)  # and given up
    aborted.abort()
    STORAGE.collect(directory)
    first = begin(directory, 6)
    for file in SMALL:
        write(first, file, 1)
    second = pickle.loads(pickle.dumps(first))
    commit(first, 1, 6)
    store_of(first.final).write(first.marker, b"")
    with pytest.raises(StorageError, match="taken over"):
        commit(second, 2, 6)
    assert inspect.verify(str(directory)).problems == []
    STORAGE.delete_step(first.final)
    STORAGE.delete_step(step)
    STORAGE.collect(directory)
    assert set(objects_below(directory)) <= {"latest", first.marker.name}


def test_a_file_of_too_many_parts_is_refused(directory: ObjectPath) -> None:
    files = lay_out(MODEL, {"huge": TensorMeta("U8", (10_000 * BLOCK_BYTES,))}, 1 << 40)
    with pytest.raises(StorageError, match=r"10001 parts .* checkpoint\.max_shard_size"):
        NewObjectStep.of(directory / "step-00000007").begin(files)


def test_imports_are_lazy(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
import checkpointing.options, checkpointing.storage.steps, checkpointing.storage.retention
from checkpointing.storage.steps import list_steps
from checkpointing.storage.place import location
assert list_steps(Path(sys.argv[1])) == [] and location("s3://bucket/x").name == "x"
assert not {"boto3", "botocore", "fsspec", "torch"} & set(sys.modules)
sys.modules["boto3"] = None
try:
    list_steps(location("s3://bucket/x"))
except Exception as error:
    print(error)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert text == "s3:// needs boto3, which is not installed: pip install 'perdure[s3]'\n"


@given(st.lists(st.sampled_from(["a", "b.c", "step-00000001"]), max_size=4), st.sampled_from("xy"))
def test_paths_are_as_pathlib_has_them(parts: list[str], name: str) -> None:
    ours, theirs = ObjectPath.of("s3://bucket/run"), PurePosixPath("/run")
    for part in parts:
        ours, theirs = ours / part, theirs / part
    for left, right in (
        (ours, theirs),
        (ours.parent, theirs.parent),
        (ours.with_name(name), theirs.with_name(name)),
        (ours / "a/b/", theirs / "a/b/"),
    ):
        assert str(left) == f"s3://bucket{right}".rstrip("/")
        assert left.name == right.name
        assert location(str(left)) == left == pickle.loads(pickle.dumps(left))


@soak
def test_the_engine_saves_and_loads(directory: ObjectPath, store: Proxy, tmp_path: Path) -> None:
    """Two ranks save, three load; a save that the store refuses costs nothing but itself."""
    options = CheckpointOptions(max_shard_size=1500, keep=2, trace=True)

    def saves(rank: int) -> list[str | None]:
        model, optimizer = (spread(part, "rows-2") for part in whole_state())
        with TensorCheckpointer(str(directory), options, dist.group.WORLD) as checkpointer:
            for step in (1, 2, 3):
                checkpointer.save(
                    step, model=model, optimizer=optimizer, state={"step": step}, files={}
                )
                checkpointer.wait()
            if rank == 0:
                Path(tmp_path / "refuse").touch()
            dist.barrier()
            checkpointer.save(4, model=model, optimizer=optimizer, state={"step": 4}, files={})
            with pytest.raises(SaveFailed, match="gives no access"):
                checkpointer.wait()
            return [outcome.path for outcome in checkpointer.outcomes()]

    def loads(rank: int) -> bool:
        whole = whole_state()
        parts = [spread(part, "rows-3") for part in whole]
        for part in parts:
            for tensor in part.values():
                local(tensor).zero_()
        with TensorCheckpointer(str(directory), options, dist.group.WORLD) as checkpointer:
            state = checkpointer.load(model=parts[0], optimizer=parts[1])
        expected = [spread(part, "rows-3") for part in whole]
        return state == {"step": 3} and all(
            same_bits(local(part[name]), local(tensor))
            for part, right in zip(parts, expected, strict=True)
            for name, tensor in right.items()
        )

    def fault(method: str, path: str) -> str | None:
        refused = "step-00000004" in path and "partNumber" in path
        return "403 AccessDenied" if refused and (tmp_path / "refuse").exists() else None

    store.fault = fault
    steps = [str(directory / f"step-{step:08}") for step in (1, 2, 3)]
    assert run_ranks(2, saves, tmp_path) == [[*steps, None]] * 2
    assert [path.name for path in list_steps(directory)] == ["step-00000003", "step-00000002"]
    assert not any("step-00000004" in name for name in objects_below(directory))
    spans = [json.loads(line) for line in STORAGE.read(directory / "trace.jsonl").splitlines()]
    for step in (1, 2, 3):
        kinds = [span["kind"] for span in spans if span["step"] == step]
        assert (kinds[0], {*kinds[1:-1]}, kinds[-1]) == ("begin", {"write"}, "commit")
    assert next(span["kind"] for span in spans if span["step"] == 4) == "begin"
    assert run_ranks(3, loads, tmp_path) == [True] * 3
