"""Checkpoints on a filesystem: each step is a directory.

[Note: names]
  step-00001000                  committed, if its commit record is valid
  step-00001000.tmp-<n>-<owner>  being written by <owner>
  step-00001000.trash-<owner>    being deleted by <owner>
  foreign-1000-<random>          set aside: a link, or a step of a user who is not trusted
  .reading                       locked by readers of a step, see posix.py [Note: readers]
Owners are processes, see ownership.py. Files with other names are never touched."""

import errno
import itertools
import logging
import mmap
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from checkpointing.errors import DamagedCheckpoint, StorageError, explain, reading
from checkpointing.format.layout import COMMIT_RECORD, LATEST, OPTIMIZER, TensorFile, parse_step
from checkpointing.format.untrusted import printable
from checkpointing.storage import ownership, posix
from checkpointing.storage.folders import is_private
from checkpointing.wire import register

logger = logging.getLogger(__name__)


_numbers = itertools.count(1)


@dataclass
class NewPosixStep:
    """A step that is written to a directory and renamed when complete; implements NewStoredStep."""

    final: Path
    tmp: Path
    in_parts = True

    @staticmethod
    def of(final: Path) -> "NewPosixStep":
        """Returns a step with a temporary name that is new at each call, so that late writers of a
        failed save of the same step do not touch it."""
        name = f"{final.name}.tmp-{next(_numbers)}-{ownership.owner()}"
        return NewPosixStep(final, final.with_name(name))

    def begin(self, files: Sequence[TensorFile]) -> None:
        """Create the directory, closed to other users, and every tensor file with its final size.
        Only the coordinator creates files, so that a single client loads the metadata server."""
        shutil.rmtree(self.tmp, ignore_errors=True)  # a failed attempt of this process may leave it
        posix.make_directory(self.tmp.parent)
        with posix.lock_file(self.tmp.parent, make=True):
            pass  # created for readers, who cannot create it
        self.tmp.mkdir(mode=0o700)
        kind = posix.filesystem(self.tmp)
        if kind == "lustre":
            posix.stripe(self.tmp)
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with _inside(self.tmp) as folder:
            (folder / OPTIMIZER.folder).mkdir(mode=self._mode | 0o111)
            for file in files:
                with posix.opened(folder / file.name, new, self._mode) as descriptor:
                    # so that a full disk fails here, before any write
                    if kind in posix.PREALLOCATING:
                        posix.retrying(os.posix_fallocate, descriptor, 0, file.size)
                    os.ftruncate(descriptor, file.size)  # so that writers may write in any order

    @property
    def _mode(self) -> int:
        """Mode of new files, before the umask: only trusted users may change them."""
        return 0o666 if ownership.lets_group_write(self.final.parent) else 0o644

    def writer(self, file: str, size: int) -> "PosixWriter":
        return PosixWriter(self.tmp, file, size)

    def commit(
        self, files: Sequence[TensorFile], small: Mapping[str, bytes], record: bytes
    ) -> None:
        """Make the step durable, in this order: all bytes, the commit record, the names in the
        directory, the directory's own name."""
        with _inside(self.tmp) as folder:
            for file in files:
                size = (folder / file.name).stat().st_size
                if size != file.size:
                    raise StorageError(
                        f"{self.tmp / file.name}: has {size} bytes, {file.size} were written"
                    )
            posix.write_files(folder, {**small, COMMIT_RECORD: record}, self._mode)
            # The step gets the mode that the kernel gave to the inner folder, by umask and group.
            with suppress(OSError):  # some filesystems, such as FUSE's, have no modes
                folder.chmod(stat.S_IMODE((folder / OPTIMIZER.folder).stat().st_mode))
            # This rename is the commit: readers see the whole step or nothing.
            os.rename(self.tmp, self.final)
        # otherwise a power cut could undo the rename
        posix.sync_directory(self.final.parent)
        try:
            posix.replace_file(self.final.parent / LATEST, f"{self.final.name}\n".encode())
        except OSError as error:  # `latest` is for people; the checkpoint itself is committed
            logger.warning(
                "%s is committed, but %s could not be moved: %s", self.final, LATEST, error
            )

    def abort(self) -> None:
        shutil.rmtree(self.tmp, ignore_errors=True)


register(NewPosixStep)


@contextmanager
def _inside(tmp: Path) -> Iterator[Path]:
    """Yields a path to a directory of this user that stays valid when other users rename files, and
    never leads through a link. Errors name the directory by `tmp`; PermissionError is raised if
    another user has replaced it."""
    descriptor = os.open(tmp, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    folder = f"/proc/self/fd/{descriptor}"
    try:
        if os.fstat(descriptor).st_uid not in ownership.TrustedStorageOwners((), tmp.parent):
            raise PermissionError(errno.EPERM, "was exchanged by another user", str(tmp))
        yield Path(folder)
    except OSError as error:
        if isinstance(error.filename, str):
            error.filename = error.filename.replace(folder, str(tmp))
        raise
    finally:
        os.close(descriptor)


class PosixWriter(AbstractContextManager["PosixWriter"]):
    """Writes a file with O_DIRECT if the filesystem supports it; implements StorageFileWriter. The
    page cache would cost CPU time and memory bandwidth, and the bytes are not read soon."""

    def __init__(self, tmp: Path, name: str, size: int) -> None:
        self._path, self._size = tmp / name, size
        with _inside(tmp) as folder:
            flags = os.O_WRONLY | os.O_NOFOLLOW
            try:
                # EINVAL: the filesystem does not support O_DIRECT
                self._descriptor = posix.retrying(os.open, folder / name, flags | os.O_DIRECT)
                self._direct = True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._descriptor = posix.retrying(os.open, folder / name, flags)
                self._direct = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        os.close(self._descriptor)
        if isinstance(error, OSError) and error.filename is None:  # the error of a write
            error.filename = str(self._path)

    def write(self, data: memoryview, offset: int) -> None:
        whole = len(data) - len(data) % mmap.PAGESIZE if self._direct else len(data)
        try:
            posix.write_at(self._descriptor, data[:whole], offset)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
            # some filesystems accept O_DIRECT at open, and then refuse the write
            self._buffered()
            posix.write_at(self._descriptor, data[:whole], offset)
        if whole < len(data):  # the size of the file is no multiple of the page size
            with posix.opened(self._path, os.O_WRONLY, by=self._again) as descriptor:
                posix.write_at(descriptor, data[whole:], offset + whole)

    def _buffered(self) -> None:
        # if this raises, __exit__ closes the old descriptor
        descriptor = posix.retrying(self._again)
        os.close(self._descriptor)
        self._descriptor, self._direct = descriptor, False

    def _again(self, *_: object) -> int:
        """Returns a second descriptor of this file, through the page cache."""
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_WRONLY)

    def finish(self) -> None:
        posix.sync(self._descriptor)
        if not self._direct:  # free the page cache for training
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


FOREIGN_SECONDS = 3600
"""Seconds without a change after which an unfinished directory of another machine counts as
abandoned, as this machine cannot see its processes."""
_ASIDE = re.compile(r"step-\d{8,}\.(?:tmp|trash)-.+")


class PosixStorage:
    """Checkpoints on a filesystem; implements Storage."""

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
    def open(self, path: Path) -> Iterator[posix.PosixFile]:
        with posix.regular(path) as descriptor:
            yield posix.PosixFile(descriptor)

    def read(self, path: Path, most: int | None = None, *, follow: bool = True) -> bytes:
        with posix.regular(path, follow=follow) as descriptor:
            size = os.fstat(descriptor).st_size
            if most is not None and size > most:
                raise OSError(errno.EFBIG, f"has {size} bytes, at most {most} are read", str(path))
            buffer = bytearray(size)
            return bytes(buffer[: posix.read_at(descriptor, [memoryview(buffer)], 0)])

    def read_private(self, path: Path) -> bytes:
        """Returns the first 65 bytes of a file, links not followed; b"" if another user can open
        it."""
        with posix.opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as descriptor:
            if not is_private(os.fstat(descriptor)):
                return b""
            buffer = bytearray(65)
            return bytes(buffer[: posix.read_at(descriptor, [memoryview(buffer)], 0)])

    def own_size(self, directory: Path, name: str) -> int:
        for folder in [directory / part for part in Path(name).parents][:-1]:
            if folder.is_symlink():
                posix.require_regular(folder, folder.lstat())
        found = (directory / name).lstat()
        posix.require_regular(directory / name, found)
        return found.st_size

    def sizes(self, directory: Path, names: Iterable[str]) -> Iterator[tuple[str, int]]:
        return ((name, self.own_size(directory, name)) for name in names)

    def create(self, path: Path, data: bytes, mode: int = 0o666) -> None:
        posix.write_file(path, data, mode)
        posix.sync_directory(path.parent)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def append(self, path: Path, data: bytes) -> None:
        posix.append(path, data)

    def make_directory(self, path: Path) -> None:
        ownership.require_own_link(path)
        posix.make_directory(path)

    def filesystem(self, path: Path) -> str:
        return posix.filesystem(path)

    def steps(self, directory: Path) -> list[Path]:
        ownership.require_own_link(directory)
        return self.children(directory)

    def is_foreign(self, step: Path) -> bool:
        return ownership.is_foreign(step)

    def new_step(self, final: Path) -> NewPosixStep:
        return NewPosixStep.of(final)

    def delete_step(self, path: Path) -> None:
        if ownership.is_foreign(path):
            _put_aside(path)
            return
        aside = path.with_name(f"{path.name}.trash-{ownership.owner()}")
        shutil.rmtree(aside, ignore_errors=True)  # left by a failed deletion of the same step
        # renamed first, so that no reader finds a step that lacks files
        os.rename(path, aside)
        _remove(aside)

    def collect(self, directory: Path, lost: Collection[str] = ()) -> None:
        for path in self.children(directory):
            match = _ASIDE.fullmatch(path.name)
            if match is None:
                continue
            # left by a failed deletion of this process
            if path.name.endswith(f".trash-{ownership.owner()}"):
                _remove(path)
            elif ownership.is_owner(path.name, lost) or _is_abandoned(path):
                logger.info("removing %s, which a dead run left behind", printable(str(path)))
                _remove_left(path)

    @contextmanager
    def reading_lock(self, path: Path) -> Iterator[None]:
        """Share the lock of a step, see posix.py [Note: readers]."""
        where = path / COMMIT_RECORD
        # check that the step exists and its owner is trusted
        with reading(where), posix.regular(where):
            pass
        with posix.lock_file(path.parent, make=False) as lock:
            deadline = time.monotonic() + posix.LOCK_SECONDS
            # polled, as a blocking call could wait for ever
            while not posix.try_lock(lock, path, alone=False) and path.exists():
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            if not path.exists():  # the step was renamed before it was locked
                raise DamagedCheckpoint(f"{path}: was removed while it was opened")
            yield

    @contextmanager
    def unless_read(self, path: Path) -> Iterator[bool]:
        with posix.lock_file(path.parent, make=True) as lock:
            yield posix.try_lock(lock, path, alone=True)


def _remove(aside: Path) -> None:
    """Delete files one by one, which loads a metadata server little."""
    shutil.rmtree(aside, ignore_errors=True)
    if aside.exists():
        where = printable(str(aside))
        logger.warning("could not delete all of %s; trying again after the next save", where)


def _remove_left(path: Path) -> None:
    """Rename an unfinished step, then delete it. If another process commits that step, either its
    commit comes first and the rename fails, or its commit fails."""
    aside = path
    if ".trash-" not in path.name:
        aside = path.with_name(f"{path.name}.trash-{ownership.owner()}")
        try:
            os.rename(path, aside)
        except FileNotFoundError:  # another process was faster
            return
        except OSError as error:
            logger.warning("could not delete %s: %s", printable(str(path)), explain(error))
            return
    _remove(aside)


def _is_abandoned(path: Path) -> bool:
    alive = ownership.is_alive(path.name)
    if alive is not None:
        return not alive
    try:
        times = [entry.stat().st_mtime for entry in (path, *path.rglob("*"))]
    except OSError:  # the directory is changing now
        return False
    return time.time() - max(times) > FOREIGN_SECONDS


def _put_aside(path: Path) -> None:
    """Rename a link, or a step of a user who is not trusted. Nothing is deleted or followed."""
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
