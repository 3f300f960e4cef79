"""A step that is being written on a filesystem."""

import errno
import itertools
import logging
import mmap
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from checkpointing.errors import StorageError
from checkpointing.format.layout import COMMIT_RECORD, LATEST, OPTIMIZER, TensorFile
from checkpointing.storage.filesystems import PREALLOCATING, filesystem, stripe
from checkpointing.storage.locks import make_lock
from checkpointing.storage.owners import owner
from checkpointing.storage.posix import (
    make_directory,
    opened,
    replace_file,
    retrying,
    sync,
    sync_directory,
    write_at,
    write_files,
)
from checkpointing.storage.trust import Trusted, lets_group_write
from checkpointing.wire import register

logger = logging.getLogger(__name__)

_numbers = itertools.count(1)


@dataclass
class NewPosixStep:
    """A directory under another name, renamed when it is complete. See `interface.NewStep`."""

    final: Path
    tmp: Path
    in_parts = True

    @staticmethod
    def of(final: Path) -> "NewPosixStep":
        """A step that this process writes: in a new place each time, so that whoever still writes
        to a save that was given up is not in the way of the next."""
        name = f"{final.name}.tmp-{next(_numbers)}-{owner()}"
        return NewPosixStep(final, final.with_name(name))

    def begin(self, files: Sequence[TensorFile]) -> None:
        """Make the directory, closed to others, and every tensor file at its final size. Nobody
        else creates files, so that one client alone loads the metadata server."""
        shutil.rmtree(self.tmp, ignore_errors=True)
        make_directory(self.tmp.parent)
        make_lock(self.tmp.parent)
        self.tmp.mkdir(mode=0o700)
        kind = filesystem(self.tmp)
        if kind == "lustre":
            stripe(self.tmp)
        new = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with _inside(self.tmp) as folder:
            (folder / OPTIMIZER.folder).mkdir(mode=self._mode | 0o111)
            for file in files:
                with opened(folder / file.name, new, self._mode) as descriptor:
                    if kind in PREALLOCATING:  # a full disk shows here, before anything is written
                        retrying(os.posix_fallocate, descriptor, 0, file.size)
                    os.ftruncate(descriptor, file.size)

    @property
    def _mode(self) -> int:
        """Mode of files, less the umask. Users whose steps are not trusted cannot change files."""
        return 0o666 if lets_group_write(self.final.parent) else 0o644

    def writer(self, file: str, size: int) -> "PosixWriter":
        """Open a file that `begin` made."""
        return PosixWriter(self.tmp, file, size)

    def commit(
        self, files: Sequence[TensorFile], small: Mapping[str, bytes], record: bytes
    ) -> None:
        """Order matters: all bytes, then the commit record, then the directory's names reach the
        disk before its own name does."""
        with _inside(self.tmp) as folder:
            for file in files:
                size = (folder / file.name).stat().st_size
                if size != file.size:
                    raise StorageError(
                        f"{self.tmp / file.name}: has {size} bytes, {file.size} were written"
                    )
            write_files(folder, {**small, COMMIT_RECORD: record}, self._mode)
            # Made by the same umask, and in the same group.
            folder.chmod(stat.S_IMODE((folder / OPTIMIZER.folder).stat().st_mode))
            os.rename(self.tmp, self.final)
        sync_directory(self.final.parent)
        try:
            replace_file(self.final.parent / LATEST, f"{self.final.name}\n".encode())
        except OSError as error:  # a pointer for people: the checkpoint itself is committed
            logger.warning(
                "%s is committed, but %s could not be moved: %s", self.final, LATEST, error
            )

    def abort(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.tmp, ignore_errors=True)


register(NewPosixStep)


@contextmanager
def _inside(tmp: Path) -> Iterator[Path]:
    """A path into a directory of this user that goes on leading there, whatever others rename, and
    never through a link. Errors name the directory as it is called.

    Raises:
        PermissionError: somebody has put another directory in its place.
    """
    descriptor = os.open(tmp, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    folder = f"/proc/self/fd/{descriptor}"
    try:
        if os.fstat(descriptor).st_uid not in Trusted((), tmp.parent):
            raise PermissionError(errno.EPERM, "was exchanged by another user", str(tmp))
        yield Path(folder)
    except OSError as error:
        if isinstance(error.filename, str):
            error.filename = error.filename.replace(folder, str(tmp))
        raise
    finally:
        os.close(descriptor)


class PosixWriter:
    """Writes past the page cache where the filesystem takes it: the cache costs CPU time and
    memory bandwidth that training wants, and the bytes are not read again soon."""

    def __init__(self, tmp: Path, name: str, size: int) -> None:
        self._path, self._size = tmp / name, size
        with _inside(tmp) as folder:
            flags = os.O_WRONLY | os.O_NOFOLLOW
            try:
                self._descriptor = retrying(os.open, folder / name, flags | os.O_DIRECT)
                self._direct = True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._descriptor = retrying(os.open, folder / name, flags)
                self._direct = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        os.close(self._descriptor)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self._path)

    def write(self, data: memoryview, offset: int) -> None:
        whole = len(data) - len(data) % mmap.PAGESIZE if self._direct else len(data)
        try:
            write_at(self._descriptor, data[:whole], offset)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
            # Some filesystems take the flag and refuse the write.
            self._buffered()
            write_at(self._descriptor, data[:whole], offset)
        if whole < len(data):  # the end of the file
            with opened(self._path, os.O_WRONLY, by=self._again) as descriptor:
                write_at(descriptor, data[whole:], offset + whole)

    def _buffered(self) -> None:
        descriptor = retrying(self._again)  # may fail; leaving closes the old
        os.close(self._descriptor)
        self._descriptor, self._direct = descriptor, False

    def _again(self, *_: object) -> int:
        """A descriptor of this file that goes through the page cache."""
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_WRONLY)

    def finish(self) -> None:
        """See the bytes to the disk."""
        sync(self._descriptor)
        if not self._direct:  # no reader wants them soon; training may want the memory
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
