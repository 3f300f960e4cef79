"""Folders in shared memory that outlive the processes that fill them: whose they are, and who uses
them.

[Note: whose] Anybody may make a folder in /dev/shm, under any name. One is ours if it belongs to
this user and is closed to all others (0700): what is in it was put there by processes of this user.
Whoever uses it holds a lock on it (flock), which the kernel drops with the process, whatever
container that was in: no name, process id or host has to be asked for.

    perdure-<run>-<pid>-<random>   in use while it is locked, else left behind by the dead
    perdure-new-<random>           being made
    perdure-gone-<random>          being deleted
"""

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
"""A dead run's memory is kept so long for its restart; on the same run directory, a new start takes
it over at once."""
_NEW, _GONE = "perdure-new-", "perdure-gone-"


@dataclass(frozen=True)
class Folder:
    """A folder that this process holds."""

    path: Path
    lock: int
    """Descriptor by which it does."""

    def close(self) -> None:
        """Let go of it; what is in it stays."""
        os.close(self.lock)


def run_id(directory: str) -> str:
    """What the memory of a run is found by: stands for its checkpoint directory, however that is
    spelt (a URL: as it is)."""
    place = directory if "://" in directory else os.path.realpath(directory)
    return hashlib.sha256(place.encode()).hexdigest()[:12]


def make(directory: str) -> Folder:
    """A new folder for the run with this checkpoint directory.

    Raises:
        OSError: there is no memory, or not for us.
    """
    mode = stat.S_IMODE(SHARED_MEMORY.stat().st_mode)
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        try:
            SHARED_MEMORY.chmod(mode | stat.S_ISVTX)  # Kubernetes makes an emptyDir without
        except OSError as error:
            why = f"anybody may rename what is in it; chmod +t {SHARED_MEMORY} as its owner"
            raise PermissionError(errno.EPERM, why, str(SHARED_MEMORY)) from error
    path = SHARED_MEMORY / f"{_NEW}{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    folder = hold(path)
    if folder is None:
        raise PermissionError(errno.EPERM, "cannot be locked", str(path))
    return take_over(folder, directory)


def take_over(folder: Folder, directory: str) -> Folder:
    """Give a folder that is held the name of this run and process."""
    path = SHARED_MEMORY / f"perdure-{run_id(directory)}-{os.getpid()}-{secrets.token_hex(4)}"
    os.rename(folder.path, path)
    return Folder(path, folder.lock)


def hold(path: Path, *, to_read: bool = False) -> Folder | None:
    """Hold a folder of ours that nobody uses, several at once to read; None if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if to_read else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        # Between open and flock somebody else may have taken it over under another name.
        if is_private(status) and os.path.samestat(status, os.lstat(path)):
            return Folder(path, descriptor)
    except OSError:
        pass
    os.close(descriptor)
    return None


def is_private(status: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user, and to nobody else."""
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


def of_run(directory: str) -> Iterator[Path]:
    """The folders of a run that are ours, on this machine. Others of its name are named once, and
    neither read nor deleted."""
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
        "to find. It is neither read nor deleted",
        path,
        user,
    )


def living_folders(directory: str) -> list[Path]:
    """Memory on this machine that living processes of a run hold."""
    return [path for path in of_run(directory) if _is_used(path)]


def _is_used(path: Path) -> bool:
    folder = hold(path, to_read=True)
    if folder:
        folder.close()
    return folder is None


def forget(folder: Folder) -> None:
    """Give a node's memory back. Its name goes first: who takes it over gets all of it or none."""
    gone = SHARED_MEMORY / f"{_GONE}{secrets.token_hex(4)}"
    with suppress(OSError):
        os.rename(folder.path, gone)
    shutil.rmtree(gone, ignore_errors=True)
    folder.close()


def collect_memory(directory: str) -> None:
    """Delete memory of dead processes: of this run, all that nobody took over; of other runs of
    this user, what was not used for FORGET_SECONDS."""
    ours = (f"perdure-{run_id(directory)}-", _GONE)
    for path in SHARED_MEMORY.glob("perdure-*"):
        with suppress(OSError):  # somebody else was faster, or it is another user's
            idle = time.time() - max(entry.lstat().st_mtime for entry in (path, *path.iterdir()))
            if not path.name.startswith(ours) and idle <= FORGET_SECONDS:
                continue
            folder = hold(path)
            if folder:
                logger.info("removing %s, which a dead run left behind", path)
                forget(folder)
