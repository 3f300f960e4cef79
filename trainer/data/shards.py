"""Prepared data sets: token shards, document ends, and the index.json that lists them. numpy only.

A data set is in a directory, or in an object store, where remote.py reads the shards. Functions
that read an object store raise StorageError if it does not answer, or denies access.

[Note: prepared data set]
```
index.json             written last; without it the directory is not a data set
tokenizer.json         the tokenizer, for checkpoints and for `perdure generate`
train-00000.tokens     ids, headerless little-endian uint16 or uint32; plain documents end in eos
train-00000.ends       uint64, end of each document in the shard, in tokens
train-00000.trained    chats and pairs: one bit per token, lowest bit of a byte first: 1 if trained
train-00000.records    uint32, for each document the number, from 1, of its record in its input
                       file, from 1; absent in data sets of older versions
train-00000.crc        uint32, CRC-32 of each 64 KiB of .tokens, to check ranges of it; absent in
                       data sets of older versions
validation-00000.…     the same files for the validation split
rejects.jsonl          rejected records: file, line, reason
```
A split is the concatenation of its shards in the order of index.json. Plain text has format 1,
chats and pairs of answers have format 2. In a data set of pairs, documents 2k and 2k + 1 are the
chosen and the rejected answer of pair k.
"""

import hashlib
import json
import mmap
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from checkpointing.errors import StorageError
from checkpointing.format.untrusted import (
    MAX_JSON_BYTES,
    a_list,
    a_name,
    a_text,
    an_object,
    count,
    read_object,
)
from checkpointing.storage.place import ObjectPath, StoragePlace, local, location
from checkpointing.storage.posix import filesystem, is_shared, read_at
from checkpointing.storage.steps import storage_of

if TYPE_CHECKING:
    from trainer.data.remote import RemoteDataRead, RemoteDataShard
    from trainer.recipe.sections import DataCacheSection

FORMAT, FORMAT_OF_CHATS = 1, 2
KINDS = {FORMAT: ("tokens", "ends"), FORMAT_OF_CHATS: ("tokens", "ends", "trained")}
"""Format → extensions of a shard's mandatory files."""
RECORDS = "records"
"""Extension of the optional file with the origins of documents; the fingerprint does not cover
it."""
CRC, CRC_BLOCK = "crc", 1 << 16
"""Extension of the file with the checksums of small blocks of tokens, and bytes of a block."""
DTYPES = ("uint16", "uint32")
SPLITS = ("train", "validation")
CHECKSUM_BLOCK = 16 << 20
_ENDS = CHECKSUM_BLOCK // 8
_CHECKED_AT_START = 4 * _ENDS
_CURE = "copy the file again, or prepare the data again"
Reader = Literal["auto", "mmap", "pread", "ram"]


class DataError(ValueError):
    """Training data, or an option of their preparation, cannot be used; the message says where."""


def read_index(directory: str | StoragePlace) -> dict[str, Any]:
    """Read index.json of a prepared data set. Raises DataError if the file is missing,
    unreadable, malformed, edited or of an unknown format, and StorageError if the bucket does not
    exist."""
    path = location(directory) / "index.json"
    way_out = f"remove {directory} and prepare the data again"
    if isinstance(path, ObjectPath):
        way_out = f"copy it again with `perdure data copy DIRECTORY {directory}`"
    try:
        index = read_object(read_small(path))
        # The format determines which other keys must exist.
        _check(index, {"format": count})
        if index["format"] in KINDS:
            kinds = _INDEX if index["format"] == FORMAT else _INDEX_OF_CHATS
            # Data sets of older versions lack some of these.
            _check(index, {key: kind for key, kind in _ABOUT.items() if key in index} | kinds)
            for split in SPLITS:
                for number, shard in enumerate(index["splits"][split]["shards"]):
                    for kinds in (_RECORDS, _CRC):
                        if shard.keys() & kinds:
                            _check(shard, kinds, f"splits.{split}.shards.{number}")
    except FileNotFoundError:
        storage_of(path).children(location(directory))  # raises if the bucket does not exist
        raise DataError(
            f"{path}: missing, so this is not a prepared data set; see "
            "`perdure data prepare --help`"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
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


def is_prepared(directory: str | StoragePlace) -> bool:
    """Whether a directory or URL has a prepared data set. Raises StorageError if the bucket does
    not exist."""
    path = location(directory) / "index.json"
    return storage_of(path).exists(path)


def read_small(path: StoragePlace) -> bytes:
    """Read a file of at most MAX_JSON_BYTES bytes. Raises OSError if it cannot be read or is
    larger."""
    return storage_of(path).read(path, MAX_JSON_BYTES)


def entries_of(index: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of all shards in index.json, in the order of SPLITS."""
    return [entry for split in SPLITS for entry in index["splits"][split]["shards"]]


def _one_of(*choices: str) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if value not in choices:
            raise ValueError(f"not one of {', '.join(choices)}")

    return check


_COUNTS = {"tokens": count, "documents": count}
_SHARD = {
    **{"name": a_name, **_COUNTS, "tokens_sha256": a_text, "tokens_crc32": [count]},
    **{"ends_sha256": a_text, "ends_crc32": [count]},
}
_RECORDS = {f"{RECORDS}_sha256": a_text, f"{RECORDS}_crc32": [count]}
"""Additional keys of a shard that has a .records file."""
_CRC = {f"{CRC}_sha256": a_text, f"{CRC}_crc32": [count], "eos": count}
"""Additional keys of a shard that has a .crc file; `eos` counts the end-of-document tokens in the
shard."""
_INDEX = {
    **{"fingerprint": a_text, "dtype": _one_of(*DTYPES), "vocab_size": count, "eos_id": count},
    "tokenizer": {"sha256": a_text},
    "splits": {split: {**_COUNTS, "shards": [_SHARD]} for split in SPLITS},
}
"""Keys of index.json → checks of their values."""
_TRAINED = {"trained": count, "trained_sha256": a_text, "trained_crc32": [count]}
_SPLIT_OF_CHATS = {**_COUNTS, "trained": count, "shards": [_SHARD | _TRAINED]}
_INDEX_OF_CHATS = {
    **{**_INDEX, "kind": _one_of("chats", "pairs"), "chats": {"template": a_text}},
    "splits": dict.fromkeys(SPLITS, _SPLIT_OF_CHATS),
}
_ABOUT = {
    **{"start_ids": [count], "documents": count, "rejected": count, "plan": a_text},
    "sources": [{"file": a_text, "bytes": count, "documents": count, "rejected": count}],
}
"""Optional keys of index.json → checks of their values."""


def _check(value: Any, kind: Any, where: str = "") -> None:
    """Raise ValueError, with the key, for a value that fails a check. `kind`: a function that
    raises ValueError; {key: kind} for a mapping; [kind] for a list."""
    inside: list[tuple[Any, Any, Any]] = []
    try:
        if isinstance(kind, dict):
            mapping = an_object(value)
            inside = [(key, mapping.get(key), inner) for key, inner in kind.items()]
        elif isinstance(kind, list):
            inside = [(number, item, kind[0]) for number, item in enumerate(a_list(value))]
        else:
            kind(value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    for key, item, inner in inside:
        _check(item, inner, f"{where}.{key}" if where else key)


def fingerprint(index: dict[str, Any]) -> str:
    """Identity of the data: hashes of contents and tokenizer, dtype, eos, and the options of chats.
    Covers neither paths nor times."""
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
    """One split of a prepared data set: tokens by index, and the ends of its documents."""

    def __init__(
        self,
        directory: str | StoragePlace,
        split: str,
        reader: Reader = "auto",
        cache: "DataCacheSection | None" = None,
    ) -> None:
        """Open a split, and check the size of every file against index.json.

        Args:
            directory: path, or URL in an object store.
            split: "train" or "validation".
            reader: mmap; pread (one read per window); ram (the whole split in memory); or auto (see
                `detect_reader`). Not used for object stores.
            cache: place of local copies of shards in an object store.

        Raises:
            DataError: names the file that is missing, truncated or too long.
        """
        self._arguments = (directory, split, reader, cache)
        self._directory = directory = location(directory)
        index = read_index(directory)
        self.dtype = np.dtype(index["dtype"]).newbyteorder("<")
        self.vocab_size: int = index["vocab_size"]
        self.eos_id: int = index["eos_id"]
        self.fingerprint: str = index["fingerprint"]
        self.tokenizer_sha256: str = index["tokenizer"]["sha256"]
        self.kind: str = index.get("kind", "documents")
        """"documents", "chats" or "pairs"."""
        self.masked: bool = index["format"] == FORMAT_OF_CHATS
        """Whether some tokens are not labels."""
        self.remote = isinstance(directory, ObjectPath)
        """Whether the data set is in an object store."""
        self._entries: list[dict[str, Any]] = index["splits"][split]["shards"]
        self._inputs = _inputs_of(index, split)
        self._ends: dict[int, NDArray] = {}
        self._bits: dict[int, NDArray[np.uint8]] = {}
        sizes = {
            f"{shard['name']}.{kind}": size
            for shard in self._entries
            for kind, size in sizes_of(shard, index).items()
        }
        check_sizes(directory, sizes)
        starts, documents = [0], [0]
        for shard in self._entries:
            starts.append(starts[-1] + shard["tokens"])
            documents.append(documents[-1] + shard["documents"])
        self._starts, self._documents = np.asarray(starts), documents
        self.tokens, self.documents = starts[-1], documents[-1]
        self.trained = index["splits"][split]["trained"] if self.masked else self.tokens
        """Number of tokens that are labels."""
        self.by_eos = (
            self.remote
            and not self.masked
            and all(shard.get("eos") == shard["documents"] for shard in self._entries)
        )
        """Whether eos tokens occur only at ends of documents. Then the .ends files of a data set in
        a store, which may take gigabytes, are not downloaded."""
        self._shards: list[Callable[[int, int], NDArray]] = []
        self._remote: list[RemoteDataShard] = []
        if isinstance(directory, ObjectPath):
            from trainer.data.remote import open_shards  # imports the client of object stores

            self._remote = open_shards(directory, index, split, cache)
            self._shards += self._remote
            return
        mode = detect_reader(local(directory)) if reader == "auto" else reader
        paths = (self._path(number, "tokens") for number in range(len(self._entries)))
        self._shards += [_open_shard(path, self.dtype, mode) for path in paths]

    def __reduce__(self) -> tuple:
        return TokenDataset, self._arguments  # a worker process opens the files itself

    def _path(self, shard: int, kind: str) -> Any:
        return self._directory / f"{self._entries[shard]['name']}.{kind}"

    def begin(self, windows: Iterable[tuple[int, int]]) -> "list[RemoteDataRead]":
        """Start to fetch windows (start, length) of tokens from an object store, for later calls of
        `read`. The data stay in memory as long as the returned list."""
        if not self._remote:
            return []
        parts: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for start, length in windows:
            for shard, offset, size in self._pieces(start, length):
                parts[shard].append((offset, size))
        return [read for shard, some in parts.items() for read in self._remote[shard].begin(some)]

    def read(self, start: int, length: int) -> NDArray:
        """Read tokens [start, start + length), in the dtype on disk. The window may span shards.
        Raises DataError if storage returned fewer bytes than the file must have."""
        pieces = [
            self._shards[shard](offset, size) for shard, offset, size in self._pieces(start, length)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def read_trained(self, start: int, length: int) -> NDArray[np.bool_]:
        """Whether each token of [start, start + length) is a label. Raises DataError."""
        if not self.masked:
            return np.ones(length, bool)
        parts = []
        for shard, offset, size in self._pieces(start, length):
            bits = self._bits_of(shard)[offset // 8 : -(-(offset + size) // 8)]
            parts.append(np.unpackbits(bits, bitorder="little")[offset % 8 :][:size])
        return np.concatenate(parts).astype(bool)

    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each document. Raises DataError if a .ends file is damaged."""
        parts = [np.empty(0, np.int64)]
        for shard in range(len(self._entries)):
            ends = self._ends_of(shard).astype(np.int64)
            parts.append(np.diff(ends, prepend=0))
        return np.concatenate(parts)

    def check_ends(self) -> None:
        """Check document ends and trained tokens of the first shards, up to _CHECKED_AT_START
        documents. Later shards are checked on first use, because checking a billion documents would
        take seconds. A DataError names the damaged file."""
        if self.by_eos:
            return
        for shard, documents in enumerate(self._documents[1:]):
            if documents <= _CHECKED_AT_START:
                self._ends_of(shard)
                if self.masked:
                    self._bits_of(shard)

    def documents_in(self, start: int, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return (index of its document) - (index of the first token's document) for each of
        `tokens`, which are consecutive. `start`: index of the first token in the split. A DataError
        names the damaged .ends file."""
        if not self.by_eos:
            numbers = self.document_ids(start, len(tokens))
            return numbers - numbers[0]
        numbers = np.zeros(len(tokens), np.int64)
        np.cumsum(tokens[:-1] == self.eos_id, out=numbers[1:])
        return numbers

    def document_ids(self, start: int, length: int) -> NDArray[np.int64]:
        """Index of the document of each token in [start, start + length). A DataError names the
        damaged .ends file."""
        numbers = []
        for shard, offset, size in self._pieces(start, length):
            ends = self._ends_of(shard)
            # Ends are exclusive: a document that ends at `offset` is before the window.
            first = int(np.searchsorted(ends, offset, side="right"))
            last = int(np.searchsorted(ends, offset + size, side="left"))
            inside = np.asarray(ends[first:last], dtype=np.int64)
            here = np.searchsorted(inside, np.arange(offset, offset + size), side="right")
            numbers.append(here + (self._documents[shard] + first))
        return numbers[0] if len(numbers) == 1 else np.concatenate(numbers)

    def document_length(self, number: int) -> int:
        """Number of tokens of a document, including its end."""
        shard = int(np.searchsorted(self._documents, number, side="right")) - 1
        place, ends = number - self._documents[shard], self._ends_of(shard)
        begin = int(ends[place - 1]) if place else 0
        return int(ends[place]) - begin

    def origin(self, number: int) -> tuple[str, int] | None:
        """Return (input file, line or row or value of the record in it, from 1) of a document; None
        if not recorded. Raises DataError if the records cannot be read."""
        shard = int(np.searchsorted(self._documents, number, side="right")) - 1
        input_file = next((file for end, file in self._inputs if number < end), None)
        if input_file is None or f"{RECORDS}_sha256" not in self._entries[shard]:
            return None
        path, line = self._path(shard, RECORDS), bytearray(4)
        place = 4 * (number - self._documents[shard])
        try:
            with storage_of(path).open(path) as file:
                if file.read_into([memoryview(line)], place) < len(line):
                    raise OSError(f"ends before byte {place + len(line)}")
        except (OSError, StorageError) as error:
            raise DataError(f"{path}: cannot be read: {error}; copy the file again") from error
        return input_file, int.from_bytes(line, "little")

    def file_of(self, start: int) -> StoragePlace:
        """Path of the shard that holds token `start`, for messages."""
        found: StoragePlace = self._path(next(self._pieces(start, 1))[0], "tokens")
        return found

    def _ends_of(self, shard: int) -> NDArray:
        """Ends of the documents of a shard, uint64."""
        if shard not in self._ends:
            self._ends[shard] = _open_ends(self._path(shard, "ends"), self._entries[shard])
        return self._ends[shard]

    def _bits_of(self, shard: int) -> NDArray[np.uint8]:
        if shard not in self._bits:
            path, entry = self._path(shard, "trained"), self._entries[shard]
            size = -(-entry["tokens"] // 8)
            self._bits[shard] = _open_numbers(
                path, "u1", size, entry["trained_crc32"], "trained tokens"
            )
        return self._bits[shard]

    def _pieces(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield (shard, offset in it, length) of each part of a window."""
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while length > 0:
            size = min(length, int(self._starts[shard + 1]) - start)
            yield shard, start - int(self._starts[shard]), size
            start, length, shard = start + size, length - size, shard + 1


def sizes_of(shard: dict[str, Any], index: dict[str, Any]) -> dict[str, int]:
    """Extension → bytes of each file of a shard. `shard`: the shard's entry in `index`."""
    tokens, documents = shard["tokens"], shard["documents"]
    width = np.dtype(index["dtype"]).itemsize
    sizes = {"tokens": tokens * width, "ends": documents * 8, "trained": -(-tokens // 8)}
    sizes |= {RECORDS: documents * 4, CRC: -(-tokens * width // CRC_BLOCK) * 4}
    known = [kind for kind in (RECORDS, CRC) if f"{kind}_sha256" in shard]
    return {kind: sizes[kind] for kind in (*KINDS[index["format"]], *known)}


def _inputs_of(index: dict[str, Any], split: str) -> list[tuple[int, str]]:
    """Return (index after its last document, name) of each input file of a split, in order; [] if
    not recorded."""
    files, end = [], 0
    for source in index.get("sources", []):
        try:
            end += count(an_object(source.get("by_split")).get(split))
        except ValueError:
            return []
        files.append((end, source["file"]))
    return files


def check_sizes(directory: StoragePlace, expected: Mapping[str, int]) -> None:
    """Check that files have the sizes in index.json. In an object store, one request covers a
    thousand files. Raises DataError if a file is missing or has another size."""
    if not isinstance(directory, ObjectPath):
        for name, size in expected.items():
            check_size(directory / name, size)
        return
    from checkpointing.storage.object_storage import store_of  # imports the client of object stores

    found = store_of(directory).walk(directory) if expected else {}
    for name, size in expected.items():
        if name not in found:
            raise DataError(f"{directory / name}: is missing; copy the data set again")
        _compare_sizes(directory / name, found[name].st_size, size)


def check_size(path: StoragePlace, expected: int) -> None:
    """Check that a file has the size in index.json. Raises DataError if it is missing or has
    another size."""
    try:
        found = storage_of(path).stat(path).st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; restore it or prepare the data again") from None
    _compare_sizes(path, found, expected)


def _compare_sizes(path: StoragePlace, found: int, expected: int) -> None:
    if found != expected:
        what = "truncated" if found < expected else "too long"
        raise DataError(f"{path}: {what}: {found} bytes instead of {expected}; {_CURE}")


def detect_reader(directory: Path) -> Literal["mmap", "pread"]:
    """Return pread for network and FUSE filesystems, where each page fault is a round trip, else
    mmap."""
    kind = filesystem(directory)
    return "pread" if kind == "fuse" or is_shared(kind) else "mmap"


def _open_shard(path: Path, dtype: np.dtype, mode: str) -> Callable[[int, int], NDArray]:
    """Open a shard as a function (start, length) → tokens."""
    descriptor = os.open(path, os.O_RDONLY)
    if mode == "pread":
        return lambda start, length: _read(path, descriptor, dtype, start, length)
    size = os.fstat(descriptor).st_size
    whole: NDArray
    if mode == "ram":
        whole = _read(path, descriptor, dtype, 0, size // dtype.itemsize)
    else:
        # mmap refuses empty files
        mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) if size else b""
        whole = np.frombuffer(mapped, dtype=dtype)
    # the mapping outlives its descriptor
    os.close(descriptor)
    return lambda start, length: whole[start : start + length]


def _open_numbers(
    path: StoragePlace, dtype: str, count: int, crc32s: list[int], contents: str
) -> NDArray[Any]:
    """Map all numbers of a shard's file into memory, or download them. `contents`: what they are,
    for messages. Raises DataError if the file cannot be read, or a checksum is wrong."""
    if not count:
        return np.empty(0, dtype)
    if isinstance(path, ObjectPath):
        from trainer.data.remote import read_whole  # imports the client of object stores

        return np.frombuffer(read_whole(path, count * np.dtype(dtype).itemsize, crc32s), dtype)
    try:
        numbers = np.memmap(str(path), dtype, "r")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}; copy the file again") from error
    content = numbers.view(np.uint8)
    starts = range(0, len(content), CHECKSUM_BLOCK)
    if [zlib.crc32(content[at : at + CHECKSUM_BLOCK].data) for at in starts] != crc32s:
        raise _damaged(path, contents)
    return numbers


def _open_ends(path: StoragePlace, shard: dict[str, Any]) -> NDArray:
    """Open the .ends file of a shard. Raises DataError if its checksum is wrong, or its numbers do
    not ascend to the end of the shard: a search in them would give wrong attention masks."""
    contents, last = "ends of documents", 0
    ends = _open_numbers(path, "<u8", shard["documents"], shard["ends_crc32"], contents)
    # in blocks, so that comparisons allocate little memory
    for start in range(0, len(ends), _ENDS):
        block = ends[start : start + _ENDS]
        if int(block[0]) <= last or (block[1:] <= block[:-1]).any():
            raise _damaged(path, contents)
        last = int(block[-1])
    if last != shard["tokens"]:
        raise _damaged(path, contents)
    return ends


def _damaged(path: StoragePlace, contents: str) -> DataError:
    return DataError(f"{path}: damaged: its {contents} have changed; {_CURE}")


def _read(path: Path, descriptor: int, dtype: np.dtype, start: int, length: int) -> NDArray:
    tokens = np.empty(length, dtype=dtype)
    target, offset = tokens.view(np.uint8).data, start * dtype.itemsize
    try:
        count = read_at(descriptor, [target], offset)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read at byte {offset}: {error.strerror}; check the storage"
        ) from error
    if count < len(target):
        raise DataError(
            f"{path}: truncated while in use, at byte {offset + count}; restore it and start again"
        )
    return tokens


def checksums(path: StoragePlace) -> tuple[str, list[int]]:
    """Return (SHA-256, CRC-32 of every 16 MiB block) of a file."""
    digest, blocks = hashlib.sha256(), []
    for block in blocks_of(path):
        digest.update(block)
        blocks.append(zlib.crc32(block))
    return digest.hexdigest(), blocks


def small_checksums(block: memoryview) -> NDArray[np.uint32]:
    """CRC-32 of every 64 KiB of some bytes, as in a .crc file."""
    starts = range(0, len(block), CRC_BLOCK)
    return np.array([zlib.crc32(block[start : start + CRC_BLOCK]) for start in starts], "<u4")


class DataShardChecksums:
    """Computes the .crc file of a shard, block by block from its tokens."""

    def __init__(self, dtype: np.dtype, eos_id: int) -> None:
        self._dtype, self._eos_id, self._eos = dtype, eos_id, 0
        self.content = bytearray()
        """Contents of the .crc file so far."""

    def add(self, block: memoryview) -> None:
        """Add the next 16 MiB of the shard, or its shorter end."""
        self.content += small_checksums(block).tobytes()
        self._eos += int((np.frombuffer(block, self._dtype) == self._eos_id).sum())

    @property
    def entry(self) -> dict[str, Any]:
        """What the .crc file adds to the shard's entry in index.json: its checksums, and the number
        of eos tokens."""
        starts = range(0, len(self.content), CHECKSUM_BLOCK)
        crc32s = [zlib.crc32(self.content[at : at + CHECKSUM_BLOCK]) for at in starts]
        digest = hashlib.sha256(self.content).hexdigest()
        return {f"{CRC}_sha256": digest, f"{CRC}_crc32": crc32s, "eos": self._eos}


def verify(directory: str | StoragePlace) -> list[str]:
    """Read and check all shards and the tokenizer; return a line per problem, with file and block.
    Raises DataError if index.json itself is missing or damaged."""
    directory = location(directory)
    index = read_index(directory)
    problems = []
    for shard in entries_of(index):
        for kind, size in sizes_of(shard, index).items():
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
            if digest == shard[f"{kind}_sha256"]:
                continue
            expected = shard[f"{kind}_crc32"]
            problems += [
                f"{path}: wrong checksum in the {CHECKSUM_BLOCK >> 20} MiB from byte "
                f"{number * CHECKSUM_BLOCK} on; {_CURE}"
                for number, (have, want) in enumerate(zip_longest(blocks, expected))
                if have != want
            ]
    tokenizer = directory / "tokenizer.json"
    if not storage_of(tokenizer).exists(tokenizer):
        problems.append(f"{tokenizer}: missing; restore it or prepare the data again")
    elif checksums(tokenizer)[0] != index["tokenizer"]["sha256"]:
        problems.append(
            f"{tokenizer}: is not the tokenizer that this data was prepared with; restore the file"
        )
    return problems


def blocks_of(path: StoragePlace) -> Iterator[memoryview]:
    """Yield the bytes of a file, 16 MiB at a time; each block is valid until the next. Raises
    OSError if the file cannot be read."""
    with storage_of(path).open(path) as file:
        buffer = memoryview(bytearray(min(file.size, CHECKSUM_BLOCK)))
        for offset in range(0, file.size, CHECKSUM_BLOCK):
            yield buffer[: file.read_into([buffer], offset)]
