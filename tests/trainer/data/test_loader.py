"""Positions become the right tensors, in this process and in workers, and errors come out whole."""

import math
import os
import pickle
import shutil
import signal
import traceback
from itertools import accumulate, count, groupby, islice
from multiprocessing import active_children
from pathlib import Path
from select import select

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainer.data.loader import SENT_BYTES, TokenStream, _reduce, load
from trainer.data.packing import room_for_documents
from trainer.data.prepare.prepare import prepare
from trainer.data.shards import DataError, read_index

T = 48


def open_stream(*paths, split="train", seq_len=T, shuffle=True, documents=None, weights=None):
    sources = list(zip(paths, weights or [1.0] * len(paths), strict=True))
    return TokenStream.open(
        sources, split=split, seq_len=seq_len, seed=1, shuffle=shuffle, documents=documents
    )


def test_packing_is_a_window_over_all_documents(prepared, tokens):
    stream = open_stream(prepared, shuffle=False, documents="document_ids")
    flat = [token for document in tokens for token in document]
    owner = [number for number, document in enumerate(tokens) for _ in document]
    assert stream.sequences == (len(flat) - 1) // T
    batch = stream.fetch(range(stream.sequences))  # among them windows that span shards
    for n in range(stream.sequences):
        assert batch["input_ids"][n].tolist() == flat[n * T : n * T + T]
        assert batch["labels"][n].tolist() == flat[n * T + 1 : n * T + T + 1]
        first = owner[n * T]
        assert batch["document_ids"][n].tolist() == [o - first for o in owner[n * T : n * T + T]]
        # a label is a token of the document that it is counted to
        assert stream.documents_of(n)[1].tolist() == owner[n * T + 1 : n * T + T + 1]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["document_ids"].dtype == torch.int32
    assert open_stream(prepared).fetch([0]).keys() == {"input_ids", "labels"}


@given(st.lists(st.integers(0, 400), min_size=1, max_size=4), st.sampled_from([7, T, 150]))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_boundaries_are_those_of_the_documents(prepared, tokens, positions, length):
    """Each run of tokens of one document in one row is one of them, and the rest are empty."""
    stream = open_stream(prepared, seq_len=length, shuffle=False, documents="cu_seqlens")
    owner = [number for number, document in enumerate(tokens) for _ in document]
    windows = [position % stream.sequences for position in positions]
    flat = [(row, owner[n * length + t]) for row, n in enumerate(windows) for t in range(length)]
    expected = list(accumulate((len(list(run)) for _, run in groupby(flat)), initial=0))
    found = stream.fetch(windows)["cu_seqlens"]
    assert found.dtype == torch.int32
    assert found.tolist() == expected + [len(flat)] * (len(found) - len(expected))
    room = room_for_documents(len(windows), length)
    doublings = max(0, math.ceil(math.log2((len(expected) - 1) / room)))
    assert len(found) == room * 2**doublings + 1


def test_shuffled_epoch_shows_every_window_once(prepared):
    ordered, shuffled = open_stream(prepared, shuffle=False), open_stream(prepared)
    n = ordered.sequences
    expected = ordered.fetch(range(n))["input_ids"].tolist()
    epochs = [shuffled.fetch(range(e * n, e * n + n))["input_ids"].tolist() for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(expected)
    assert expected != epochs[0] != epochs[1] != expected


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_same_tensors_from_any_number_of_workers(prepared, workers):
    stream = open_stream(prepared, documents="cu_seqlens")
    requests = [[3, 1], [2], [10**9, 5, 4], [0]]
    batches = list(load(stream, requests, workers=workers, pin_memory=False))
    assert len(batches) == len(requests)
    for batch, request in zip(batches, requests, strict=True):
        expected = stream.fetch(request)
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[key], expected[key]) for key in expected)
        # Shared memory would take a conversation with the worker for each tensor.
        assert not any(batch[key].is_shared() for key in expected)


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.arange(6.0).reshape(2, 3).T, torch.tensor(3), torch.empty(0, 2)),
        *(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, requires_grad=True)),
        torch.zeros(SENT_BYTES + 1, dtype=torch.uint8),
    ],
    ids=["strided", "scalar", "empty", "bfloat16", "with gradient", "large"],
)
def test_any_tensor_is_sent(tensor):
    rebuild, arguments = _reduce(tensor)
    plain = tensor.dtype != torch.bfloat16 and not tensor.requires_grad
    assert (rebuild is torch.from_numpy) == (plain and tensor.nbytes <= SENT_BYTES)
    if rebuild is torch.from_numpy:
        sent = rebuild(*pickle.loads(pickle.dumps(arguments)))
        assert torch.equal(sent, tensor)
        assert sent.dtype == tensor.dtype
        sent.zero_()  # batches may be changed in place


def test_a_stream_travels_to_other_processes(prepared):
    stream = open_stream(prepared)
    copy = pickle.loads(pickle.dumps(stream))
    assert copy.fingerprint == stream.fingerprint
    assert torch.equal(copy.fetch([7])["labels"], stream.fetch([7])["labels"])


def test_workers_end_with_their_iterator(prepared):
    batches = load(open_stream(prepared), ([n] for n in count()), workers=2, pin_memory=False)
    next(batches)
    assert len(active_children()) == 2
    batches.close()
    assert not active_children()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_shard_is_named_in_one_line(prepared, tmp_path, workers):
    path = shutil.copytree(prepared, tmp_path / "data")
    shard = path / "train-00002.tokens"
    content = np.fromfile(shard, dtype="<u2")
    content[100] = 300  # no such token
    content.tofile(shard)
    stream = open_stream(path)
    batches = load(stream, ([n] for n in count()), workers=workers, pin_memory=False)
    with pytest.raises(DataError) as raised:
        list(islice(batches, stream.sequences))
    assert str(raised.value) == (
        f"{shard}: token 300 is outside the vocabulary of 257, so the file is damaged; see "
        f"`perdure data inspect {path} --verify`"
    )
    assert not active_children()


def test_a_killed_worker_is_an_error_not_a_hang(prepared):
    """In a fork: torch's handler of SIGCHLD stays with the process that loads."""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            stream = open_stream(prepared)
            batches = load(stream, ([n] for n in count()), workers=1, pin_memory=False)
            next(batches)
            (worker,) = active_children()
            os.write(write, f"{worker.pid} ".encode())
            worker.kill()
            for _ in batches:
                pass
        except RuntimeError:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as said:
        pid, _, error = said.read().partition(" ")
    os.waitpid(process, 0)
    assert "is killed" in error
    # Killed while torch made room for a batch, it leaves that: nobody has its name yet.
    for left in Path("/dev/shm").glob(f"torch_{pid}_*"):
        left.unlink()


def test_workers_end_with_a_process_that_is_killed(prepared):
    """At once: on a GPU machine they hold the memory of the device, which its successor needs."""
    read, write = os.pipe()
    reader = os.fork()
    if reader == 0:
        batches = load(open_stream(prepared), ([n] for n in count()), workers=2, pin_memory=False)
        next(batches)
        os.write(write, " ".join(str(worker.pid) for worker in active_children()).encode())
        signal.pause()
    workers = [int(pid) for pid in os.read(read, 100).split()]
    assert len(workers) == 2
    os.kill(reader, signal.SIGKILL)
    os.waitpid(reader, 0)
    os.close(write)
    # A pipe that nobody can write to any more ends: of those who had it, none is left. Workers that
    # only look for their parent do so every 5 s.
    assert select([read], [], [], 4.5)[0]
    assert os.read(read, 1) == b""
    os.close(read)


def test_validation_is_in_file_order_over_all_sources(tmp_path, write_jsonl, documents):
    options = {"tokenizer": "bytes", "validation_fraction": 0.5}
    paths = []
    for name, texts in (("a", documents[:120]), ("b", documents[120:])):
        source = write_jsonl(tmp_path / f"{name}.jsonl", texts)
        prepare([str(source)], tmp_path / name, **options)
        paths.append(tmp_path / name)
    stream = open_stream(*paths, split="validation", shuffle=False)
    parts = [open_stream(path, split="validation", shuffle=False) for path in paths]
    assert stream.sequences == parts[0].sequences + parts[1].sequences
    assert min(part.sequences for part in parts) > 0
    expected = [part.fetch(range(part.sequences))["labels"] for part in parts]
    assert torch.equal(stream.fetch(range(stream.sequences))["labels"], torch.cat(expected))


def test_fingerprint_tells_streams_apart(prepared, tmp_path):
    base = open_stream(prepared)
    assert base.fingerprint == open_stream(prepared, documents="cu_seqlens").fingerprint
    moved = shutil.copytree(prepared, tmp_path / "moved")
    for file in moved.iterdir():
        os.utime(file, (0, 0))
    assert base.fingerprint == open_stream(moved).fingerprint
    others = [
        open_stream(prepared, seq_len=T + 1),
        open_stream(prepared, prepared),
        open_stream(prepared, prepared, weights=[1.0, 2.0]),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_refuses_sources_that_do_not_fit(prepared, tmp_path, write_jsonl, documents):
    with pytest.raises(DataError, match="less than one sequence of 1000000"):
        open_stream(prepared, seq_len=10**6)
    with pytest.raises(DataError, match=r"data\.sources: source 1 has .* raise its weight"):
        open_stream(prepared, prepared, weights=[1.0, 1e-6])
    source = write_jsonl(tmp_path / "other.jsonl", documents)
    prepare([str(source)], tmp_path / "other", train_bpe=300)
    assert read_index(tmp_path / "other")["vocab_size"] == 300
    with pytest.raises(DataError, match="prepared with another tokenizer"):
        open_stream(prepared, tmp_path / "other")
