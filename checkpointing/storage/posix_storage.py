"""Checkpoints on a filesystem: each step is a directory.

[Note: names]
  step-00001000                 committed, if its commit record is valid
  step-00001000.tmp-<n>-<owner> being written by <owner>
  step-00001000.trash-<owner>   being deleted by <owner>
  foreign-1000-<random>         put aside: a link, or a step of a user who is not trusted
  .reading                      locked by those who read a step, see locks.py
Owners are processes, see owners.py. Nothing with any other name is ever touched.
"""

import errno
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpointing.errors import DamagedCheckpoint, explain
from checkpointing.format.layout import COMMIT_RECORD, parse_step
from checkpointing.format.untrusted import printable
from checkpointing.storage.filesystems import filesystem
from checkpointing.storage.folders import is_private
from checkpointing.storage.locks import LOCK_SECONDS, open_lock, try_lock
from checkpointing.storage.owners import is_alive, is_owner, owner
from checkpointing.storage.posix import (
    PosixFile,
    append,
    make_directory,
    opened,
    read_at,
    regular,
    require_regular,
    sync_directory,
    write_file,
)
from checkpointing.storage.posix_step import NewPosixStep
from checkpointing.storage.reading import reading
from checkpointing.storage.trust import is_foreign, require_own_link

logger = logging.getLogger(__name__)

FOREIGN_SECONDS = 3600
"""A half-written directory of another machine, whose processes cannot be seen from here, counts as
left behind when nothing in it has changed for so long."""
_ASIDE = re.compile(r"step-\d{8,}\.(?:tmp|trash)-.+")


class PosixStorage:
    """See `interface.Storage`."""

    def exists(self, path: Path) -> bool:
        return path.exists()

    def exists_as(self, path: Path) -> bool:
        return os.path.lexists(path)

    def is_directory(self, path: Path) -> bool:
        return path.is_dir()

    def children(self, directory: Path) -> list[Path]:
        return list(directory.iterdir()) if directory.is_dir() else []

    def stat(self, path: Path) -> os.stat_result:
        return path.stat()

    @contextmanager
    def open(self, path: Path) -> Iterator[PosixFile]:
        with regular(path) as descriptor:
            yield PosixFile(descriptor)

    def read(self, path: Path, most: int | None = None, *, follow: bool = True) -> bytes:
        with regular(path, follow=follow) as descriptor:
            size = os.fstat(descriptor).st_size
            if most is not None and size > most:
                raise OSError(errno.EFBIG, f"has {size} bytes, at most {most} are read", str(path))
            buffer = bytearray(size)
            return bytes(buffer[: read_at(descriptor, memoryview(buffer), 0)])

    def read_private(self, path: Path) -> bytes:
        """See Storage; follows no link."""
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as descriptor:
            if not is_private(os.fstat(descriptor)):
                return b""
            buffer = bytearray(65)
            return bytes(buffer[: read_at(descriptor, memoryview(buffer), 0)])

    def own_size(self, directory: Path, name: str) -> int:
        for folder in [directory / part for part in Path(name).parents][:-1]:
            if folder.is_symlink():
                require_regular(folder, folder.lstat())
        found = (directory / name).lstat()
        require_regular(directory / name, found)
        return found.st_size

    def sizes(self, directory: Path, names: Iterable[str]) -> Iterator[tuple[str, int]]:
        return ((name, self.own_size(directory, name)) for name in names)

    def create(self, path: Path, data: bytes, mode: int = 0o666) -> None:
        write_file(path, data, mode)
        sync_directory(path.parent)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def append(self, path: Path, data: bytes) -> None:
        append(path, data)

    def make_directory(self, path: Path) -> None:
        require_own_link(path)
        make_directory(path)

    def filesystem(self, path: Path) -> str:
        return filesystem(path)

    # --- steps -----------------------------------------------------------------------------------

    def steps(self, directory: Path) -> list[Path]:
        require_own_link(directory)
        return self.children(directory)

    def is_foreign(self, step: Path) -> bool:
        return is_foreign(step)

    def new_step(self, final: Path) -> NewPosixStep:
        return NewPosixStep.of(final)

    def delete_step(self, path: Path) -> None:
        """See Storage. It is renamed first. What is not of a trusted user, or a link, is put aside
        under another name."""
        if is_foreign(path):
            _put_aside(path)
            return
        aside = path.with_name(f"{path.name}.trash-{owner()}")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(path, aside)
        _remove(aside)

    def collect(self, directory: Path, lost: Collection[str] = ()) -> None:
        for path in self.children(directory):
            match = _ASIDE.fullmatch(path.name)
            if match is None:
                continue
            if path.name.endswith(f".trash-{owner()}"):
                _remove(path)
            elif is_owner(path.name, lost) or _is_abandoned(path):
                logger.info("removing %s, which a dead run left behind", printable(str(path)))
                _remove_left(path)

    @contextmanager
    def reading_lock(self, path: Path) -> Iterator[None]:
        """See Storage and [Note: readers]. Waits for retention no longer than LOCK_SECONDS."""
        where = path / COMMIT_RECORD
        with reading(where), regular(where):  # it is there, and of somebody trusted
            pass
        lock = open_lock(path.parent, make=False)
        try:
            deadline = time.monotonic() + LOCK_SECONDS
            while not try_lock(lock, path, alone=False) and path.exists():
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            if not path.exists():  # renamed before the lock was there
                raise DamagedCheckpoint(f"{path}: is being deleted by retention")
            yield
        finally:
            if lock is not None:
                os.close(lock)

    @contextmanager
    def unless_read(self, path: Path) -> Iterator[bool]:
        lock = open_lock(path.parent, make=True)
        try:
            yield try_lock(lock, path, alone=True)
        finally:
            if lock is not None:
                os.close(lock)


def _remove(aside: Path) -> None:
    """One file after the other, which a metadata server hardly notices."""
    shutil.rmtree(aside, ignore_errors=True)
    if aside.exists():
        where = printable(str(aside))
        logger.warning("could not delete all of %s; tried again after the next save", where)


def _remove_left(path: Path) -> None:
    """Renamed first: a commit of it that is still under way somewhere fails, or was whole."""
    aside = path
    if ".trash-" not in path.name:
        aside = path.with_name(f"{path.name}.trash-{owner()}")
        try:
            os.rename(path, aside)
        except FileNotFoundError:  # another process was faster
            return
        except OSError as error:
            logger.warning("could not delete %s: %s", printable(str(path)), explain(error))
            return
    _remove(aside)


def _is_abandoned(path: Path) -> bool:
    alive = is_alive(path.name)
    if alive is not None:
        return not alive
    try:
        times = [entry.stat().st_mtime for entry in (path, *path.rglob("*"))]
    except OSError:  # it changes at this moment
        return False
    return time.time() - max(times) > FOREIGN_SECONDS


def _put_aside(path: Path) -> None:
    """Rename a link, or a step of a user who is not trusted. Deletes and follows nothing."""
    found = os.lstat(path)
    aside = path.with_name(f"foreign-{parse_step(path.name)}-{secrets.token_hex(4)}")
    try:
        os.rename(path, aside)
    except OSError as error:
        why = f"is of uid {found.st_uid}, who is not trusted, and cannot be put aside; remove it"
        raise PermissionError(errno.EPERM, why, str(path)) from error
    logger.warning(
        "%s: what was there as step %s is of uid %d, who is not trusted, or a link; it is now "
        "called %s, and was neither read nor deleted",
        path.parent, parse_step(path.name), found.st_uid, aside.name,
    )  # fmt: skip
