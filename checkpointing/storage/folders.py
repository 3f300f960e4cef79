"""Folders in shared memory that outlive the processes that fill them.

[Note: private folders] Any user may create a folder in /dev/shm, under any name. A folder is used
only if it belongs to this user and is closed to all others (0700): then only this user's processes
can have filled it. A process that uses a folder holds a lock on it (flock). The kernel drops the
lock when the process ends, in any container, so no process id or host is compared.

    perdure-<run>-<pid>-<random>   in use while it is locked, else left by a dead process
    perdure-new-<random>           being created
    perdure-gone-<random>          being deleted"""

import errno
import fcntl
import hashlib
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
FORGET_SECONDS = 3600
"""Seconds for which a dead run's memory is kept for its restart. A new start with the same
checkpoint directory takes it over at once."""
_NEW, _GONE = "perdure-new-", "perdure-gone-"


@dataclass(frozen=True)
class LockedStorageFolder:
    """A folder in shared memory that this process has locked."""

    path: Path
    lock: int
    """Descriptor that holds the lock."""

    def close(self) -> None:
        os.close(self.lock)


def run_id(directory: str) -> str:
    """Returns the identifier in the names of a run's folders: a digest of its checkpoint directory
    without links, or of its URL."""
    place = directory if "://" in directory else os.path.realpath(directory)
    return hashlib.sha256(place.encode()).hexdigest()[:12]


def make(directory: str) -> LockedStorageFolder:
    """Create a folder for the run with this checkpoint directory. Raises OSError if shared memory
    is full, missing or not writable."""
    mode = stat.S_IMODE(SHARED_MEMORY.stat().st_mode)
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        try:
            # An emptyDir of Kubernetes lacks the sticky bit.
            SHARED_MEMORY.chmod(mode | stat.S_ISVTX)
        except OSError as error:
            why = f"anybody may rename what is in it; chmod +t {SHARED_MEMORY} as its owner"
            raise PermissionError(errno.EPERM, why, str(SHARED_MEMORY)) from error
    path = SHARED_MEMORY / f"{_NEW}{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    # locked before it has a name that other processes look for
    folder = hold(path)
    if folder is None:
        raise PermissionError(errno.EPERM, "cannot be locked", str(path))
    return take_over(folder, directory)


def take_over(folder: LockedStorageFolder, directory: str) -> LockedStorageFolder:
    """Rename a locked folder so that it belongs to this run and process."""
    path = SHARED_MEMORY / f"perdure-{run_id(directory)}-{os.getpid()}-{secrets.token_hex(4)}"
    os.rename(folder.path, path)
    return LockedStorageFolder(path, folder.lock)


def hold(path: Path, *, to_read: bool = False) -> LockedStorageFolder | None:
    """Lock a private folder that no process uses; with `to_read`, share the lock with other
    readers. Returns None if that is not possible."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        # LOCK_NB, as a living process holds its lock for as long as it runs
        fcntl.flock(descriptor, (fcntl.LOCK_SH if to_read else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        # between open and flock another process may have renamed the folder
        if is_private(status) and os.path.samestat(status, os.lstat(path)):
            return LockedStorageFolder(path, descriptor)
    except OSError:
        pass
    os.close(descriptor)
    return None


def is_private(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user and is closed to all others."""
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def memory_folders(directory: str) -> Iterator[Path]:
    """Yields the folders in shared memory that this user's processes of a run have created. Files
    and folders with such names that other users own or can open are logged once, and neither read
    nor deleted."""
    for path in sorted(SHARED_MEMORY.glob(f"perdure-{run_id(directory)}-*")):
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(status.st_mode) and is_private(status):
            yield path
        else:
            _name_stranger(path, status.st_uid)


@cache
def _name_stranger(path: Path, user: int) -> None:
    logger.warning(
        "%s (of user %d) is not closed to others: somebody else may have put it there for this run "
        "to find. It is neither read nor deleted", path, user,
    )  # fmt: skip


def living_folders(directory: str) -> list[Path]:
    def is_used(path: Path) -> bool:
        folder = hold(path, to_read=True)
        if folder:
            folder.close()
        return folder is None

    return [path for path in memory_folders(directory) if is_used(path)]


def forget(folder: LockedStorageFolder) -> None:
    """Rename and delete a locked folder, so that another process gets all of it or nothing."""
    gone = SHARED_MEMORY / f"{_GONE}{secrets.token_hex(4)}"
    with suppress(OSError):
        os.rename(folder.path, gone)
    shutil.rmtree(gone, ignore_errors=True)
    folder.close()


def collect_memory(directory: str) -> None:
    """Delete folders of dead processes: those of this run that no process took over, and those of
    this user's other runs that were unused for FORGET_SECONDS."""
    ours = (f"perdure-{run_id(directory)}-", _GONE)
    for path in SHARED_MEMORY.glob("perdure-*"):
        with suppress(OSError):  # another process was faster, or the folder is another user's
            # without locking it, which would look like a living process
            idle = time.time() - max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
            if not path.name.startswith(ours) and idle <= FORGET_SECONDS:
                continue
            folder = hold(path)
            if folder:
                logger.info("removing %s, which a dead run left behind", path)
                forget(folder)
