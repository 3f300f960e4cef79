"""Prepared data on disk: token shards, document ends, the index.json that names them. numpy only.

[Note: prepared data set]
```
index.json             written last; without it the directory is not a data set
tokenizer.json         the tokenizer, for checkpoints and for `perdure generate`
train-00000.tokens     ids, headerless little-endian uint16 or uint32; documents end in eos
train-00000.ends       uint64, end of each document in the shard, in tokens
validation-00000.…     the same for the validation split
rejects.jsonl          records that were left out: file, line, reason
```
A split is the concatenation of its shards in the order of index.json.
"""

import errno
import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_random_exponential

FORMAT = 1
SPLITS = ("train", "validation")
CHECKSUM_BLOCK = 16 << 20
Reader = Literal["auto", "mmap", "pread", "ram"]

# Filesystems on which a page fault is a round trip of its own.
_NETWORK_FILESYSTEMS = (
    "nfs",
    "lustre",
    "fuse",
    "gpfs",
    "ceph",
    "beegfs",
    "cifs",
    "smb",
    "glusterfs",
)
_TRANSIENT = (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)


class DataError(ValueError):
    """A prepared data set is missing, damaged, or not what it was; the message names the file."""


def read_index(directory: str | Path) -> dict[str, Any]:
    """index.json of a prepared data set.

    Raises:
        DataError: it is missing, malformed, or of another format.
    """
    path = Path(directory) / "index.json"
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        found = index["format"]
    except FileNotFoundError:
        raise DataError(
            f"{path}: missing, so this is not a prepared data set; see `perdure data prepare`"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: damaged ({error}); prepare the data again") from error
    if found != FORMAT:
        raise DataError(
            f"{path}: has format {found}, this version reads {FORMAT}; prepare it again"
        )
    if index.get("fingerprint") != fingerprint(index):
        raise DataError(f"{path}: was edited (its fingerprint does not match); prepare it again")
    return index


def fingerprint(index: dict[str, Any]) -> str:
    """What the data *is*: hashes of contents and tokenizer, dtype and eos; no paths, no times."""
    shards = {
        split: [[s["tokens_sha256"], s["ends_sha256"]] for s in index["splits"][split]["shards"]]
        for split in SPLITS
    }
    facts = [FORMAT, index["dtype"], index["eos_id"], index["tokenizer"]["sha256"], shards]
    return "sha256:" + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class TokenDataset:
    """One split of a prepared data set: an array of tokens, and where documents end in it."""

    def __init__(self, directory: str | Path, split: str, reader: Reader = "auto") -> None:
        """Open a split; checks that every file has the size that index.json says.

        Args:
            directory: written by `prepare`.
            split: "train" or "validation".
            reader: mmap, pread (one read per window), ram (all of it in memory), or auto: pread on
                network filesystems, else mmap.

        Raises:
            DataError: names the file that is missing, truncated or too long.
        """
        self._arguments = (directory, split, reader)
        directory = Path(directory)
        index = read_index(directory)
        self.dtype = np.dtype(index["dtype"]).newbyteorder("<")
        self.vocab_size: int = index["vocab_size"]
        self.eos_id: int = index["eos_id"]
        self.fingerprint: str = index["fingerprint"]
        self._mode = detect_reader(directory) if reader == "auto" else reader
        self._shards: list[Callable[[int, int], NDArray]] = []
        self._ends: list[NDArray] = []
        starts, documents = [0], [0]
        for shard in index["splits"][split]["shards"]:
            tokens_file, ends_file = (
                directory / f"{shard['name']}.{k}" for k in ("tokens", "ends")
            )
            check_size(tokens_file, shard["tokens"] * self.dtype.itemsize)
            check_size(ends_file, shard["documents"] * 8)
            self._shards.append(_open_shard(tokens_file, self.dtype, self._mode))
            self._ends.append(np.memmap(ends_file, dtype="<u8", mode="r"))
            starts.append(starts[-1] + shard["tokens"])
            documents.append(documents[-1] + shard["documents"])
        self._starts, self._documents = np.asarray(starts), documents
        self.tokens, self.documents = starts[-1], documents[-1]

    def __reduce__(self) -> tuple:
        return TokenDataset, self._arguments  # a worker process opens the files for itself

    def read(self, start: int, length: int) -> NDArray:
        """Tokens [start, start + length), in the dtype on disk; may span shards.

        Raises:
            DataError: storage gave fewer bytes than the file should have.
        """
        pieces = [
            self._shards[shard](offset, size) for shard, offset, size in self._pieces(start, length)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def document_ids(self, start: int, length: int) -> NDArray[np.int64]:
        """Number of the document that each token of [start, start + length) belongs to."""
        numbers = []
        for shard, offset, size in self._pieces(start, length):
            ends = self._ends[shard]
            first = int(np.searchsorted(ends, offset, side="right"))
            last = int(np.searchsorted(ends, offset + size, side="left"))
            inside = np.asarray(ends[first:last], dtype=np.int64)
            here = np.searchsorted(inside, np.arange(offset, offset + size), side="right")
            numbers.append(here + (self._documents[shard] + first))
        return numbers[0] if len(numbers) == 1 else np.concatenate(numbers)

    def document_length(self, number: int) -> int:
        """Tokens of a document, its end included."""
        shard = int(np.searchsorted(self._documents, number, side="right")) - 1
        place = number - self._documents[shard]
        begin = int(self._ends[shard][place - 1]) if place else 0
        return int(self._ends[shard][place]) - begin

    def _pieces(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """(shard, offset in it, length) of each part of a window."""
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while length > 0:
            size = min(length, int(self._starts[shard + 1]) - start)
            yield shard, start - int(self._starts[shard]), size
            start, length, shard = start + size, length - size, shard + 1


def check_size(path: Path, expected: int) -> None:
    """Raise DataError unless the file has the size that index.json says."""
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; restore it or prepare the data again") from None
    if found != expected:
        what = "truncated" if found < expected else "too long"
        raise DataError(
            f"{path}: {what}: {found} bytes instead of {expected}; copy the file again, or prepare "
            "the data again"
        )


def detect_reader(directory: Path) -> Literal["mmap", "pread"]:
    """pread where the filesystem of `directory` is a network one, else mmap (Linux; elsewhere
    mmap)."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "mmap"
    for line in lines:
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == wanted and kind.startswith(_NETWORK_FILESYSTEMS):
            return "pread"
    return "mmap"


def _open_shard(path: Path, dtype: np.dtype, mode: str) -> Callable[[int, int], NDArray]:
    """A function (start, length) → tokens."""
    size = dtype.itemsize
    descriptor = os.open(path, os.O_RDONLY)
    if mode == "pread":
        return lambda start, length: _pread(path, descriptor, start * size, length * size, dtype)
    whole: NDArray
    if mode == "ram":
        whole = np.fromfile(path, dtype=dtype)
    else:
        length = os.fstat(descriptor).st_size
        mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) if length else b""
        whole = np.frombuffer(mapped, dtype=dtype)
    os.close(descriptor)
    return lambda start, length: whole[start : start + length]


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _TRANSIENT


@retry(
    retry=retry_if_exception(_is_transient),
    wait=wait_random_exponential(0.1, max=10),
    stop=stop_after_attempt(6),
    reraise=True,
)
def _pread(path: Path, descriptor: int, offset: int, size: int, dtype: np.dtype) -> NDArray:
    content = os.pread(descriptor, size, offset)
    if len(content) < size:
        raise DataError(f"{path}: truncated while in use, at byte {offset + len(content)}")
    return np.frombuffer(content, dtype=dtype)


def checksums(path: Path) -> tuple[str, list[int]]:
    """(sha256, CRC-32 of every 16 MiB block) of a file."""
    digest, blocks = hashlib.sha256(), []
    for block in _blocks(path):
        digest.update(block)
        blocks.append(zlib.crc32(block))
    return digest.hexdigest(), blocks


def verify(directory: str | Path) -> list[str]:
    """Read every byte again; returns what is wrong, one line a problem naming file and block."""
    directory = Path(directory)
    index = read_index(directory)
    problems = []
    for split in SPLITS:
        for shard in index["splits"][split]["shards"]:
            for kind in ("tokens", "ends"):
                path = directory / f"{shard['name']}.{kind}"
                size = shard["tokens"] * np.dtype(index["dtype"]).itemsize
                try:
                    check_size(path, size if kind == "tokens" else shard["documents"] * 8)
                except DataError as error:
                    problems.append(str(error))
                    continue
                _, blocks = checksums(path)
                problems += [
                    f"{path}: wrong checksum in the 16 MiB from byte {number * CHECKSUM_BLOCK} on; "
                    "copy the file again"
                    for number, (found, expected) in enumerate(
                        zip(blocks, shard[f"{kind}_crc32"], strict=True)
                    )
                    if found != expected
                ]
    found = hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
    if found != index["tokenizer"]["sha256"]:
        problems.append(f"{directory / 'tokenizer.json'}: is not the tokenizer of this data set")
    return problems


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(CHECKSUM_BLOCK):
            yield block
