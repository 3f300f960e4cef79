"""Files of checkpoints: where they lie, and exact reads. Of POSIX files also exact writes, what
must reach the disk when, and which errors are retried."""

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import tenacity

from checkpointing.layout import BLOCK_BYTES
from checkpointing.objects import ObjectFile, ObjectPath, store_of

logger = logging.getLogger(__name__)

TRANSIENT = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.EAGAIN,
        errno.EINTR,
        errno.EBUSY,
        errno.ETIMEDOUT,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
    }
)
"""Errors that shared storage gives while it fails over. All others (no space, quota, read-only,
permission, …) do not go away by trying again."""

_ATTEMPTS = 6
_MOST_BUFFERS = 1024
"""IOV_MAX on Linux."""


def location(text: str | Path) -> Path:
    """Where checkpoints lie: a path, or the URL of an object store ("s3://bucket/folder").

    What comes of a URL is an `ObjectPath`, which has those parts of Path that this package uses.

    Raises:
        StorageError: a URL without a bucket.
    """
    if isinstance(text, ObjectPath):
        return text.as_path()
    return ObjectPath.of(str(text)).as_path() if "://" in str(text) else Path(text)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a little later."""
    return isinstance(error, OSError) and error.errno in TRANSIENT


def retrying(call: Callable[..., Any], *arguments: Any) -> Any:
    """call(*arguments), again after transient errors: exponential back-off with jitter, some
    ten seconds in all."""
    try:
        return call(*arguments)
    except OSError as error:
        if not is_transient(error):
            raise
        logger.warning("%s; trying again", error)
    again = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        wait=tenacity.wait_exponential(multiplier=0.2, max=5) + tenacity.wait_random(0, 0.2),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
        reraise=True,
    )
    return again(call, *arguments)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file descriptor; errors inside name the file. A new file's mode follows the umask."""
    descriptor = retrying(os.open, path, flags, 0o666)
    try:
        yield descriptor
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` (bytes) at `offset`."""
    while data:
        written = retrying(os.pwrite, descriptor, data, offset)
        data, offset = data[written:], offset + written


def read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` (bytes) from `offset` on; returns how many bytes the file had."""
    done = 0
    while done < len(buffer):
        count = retrying(os.preadv, descriptor, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


class StoredFile(Protocol):
    """A file of a checkpoint, open for reading, wherever it lies."""

    @property
    def size(self) -> int:
        """Bytes."""

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` in turn from `offset` on; returns how many bytes the file had."""


@contextmanager
def open_file(path: Path) -> Iterator[StoredFile]:
    """A file of a checkpoint to read from; errors inside name the file."""
    if isinstance(path, ObjectPath):
        yield ObjectFile(path)
        return
    with opened(path, os.O_RDONLY) as descriptor:
        yield _PosixFile(descriptor)


class _PosixFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        rest, done = list(buffers), 0
        while rest:
            count = retrying(os.preadv, self._descriptor, rest[:_MOST_BUFFERS], offset + done)
            if count == 0:
                break
            done += count
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                rest[0] = rest[0][count:]
        return done


def file_sizes(directory: Path, names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """(name, bytes) of files of a checkpoint, in the order given.

    Raises:
        FileNotFoundError: one is missing.
    """
    if isinstance(directory, ObjectPath):  # one request for a thousand files
        found = store_of(directory).walk(directory)
        for name in names:
            yield name, (found[name] if name in found else (directory / name).stat()).st_size
        return
    for name in names:
        yield name, (directory / name).stat().st_size


def read_file(path: Path) -> bytes:
    """All bytes of a small file."""
    if isinstance(path, ObjectPath):
        return store_of(path).read(path)
    with opened(path, os.O_RDONLY) as descriptor:
        buffer = bytearray(os.fstat(descriptor).st_size)
        return bytes(buffer[: read_at(descriptor, memoryview(buffer), 0)])


def create_file(path: Path, data: bytes) -> None:
    """Make a small file that a power cut may take away.

    Raises:
        FileExistsError: there is one.
    """
    if isinstance(path, ObjectPath):
        store_of(path).write_new(path, data)
        return
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        retrying(os.write, descriptor, data)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and see it to the disk."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        write_at(descriptor, memoryview(data), 0)
        sync(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file such that every reader, also after a crash, sees the old bytes or the new."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(missing_ok=True)
    write_file(aside, data)
    os.replace(aside, path)
    sync_directory(path.parent)


def sync(descriptor: int) -> None:
    """See a file's bytes to the disk.

    Never tried again: after a failed fsync Linux drops the dirty pages, and a second one reports
    success without the data.
    """
    os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """See the names in a directory to the disk."""
    with opened(path, os.O_RDONLY) as descriptor:
        sync(descriptor)


def block_buffer(size: int) -> memoryview:
    """A buffer for any block of a file of `size` bytes."""
    return memoryview(bytearray(min(size, BLOCK_BYTES)))
