"""`perdure data copy`: copies a prepared data set, and compares its shards and tokenizer with the
checksums in index.json. A data set of an older version gets the checksums of small blocks (.crc).
index.json is written last: without it the copy is no data set."""

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from checkpointing.errors import StorageError
from checkpointing.format.layout import BLOCK_BYTES
from checkpointing.storage.place import ObjectPath, StoragePlace
from checkpointing.storage.steps import storage_of
from trainer.data.prepare.writer import atomic, to_json
from trainer.data.shards import (
    CHECKSUM_BLOCK,
    CRC,
    DataError,
    DataShardChecksums,
    blocks_of,
    check_size,
    entries_of,
    read_index,
    read_small,
    sizes_of,
)

INDEX, TOKENIZER, REJECTS = "index.json", "tokenizer.json", "rejects.jsonl"


def copy_data_set(
    source: StoragePlace, target: StoragePlace, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Copy a prepared data set, and return the index of the copy. After an interruption, the same
    call resumes with the shard that was being copied. A data set without files of checksums, of
    older versions of Perdure, is copied from its start.

    Args:
        source: directory or URL.
        target: directory or URL; created if missing.
        say: receives lines of progress.

    Raises:
        DataError: the source is no data set, or damaged; or the target holds another data set.
        StorageError: a store does not answer, or denies access.
        OSError: a disk fails.
    """
    index = read_index(source)
    if storage_of(target).exists(target / INDEX):
        there = read_index(target)
        if there["fingerprint"] != index["fingerprint"]:
            raise DataError(
                f"{target}: holds another data set; choose another target, or remove it first"
            )
        if all(f"{CRC}_sha256" in shard for shard in entries_of(there)):
            say(f"{target}: is up to date")
            return there
    if isinstance(target, Path):
        target.mkdir(parents=True, exist_ok=True)
    entries = entries_of(index)
    for number, entry in enumerate(entries):
        if not _is_copied(source, target, entry, index):
            _copy_shard(source, target, entry, index)
        say(f"{number + 1} of {len(entries)} shards")
    tokenizer = read_small(source / TOKENIZER)
    if hashlib.sha256(tokenizer).hexdigest() != index["tokenizer"]["sha256"]:
        raise DataError(
            f"{source / TOKENIZER}: is not the tokenizer that this data was prepared with; restore "
            "the file"
        )
    write(target / TOKENIZER, len(tokenizer), [memoryview(tokenizer)])
    if storage_of(source).exists(source / REJECTS):
        rejects = source / REJECTS
        write(target / REJECTS, storage_of(source).stat(rejects).st_size, blocks_of(rejects))
    content = to_json(index, indent=2)
    write(target / INDEX, len(content), [memoryview(content)])
    return index


def _is_copied(
    source: StoragePlace, target: StoragePlace, entry: dict[str, Any], index: dict[str, Any]
) -> bool:
    """Whether an earlier call has completed this shard in `target`. A shard's .crc file is written
    last, and identifies the shard's contents."""
    if f"{CRC}_sha256" not in entry:
        return False
    name = f"{entry['name']}.{CRC}"
    try:
        for kind, size in sizes_of(entry, index).items():
            check_size(target / f"{entry['name']}.{kind}", size)
        return read_small(source / name) == read_small(target / name)
    except (OSError, DataError):
        return False


def _copy_shard(
    source: StoragePlace, target: StoragePlace, entry: dict[str, Any], index: dict[str, Any]
) -> None:
    """Copy the files of a shard, and add the checksums of its .crc file to `entry`, the shard's
    entry in index.json."""
    sizes = sizes_of(entry, index)
    checksums = DataShardChecksums(np.dtype(index["dtype"]).newbyteorder("<"), index["eos_id"])

    def counted(blocks: Iterator[memoryview]) -> Iterator[memoryview]:
        for block in blocks:
            checksums.add(block)
            yield block

    for kind in sizes.keys() - {CRC}:
        place = source / f"{entry['name']}.{kind}"
        check_size(place, sizes[kind])
        blocks = _checked(place, entry[f"{kind}_crc32"])
        blocks = counted(blocks) if kind == "tokens" else blocks
        write(target / f"{entry['name']}.{kind}", sizes[kind], blocks)
    entry |= checksums.entry
    content = memoryview(checksums.content)
    write(target / f"{entry['name']}.{CRC}", len(content), [content])


def _checked(place: StoragePlace, crc32s: list[int]) -> Iterator[memoryview]:
    for number, block in enumerate(blocks_of(place)):
        if crc32s[number : number + 1] != [zlib.crc32(block)]:
            raise DataError(
                f"{place}: wrong checksum in the {CHECKSUM_BLOCK >> 20} MiB from byte "
                f"{number * CHECKSUM_BLOCK} on, so it is not copied; restore the file, or prepare "
                "the data again"
            )
        yield block


def write(place: StoragePlace, size: int, blocks: Iterable[memoryview]) -> None:
    """Write a file of `size` bytes atomically: it appears whole or not at all. `blocks`: contents
    in blocks of CHECKSUM_BLOCK bytes; the last may be shorter."""
    if not isinstance(place, ObjectPath):
        assert isinstance(place, Path)
        with atomic(place) as file:
            for block in blocks:
                file.write(block)
        return
    from checkpointing.storage.object_storage import store_of  # imports the client of object stores

    store = store_of(place)
    if size <= BLOCK_BYTES:
        store.write(place, b"".join(blocks))
        return
    (token,) = store.begin_uploads([(place, size)])
    try:
        with store.open_upload(place, token, size) as upload:
            for number, block in enumerate(blocks):
                upload.write(block, number * BLOCK_BYTES)
            upload.finish()
    except BaseException:
        with suppress(StorageError):
            store.abort_uploads([(place, token)])
        raise
