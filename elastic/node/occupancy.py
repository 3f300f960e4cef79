"""One launch at a time trains in a folder.

[Note: occupancy] The first process of a launch (the agent of group rank 0; rank 0 itself, where
there is no such agent) holds a lock that the kernel drops with it, and leaves a record that says
who it is and changes every BEAT_SECONDS. On one machine the lock tells whether a launch lives. On
another machine, or on a filesystem without locks, the record does: what does not change any more is
dead. Another process of the same job takes the folder over without asking; so does the next round
of a job whose first node was lost.

Locks of POSIX, since no fork inherits them, and NFS has them.
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


class OccupiedError(Exception):
    """Another launch trains in the folder. The message says which."""


@dataclass
class Holder:
    """Who trains in a folder, as the record there says."""

    job: str
    """Equal in all processes of one launch, and different in others."""
    pid: int
    host: str
    boot: str
    """Boot id of the machine: hosts may have the same name."""
    since: float
    """Unix time."""
    beat: int = 0

    def is_another(self, other: "Holder") -> bool:
        """Whether the other is another process."""
        return (self.boot, self.pid, self.since) != (other.boot, other.pid, other.since)


class Occupancy:
    """A folder that this process trains in, until `release`.

    Args:
        folder: made if need be. One that cannot be written to is left to others to tell of.
        job: see `Holder`.

    Raises:
        OccupiedError: another launch does.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self._folder = folder
        self._mine = Holder(
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
        """Leave it to others. They need not wait then."""
        self._end.set()
        self._thread.join(timeout=BEAT_SECONDS)
        found = _read(self._folder)
        if found and not self._mine.is_another(found):
            with suppress(OSError):
                (self._folder / RECORD).unlink()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _try_lock(self) -> bool | None:
        """Whether the lock is ours; None where there are no locks, or none for this user."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        path = self._folder / LOCK
        try:
            if path.is_symlink():
                put_aside(path, path.lstat())
            lock = self._lock
            if lock is None:
                lock = os.open(path, flags, 0o600)
                if not is_ours(os.fstat(lock), self._folder):
                    os.close(lock)
                    return None  # whoever made it may hold it for ever; the record tells who trains
            self._lock = lock
        except PermissionError:  # another user's, and the record tells whether he trains
            return None
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            return None
        return True

    def _wait_for_the_dead(self) -> None:
        """Return once nobody of another job is here."""
        deadline = time.monotonic() + MISSED_BEATS * BEAT_SECONDS
        mine, locked, found = self._mine, self._try_lock(), _read(self._folder)
        # Who holds the lock without a record has just come, or is about to leave.
        while locked is False and found is None and time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 100)
            locked, found = self._try_lock(), _read(self._folder)
        if locked is False and (found is None or found.job != mine.job):
            raise self._occupied(found)
        if found is None or found.job == mine.job or (locked and found.boot == mine.boot):
            return
        logger.warning(
            "%s: process %d on %s was the last that trained here; looking whether it still does",
            self._folder, found.pid, found.host,
        )  # fmt: skip
        deadline = time.monotonic() + MISSED_BEATS * BEAT_SECONDS
        while time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 10)
            now = _read(self._folder)
            if now is None:
                return
            if now != found:
                raise self._occupied(now)

    def _occupied(self, holder: Holder | None) -> OccupiedError:
        who = "another process"
        if holder:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
            who = f"process {holder.pid} on {holder.host}, since {since},"
        return OccupiedError(
            f"{self._folder}: {who} trains there; end it first, or give this launch a run.dir of "
            "its own"
        )

    def _renew(self) -> None:
        """Say that we live, until another has taken over."""
        while not self._end.wait(BEAT_SECONDS):
            with suppress(OSError):  # storage may be away for a moment
                found = _read(self._folder)
                if found and self._mine.is_another(found):
                    if found.job != self._mine.job:
                        logger.warning("%s Its saves count.", self._occupied(found))
                    return
                self._try_lock()  # a process of this job may have had it, and be dead now
                self._mine.beat += 1
                self._write()

    def _write(self) -> None:
        write_whole(self._folder / RECORD, json.dumps(asdict(self._mine)))


def _read(folder: Path) -> Holder | None:
    """None if there is no record, or none that can be read."""
    try:
        return Holder(**json.loads(read_text(folder / RECORD)))
    except (OSError, ValueError, TypeError):
        return None
