"""Prepared data on disk: token shards, document ends, the index.json that names them. numpy only.

[Note: prepared data set]
```
index.json             written last; without it the directory is not a data set
tokenizer.json         the tokenizer, for checkpoints and for `perdure generate`
train-00000.tokens     ids, headerless little-endian uint16 or uint32; documents end in eos
train-00000.ends       uint64, end of each document in the shard, in tokens
train-00000.trained    of chats, a bit for each token, from the lowest of a byte on: is it trained
train-00000.records    uint32, for each document the line (row, value) of its record in its input
                       file, from 1; data sets of older versions have none
validation-00000.…     the same for the validation split
rejects.jsonl          records that were left out: file, line, reason
```
A split is the concatenation of its shards in the order of index.json. Plain text has format 1,
chats and pairs of answers format 2. Of pairs, documents 2k and 2k + 1 are the chosen and the
rejected answer.
"""

import errno
import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tenacity import retry, retry_if_exception, stop_after_attempt, wait_random_exponential

from checkpointing.format.untrusted import (
    a_list,
    a_name,
    a_text,
    an_object,
    count,
    read_object,
)
from checkpointing.storage.posix import filesystem, is_shared

FORMAT, FORMAT_OF_CHATS = 1, 2
KINDS = {FORMAT: ("tokens", "ends"), FORMAT_OF_CHATS: ("tokens", "ends", "trained")}
"""Extensions of a shard's files, by format; `RECORDS` is optional."""
RECORDS = "records"
"""Extension of the file with the origins of documents, which is not part of the data's identity."""
DTYPES = ("uint16", "uint32")
SPLITS = ("train", "validation")
CHECKSUM_BLOCK = 16 << 20
_ENDS = CHECKSUM_BLOCK // 8
_CHECKED_AT_START = 4 * _ENDS
Reader = Literal["auto", "mmap", "pread", "ram"]

_TRANSIENT = (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)


class DataError(ValueError):
    """A prepared data set is missing, damaged, or has changed; the message names the file."""


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in _TRANSIENT


_patient = retry(
    retry=retry_if_exception(_is_transient),
    wait=wait_random_exponential(0.1, max=10),
    stop=stop_after_attempt(6),
    reraise=True,
)
"""Decorator: retry for up to half a minute after an error that storage may recover from."""


def read_index(directory: str | Path) -> dict[str, Any]:
    """index.json of a prepared data set.

    Raises:
        DataError: it is missing, malformed, or of another format.
    """
    path = Path(directory) / "index.json"
    way_out = f"remove {directory} and prepare the data again"
    try:
        index = read_object(_patient(path.read_bytes)())
        # The format decides which other keys must exist.
        _check(index, {"format": count})
        if index["format"] in KINDS:
            kinds = _INDEX if index["format"] == FORMAT else _INDEX_OF_CHATS
            # Data sets of older versions lack some of these.
            _check(index, {key: kind for key, kind in _ABOUT.items() if key in index} | kinds)
            for split in SPLITS:
                for number, shard in enumerate(index["splits"][split]["shards"]):
                    if shard.keys() & _RECORDS:
                        _check(shard, _RECORDS, f"splits.{split}.shards.{number}")
    except FileNotFoundError:
        raise DataError(
            f"{path}: missing, so this is not a prepared data set; see "
            "`perdure data prepare --help`"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: damaged: {error}; {way_out}") from error
    if index["format"] not in KINDS:
        known = " and ".join(map(str, KINDS))
        raise DataError(
            f"{path}: has format {index['format']}, this version reads {known}; {way_out}"
        )
    if index["fingerprint"] != fingerprint(index):
        raise DataError(f"{path}: was edited: its fingerprint does not match; {way_out}")
    for split in SPLITS if index.get("kind") == "pairs" else ():
        if index["splits"][split]["documents"] % 2:
            raise DataError(
                f"{path}: damaged: splits.{split}.documents: odd, but pairs have two answers each; "
                f"{way_out}"
            )
    return index


def _dtype(value: Any) -> None:
    if value not in DTYPES:
        raise ValueError(f"none of {', '.join(DTYPES)}")


def _kind(value: Any) -> None:
    if value not in ("chats", "pairs"):
        raise ValueError("neither chats nor pairs")


_COUNTS = {"tokens": count, "documents": count}
_SHARD = {
    **{"name": a_name, **_COUNTS, "tokens_sha256": a_text, "tokens_crc32": [count]},
    **{"ends_sha256": a_text, "ends_crc32": [count]},
}
_RECORDS = {f"{RECORDS}_sha256": a_text, f"{RECORDS}_crc32": [count]}
"""Keys of a shard with records of its documents."""
_INDEX = {
    **{"fingerprint": a_text, "dtype": _dtype, "vocab_size": count, "eos_id": count},
    "tokenizer": {"sha256": a_text},
    "splits": {split: {**_COUNTS, "shards": [_SHARD]} for split in SPLITS},
}
"""Keys of index.json, and the checks of their values."""
_SHARD_OF_CHATS = {
    **{**_SHARD, "trained": count, "trained_sha256": a_text, "trained_crc32": [count]}
}
_COUNTS_OF_CHATS = {**_COUNTS, "trained": count, "shards": [_SHARD_OF_CHATS]}
_INDEX_OF_CHATS = {
    **{**_INDEX, "kind": _kind, "chats": {"template": a_text}},
    "splits": dict.fromkeys(SPLITS, _COUNTS_OF_CHATS),
}
_ABOUT = {
    **{"start_ids": [count], "documents": count, "rejected": count, "plan": a_text},
    "sources": [{"file": a_text, "bytes": count, "documents": count, "rejected": count}],
}
"""Optional keys of index.json, and the checks of their values."""


def _check(value: Any, kind: Any, where: str = "") -> None:
    """Raise ValueError, with the key, for a value of the wrong kind."""
    inside: list[tuple[Any, Any, Any]] = []
    try:
        if isinstance(kind, dict):
            found = an_object(value)
            inside = [(key, found.get(key), inner) for key, inner in kind.items()]
        elif isinstance(kind, list):
            inside = [(number, one, kind[0]) for number, one in enumerate(a_list(value))]
        else:
            kind(value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    for key, one, inner in inside:
        _check(one, inner, f"{where}.{key}" if where else key)


def fingerprint(index: dict[str, Any]) -> str:
    """Identity of the data: hashes of contents and tokenizer, dtype and eos, and the options of
    chats; no paths, no times."""
    form = index["format"]
    shards = {
        split: [
            [shard[f"{kind}_sha256"] for kind in KINDS[form]]
            for shard in index["splits"][split]["shards"]
        ]
        for split in SPLITS
    }
    facts = [form, index["dtype"], index["eos_id"], index["tokenizer"]["sha256"], shards]
    if form == FORMAT_OF_CHATS:
        facts += [index["kind"], index["chats"]]
    return "sha256:" + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class TokenDataset:
    """One split of a prepared data set: an array of tokens, and the ends of its documents."""

    def __init__(self, directory: str | Path, split: str, reader: Reader = "auto") -> None:
        """Open a split, and check the size of every file against index.json.

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
        self.tokenizer_sha256: str = index["tokenizer"]["sha256"]
        self.kind: str = index.get("kind", "documents")
        """documents, chats or pairs."""
        self.masked: bool = index["format"] == FORMAT_OF_CHATS
        """Whether some tokens are no labels."""
        self._mode = detect_reader(directory) if reader == "auto" else reader
        self._shards: list[Callable[[int, int], NDArray]] = []
        self._entries: list[dict[str, Any]] = index["splits"][split]["shards"]
        self._inputs = _inputs_of(index, split)
        self._ends: dict[int, NDArray] = {}
        self._bits: dict[int, NDArray[np.uint8]] = {}
        self._files: list[Path] = []
        starts, documents = [0], [0]
        for shard in self._entries:
            tokens_file = directory / f"{shard['name']}.tokens"
            for kind, size in sizes_of(shard, self.dtype.itemsize, index["format"]).items():
                check_size(tokens_file.with_suffix(f".{kind}"), size)
            self._files.append(tokens_file)
            self._shards.append(_open_shard(tokens_file, self.dtype, self._mode))
            starts.append(starts[-1] + shard["tokens"])
            documents.append(documents[-1] + shard["documents"])
        self._starts, self._documents = np.asarray(starts), documents
        self.tokens, self.documents = starts[-1], documents[-1]
        self.trained = index["splits"][split]["trained"] if self.masked else self.tokens
        """Number of tokens that are labels."""

    def __reduce__(self) -> tuple:
        return TokenDataset, self._arguments  # a worker process opens the files itself

    def read(self, start: int, length: int) -> NDArray:
        """Tokens [start, start + length), in the dtype on disk; may span shards.

        Raises:
            DataError: storage returned fewer bytes than the file must have.
        """
        pieces = [
            self._shards[shard](offset, size) for shard, offset, size in self._pieces(start, length)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def read_trained(self, start: int, length: int) -> NDArray[np.bool_]:
        """Whether each token of [start, start + length) is a label.

        Raises:
            DataError: names the .trained file that is damaged.
        """
        if not self.masked:
            return np.ones(length, bool)
        parts = []
        for shard, offset, size in self._pieces(start, length):
            bits = self._bits_of(shard)[offset // 8 : -(-(offset + size) // 8)]
            found = np.unpackbits(bits, bitorder="little")[offset % 8 :][:size]
            parts.append(found.astype(bool))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document.

        Raises:
            DataError: names the .ends file that is damaged.
        """
        parts = [
            np.diff(np.asarray(self._ends_of(shard), np.int64), prepend=0)
            for shard in range(len(self._files))
        ]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def check_ends(self) -> None:
        """Check ends of documents and trained tokens of the first shards, up to _CHECKED_AT_START
        documents. Others are checked on first use, as a billion would take seconds.

        Raises:
            DataError: names the file that is damaged.
        """
        for shard, documents in enumerate(self._documents[1:]):
            if documents <= _CHECKED_AT_START:
                self._ends_of(shard)
                if self.masked:
                    self._bits_of(shard)

    def document_ids(self, start: int, length: int) -> NDArray[np.int64]:
        """Index of the document of each token in [start, start + length).

        Raises:
            DataError: names the .ends file that is damaged.
        """
        numbers = []
        for shard, offset, size in self._pieces(start, length):
            ends = self._ends_of(shard)
            # Ends are exclusive: a document that ends at `offset` lies before the window.
            first = int(np.searchsorted(ends, offset, side="right"))
            last = int(np.searchsorted(ends, offset + size, side="left"))
            inside = np.asarray(ends[first:last], dtype=np.int64)
            here = np.searchsorted(inside, np.arange(offset, offset + size), side="right")
            numbers.append(here + (self._documents[shard] + first))
        return numbers[0] if len(numbers) == 1 else np.concatenate(numbers)

    def document_length(self, number: int) -> int:
        """Tokens of a document, including its end."""
        shard = int(np.searchsorted(self._documents, number, side="right")) - 1
        place, ends = number - self._documents[shard], self._ends_of(shard)
        begin = int(ends[place - 1]) if place else 0
        return int(ends[place]) - begin

    def origin(self, number: int) -> tuple[str, int] | None:
        """Input file of a document, and the line (row, value) of its record there, from 1; None if
        not recorded.

        Raises:
            DataError: the records cannot be read.
        """
        shard = int(np.searchsorted(self._documents, number, side="right")) - 1
        input_file = next((file for end, file in self._inputs if number < end), None)
        if input_file is None or f"{RECORDS}_sha256" not in self._entries[shard]:
            return None
        path = self._files[shard].with_suffix(f".{RECORDS}")
        try:
            lines = np.memmap(path, "<u4", "r")
            return input_file, int(lines[number - self._documents[shard]])
        except (OSError, ValueError, IndexError) as error:
            raise DataError(f"{path}: cannot be read: {error}; copy the file again") from error

    def file_of(self, start: int) -> Path:
        """The shard that holds token `start`, for messages."""
        return self._files[next(self._pieces(start, 1))[0]]

    def _ends_of(self, shard: int) -> NDArray:
        """Ends of the documents of a shard, uint64."""
        if shard not in self._ends:
            # Checked: a search in unsorted ends would silently give wrong attention masks.
            path = self._files[shard].with_suffix(".ends")
            self._ends[shard] = _open_ends(path, self._entries[shard])
        return self._ends[shard]

    def _bits_of(self, shard: int) -> NDArray[np.uint8]:
        """One bit per token of a shard: whether it is trained."""
        if shard not in self._bits:
            path = self._files[shard].with_suffix(".trained")
            self._bits[shard] = _open_bits(path, self._entries[shard])
        return self._bits[shard]

    def _pieces(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield (shard, offset in it, length) of each part of a window."""
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while length > 0:
            size = min(length, int(self._starts[shard + 1]) - start)
            yield shard, start - int(self._starts[shard]), size
            start, length, shard = start + size, length - size, shard + 1


def sizes_of(shard: dict[str, Any], width: int, form: int) -> dict[str, int]:
    """Bytes of each file of a shard, by extension.

    Args:
        shard: its entry in index.json.
        width: bytes of a token.
        form: format of the data set.
    """
    tokens, documents = shard["tokens"], shard["documents"]
    sizes = {"tokens": tokens * width, "ends": documents * 8, "trained": -(-tokens // 8)}
    of_records = {RECORDS: documents * 4} if f"{RECORDS}_sha256" in shard else {}
    return {kind: sizes[kind] for kind in KINDS[form]} | of_records


def _inputs_of(index: dict[str, Any], split: str) -> list[tuple[int, str]]:
    """For each input file of a split, in order: index after its last document, and the file; [] if
    not recorded."""
    found, end = [], 0
    for source in index.get("sources", []):
        try:
            end += count(an_object(source.get("by_split")).get(split))
        except ValueError:
            return []
        found.append((end, source["file"]))
    return found


def check_size(path: Path, expected: int) -> None:
    """Raise DataError unless the file has the size in index.json."""
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
    """Return pread for network filesystems, where each page fault is a round trip, and mmap for
    others."""
    kind = filesystem(directory)
    return "pread" if kind == "fuse" or is_shared(kind) else "mmap"


def _open_shard(path: Path, dtype: np.dtype, mode: str) -> Callable[[int, int], NDArray]:
    """A function (start, length) → tokens."""
    descriptor = os.open(path, os.O_RDONLY)
    if mode == "pread":
        return lambda start, length: _read(path, descriptor, dtype, start, length)
    size = os.fstat(descriptor).st_size
    whole: NDArray
    if mode == "ram":
        whole = _read(path, descriptor, dtype, 0, size // dtype.itemsize)
    else:
        # mmap refuses empty files.
        mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) if size else b""
        whole = np.frombuffer(mapped, dtype=dtype)
    # The mapping outlives its descriptor.
    os.close(descriptor)
    return lambda start, length: whole[start : start + length]


def _open_ends(path: Path, shard: dict[str, Any]) -> NDArray:
    """Map the .ends file of a shard into memory.

    Args:
        shard: its entry in index.json.

    Raises:
        DataError: its checksum is wrong, or its numbers do not ascend to the end of the shard.
    """
    try:
        ends = np.memmap(path, "<u8", "r") if shard["documents"] else np.empty(0, "<u8")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}; copy the file again") from error
    # In blocks, so that comparisons allocate little.
    blocks = [ends[start : start + _ENDS] for start in range(0, len(ends), _ENDS)]
    wrong = [zlib.crc32(block.data) for block in blocks] != shard["ends_crc32"]
    last = 0
    for block in blocks:
        wrong = wrong or int(block[0]) <= last or bool((block[1:] <= block[:-1]).any())
        last = int(block[-1])
    if wrong or last != shard["tokens"]:
        raise DataError(
            f"{path}: damaged: its ends of documents are not those that were written; copy the "
            "file again, or prepare the data again"
        )
    return ends


def _open_bits(path: Path, shard: dict[str, Any]) -> NDArray[np.uint8]:
    """Map the .trained file of a shard into memory.

    Args:
        shard: its entry in index.json.

    Raises:
        DataError: its checksum is wrong.
    """
    try:
        bits = np.memmap(path, np.uint8, "r") if shard["tokens"] else np.empty(0, np.uint8)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}; copy the file again") from error
    starts = range(0, len(bits), CHECKSUM_BLOCK)
    found = [zlib.crc32(bits[start : start + CHECKSUM_BLOCK].data) for start in starts]
    if found != shard["trained_crc32"]:
        raise DataError(
            f"{path}: damaged: what is trained is not what was written; copy the file again, or "
            "prepare the data again"
        )
    return bits


def _read(path: Path, descriptor: int, dtype: np.dtype, start: int, length: int) -> NDArray:
    tokens = np.empty(length, dtype=dtype)
    # As bytes: a short read may end inside a token.
    left, offset = tokens.view(np.uint8).data, start * dtype.itemsize
    while left:  # reads may be short
        try:
            count = _preadv(descriptor, [left], offset)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read at byte {offset}: {error.strerror}; check the storage"
            ) from error
        if not count:
            raise DataError(
                f"{path}: truncated while in use, at byte {offset}; restore it and start again"
            )
        left, offset = left[count:], offset + count
    return tokens


@_patient
def _preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
    return os.preadv(descriptor, buffers, offset)


def checksums(path: Path) -> tuple[str, list[int]]:
    """(sha256, CRC-32 of every 16 MiB block) of a file."""
    digest, blocks = hashlib.sha256(), []
    for block in _blocks(path):
        digest.update(block)
        blocks.append(zlib.crc32(block))
    return digest.hexdigest(), blocks


def verify(directory: str | Path) -> list[str]:
    """Read every byte again; returns a line per problem with file and block.

    Raises:
        DataError: index.json itself is missing or damaged.
    """
    directory = Path(directory)
    index = read_index(directory)
    problems = []
    for split in SPLITS:
        for shard in index["splits"][split]["shards"]:
            width = np.dtype(index["dtype"]).itemsize
            for kind, size in sizes_of(shard, width, index["format"]).items():
                path = directory / f"{shard['name']}.{kind}"
                try:
                    check_size(path, size)
                    digest, blocks = checksums(path)
                except DataError as error:
                    problems.append(str(error))
                    continue
                except OSError as error:
                    problems.append(f"{path}: cannot be read: {error.strerror}")
                    continue
                if digest != shard[f"{kind}_sha256"]:
                    problems += _damaged_blocks(path, blocks, shard[f"{kind}_crc32"])
    tokenizer = directory / "tokenizer.json"
    if not tokenizer.is_file():
        problems.append(f"{tokenizer}: missing; restore it or prepare the data again")
    elif checksums(tokenizer)[0] != index["tokenizer"]["sha256"]:
        problems.append(f"{tokenizer}: is not the tokenizer that this data was prepared with")
    return problems


def _damaged_blocks(path: Path, found: list[int], expected: list[int]) -> list[str]:
    return [
        f"{path}: wrong checksum in the {CHECKSUM_BLOCK >> 20} MiB from byte "
        f"{number * CHECKSUM_BLOCK} on; copy the file again, or prepare the data again"
        for number, (have, want) in enumerate(zip_longest(found, expected))
        if have != want
    ]


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(CHECKSUM_BLOCK):
            yield block
