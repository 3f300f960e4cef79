"""Data in an object store is what it is on a disk, or one line says what is wrong."""

import gc
import json
import shutil
import stat
import threading
import time
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpointing.errors import StorageError
from checkpointing.storage.folders import hold
from checkpointing.storage.object_storage import store_of
from checkpointing.storage.place import location
from tests.distributed.jobs import soak
from tests.s3 import Handler
from trainer.data import cache, remote
from trainer.data.copying import copy_data_set, write
from trainer.data.inspect import inspect
from trainer.data.loader import READ_AHEAD, TokenStream, load
from trainer.data.prepare.prepare import prepare
from trainer.data.prepare.writer import write_data_set
from trainer.data.shards import DataError, blocks_of, read_index, verify
from trainer.recipe.sections import DataCacheSection

BLOCK = 1 << 16
_names = count()


@pytest.fixture(scope="session")
def local(tmp_path_factory) -> Path:
    """Documents of bytes, in shards of three blocks and a bit, of which most are for training."""
    folder = tmp_path_factory.mktemp("remote")
    lines = (f"{number}: " + "to be or not to be " * (number % 40) for number in range(1000))
    (folder / "text.txt").write_text("\n".join(lines))
    options = {"tokenizer": "bytes", "split_documents": "line", "shard_tokens": 100_000}
    index = prepare([str(folder / "text.txt")], folder / "data", **options)
    assert len(index["splits"]["train"]["shards"]) > 3
    return folder / "data"


@pytest.fixture(scope="session")
def chats(tmp_path_factory, local) -> Path:
    """Whole documents of which every second token is trained."""
    folder = tmp_path_factory.mktemp("chats")
    lengths = np.arange(2, 600)
    tokens = int(lengths.sum())
    part = {kind: folder / kind for kind in ("tokens", "ends", "trained")}
    (np.arange(tokens) % 256).astype("<u2").tofile(part["tokens"])
    lengths.cumsum().astype("<u8").tofile(part["ends"])
    (np.arange(tokens) % 2).astype("u1").tofile(part["trained"])
    (folder / "data").mkdir()
    write_data_set(
        folder / "data", {"train": [part], "validation": []}, dtype="uint16", vocab_size=257,
        eos_id=256, start_ids=[], tokenizer=(local / "tokenizer.json").read_bytes(), about={},
        shard_tokens=50_000, chats={"kind": "chats", "chats": {"template": ""}},
    )  # fmt: skip
    return folder / "data"


@pytest.fixture(scope="session")
def urls(local, chats, server):
    """Where `local` and `chats` lie in a bucket."""
    found = [location(f"s3://bucket/data/{name}") for name in ("local", "chats")]
    for source, target in zip((local, chats), found, strict=True):
        copy_data_set(source, target)
    return found


@pytest.fixture
def bucket(urls, local, store):
    """Where `local` lies in a bucket; what a test does to objects there is undone."""
    yield urls[0]
    store.fault = lambda method, path: None
    changed = [path for method, path in store.requests if method in ("PUT", "DELETE")]
    for file in local.iterdir():
        if any(path.partition("?")[0].endswith(f"/local/{file.name}") for path in changed):
            store_of(urls[0]).write(urls[0] / file.name, file.read_bytes())


@pytest.fixture
def new(store):
    """A folder of a bucket that is not there yet."""
    return location(f"s3://bucket/new-{next(_names)}")


def open_stream(*places, cache=None, split="train"):
    sources = [(place, 1.0) for place in places]
    return TokenStream.open(
        sources, split=split, seq_len=700, seed=3, shuffle=split == "train",
        documents="document_ids", ahead=3, cache=cache,
    )  # fmt: skip


def batches(stream, requests):
    return list(load(stream, requests, workers=0, pin_memory=False, account=True))


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            same = torch.equal(value, other[key]) if torch.is_tensor(value) else value == other[key]
            assert same, key


def gets(store, ending):
    asked = [path.partition("?")[0] for method, path in store.requests if method == "GET"]
    return [path for path in asked if path.endswith(ending)]


def test_the_same_samples_as_from_a_disk(local, chats, urls, store):
    there, here = open_stream(*urls), open_stream(local, chats)
    assert there.fingerprint == here.fingerprint
    requests = [[n, n + 1, n + 2, n + 3] for n in range(0, 80, 4)] + [[5, 5], [10**6]]
    expected = batches(here, requests)
    seen = count()

    def flaky(method, path):
        """Some requests for tokens fail, in turn in another way."""
        number = next(seen) if ".tokens" in path else 1
        return None if number % 10 else ["503 SlowDown", "reset", "cut"][number // 10 % 3]

    store.fault = flaky
    assert_same(batches(there, requests), expected)
    assert next(seen) > 30
    store.fault = lambda method, path: None
    assert_same([there.fetch(requests[0])], [here.fetch(requests[0])])
    there._packings[0]._dataset.by_eos = False  # as if the token that ends documents stood in them
    assert_same([there.fetch(requests[0])], [here.fetch(requests[0])])

    store.requests.clear()
    eight = [list(range(8))]
    validation = open_stream(urls[0], split="validation")
    assert_same(batches(validation, eight), batches(open_stream(local, split="validation"), eight))
    assert len(gets(store, ".tokens")) == 1  # neighbours are one range
    assert [path for method, path in store.requests if method == "HEAD" and ".tokens" in path] == []
    assert inspect(urls[0]).splitlines()[1:] == inspect(local).splitlines()[1:]
    assert verify(urls[0]) == verify(urls[1]) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_what_comes_next_is_under_way_before_it_is_needed(bucket, store, workers):
    stream, other = open_stream(bucket), open_stream(bucket)
    fetched = 1 + READ_AHEAD * workers
    ranges = {one for n in range(fetched + stream.ahead) for one in [*other.begin([n])]}
    for one in ranges:
        one.data()
    store.requests.clear()
    batch = load(stream, [[n] for n in range(100)], workers=workers, pin_memory=False)
    next(batch)
    deadline = time.monotonic() + 60
    while len(gets(store, ".tokens")) < len(ranges) and time.monotonic() < deadline:
        time.sleep(0.01)
    # A worker has already dropped ranges that a later request needs again.
    assert len(ranges) <= len(gets(store, ".tokens")) <= len(ranges) + 2 * workers
    assert len(ranges) > 1
    batch.close()
    gc.collect()
    assert sum(len(shard._ranges) for shard in stream._packings[0]._dataset._remote) == 0


def test_no_token_is_used_unchecked(local, bucket, store, monkeypatch):
    path = bucket / "train-00001.tokens"
    content = bytearray((local / path.name).read_bytes())
    first = int(read_index(local)["splits"]["train"]["shards"][0]["tokens"])
    window = first + BLOCK // 2 + 10, 100  # in the second block of that shard

    def read():
        return open_stream(bucket)._packings[0]._dataset.read(*window)

    expected = read()
    answer, once = Handler._answer, iter([True])

    def one_wrong_bit(self, status, headers, body, **how):
        if path.name in self.path and self.command == "GET" and next(once, False):
            body = body[:-1] + bytes([body[-1] ^ 1])
        answer(self, status, headers, body, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Handler, "_answer", one_wrong_bit)
        assert (read() == expected).all()
    assert next(once, None) is None  # it was wrong once
    content[BLOCK + 5] ^= 1
    store_of(path).write(path, bytes(content))
    with pytest.raises(
        DataError, match=f"^{path}: bytes {BLOCK} to {2 * BLOCK - 1} have a wrong checksum, downl"
    ):
        read()
    open_stream(bucket)._packings[0]._dataset.read(0, 100)  # others are read
    stream = open_stream(bucket)
    store_of(path).delete([path])
    with pytest.raises(DataError, match=f"^{path}: is missing"):
        stream._packings[0]._dataset.read(*window)


def test_a_range_that_hangs_is_requested_again(bucket, store, monkeypatch):
    dataset = open_stream(bucket)._packings[0]._dataset
    expected = dataset.read(0, 100)
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 0.2)
    first, over, waited = iter([True]), threading.Event(), []

    def delay():
        if next(first, False):
            waited.append(over.wait(60))
        return 0.0

    monkeypatch.setattr(store, "delay", delay)
    assert (dataset.read(0, 100) == expected).all()
    assert next(first, None) is None
    assert waited == []  # the first request still hangs
    over.set()
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 30.0)
    monkeypatch.setattr(remote, "DEADLINE_SECONDS", 0.0)
    monkeypatch.setattr("checkpointing.storage.s3.ATTEMPTS", 1)
    store.fault = lambda method, path: "503 SlowDown"
    with pytest.raises(DataError, match=r"train-00000.tokens: bytes 0 to 65535: .*SlowDown"):
        dataset.read(0, 100)


def lose(bucket):
    store_of(bucket).delete([bucket / "train-00000.tokens"])


def cut(bucket):
    store_of(bucket).write(bucket / "train-00001.ends", b"12345678")


def of_older_version(bucket):
    index = read_index(bucket)
    for shard in index["splits"]["train"]["shards"]:
        for key in ("crc_sha256", "crc_crc32", "eos"):
            del shard[key]
    store_of(bucket).write(bucket / "index.json", json.dumps(index).encode())


def pickled(bucket):
    store_of(bucket).write(bucket / "index.json", b"cos\nsystem\n(S'false'\ntR.")


def of_others(bucket):
    index = read_index(bucket)
    index["eos_id"] = 3
    store_of(bucket).write(bucket / "index.json", json.dumps(index).encode())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose, "train-00000.tokens: is missing; copy the data set again"),
        (cut, "train-00001.ends: truncated: 8 bytes instead of"),
        (of_older_version, "no checksums of small blocks"),
        (pickled, "index.json: damaged: "),
        (of_others, "index.json: was edited: its fingerprint does not match"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damage_is_found_at_the_start(bucket, damage, message):
    damage(bucket)
    with pytest.raises(DataError, match=message) as refused:
        open_stream(bucket)
    assert "\n" not in str(refused.value)


def test_a_store_that_is_not_there_or_gives_no_access(bucket, new, store):
    with pytest.raises(DataError, match=r"index.json: missing, so this is not a prepared data set"):
        open_stream(new)
    with pytest.raises(StorageError, match="has no bucket 'nowhere'; create it, or correct"):
        open_stream("s3://nowhere/data")
    store.fault = lambda method, path: "403 AccessDenied"
    with pytest.raises(StorageError, match=r"gives no access .403.; check AWS_ACCESS_KEY"):
        open_stream(bucket)


def test_a_copy_goes_on_where_it_was_and_comes_back_as_it_was(local, urls, new, store, tmp_path):
    older = shutil.copytree(local, tmp_path / "older")
    index = read_index(older)
    for split in index["splits"].values():
        for shard in split["shards"]:
            (older / f"{shard['name']}.crc").unlink()
            for key in ("crc_sha256", "crc_crc32", "eos"):
                del shard[key]
    (older / "index.json").write_text(json.dumps(index))
    store.fault = lambda method, path: (
        "403 AccessDenied" if method == "PUT" and "train-00002" in path else None
    )
    for source in (older, local):  # of an older version all is sent again
        store.requests.clear()
        with pytest.raises(StorageError, match="gives no access"):
            copy_data_set(source, new)
    sent = [path.rpartition("/")[2] for method, path in store.requests if method == "PUT"]
    assert {name.partition(".")[0] for name in sent} == {"train-00002"}
    store.fault = lambda method, path: None
    with pytest.raises(DataError, match="missing, so this is not"):
        open_stream(new)
    copy_data_set(older, new)
    assert read_index(new) == json.loads((local / "index.json").read_text())
    said = []
    copy_data_set(local, new, said.append)
    assert said == [f"{new}: is up to date"]
    copy_data_set(new, tmp_path / "back")
    files = {file.name: file.read_bytes() for file in local.iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "back").iterdir()} == files

    (older / "index.json").write_text(json.dumps(index | {"eos_id": 255}))
    with pytest.raises(DataError, match="was edited"):
        copy_data_set(older, new)
    damaged = bytearray(files["train-00001.tokens"])
    damaged[7] ^= 1
    (tmp_path / "back" / "train-00001.tokens").write_bytes(damaged)
    with pytest.raises(DataError, match=r"train-00001.tokens: wrong checksum in the 16 MiB from"):
        copy_data_set(tmp_path / "back", new / "other")
    with pytest.raises(DataError, match=f"^{urls[1]}: holds another data set; choose another"):
        copy_data_set(local, urls[1])


@soak
def test_a_large_file_is_sent_in_parts(new, store, tmp_path):
    content = np.random.default_rng(0).bytes((16 << 20) + 12345)
    (tmp_path / "large").write_bytes(content)
    write(new / "large", len(content), blocks_of(tmp_path / "large"))
    assert sum("partNumber=" in path for _, path in store.requests) == 2
    assert store_of(new).read(new / "large") == content


# --- copies on a local disk -----------------------------------------------------------------------


def copied(folder, size, url):
    return cache.copy_all(Path(folder), size, [str(url)], threading.Event())


def test_copies_of_shards(local, chats, urls, store, tmp_path):
    needed = sum(file.stat().st_size for file in local.glob("*.tokens"))
    assert "no shard is copied" in copied(tmp_path, needed - 1, urls[0])
    assert list(tmp_path.iterdir()) == []
    assert "are in" in copied(tmp_path, 10 * needed, urls[0])
    assert copied(tmp_path, 10 * needed, urls[0]) == ""  # all are there
    home = cache.home(tmp_path)
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    (folder,) = home.iterdir()
    there = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert there == {file.name: file.read_bytes() for file in local.glob("*.tokens")}

    place = DataCacheSection(directory=str(tmp_path), size=10 * needed)
    stream, requests = open_stream(urls[0], cache=place), [[n] for n in range(30)]
    expected = batches(open_stream(local), requests)
    store.requests.clear()
    assert_same(batches(stream, requests), expected)
    assert gets(store, ".tokens") == []
    name = "train-00000.tokens"
    (folder / name).write_bytes(bytes(len(there[name])))  # a damaged copy costs requests
    again = open_stream(urls[0], cache=place)
    assert_same(batches(again, requests), expected)
    assert set(gets(store, ".tokens")) == {f"/bucket/{(urls[0] / name).key}"}
    assert not (folder / name).exists()

    other = sum(file.stat().st_size for file in chats.glob("*.tokens"))
    assert "other runs use" in copied(tmp_path, needed, urls[1])  # the streams hold its folder
    for one in (stream, again):
        copies = one._packings[0]._dataset._remote[0]._copies
        copies._folders.popitem()[1].close()  # as when a rank ends
    assert "are in" in copied(tmp_path, max(needed, other), urls[1])
    assert not folder.exists()


def test_one_process_of_a_node_copies_and_only_in_a_folder_of_its_own(local, bucket, tmp_path):
    home = cache.home(tmp_path)
    home.mkdir(mode=0o700)
    held = hold(home)
    with pytest.raises(BlockingIOError):
        copied(tmp_path, 10**9, bucket)
    held.close()
    home.chmod(0o777)
    with pytest.raises(PermissionError, match="mode 777, so others may have written there"):
        copied(tmp_path, 10**9, bucket)
    assert "others may have written" in cache.hindrance(str(tmp_path))
    assert "cannot be created or written" in cache.hindrance(str(local / "index.json" / "copies"))
