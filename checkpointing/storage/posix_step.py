"""A step that is being written on a filesystem."""

import errno
import itertools
import logging
import mmap
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from checkpointing.errors import StorageError
from checkpointing.format.layout import COMMIT_RECORD, LATEST, OPTIMIZER, TensorFile
from checkpointing.storage.filesystems import PREALLOCATING, filesystem, stripe
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
        """Make the directory and every tensor file at its final size. Nobody else creates files,
        so that one client alone loads the metadata server."""
        shutil.rmtree(self.tmp, ignore_errors=True)
        make_directory(self.tmp.parent)
        self.tmp.mkdir()
        kind = filesystem(self.tmp)
        if kind == "lustre":
            stripe(self.tmp)
        (self.tmp / OPTIMIZER.folder).mkdir()
        for file in files:
            with opened(self.tmp / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
                if kind in PREALLOCATING:  # a full disk shows here, before anything is written
                    retrying(os.posix_fallocate, descriptor, 0, file.size)
                os.ftruncate(descriptor, file.size)

    def writer(self, file: str, size: int) -> "PosixWriter":
        """Open a file that `begin` made."""
        return PosixWriter(self.tmp / file, size)

    def commit(
        self, files: Sequence[TensorFile], small: Mapping[str, bytes], record: bytes
    ) -> None:
        """Order matters: all bytes, then the commit record, then the directory's names reach the
        disk before its own name does."""
        for file in files:
            size = (self.tmp / file.name).stat().st_size
            if size != file.size:
                raise StorageError(
                    f"{self.tmp / file.name}: has {size} bytes, {file.size} were written"
                )
        write_files(self.tmp, {**small, COMMIT_RECORD: record})
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


class PosixWriter:
    """Writes past the page cache where the filesystem takes it: the cache costs CPU time and
    memory bandwidth that training wants, and the bytes are not read again soon."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size = path, size
        try:
            self._descriptor = retrying(os.open, path, os.O_WRONLY | os.O_DIRECT)
            self._direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._descriptor = retrying(os.open, path, os.O_WRONLY)
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
            with opened(self._path, os.O_WRONLY) as descriptor:
                write_at(descriptor, data[whole:], offset + whole)

    def _buffered(self) -> None:
        descriptor = retrying(os.open, self._path, os.O_WRONLY)  # may fail; leaving closes the old
        os.close(self._descriptor)
        self._descriptor, self._direct = descriptor, False

    def finish(self) -> None:
        """See the bytes to the disk."""
        sync(self._descriptor)
        if not self._direct:  # no reader wants them soon; training may want the memory
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
