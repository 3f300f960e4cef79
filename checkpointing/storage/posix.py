"""Files of a filesystem: exact reads and writes, durability, retries, kinds and locks.

[Note: readers] Any user who may read a file may lock it, and could hold up a run for ever. So the
lock is on a file that only the user who trains can open: `.reading` in the checkpoint directory,
mode 0600. Its byte n stands for step n. Readers share the lock; retention takes it exclusively.
Other users read without a lock, and a step may be deleted while they read it. Readers wait for a
lock at most LOCK_SECONDS, retention does not wait.

The locks are Linux's open file description locks: the kernel drops them with their process, and one
process may hold several. NFS forwards them."""

import errno
import fcntl
import logging
import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import tenacity

from checkpointing.format.layout import BLOCK_BYTES, parse_step
from checkpointing.storage.ownership import TrustedStorageOwners, open_to_read

logger = logging.getLogger(__name__)

TRANSIENT = frozenset({
    errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ETIMEDOUT,
    errno.ECONNRESET, errno.ECONNABORTED, errno.EHOSTUNREACH, errno.ENETUNREACH,
})  # fmt: skip
"""Errors of shared storage while it fails over. A retry cures no other error (no space, quota,
read-only, permission, …)."""

_ATTEMPTS = 6
_MOST_BUFFERS = 1024
"""IOV_MAX on Linux."""


def is_transient(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in TRANSIENT


def retrying(call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns call(*arguments), retried after transient errors: six times, after waits of 7 s in
    all, with exponential back-off and jitter."""
    try:
        return call(*arguments)
    except OSError as error:
        if not is_transient(error):
            raise
        # The first call is made without tenacity, which costs time at every call.
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
    """Yields the descriptor of by(path, flags, mode), a function like os.open; errors in the block
    name the file. `mode` of a new file is before the umask."""
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
    while data:
        written = retrying(os.pwrite, descriptor, data, offset)
        data, offset = data[written:], offset + written


def read_at(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill `buffers` in turn, from `offset` on. Returns the number of bytes read, which is smaller
    at the end of the file."""
    rest, done = list(buffers), 0
    while rest:
        count = retrying(os.preadv, descriptor, rest[:_MOST_BUFFERS], offset + done)
        if count == 0:
            break
        done += count
        # a read may end inside a buffer
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]
    return done


@contextmanager
def regular(path: Path, *, follow: bool = True) -> Iterator[int]:
    """Open a regular file of a trusted owner (ownership.py [Note: trust]) for reading. Without
    `follow`, refuse links."""
    # O_NONBLOCK: opening a pipe would wait for its other end.
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    with opened(path, flags, by=lambda path, flags, _: open_to_read(path, flags)) as descriptor:
        require_regular(path, os.fstat(descriptor))
        yield descriptor


def require_regular(path: Path, found: os.stat_result) -> None:
    """Raises OSError unless `found` is the status of a regular file."""
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "a link, which is not followed", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.ENXIO, "not a regular file", str(path))


class PosixFile:
    """A file of a filesystem, open for reading; implements StorageFile."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        return read_at(self._descriptor, buffers, offset)


def make_directory(path: Path) -> None:
    """Create a directory and its parents unless they exist, durable on return."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in missing:  # a new directory is durable only once the names in its parent are
        sync_directory(place.parent)


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Create a file. Its contents are durable on return, its name only after `sync_directory` of
    its directory. Raises FileExistsError if `path` exists."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as descriptor:
        write_at(descriptor, memoryview(data), 0)
        sync(descriptor)


def append(path: Path, data: bytes) -> None:
    """Append to a file of a trusted user, or create it. Raises OSError if the file is a link,
    belongs to another user, or cannot be written."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with opened(path, flags) as descriptor:
        found = os.fstat(descriptor)
        require_regular(path, found)
        # a planted hard link would make this append to another file of this user
        if found.st_nlink > 1 or found.st_uid not in TrustedStorageOwners((), path.parent):
            raise PermissionError(
                errno.EPERM, "is not a file of this user alone; remove it", str(path)
            )
        os.write(descriptor, data)


def write_files(directory: Path, files: Mapping[str, bytes], mode: int = 0o666) -> None:
    """Create files below a directory, in order; contents and names are durable on return."""
    for name, data in files.items():
        make_directory((directory / name).parent)
        write_file(directory / name, data, mode)
    # inner folders before the folders that contain their names
    for folder in sorted({(directory / name).parent for name in files}, reverse=True):
        sync_directory(folder)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file such that every reader, even after a crash, gets the old or the new bytes."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.unlink(missing_ok=True)  # left by a killed process, or planted as a link
    write_file(aside, data)
    os.replace(aside, path)  # atomic; the new contents are durable already
    sync_directory(path.parent)


def sync(descriptor: int) -> None:
    """Make a file's contents durable. Never retried: after a failed fsync Linux drops the dirty
    pages, and a second fsync would report success without the data."""
    os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    with opened(path, os.O_RDONLY) as descriptor:
        sync(descriptor)


def block_buffer(size: int) -> memoryview:
    return memoryview(bytearray(min(size, BLOCK_BYTES)))


# --- kinds of filesystems -------------------------------------------------------------------------

STRIPE_BYTES = "16M"
"""Stripe size on Lustre, so that a block is on one storage target."""

PREALLOCATING = {"ext4", "xfs", "btrfs", "tmpfs"}
"""Filesystems on which posix_fallocate only reserves space. On others the C library would write
zeros, so it is not called."""

SHARED = {"lustre", "nfs", "nfs4", "cifs", "smb3", "beegfs", "gpfs", "ceph", "wekafs", "9p"}
"""Filesystems that several nodes mount."""


def filesystem(path: Path) -> str:
    """Returns the type of the filesystem that holds `path`, as in /proc/self/mountinfo ("ext4",
    "lustre", "fuse.glusterfs", …), behind symbolic links; "" if unknown. `path` need not exist."""
    path = Path(os.path.realpath(path))
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        if path.is_relative_to(point) and len(point) >= best:  # a later mount hides earlier ones
            best, kind = len(point), after.split()[0]
    return kind


def is_shared(kind: str) -> bool:
    """Whether several nodes may mount a filesystem of this type."""
    return kind in SHARED or kind.startswith("fuse.")


def stripe(directory: Path) -> None:
    """Make Lustre spread files in `directory` over several storage targets, with `lfs` if that is
    installed. A failure is only logged."""
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
"""Format of struct flock: type, whence, start, length, process."""


@contextmanager
def lock_file(directory: Path, *, make: bool) -> Iterator[int | None]:
    """Yields a descriptor of the lock file of a checkpoint directory. None if the file is missing,
    cannot be opened for writing, or is open to other users, who could hold its lock for ever.
    `make`: create a missing file; readers may not."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if make else 0)
    with ExitStack() as stack:
        descriptor = None
        # fails if the file is another user's, missing, or in a directory that is not writable
        with suppress(OSError):
            lock = os.open(directory / LOCK_FILE, flags, 0o600)
            stack.callback(os.close, lock)
            found = os.fstat(lock)
            # another user could hold a lock on a file that is not private for ever
            if not found.st_mode & 0o077 and found.st_uid in TrustedStorageOwners((), directory):
                descriptor = lock
        yield descriptor


def try_lock(descriptor: int | None, step: Path, *, alone: bool) -> bool:
    """Lock a step, shared or, with `alone`, exclusively. Returns whether that succeeded."""
    number = parse_step(step.name)
    if descriptor is None or number is None:
        return True  # locks are best effort: without them readers continue
    kind = fcntl.F_WRLCK if alone else fcntl.F_RDLCK
    try:
        call = struct.pack(_FLOCK, kind, os.SEEK_SET, number, 1, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, call)
    except (BlockingIOError, PermissionError):
        return False
    except (OSError, AttributeError, struct.error) as error:
        logger.debug("%s: no locks on this filesystem: %s", step.parent, error)
    return True
