"""A lock by which one launch at a time trains in a run directory.

[Note: occupancy] The first process of a launch (the agent of group rank 0; without agents, rank 0
itself) holds a lock, which the kernel releases when the process ends. It also keeps a record that
names the process and changes every BEAT_SECONDS. On one machine the lock shows whether a launch is
alive. Across machines, or on a filesystem without locks, the record shows it: a launch whose record
stops changing is dead. Another process of the same job takes the directory over without waiting, as
the first node may change between rounds.

The locks are POSIX locks: forks do not inherit them, and NFS supports them.
"""

import fcntl
import json
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic.node.files import is_ours, put_aside, read_text, write_whole
from elastic.process import boot_id

logger = logging.getLogger(__name__)

BEAT_SECONDS = 2.0
MISSED_BEATS = 3.5
RECORD, LOCK = "launch.json", "launch.lock"


class NodeDirectoryOccupiedError(Exception):
    """Another launch trains in the directory; the message names it if it is known."""


@dataclass
class _DirectoryHolder:
    """The process that uses a run directory, as recorded in RECORD."""

    job: str
    """Identity of the launch: equal in all its processes, different in every other launch."""
    pid: int
    host: str
    boot: str
    """Boot id of the machine, as two machines may have the same host name."""
    since: float
    """Unix time at which the process began to use the directory."""
    beat: int = 0

    def is_another(self, other: "_DirectoryHolder") -> bool:
        return (self.boot, self.pid, self.since) != (other.boot, other.pid, other.since)


class NodeDirectoryHold:
    """Holds a run directory for this process, until `release`. Raises NodeDirectoryOccupiedError if
    another launch trains in the directory. If the directory cannot be written to, nothing is held,
    and no error is raised, because later writes of the run report the error."""

    def __init__(self, folder: Path, job: str) -> None:
        self._folder = folder
        self._own = _DirectoryHolder(
            job, os.getpid(), socket.gethostname(), boot_id() or socket.gethostname(), time.time()
        )
        self._lock: int | None = None
        self._end = threading.Event()
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            self._wait_for_the_dead()
            self._write()
        self._thread = threading.Thread(target=self._renew, name="perdure-occupancy", daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._end.set()
        self._thread.join(timeout=BEAT_SECONDS)
        record = _read(self._folder)
        if record and not self._own.is_another(record):  # another launch may have taken over
            with suppress(OSError):
                (self._folder / RECORD).unlink()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _try_lock(self) -> bool | None:
        """Returns whether this process has the lock; None if locks do not work for this user."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        path = self._folder / LOCK
        try:
            if path.is_symlink():
                put_aside(path, path.lstat())
            if self._lock is None:
                lock = os.open(path, flags, 0o600)
                if not is_ours(os.fstat(lock), self._folder):
                    os.close(lock)
                    # The file's owner may hold the lock for ever, so only the record decides.
                    return None
                self._lock = lock
        # The lock file is another user's, so only the record decides.
        except PermissionError:
            return None
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            return None
        return True

    def _wait_for_the_dead(self) -> None:
        """Return once no launch of another job uses the directory; else raise
        NodeDirectoryOccupiedError."""
        deadline = time.monotonic() + MISSED_BEATS * BEAT_SECONDS
        own, locked, record = self._own, self._try_lock(), _read(self._folder)
        # A process that holds the lock but has no record has just started, or is about to end.
        while locked is False and record is None and time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 100)
            locked, record = self._try_lock(), _read(self._folder)
        if locked is False and (record is None or record.job != own.job):
            raise self._occupied(record)
        if record is None or record.job == own.job or (locked and record.boot == own.boot):
            return
        logger.warning(
            "%s: process %d on %s was the last that trained here; waiting up to %.0f s to see "
            "whether it still does", self._folder, record.pid, record.host,
            MISSED_BEATS * BEAT_SECONDS,
        )  # fmt: skip
        deadline = time.monotonic() + MISSED_BEATS * BEAT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 10)
            now = _read(self._folder)
            if now is None:
                return
            if now != record:
                raise self._occupied(now)

    def _occupied(self, holder: _DirectoryHolder | None) -> NodeDirectoryOccupiedError:
        name = "another process"
        if holder:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
            name = f"process {holder.pid} on {holder.host}, since {since},"
        return NodeDirectoryOccupiedError(
            f"{self._folder}: {name} trains there; end it first, or give this launch a run.dir of "
            "its own"
        )

    def _renew(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            with suppress(OSError):  # storage may be unavailable for a moment
                record = _read(self._folder)
                if record and self._own.is_another(record):
                    if record.job != self._own.job:
                        logger.warning(
                            "%s; only the saves of that process count", self._occupied(record)
                        )
                    return
                # Another process of this job may have held the lock, and may have died since.
                self._try_lock()
                self._own.beat += 1
                self._write()

    def _write(self) -> None:
        write_whole(self._folder / RECORD, json.dumps(asdict(self._own)))


def _read(folder: Path) -> _DirectoryHolder | None:
    try:
        return _DirectoryHolder(**json.loads(read_text(folder / RECORD)))
    except (OSError, ValueError, TypeError):
        return None
