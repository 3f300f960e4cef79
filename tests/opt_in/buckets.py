"""Runs in gs:// and az:// against real servers, Google's storage-testbench and Azurite, behind a
proxy that loses answers: see buckets.sh, which names them.

    python -m pytest tests/opt_in/buckets.py
"""

import os
import pickle
import random
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import fsspec
import pytest

from benchmarks.support import python_path
from checkpointing.errors import StorageError
from checkpointing.format.layout import BLOCK_BYTES
from checkpointing.storage import object_storage
from checkpointing.storage.fsspec_store import FsspecStorage
from checkpointing.storage.object_storage import store_of
from checkpointing.storage.place import ObjectPath
from checkpointing.storage.steps import list_steps, newest_checkpoint, open_step, read_state
from checkpointing.tools import inspect
from elastic.node.occupancy import NodeDirectoryOccupiedError
from lab.local_nodes import LocalNodes, free_port
from tests.checkpointing.faults import until
from tests.checkpointing.storage.test_objects import (
    LARGE,
    SMALL,
    STORAGE,
    begin,
    commit,
    fork,
    objects_below,
    save,
    write,
)
from tests.distributed.conftest import workspace  # noqa: F401
from tests.distributed.jobs import ROOT
from tests.distributed.test_bucket import last_line, living, texts, wait_for_step
from tests.s3 import Proxy
from trainer.cli.main import parse
from trainer.run import terms
from trainer.run.terms import claim, holder_of

KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's, which its documentation names."""


def start_server(kind, port):
    """A server that ends with this process."""
    command = {
        "gs": [os.environ["TESTBENCH"], "--port", str(port)],
        "az": [
            *(os.environ["AZURITE"], "--inMemoryPersistence", "--skipApiVersionCheck"),
            *("--blobHost", "127.0.0.1", "--blobPort", str(port), "--silent"),
        ],
    }[kind]
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def with_carriage_returns(path, body):
    """gcsfs ends the lines of a multipart body with LF, which Google takes, but not its server for
    tests."""
    if "uploadType=multipart" not in path:
        return body
    kind, _, rest = body.partition(b"\n\n")
    metadata, mark, rest = rest.partition(b"\n--==0==\n")
    head, _, data = rest.partition(b"\n\n")
    end = b"\n--==0==--"
    parts = [kind, b"\n\n", metadata, mark, head, b"\n\n"]
    return b"".join(part.replace(b"\n", b"\r\n") for part in parts) + (
        data.removesuffix(end) + end.replace(b"\n", b"\r\n")
    )


def access(kind, port):
    """The environment that leads to a server."""
    url = f"http://127.0.0.1:{port}"
    account = f"AccountName=devstoreaccount1;AccountKey={KEY}"
    endpoint = f"BlobEndpoint={url}/devstoreaccount1;"
    return {
        "gs": {"STORAGE_EMULATOR_HOST": url, "FSSPEC_GS_TOKEN": "anon"},
        "az": {"AZURE_STORAGE_CONNECTION_STRING": f"{account};{endpoint}"},
    }[kind]


@pytest.fixture(scope="module", params=["gs", "az"])
def server(request):
    """(proxy of a server with an empty bucket, URL of the bucket)"""
    kind, port = request.param, free_port()
    serving, proxy = start_server(kind, port), Proxy(port)
    if kind == "gs":
        proxy.rewritten = with_carriage_returns
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in access(kind, proxy.server_port).items():
            patch.setenv(name, value)
        fsspec.config.set_conf_env(fsspec.config.conf)
        object_storage._store.cache_clear()
        # adlfs takes a container for an existing one if no server answers, and does not create it
        assert until(lambda: tried(lambda: listens(port)), 120), "the server does not start"
        make = lambda: FsspecStorage(kind)._files.mkdir("bucket") or True  # noqa: E731
        assert until(lambda: tried(make), 30), "the server creates no bucket"
        yield proxy, f"{kind}://bucket"
        object_storage._store.cache_clear()
        fsspec.config.conf.pop("gs", None)
    proxy.shutdown()
    serving.kill()
    serving.wait()


def listens(port):
    socket.create_connection(("127.0.0.1", port)).close()
    return True


def tried(work):
    with suppress(Exception):
        return work()


@pytest.fixture
def store(server):
    """The proxy, without faults."""
    yield server[0]
    server[0].fault = lambda method, path: None


@pytest.fixture
def directory(server, request):
    """A folder of the bucket that is not there yet."""
    name = re.sub(r"\W", "-", request.node.name)
    return ObjectPath.of(f"{server[1]}/{name}/run")


def losing(share, seed=0):
    """A fault of the proxy: of all answers a share is lost, after or before the work is done."""
    draw = random.Random(seed)

    def fault(method, path):
        luck = draw.random()
        return "cut" if luck < share / 2 else "reset" if luck < share else None

    return fault


def test_one_of_all_creates_an_object(store, directory):
    """And knows that it did, whatever answers are lost."""
    assert store_of(directory).children(directory) == []
    store.fault = losing(0.3)
    objects = store_of(directory)

    def create(number, key):
        try:
            objects.write_new(directory / f"{key}", b"%d" % number)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        for key in range(8):
            done = list(pool.map(create, range(6), [key] * 6))
            assert done.count(True) == 1
            assert objects.read(directory / f"{key}") == b"%d" % done.index(True)
    names = [place.name for place in objects.children(directory)]
    assert names == [str(key) for key in range(8)]
    assert [*objects.walk(directory)] == names
    objects.write(directory / "0", b"again")
    assert objects.read(directory / "0") == b"again"
    objects.delete([directory / "0", directory / "none"])
    assert objects.find(directory / "0") is None


def test_terms(store, directory, monkeypatch):
    monkeypatch.setattr(terms, "BEAT_SECONDS", 0.3)
    store.fault = losing(0.15)
    with ThreadPoolExecutor(4) as pool:
        claimed = list(pool.map(lambda _: claim(directory, "a", ""), range(4)))
    assert sorted(one.number for one in claimed) == [1, 2, 3, 4]
    for one in claimed:
        holder = holder_of(directory, one.number)
        assert holder
        assert holder.token == one.token
    store.fault = lambda method, path: None
    newest = max(claimed, key=lambda one: one.number)
    # A request whose answer was lost is repeated only after a pause longer than a claim watches.
    seen = terms._beat(directory, newest.number)
    assert until(lambda: terms._beat(directory, newest.number) != seen, 20)
    with pytest.raises(NodeDirectoryOccupiedError, match="trains there; end it first"):
        claim(directory, "b", "")
    newest.release()
    claim(directory, "b", "").release()


def test_a_store_without_conditions_is_refused(store, directory, monkeypatch):
    monkeypatch.setattr(FsspecStorage, "write_new", FsspecStorage.write)
    with pytest.raises(StorageError, match="its store ignores the condition"):
        claim(directory, "a", "")


def test_a_bucket_that_is_not_there(store, server):
    run = ObjectPath.of(f"{server[1]}s-nowhere/run")
    for work in (terms.newest_term, lambda run: claim(run, "a", "")):
        with pytest.raises(StorageError, match=r"no bucket 'buckets-nowhere'; create it") as told:
            work(run)
        assert "\n" not in str(told.value)
    with pytest.raises(StorageError, match="no bucket"):
        store_of(run).write(run / "a", b"")


def test_steps(store, directory, tmp_path):
    """As in any store: written by processes that are forked from one that used the store."""
    target = pickle.dumps(begin(directory, 7, LARGE))
    children = [
        fork(lambda half=half: [write(pickle.loads(target), file, 3) for file in half])
        for half in (LARGE[::2], LARGE[1::2])
    ]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert list_steps(directory) == []
    commit(pickle.loads(target), 3, 7, LARGE)
    step = newest_checkpoint(directory)
    assert list_steps(directory) == [step]
    assert read_state(step) == {"step": 7, "seed": 3}
    assert open_step(step)
    assert inspect.verify(str(directory)).problems == []
    store.fault = losing(0.1)
    save(directory, 8, SMALL)
    store.fault = lambda method, path: None
    assert len(list_steps(directory)) == 2
    STORAGE.delete_step(step)
    STORAGE.collect(directory)
    assert not any("step-00000007" in name for name in objects_below(directory))
    assert inspect.verify(str(directory)).problems == []


@pytest.mark.parametrize("files", [SMALL, LARGE], ids=["small", "large"])
def test_who_is_taken_over_changes_nothing(directory, tmp_path, files):
    def start():
        (tmp_path / "target").write_bytes(pickle.dumps(begin(directory, 7, files)))

    assert os.waitpid(fork(start), 0)[1] == 0
    old = pickle.loads((tmp_path / "target").read_bytes())
    late = old.writer(files[0].name, files[0].size)  # has begun before it is taken over
    for start in range(0, files[0].size, BLOCK_BYTES):
        late.write(memoryview(bytes(min(BLOCK_BYTES, files[0].size - start))), start)
    new = begin(directory, 7, files)
    for file in files:
        write(new, file, 2)
    with pytest.raises(StorageError, match="another process has written it"):
        late.finish()
    with pytest.raises(StorageError, match="another process has written it"):
        write(old, files[-1], 1)
    commit(new, 2, 7, files)
    assert inspect.verify(str(directory)).problems == []
    assert read_state(new.final)["seed"] == 2


def perdure(*words):
    arguments = parse(words)
    return arguments.run(arguments)


@pytest.mark.timeout(900)
def test_nodes_that_share_nothing_else(server, workspace, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Rank 0's machine is lost. The weights are those of a run on a disk to which nothing
    happened."""
    url, steps = f"{server[1]}/runs/lost", 24
    shared = (f"run.steps={steps}", "run.determinism=exact", "run.log_every=1")
    saved = ("checkpoint.every=4", "elastic.snapshot_every=2", "checkpoint.peer_copy=true")
    undisturbed = ["trainer", "recipe.yaml", f"run.dir={tmp_path}/undisturbed", *shared]
    subprocess.run([sys.executable, "-m", *undisturbed], cwd=workspace, check=True)
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of this test alone")
    environment = {
        "PYTHONPATH": python_path(ROOT, workspace) + ":" + os.environ.get("PYTHONPATH", ""),
        "PERDURE_SECRET_FILE": str(secret),
        "XDG_CACHE_HOME": "/dev/shm/cache",  # a node's own, as its memory is
    }
    with LocalNodes(
        ["recipe.yaml", f"run.dir={url}", *shared, *saved],
        folder=workspace, nnodes="1:2", logs=tmp_path, environment=environment,
        launcher=("trainer.cli", "train"), own_memory=True,
    ) as nodes:  # fmt: skip
        for _ in range(2):
            nodes.add()
        wait_for_step(nodes, 6)
        lost = max(living(nodes), key=last_line)
        lost.kill()
        nodes.add()
        deadline = time.monotonic() + 600
        while living(nodes):
            assert time.monotonic() < deadline, texts(nodes)
            time.sleep(0.1)
        ended = [node.process.returncode for node in nodes.nodes if node is not lost]
        assert set(ended) == {0}, texts(nodes)
    verdict = [sys.executable, "-m", "tests.distributed.bucket_verdict", url]
    subprocess.run([*verdict, f"{tmp_path}/undisturbed", str(steps)], check=True, cwd=ROOT)
    monkeypatch.chdir(workspace)
    assert perdure("report", url, "--check") == 0, capsys.readouterr()
    assert perdure("watch", url, "--once") == 0
    assert perdure("runs", url.rpartition("/")[0]) == 0
    assert perdure("ckpt", "show", url) == 0
    assert perdure("generate", url, "--prompt", "a", "--max-new-tokens", "2") == 0
    told = capsys.readouterr().out
    print(told)
    assert re.search("every sequence exactly once", told)
    assert "holds no run" not in told
