"""Files of checkpoints: where they lie, and exact reads. Of POSIX files also exact writes, what
must reach the disk when, and which errors are retried."""

import errno
import logging
import os
import stat
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
def opened(path: Path, flags: int, mode: int = 0o666) -> Iterator[int]:
    """A file descriptor; errors inside name the file. A new file gets `mode`, less the umask."""
    descriptor = retrying(os.open, path, flags, mode)
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
    with _regular(path) as descriptor:
        yield _PosixFile(descriptor)


@contextmanager
def _regular(path: Path) -> Iterator[int]:
    """A file opened for reading; whoever opens a pipe would wait for its other end."""
    with opened(path, os.O_RDONLY | os.O_NONBLOCK) as descriptor:
        _require_regular(path, os.fstat(descriptor))
        yield descriptor


def _require_regular(path: Path, found: os.stat_result) -> None:
    """Raises OSError: what is there holds no bytes of its own."""
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "a link, which is not followed", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.ENXIO, "not a regular file", str(path))


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
        OSError: one is a link, so that its bytes lie elsewhere, or no regular file.
    """
    if isinstance(directory, ObjectPath):  # one request for a thousand files
        found = store_of(directory).walk(directory)
        for name in names:
            yield name, (found[name] if name in found else (directory / name).stat()).st_size
        return
    for name in names:
        yield name, own_size(directory, name)


def own_size(directory: Path, name: str) -> int:
    """Bytes of a file that lies in a directory itself, not elsewhere behind a link.

    Raises:
        FileNotFoundError: it is missing.
        OSError: it is a link, or no regular file.
    """
    path = directory / name
    if isinstance(path, ObjectPath):
        return path.stat().st_size
    for folder in [directory / part for part in Path(name).parents][:-1]:
        if folder.is_symlink():
            _require_regular(folder, folder.lstat())
    found = path.lstat()
    _require_regular(path, found)
    return found.st_size


def read_file(path: Path, most: int | None = None) -> bytes:
    """All bytes of a small file.

    Args:
        path: of the file.
        most: bytes that it may have.

    Raises:
        OSError: it cannot be read, or has more.
    """
    if isinstance(path, ObjectPath):
        if most is not None:
            _require_small(path, path.stat().st_size, most)
        return store_of(path).read(path)
    with _regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        _require_small(path, size, most)
        buffer = bytearray(size)
        return bytes(buffer[: read_at(descriptor, memoryview(buffer), 0)])


def _require_small(path: Path, size: int, most: int | None) -> None:
    if most is not None and size > most:
        raise OSError(errno.EFBIG, f"has {size} bytes, at most {most} are read", str(path))


def create_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Make a small file, and see it and its name to the disk. A power cut before that may leave
    it empty.

    Raises:
        FileExistsError: there is one.
    """
    if isinstance(path, ObjectPath):
        store_of(path).write_new(path, data)
        return
    write_file(path, data, mode)
    sync_directory(path.parent)


def remove_file(path: Path) -> None:
    """Remove a file, if it is there."""
    if isinstance(path, ObjectPath):
        store_of(path).delete([path])
    else:
        path.unlink(missing_ok=True)


def make_directory(path: Path) -> None:
    """Make a directory, unless it is there, and see all names that lead to it to the disk."""
    if isinstance(path, ObjectPath):
        return
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_directory(place.parent)


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a new file and see it to the disk."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as descriptor:
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
