"""Shards in an object store, read by ranges that are requested before they are needed.

[Note: ranges] The order of samples touches all shards at once, but it is a function of position. So
the ranges of the next micro-batches are known, and threads wait for them instead of the training. A
range consists of whole blocks of 64 KiB, whose checksums are in .crc. A range with a wrong checksum
is downloaded once more. If a checksum is still wrong, reading fails: no token is used unchecked. A
range that takes longer than PATIENCE_SECONDS is requested a second time, and the first response
counts. While the store refuses or does not answer, a range is retried for DEADLINE_SECONDS.
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
from trainer.data.cache import DataShardCopies, wrong_twice
from trainer.data.shards import CHECKSUM_BLOCK, CRC, CRC_BLOCK, DataError, small_checksums
from trainer.recipe.sections import DataCacheSection

logger = logging.getLogger(__name__)

THREADS, SECOND_THREADS = 12, 4
"""Threads of a process for first requests, and separate threads for repeated requests, because all
threads for first requests may wait for a store that hangs. Together they use as many connections as
a client has."""
PATIENCE_SECONDS, DEADLINE_SECONDS, PAUSE_SECONDS = 3.0, 300.0, 1.0
MOST_BYTES = 8 << 20
"""Largest size of one request, in bytes."""


def open_shards(
    directory: ObjectPath, index: dict[str, Any], split: str, cache: DataCacheSection | None
) -> "list[RemoteDataShard]":
    """Open the shards of a split of a data set. Makes no request. Raises DataError if `index`, the
    contents of index.json, has no checksums of small blocks."""
    dtype = np.dtype(index["dtype"]).newbyteorder("<")
    copies = DataShardCopies(cache.directory, index["fingerprint"]) if cache else None
    shards = []
    for entry in index["splits"][split]["shards"]:
        if f"{CRC}_crc32" not in entry:
            raise DataError(
                f"{directory}: its index.json has no checksums of small blocks, which reading from "
                "a store needs, because an older version wrote it; copy the data set again with "
                f"`perdure data copy DIRECTORY {directory}`, which adds them"
            )
        shards.append(RemoteDataShard(directory, entry, dtype, copies))
    return shards


def read_whole(path: ObjectPath, size: int, crc32s: Sequence[int]) -> memoryview:
    """Read a whole object of `size` bytes in this thread alone, because the caller may still fork.
    `crc32s`: CRC-32 of each 16 MiB block. Raises DataError if the object cannot be read, or a
    checksum is wrong in two downloads."""
    try:
        return _read_whole(path, size, crc32s)
    except StorageError as error:
        raise DataError(str(error)) from error


def _read_whole(path: ObjectPath, size: int, crc32s: Sequence[int]) -> memoryview:
    """Like `read_whole`, but raises StorageError for errors that a retry may cure."""
    data = memoryview(bytearray(size))
    for number, begin in enumerate(range(0, size, CHECKSUM_BLOCK)):
        block = data[begin : begin + CHECKSUM_BLOCK]
        for _ in range(2):
            for start in range(0, len(block), MOST_BYTES):
                _fetch(path, block[start : start + MOST_BYTES], begin + start)
            if [zlib.crc32(block)] == list(crc32s[number : number + 1]):
                break
        else:
            raise wrong_twice(path, begin, len(block))
    return data


class RemoteDataRead:
    """A range of an object that is being fetched by another thread."""

    def __init__(
        self, path: ObjectPath, begin: int, size: int, fetch: Callable[[], bytearray]
    ) -> None:
        """Start to read bytes [begin, begin + size) of an object. `fetch`: returns these bytes;
        called in another thread."""
        self.begin = begin
        self._what = f"{path}: bytes {begin} to {begin + size - 1}"
        self._fetch = fetch
        self._began = time.monotonic()
        self._tries: list[Future[bytearray]] = [_threads("first", os.getpid()).submit(fetch)]

    def data(self) -> memoryview:
        """Wait for the bytes, and return them. Raises DataError, which names object and range, if a
        checksum is wrong in two downloads, the object is missing, or the store does not answer."""
        since = time.monotonic()
        patience = max(0.0, self._began + PATIENCE_SECONDS - since)
        while True:
            done, waiting = wait(self._tries, patience, FIRST_COMPLETED)
            waited, patience = time.monotonic() - since, PATIENCE_SECONDS
            for attempt in done:
                error = attempt.exception()
                if error is None:
                    self._tries = [attempt]  # pending attempts are not needed
                    return memoryview(attempt.result())
                if not isinstance(error, StorageError):
                    raise error
                if waited > DEADLINE_SECONDS:
                    raise DataError(f"{self._what}: {error}") from error
            if waited > DEADLINE_SECONDS:
                raise DataError(
                    f"{self._what}: no answer for {waited:.0f} s; check the store and the network"
                )
            if done:  # the store refused the request
                time.sleep(PAUSE_SECONDS)
            self._tries = list(waiting)
            if len(waiting) < 2:
                self._tries.append(_threads("second", os.getpid()).submit(self._fetch))


class RemoteDataShard:
    """The tokens of a shard in an object store; called with (start, length), it returns tokens."""

    def __init__(
        self,
        directory: ObjectPath,
        entry: dict[str, Any],
        dtype: np.dtype,
        copies: DataShardCopies | None,
    ) -> None:
        """Open the shard of `entry`, its entry in index.json. `copies`: local copies; None: always
        read from the store."""
        self._path = directory / f"{entry['name']}.tokens"
        self._crc_path = directory / f"{entry['name']}.{CRC}"
        self._dtype, self._size = dtype, entry["tokens"] * dtype.itemsize
        self._crc_crc32: list[int] = entry[f"{CRC}_crc32"]
        self._copies = copies
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Discard the requests of the parent process after a fork, because its threads do not exist
        in this process."""
        self._process, self._lock = os.getpid(), Lock()
        self._crc: NDArray[np.uint32] | None = None
        self._ranges: WeakValueDictionary[int, RemoteDataRead] = WeakValueDictionary()
        """Block number → the fetch that covers it, while a caller holds that fetch."""

    def begin(self, windows: Iterable[tuple[int, int]]) -> list[RemoteDataRead]:
        """Start to fetch windows (start, length) of tokens that are not being fetched already. The
        data stay in memory as long as the returned list. Adjacent blocks become one range."""
        if self._process != os.getpid():
            self._begin_anew()
        width = self._dtype.itemsize
        wanted: set[int] = set()
        for start, length in windows:
            end = (start + length) * width
            wanted |= {*range(start * width // CRC_BLOCK, -(-end // CRC_BLOCK))}
        known = {block: self._ranges.get(block) for block in sorted(wanted)}
        found = {block: fetch for block, fetch in known.items() if fetch}
        for first, last in _runs([block for block in known if block not in found]):
            offset, stop = first * CRC_BLOCK, min((last + 1) * CRC_BLOCK, self._size)
            fetch = partial(self._fetch_checked, first, stop - offset)
            read = RemoteDataRead(self._path, offset, stop - offset, fetch)
            for block in range(first, last + 1):
                self._ranges[block] = found[block] = read
        return list(dict.fromkeys(found.values()))

    def __call__(self, start: int, length: int) -> NDArray:
        """Return tokens [start, start + length). A DataError names the object and the unreadable
        bytes."""
        tokens = np.empty(length, self._dtype)
        target, offset = tokens.view(np.uint8).data, start * self._dtype.itemsize
        for read in self.begin([(start, length)]):
            data = read.data()
            first = max(offset, read.begin)
            last = min(offset + len(target), read.begin + len(data))
            target[first - offset : last - offset] = data[first - read.begin : last - read.begin]
        return tokens

    def _fetch_checked(self, block: int, size: int) -> bytearray:
        """Read `size` bytes from the beginning of block number `block` on, from a local copy or the
        store, and check them. Raises StorageError for errors that a retry may cure, else
        DataError."""
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
        raise wrong_twice(self._path, at, min(CRC_BLOCK, self._size - at))

    def _checksums(self) -> NDArray[np.uint32]:
        with self._lock:
            if self._crc is None:
                size = -(-self._size // CRC_BLOCK) * 4
                data = _read_whole(self._crc_path, size, self._crc_crc32)
                self._crc = np.frombuffer(data, "<u4")
            return self._crc


def _fetch(path: ObjectPath, target: memoryview, offset: int) -> None:
    """Fill `target` with the bytes of an object from `offset` on. Raises StorageError if the store
    does not answer or denies access, DataError if the object is missing."""
    try:
        store_of(path).read_into(path, [target], offset)
    except FileNotFoundError as error:
        raise DataError(f"{path}: is missing; copy the data set again") from error


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each run of consecutive blocks, cut at MOST_BYTES."""
    begin = 0
    for place, block in enumerate(blocks):
        ends = place + 1 == len(blocks) or blocks[place + 1] != block + 1
        if ends or (place + 1 - begin) * CRC_BLOCK >= MOST_BYTES:
            yield blocks[begin], block
            begin = place + 1


@cached
def _threads(purpose: str, process: int) -> ThreadPoolExecutor:
    """Return a thread pool of the process with this pid: after a fork, the parent's threads do not
    exist. `purpose`: "first" or "second" requests."""
    return ThreadPoolExecutor(THREADS if purpose == "first" else SECOND_THREADS, f"data-{purpose}")
