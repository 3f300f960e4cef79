"""Shards in an object store, read by ranges that are requested before they are needed.

[Note: ranges] The order of the samples is a function of position and touches all shards at once. So
what the next micro-batches need is known: threads wait for it, and training does not. A range is
made of whole blocks of 64 KiB, of which .crc has the checksums. A block that is wrong is fetched
once more. If it is wrong again, reading fails: no token is used unchecked. A range that takes
PATIENCE_SECONDS is requested a second time, and the first answer counts. While the store refuses or
is away, a range is tried again for DEADLINE_SECONDS.
"""

import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache as cached
from functools import partial
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from checkpointing.errors import StorageError
from checkpointing.storage.object_storage import store_of
from checkpointing.storage.place import ObjectPath
from trainer.data.cache import ShardCopies
from trainer.data.shards import CHECKSUM_BLOCK, CRC, CRC_BLOCK, DataError, small_checksums
from trainer.recipe.sections import DataCache

logger = logging.getLogger(__name__)

THREADS, SECOND_THREADS = 12, 4
"""Ranges that a process waits for at a time, and those of them that it requests again: the first
threads may all wait for a store that hangs. Together as many as a client has connections."""
PATIENCE_SECONDS, DEADLINE_SECONDS, PAUSE_SECONDS = 3.0, 300.0, 1.0
MOST_BYTES = 8 << 20
"""Bytes of one request."""


def open_shards(
    directory: ObjectPath, index: dict[str, Any], split: str, cache: DataCache | None
) -> "list[RemoteShard]":
    """The shards of a split. Makes no request.

    Args:
        directory: of the data set.
        index: its index.json.
        split: "train" or "validation".
        cache: where copies of them may lie.

    Raises:
        DataError: there are no checksums of small blocks.
    """
    dtype = np.dtype(index["dtype"]).newbyteorder("<")
    copies = ShardCopies(cache.directory, index["fingerprint"]) if cache else None
    shards = []
    for entry in index["splits"][split]["shards"]:
        if f"{CRC}_crc32" not in entry:
            raise DataError(
                f"{directory}: its index.json has no checksums of small blocks, without which no "
                "range can be checked; an older version made it. Copy it there with `perdure data "
                f"copy DIRECTORY {directory}`, which adds them"
            )
        shards.append(RemoteShard(directory, entry, dtype, copies))
    return shards


def read_whole(path: ObjectPath, size: int, crc32s: Sequence[int]) -> memoryview:
    """All bytes of an object, fetched by this thread alone: what it serves may have to fork.

    Args:
        path: of the object.
        size: its bytes.
        crc32s: CRC-32 of each 16 MiB of it.

    Raises:
        DataError: it cannot be read, or a checksum is wrong twice.
    """
    try:
        return _read_whole(path, size, crc32s)
    except StorageError as error:
        raise DataError(str(error)) from error


def _read_whole(path: ObjectPath, size: int, crc32s: Sequence[int]) -> memoryview:
    """Implements `read_whole`; raises StorageError where it may help to try again."""
    data = memoryview(bytearray(size))
    for number, begin in enumerate(range(0, size, CHECKSUM_BLOCK)):
        block = data[begin : begin + CHECKSUM_BLOCK]
        for _ in range(2):
            for start in range(0, len(block), MOST_BYTES):
                _fetch(path, block[start : start + MOST_BYTES], begin + start)
            if [zlib.crc32(block)] == list(crc32s[number : number + 1]):
                break
        else:
            raise _wrong_twice(path, begin, len(block))
    return data


class RangeRead:
    """Bytes of an object that are being fetched."""

    def __init__(
        self, path: ObjectPath, begin: int, size: int, fetch: Callable[[], bytearray]
    ) -> None:
        """
        Args:
            path: of the object.
            begin: offset of the first byte.
            size: bytes.
            fetch: returns them; called in another thread.
        """
        self.begin = begin
        self._what = f"{path}: bytes {begin} to {begin + size - 1}"
        self._fetch = fetch
        self._began = time.monotonic()
        self._tries: list[Future[bytearray]] = [_threads("first", os.getpid()).submit(fetch)]

    def data(self) -> memoryview:
        """Returns the bytes, and waits for them.

        Raises:
            DataError: a checksum is wrong twice, or the store has no answer; names object and
                range.
        """
        since = time.monotonic()
        patience = max(0.0, self._began + PATIENCE_SECONDS - since)
        while True:
            done, waiting = wait(self._tries, patience, FIRST_COMPLETED)
            waited, patience = time.monotonic() - since, PATIENCE_SECONDS
            for one in done:
                error = one.exception()
                if error is None:
                    self._tries = [one]  # what else is under way is of no use
                    return memoryview(one.result())
                if not isinstance(error, StorageError):
                    raise error
                if waited > DEADLINE_SECONDS:
                    raise DataError(f"{self._what}: {error}") from error
            if waited > DEADLINE_SECONDS:
                raise DataError(
                    f"{self._what}: no answer for {waited:.0f} s; check the store and the network"
                )
            if done:  # the store has refused
                time.sleep(PAUSE_SECONDS)
            self._tries = list(waiting)
            if len(waiting) < 2:
                self._tries.append(_threads("second", os.getpid()).submit(self._fetch))


class RemoteShard:
    """The tokens of a shard in an object store. Called with (start, length), returns tokens."""

    def __init__(
        self,
        directory: ObjectPath,
        entry: dict[str, Any],
        dtype: np.dtype,
        copies: ShardCopies | None,
    ) -> None:
        """
        Args:
            directory: of the data set.
            entry: of the shard in index.json.
            dtype: of its tokens.
            copies: where it may lie on a local disk.
        """
        self._path = directory / f"{entry['name']}.tokens"
        self._crc_path = directory / f"{entry['name']}.{CRC}"
        self._dtype, self._size = dtype, entry["tokens"] * dtype.itemsize
        self._crc_crc32: list[int] = entry[f"{CRC}_crc32"]
        self._copies = copies
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget what a process has begun of which this one is a fork: its threads are not here."""
        self._process, self._lock = os.getpid(), Lock()
        self._crc: NDArray[np.uint32] | None = None
        self._ranges: WeakValueDictionary[int, RangeRead] = WeakValueDictionary()
        """By number of a block: what fetches it, as long as somebody keeps that."""

    def begin(self, windows: Iterable[tuple[int, int]]) -> list[RangeRead]:
        """Begin to fetch windows (start, length) of tokens, unless that is under way. What is
        fetched is kept as long as the result is. Blocks that are neighbours are one range."""
        if self._process != os.getpid():
            self._begin_anew()
        width = self._dtype.itemsize
        wanted: set[int] = set()
        for start, length in windows:
            end = (start + length) * width
            wanted |= {*range(start * width // CRC_BLOCK, -(-end // CRC_BLOCK))}
        known = {block: self._ranges.get(block) for block in sorted(wanted)}
        found = {block: one for block, one in known.items() if one}
        for first, last in _runs([block for block in known if block not in found]):
            offset, stop = first * CRC_BLOCK, min((last + 1) * CRC_BLOCK, self._size)
            fetch = partial(self._fetch_checked, first, stop - offset)
            made = RangeRead(self._path, offset, stop - offset, fetch)
            for block in range(first, last + 1):
                self._ranges[block] = found[block] = made
        return list(dict.fromkeys(found.values()))

    def __call__(self, start: int, length: int) -> NDArray:
        """Returns tokens [start, start + length).

        Raises:
            DataError: names the object and the bytes that cannot be had.
        """
        tokens = np.empty(length, self._dtype)
        target, offset = tokens.view(np.uint8).data, start * self._dtype.itemsize
        for one in self.begin([(start, length)]):
            data = one.data()
            first = max(offset, one.begin)
            last = min(offset + len(target), one.begin + len(data))
            target[first - offset : last - offset] = data[first - one.begin : last - one.begin]
        return tokens

    def _fetch_checked(self, block: int, size: int) -> bytearray:
        """Bytes from a block on; raises StorageError where it may help to try again."""
        data, offset = bytearray(size), block * CRC_BLOCK
        view, expected = memoryview(data), self._checksums()[block:][: -(-size // CRC_BLOCK)]
        if self._copies and self._copies.read(self._path.name, self._size, view, offset):
            if np.array_equal(small_checksums(view), expected):
                return data
            self._copies.discard(self._path.name)
        for _ in range(2):
            _fetch(self._path, view, offset)
            wrong = np.flatnonzero(small_checksums(view) != expected)
            if not len(wrong):
                return data
            logger.warning("%s: wrong checksum at byte %d", self._path, offset)
        at = offset + int(wrong[0]) * CRC_BLOCK
        raise _wrong_twice(self._path, at, min(CRC_BLOCK, self._size - at))

    def _checksums(self) -> NDArray[np.uint32]:
        with self._lock:
            if self._crc is None:
                size = -(-self._size // CRC_BLOCK) * 4
                data = _read_whole(self._crc_path, size, self._crc_crc32)
                self._crc = np.frombuffer(data, "<u4")
            return self._crc


def _fetch(path: ObjectPath, target: memoryview, offset: int) -> None:
    """Fill `target` with the bytes of an object from `offset` on.

    Raises:
        StorageError: the store does not answer, or gives no access.
        DataError: the object is gone.
    """
    try:
        store_of(path).read_into(path, [target], offset)
    except FileNotFoundError as error:
        raise DataError(f"{path}: is missing; copy the data set again") from error


def _wrong_twice(path: ObjectPath, begin: int, size: int) -> DataError:
    return DataError(
        f"{path}: bytes {begin} to {begin + size - 1} have a wrong checksum, fetched twice; copy "
        "the data set again with `perdure data copy`"
    )


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of each run of consecutive blocks, of at most MOST_BYTES."""
    begin = 0
    for place, block in enumerate(blocks):
        ends = place + 1 == len(blocks) or blocks[place + 1] != block + 1
        if ends or (place + 1 - begin) * CRC_BLOCK >= MOST_BYTES:
            yield blocks[begin], block
            begin = place + 1


@cached
def _threads(purpose: str, process: int) -> ThreadPoolExecutor:
    """The threads of this process: those of a parent do not survive a fork."""
    return ThreadPoolExecutor(THREADS if purpose == "first" else SECOND_THREADS, f"data-{purpose}")
