"""Writes files of a prepared data set: synced and complete, or not at all."""

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from checkpointing.storage.posix import sync_directory
from trainer.data.shards import (
    CRC,
    FORMAT,
    FORMAT_OF_CHATS,
    KINDS,
    RECORDS,
    SPLITS,
    DataError,
    DataShardChecksums,
    blocks_of,
    checksums,
    fingerprint,
)

SHARD_TOKENS = 1 << 28
_BLOCK_BYTES = 1 << 20
_ENDS = 1 << 16  # documents per read


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, whose contents are on disk when the block ends without error."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:  # x: never through a link that another user has placed
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a file that appears complete under its name after the block, or not at all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with synced(temporary) as file:
        yield file
    temporary.replace(path)
    sync_directory(path.parent)  # a rename survives a power failure only after this


def write_data_set(
    out: Path,
    parts: Mapping[str, Iterable[Mapping[str, Path]]],
    *,
    dtype: str,
    vocab_size: int,
    eos_id: int,
    start_ids: Sequence[int],
    tokenizer: bytes,
    about: Mapping[str, Any],
    shard_tokens: int = SHARD_TOKENS,
    chats: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Write a prepared data set, index.json last, and return the index. See `write_shards` too.

    Args:
        parts: split → its parts, see `write_shards`.
        vocab_size: largest id plus one.
        start_ids: tokens that begin a document.
        tokenizer: contents of tokenizer.json.
        about: further keys of the index, such as sources.
        chats: the keys "kind" and "chats" of the index; empty for plain documents.
    """
    splits = {}
    for split in SPLITS:
        shards = write_shards(parts[split], out, split, dtype, eos_id, shard_tokens)
        splits[split] = {
            "tokens": sum(shard["tokens"] for shard in shards),
            "documents": sum(shard["documents"] for shard in shards),
            "shards": shards,
        }
        if chats:
            splits[split]["trained"] = sum(shard["trained"] for shard in shards)
    with atomic(out / "tokenizer.json") as output:
        output.write(tokenizer)
    index: dict[str, Any] = {
        "format": FORMAT_OF_CHATS if chats else FORMAT,
        "fingerprint": "",
        "dtype": dtype,
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "start_ids": list(start_ids),
        "tokenizer": {"file": "tokenizer.json", "sha256": hashlib.sha256(tokenizer).hexdigest()},
        "splits": splits,
        **chats,
        **about,
    }
    index["fingerprint"] = fingerprint(index)
    with atomic(out / "index.json") as output:
        output.write(to_json(index, indent=2))
    return index


def to_json(value: Any, indent: int | None = None) -> bytes:
    """JSON in UTF-8, with a line end."""
    text = json.dumps(value, indent=indent, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")  # file names may have other bytes


def write_shards(
    parts: Iterable[Mapping[str, Path]],
    out: Path,
    split: str,
    dtype: str,
    eos_id: int,
    shard_tokens: int,
) -> list[dict[str, Any]]:
    """Join parts into shards that each end with a document, and return their entries in index.json.

    Args:
        parts: in order; files by extension: tokens, document ends (uint64, within the part), and
            optionally trained marks (a byte of 0 or 1 per token) and records (uint32).
        out: directory; older shards of the split in it are removed.
        dtype: dtype of tokens on disk.
        eos_id: token that ends a document.
        shard_tokens: a shard ends with the document that reaches this number of tokens.
    """
    for kind in (*KINDS[FORMAT_OF_CHATS], RECORDS, CRC):
        for stale in out.glob(f"{split}-[0-9][0-9][0-9][0-9][0-9].{kind}"):
            stale.unlink()
    of_tokens = np.dtype(dtype).newbyteorder("<")
    shards: list[dict[str, Any]] = []
    writer: _ShardWriter | None = None
    for part in parts:
        with ExitStack() as stack:
            files = {kind: stack.enter_context(path.open("rb")) for kind, path in part.items()}
            listed, start = files.pop("ends"), 0
            while len(ends := np.frombuffer(listed.read(_ENDS * 8), "<u8").astype(np.int64)):
                first = 0
                while first < len(ends):
                    name = f"{split}-{len(shards):05}"
                    writer = writer or _ShardWriter(out, name, of_tokens, eos_id, list(part))
                    # up to and including the document that fills the shard
                    full = start + shard_tokens - writer.tokens
                    last = int(np.searchsorted(ends, full, side="left"))
                    last = min(last + 1, len(ends))
                    writer.add(files, ends[first:last] - start)
                    start, first = int(ends[last - 1]), last
                    if writer.tokens >= shard_tokens:
                        shards.append(writer.close())
                        writer = None
    if writer:
        shards.append(writer.close())
    return shards


class _ShardWriter:
    """Writes the files of one shard."""

    def __init__(
        self, out: Path, name: str, dtype: np.dtype, eos_id: int, kinds: Sequence[str]
    ) -> None:
        """`kinds`: extensions of the shard's files."""
        self.tokens = self.documents = self._trained = 0
        self._out, self._name, self._dtype, self._eos_id = out, name, dtype, eos_id
        self._files = {kind: (out / f"{name}.{kind}").open("xb") for kind in kinds}
        self._bits = np.empty(0, np.uint8)  # bits of an incomplete byte

    def add(self, files: Mapping[str, BinaryIO], ends: NDArray) -> None:
        """Append whole documents, read from the current positions of the files of a part. `ends`:
        end of each document, in tokens after the current position."""
        size = int(ends[-1])
        for block in _blocks_of(files["tokens"], size * self._dtype.itemsize):
            self._files["tokens"].write(block)
        if "trained" in files:
            for block in _blocks_of(files["trained"], size):
                self._add_bits(np.frombuffer(block, np.uint8))
        if RECORDS in files:
            for block in _blocks_of(files[RECORDS], len(ends) * 4):
                self._files[RECORDS].write(block)
        self._files["ends"].write((ends + self.tokens).astype("<u8").tobytes())
        self.tokens += size
        self.documents += len(ends)

    def _add_bits(self, bits: NDArray[np.uint8]) -> None:
        self._trained += int(bits.sum())
        bits = np.concatenate([self._bits, bits])
        whole = len(bits) // 8 * 8
        self._files["trained"].write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self._bits = bits[whole:]

    def close(self) -> dict[str, Any]:
        """Sync the files, and return the shard's entry in index.json."""
        entry: dict[str, Any] = {"name": self._name, "tokens": self.tokens}
        entry["documents"] = self.documents
        if "trained" in self._files:
            self._files["trained"].write(np.packbits(self._bits, bitorder="little").tobytes())
            entry["trained"] = self._trained
        for kind, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            digest, blocks = checksums(self._out / f"{self._name}.{kind}")
            entry |= {f"{kind}_sha256": digest, f"{kind}_crc32": blocks}
        small = DataShardChecksums(self._dtype, self._eos_id)
        for block in blocks_of(self._out / f"{self._name}.tokens"):
            small.add(block)
        with synced(self._out / f"{self._name}.{CRC}") as output:
            output.write(small.content)
        return entry | small.entry


def _blocks_of(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes of a file in blocks."""
    while size:
        block = file.read(min(size, _BLOCK_BYTES))
        if not block:
            raise DataError(f"{file.name}: truncated; remove its directory and start again")
        yield block
        size -= len(block)
