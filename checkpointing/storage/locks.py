"""Locks by which readers of a step keep retention from deleting it.

[Note: readers] Whoever may read a file may lock it, and so could hold up a run for ever. So the
lock is on a file that only the user who trains can open: `.reading` in the checkpoint directory,
mode 0600. Its byte n stands for step n; readers share it, retention takes it alone. Other users
read without a lock, and a step may be deleted under them. A lock delays, and never makes a step
damaged: readers wait LOCK_SECONDS at most, retention not at all.

Locks of open file descriptions (Linux): the kernel drops them with their process, and one process
may have several. NFS passes them on.
"""

import fcntl
import logging
import os
import struct
from pathlib import Path

from checkpointing.format.layout import parse_step
from checkpointing.storage.trust import Trusted

logger = logging.getLogger(__name__)

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
