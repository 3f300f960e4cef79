"""Files of a filesystem: exact reads and writes, durability, retries, kinds and locks.

[Note: readers] Any user who may read a file may lock it, and could hold up a run for ever. So the
lock is on a file that only the user who trains can open: `.reading` in the checkpoint directory,
mode 0600. Its byte n stands for step n. Readers share the lock; retention takes it exclusively.
Other users read without a lock, and a step may be deleted under them. A lock delays, and never
damages a step: readers wait LOCK_SECONDS at most, retention not at all.

The locks are Linux's open file description locks: the kernel drops them with their process, and one
process may hold several. NFS forwards them.
"""

import errno
import fcntl
import logging
import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tenacity

from checkpointing.format.layout import BLOCK_BYTES, parse_step
from checkpointing.storage.ownership import Trusted, open_to_read

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


# --- kinds of filesystems -------------------------------------------------------------------------

STRIPE_BYTES = "16M"
"""Lustre stripe size: a block of ours lies on one storage target."""

PREALLOCATING = {"ext4", "xfs", "btrfs", "tmpfs"}
"""Filesystems that reserve space at once; where the C library would have to write zeros instead,
nothing is reserved."""

SHARED = {"lustre", "nfs", "nfs4", "cifs", "smb3", "beegfs", "gpfs", "ceph", "wekafs", "9p"}
"""Filesystems that several nodes mount."""


def filesystem(path: Path) -> str:
    """Type of the filesystem that holds `path`, as in /proc/self/mountinfo ("ext4", "lustre",
    "fuse.glusterfs", …), behind symbolic links; "" where that cannot be told. `path` need not exist
    yet."""
    path = Path(os.path.realpath(path))
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        if path.is_relative_to(point) and len(point) >= best:  # of equal ones the last is on top
            best, kind = len(point), after.split()[0]
    return kind


def is_shared(kind: str) -> bool:
    """Whether a filesystem of this type is one that several nodes write to."""
    return kind in SHARED or kind.startswith("fuse.")


def stripe(directory: Path) -> None:
    """Ask Lustre to spread files in `directory` over a few storage targets, by `lfs` if it is
    installed. A hint: failure is logged."""
    tool = shutil.which("lfs")
    if tool is None:
        logger.info(
            "%s is on Lustre, but there is no lfs: files get the default stripes", directory
        )
        return
    command = [tool, "setstripe", "-c", "4", "-S", STRIPE_BYTES, str(directory)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    if result.returncode:
        logger.warning("%s failed: %s", " ".join(command), result.stderr.strip())


# --- locks of readers -----------------------------------------------------------------------------

LOCK_FILE = ".reading"
LOCK_SECONDS = 5.0
_FLOCK = "hhqqi"
"""struct flock: type, whence, start, length, process."""


def open_lock(directory: Path, *, make: bool) -> int | None:
    """A descriptor of the lock file; None where there is none of this user.

    Args:
        directory: of the checkpoints.
        make: it, if it is not there.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(directory / LOCK_FILE, flags | (os.O_CREAT if make else 0), 0o600)
    except OSError:  # another user's, or not there, or a directory that cannot be written
        return None
    found = os.fstat(descriptor)
    if found.st_mode & 0o077 or found.st_uid not in Trusted((), directory):
        os.close(descriptor)  # others can lock that, too
        return None
    return descriptor


def make_lock(directory: Path) -> None:
    """Make the lock file, if it is not there: for readers, before there is a step to read."""
    descriptor = open_lock(directory, make=True)
    if descriptor is not None:
        os.close(descriptor)


def try_lock(descriptor: int | None, step: Path, *, alone: bool) -> bool:
    """Whether a step could be locked, to read it or (`alone`) to delete it. Where there are no
    locks, always."""
    number = parse_step(step.name)
    if descriptor is None or number is None:
        return True
    kind = fcntl.F_WRLCK if alone else fcntl.F_RDLCK
    try:
        call = struct.pack(_FLOCK, kind, os.SEEK_SET, number, 1, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, call)
    except (BlockingIOError, PermissionError):
        return False
    except (OSError, AttributeError, struct.error) as error:
        logger.debug("%s: no locks on this filesystem: %s", step.parent, error)
    return True
