"""Files of a filesystem: exact reads and writes, what reaches the disk when, which errors are tried
again."""

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tenacity

from checkpointing.format.layout import BLOCK_BYTES
from checkpointing.storage.trust import Trusted, open_to_read

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
def opened(
    path: Path, flags: int, mode: int = 0o666, by: Callable[..., int] = os.open
) -> Iterator[int]:
    """A file descriptor; errors inside name the file.

    Args:
        path: of the file.
        flags: as of os.open.
        mode: of a new file, less the umask.
        by: opens it; called as os.open.
    """
    descriptor = retrying(by, path, flags, mode)
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


@contextmanager
def regular(path: Path, *, follow: bool = True) -> Iterator[int]:
    """A file opened for reading, whose owner is trusted [Note: trust]; whoever opens a pipe would
    wait for its other end. Where `follow` is false, a link is refused."""
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    with opened(path, flags, by=lambda path, flags, _: open_to_read(path, flags)) as descriptor:
        require_regular(path, os.fstat(descriptor))
        yield descriptor


def require_regular(path: Path, found: os.stat_result) -> None:
    """Raises OSError: what is there holds no bytes of its own."""
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "a link, which is not followed", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.ENXIO, "not a regular file", str(path))


class PosixFile:
    """See `interface.StoredFile`."""

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


def make_directory(path: Path) -> None:
    """Make a directory, unless it is there, and see all names that lead to it to the disk."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_directory(place.parent)


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a new file and see it to the disk."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as descriptor:
        write_at(descriptor, memoryview(data), 0)
        sync(descriptor)


def append(path: Path, data: bytes) -> None:
    """Add to a file of a trusted user, which is made if it is not there.

    Raises:
        OSError: it cannot be written, or is a link, or of another user.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with opened(path, flags) as descriptor:
        found = os.fstat(descriptor)
        require_regular(path, found)
        if found.st_nlink > 1 or found.st_uid not in Trusted((), path.parent):
            raise PermissionError(
                errno.EPERM, "is not a file of this user alone; remove it", str(path)
            )
        os.write(descriptor, data)


def write_files(directory: Path, files: Mapping[str, bytes], mode: int = 0o666) -> None:
    """Write new files below a directory, in order, and see them and their names to the disk."""
    for name, data in files.items():
        make_directory((directory / name).parent)
        write_file(directory / name, data, mode)
    for folder in sorted({(directory / name).parent for name in files}, reverse=True):
        sync_directory(folder)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file such that every reader, also after a crash, sees the old bytes or the new."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(
        missing_ok=True
    )  # of a process that was killed; or a link, which leads nowhere now
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
