"""Reading gives what was written, in every mode; damage is refused with the name of the file."""

import errno
import json
import os
import shutil
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data import shards
from trainer.data.inspect import inspect
from trainer.data.loader import TokenStream
from trainer.data.shards import DataError, TokenDataset, detect_reader, read_index, verify

STREAM = {"split": "train", "seq_len": 8, "seed": 0, "shuffle": True}


@pytest.fixture
def copied(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "data")


@given(data=st.data())
def test_readers_agree_with_what_was_written(prepared, tokens, data):
    flat = np.concatenate(tokens)
    owner = np.repeat(np.arange(len(tokens)), [len(document) for document in tokens])
    start = data.draw(st.integers(0, len(flat) - 1))
    length = data.draw(st.integers(1, len(flat) - start))
    for reader in ("auto", "mmap", "pread", "ram"):
        dataset = TokenDataset(prepared, "train", reader)
        assert dataset.dtype == np.uint16
        assert (dataset.tokens, dataset.documents) == (len(flat), len(tokens))
        assert (dataset.read(start, length) == flat[start : start + length]).all()
    assert (dataset.document_ids(start, length) == owner[start : start + length]).all()
    assert dataset.document_length(int(owner[start])) == len(tokens[owner[start]])


def test_network_filesystems_are_read_whole_windows_at_a_time(prepared, monkeypatch):
    assert detect_reader(prepared) == "mmap"
    for kind, expected in (("nfs4", "pread"), ("fuse.s3", "pread"), ("ext4", "mmap")):
        monkeypatch.setattr(shards, "filesystem", lambda _, kind=kind: kind)
        assert detect_reader(prepared) == expected


def fail_reads(monkeypatch, code, times):
    """Let the next `times` reads fail with an error number."""
    real, failures = os.preadv, iter([code] * times)

    def preadv(*arguments):
        if number := next(failures, 0):
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)


def test_transient_errors_are_retried_and_permanent_ones_named(prepared, monkeypatch):
    dataset = TokenDataset(prepared, "train", "pread")
    expected = dataset.read(0, 100)
    fail_reads(monkeypatch, errno.ESTALE, times=3)
    assert (dataset.read(0, 100) == expected).all()
    shard = prepared / "train-00000.tokens"
    for code, times in ((errno.EIO, 1000), (errno.EACCES, 1)):
        fail_reads(monkeypatch, code, times)
        with pytest.raises(DataError, match=f"{shard}: cannot be read at byte 20: "):
            dataset.read(10, 100)


def test_a_shard_that_shrinks_while_it_is_read(copied):
    dataset = TokenDataset(copied, "train", "pread")
    shard = copied / "train-00000.tokens"
    os.truncate(shard, 50)
    with pytest.raises(DataError, match=f"{shard}: truncated while in use, at byte 50"):
        dataset.read(10, 100)


@pytest.mark.parametrize("name", ["train-00001.tokens", "train-00001.ends"])
def test_files_that_are_not_as_long_as_they_were(copied, name):
    file = copied / name
    content = file.read_bytes()
    file.write_bytes(content[:-2])
    with pytest.raises(DataError, match=f"{file}: truncated: {len(content) - 2} bytes instead of"):
        TokenDataset(copied, "train")
    assert [problem.split(":")[0] for problem in verify(copied)] == [str(file)]
    file.write_bytes(content + b"\0")
    with pytest.raises(DataError, match=f"{file}: too long"):
        TokenDataset(copied, "train")
    file.unlink()
    with pytest.raises(DataError, match=f"{file}: No such file or directory; restore it"):
        TokenDataset(copied, "train")
    assert len(verify(copied)) == 1


def falling(ends):
    ends[: len(ends) // 2] = ends[: len(ends) // 2][::-1]


def twice(ends):
    ends[3] = ends[2]


def beyond_the_tokens(ends):
    ends[-1] += 1000


def short_of_the_tokens(ends):
    ends[-1] -= 1


def one_bit_and_still_rising(ends):
    ends[5] += 1
    assert (np.diff(ends.astype(np.int64)) > 0).all()


DAMAGES = [falling, twice, beyond_the_tokens, short_of_the_tokens, one_bit_and_still_rising]


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("damage", DAMAGES)
def test_ends_of_documents_that_are_not_those_written(copied, monkeypatch, damage, blocks):
    """Attention would be masked by them, in silence. A writer whose checksums fit is tried, too."""
    file = copied / "train-00001.ends"
    ends = np.fromfile(file, "<u8")
    damage(ends)
    ends.tofile(file)
    if blocks > 1:
        monkeypatch.setattr(shards, "_ENDS", len(ends) // blocks)
        monkeypatch.setattr(shards, "CHECKSUM_BLOCK", len(ends) // blocks * 8)
        index = read_index(copied)
        for shard in index["splits"]["train"]["shards"]:
            numbers = np.fromfile(copied / f"{shard['name']}.ends", "<u8")
            starts = range(0, len(numbers), len(ends) // blocks)
            parts = (numbers[start : start + len(ends) // blocks] for start in starts)
            shard["ends_crc32"] = [zlib.crc32(part.tobytes()) for part in parts]
        (copied / "index.json").write_text(json.dumps(index))
    dataset = TokenDataset(copied, "train")
    first = int(dataset._starts[1])
    assert (dataset.document_ids(0, first) >= 0).all()  # the shard before is whole
    message = f"^{file}: damaged: its ends of documents have changed"
    # With checksums that fit, and numbers that rise to the end, it is the other data set.
    if blocks == 1 or damage is not one_bit_and_still_rising:
        for use in (
            lambda: dataset.document_ids(first, 10),
            dataset.check_ends,
            lambda: dataset.document_length(dataset._documents[1]),
            lambda: TokenStream.open([(copied, 1.0)], documents="cu_seqlens", **STREAM),
        ):
            with pytest.raises(DataError, match=message):
                use()
    TokenStream.open([(copied, 1.0)], **STREAM)  # without documents they are not used


def test_verify_finds_one_flipped_bit(copied, monkeypatch):
    assert verify(copied) == []
    tokenizer = copied / "tokenizer.json"
    for name in ("train-00002.tokens", "train-00000.ends", "tokenizer.json"):
        content = bytearray((copied / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copied / name).write_bytes(content)
    first, second, third = verify(copied)
    assert first.startswith(
        f"{copied / 'train-00000.ends'}: wrong checksum in the 16 MiB from byte 0"
    )
    assert second.startswith(f"{copied / 'train-00002.tokens'}: wrong checksum")
    assert third.startswith(f"{tokenizer}: is not the tokenizer that this data was prepared with;")


def test_an_index_that_is_damaged_edited_or_of_another_format(copied):
    file = copied / "index.json"
    index = read_index(copied)

    def message(content):
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        with pytest.raises(DataError, match=f"^{file}: ") as raised:
            read_index(copied)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert f"remove {copied} and prepare the data again" in message(file.read_bytes()[:-100])
    assert "damaged" in message(b"\xff")
    assert "damaged: [] where an object is due" in message([])
    assert "damaged: nested too deep" in message(b"[" * 100_000)
    assert "vocab_size: None where a" in message({k: index[k] for k in index if k != "vocab_size"})
    assert "has format 3, this version reads 1 and 2" in message({**index, "format": 3})
    assert "dtype: not one of uint16, uint32" in message({**index, "dtype": "object"})
    shards = index["splits"]["train"]["shards"]

    def of_shard(**wrong):
        train = {**index["splits"]["train"], "shards": [{**shards[0], **wrong}]}
        return message({**index, "splits": {**index["splits"], "train": train}})

    for name in ("../../etc/passwd", "/etc/passwd", "a\0b", "a\nb", "\x1b[31m"):
        assert f"shards.0.name: {name!a} is no file in its directory" in of_shard(name=name)
    assert "splits.train.shards.0.tokens: 'x' where a whole number is due" in of_shard(tokens="x")
    assert "shards.0.ends_crc32: 7 where a list is due" in of_shard(ends_crc32=7)
    assert "was edited" in message({**index, "eos_id": 3})
    file.unlink()
    with pytest.raises(DataError, match="missing, so this is not a prepared data set"):
        read_index(copied)


def test_inspect_shows_counts_sources_and_text(prepared, documents, tokens):
    shown = inspect(prepared)
    assert "uint16 tokens, vocabulary 257, documents end in token 256" in shown
    assert f"{sum(map(len, tokens)):,} tokens" in shown
    assert "200 documents taken, 0 records left out" in shown
    assert f"document 0, {len(tokens[0])} tokens: {documents[0][:20]!r}"[:-1] in shown
