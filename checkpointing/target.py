"""Where the files of one save go, and how they become a checkpoint.

A target is made and begun by the coordinator, then sent (pickled) to the writers of all nodes, who
write tensor files through it; at the end the coordinator commits or aborts it. Nothing that readers
accept exists before `commit` returns.
"""

import errno
import logging
import mmap
import os
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from checkpointing.errors import DamagedCheckpoint, StorageError, UnreadableCheckpoint
from checkpointing.layout import COMMIT_RECORD, LATEST, OPTIMIZER, TensorFile
from checkpointing.object_target import ObjectTarget
from checkpointing.objects import ObjectPath
from checkpointing.retention import delete, tmp_path
from checkpointing.steps import open_step
from checkpointing.storage import (
    make_directory,
    opened,
    replace_file,
    retrying,
    sync,
    sync_directory,
    write_at,
    write_file,
)

logger = logging.getLogger(__name__)

STRIPE_BYTES = "16M"
"""Lustre stripe size: a block of ours lies on one storage target."""


class FileWriter(Protocol):
    """One tensor file, or a part of it, being written by one thread. A context manager: leaving it
    without `finish` gives the file up."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def write(self, data: memoryview, offset: int) -> None:
        """Write one block: `data` begins at a page boundary in memory and is BLOCK_BYTES long, or
        shorter at the end of the file; `offset` is a multiple of BLOCK_BYTES."""

    def finish(self) -> None:
        """Everything written is durable when this returns."""


class Target(Protocol):
    """One save on one kind of storage. Picklable after `begin`."""

    @property
    def final(self) -> Path:
        """What the checkpoint is called once it is committed."""

    @property
    def in_parts(self) -> bool:
        """Whether several writers of a node may write to one file at the same time."""

    def begin(self, files: Sequence[TensorFile]) -> None:
        """Prepare for the tensor files. In the coordinator."""

    def writer(self, file: str, size: int) -> FileWriter:
        """Open a tensor file of `size` bytes for writing. On any node, after `begin`."""

    def commit(
        self, files: Sequence[TensorFile], small: Mapping[str, bytes], record: bytes
    ) -> None:
        """Make it a checkpoint, after all writers have finished. In the coordinator.

        Args:
            files: the tensor files, whose sizes are checked.
            small: all other files by name, except for the commit record.
            record: contents of the commit record, written last.
        """

    def abort(self) -> None:
        """Remove what was written, as far as that is possible. In the coordinator."""


@dataclass
class PosixTarget:
    """A directory under another name, renamed when it is complete."""

    final: Path
    tmp: Path
    in_parts = True

    @staticmethod
    def of(final: Path) -> "PosixTarget":
        """A target owned by this process."""
        return PosixTarget(final, tmp_path(final))

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
        for name, data in small.items():
            write_file(self.tmp / name, data)
        write_file(self.tmp / COMMIT_RECORD, record)
        sync_directory(self.tmp / OPTIMIZER.folder)
        sync_directory(self.tmp)
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self._path)

    def write(self, data: memoryview, offset: int) -> None:
        """See `FileWriter.write`."""
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


def new_target(final: Path, damaged: Collection[str]) -> Target | None:
    """Where to write the step that is going to be `final`; None if it is committed already.

    Args:
        final: its path.
        damaged: names of steps that are known to be damaged, though their records are good; such a
            one is deleted to be written again.
    """
    if final.exists():
        if final.name not in damaged and _is_good(final):
            return None
        delete(final)
    return ObjectTarget.of(final) if isinstance(final, ObjectPath) else PosixTarget.of(final)


def _is_good(path: Path) -> bool:
    try:
        open_step(path)
    except UnreadableCheckpoint:  # no reason to delete it
        raise
    except DamagedCheckpoint:
        return False
    return True


# --- filesystems ---------------------------------------------------------------------------------

PREALLOCATING = {"ext4", "xfs", "btrfs", "tmpfs"}
"""Filesystems that reserve space at once; where the C library would have to write zeros instead,
nothing is reserved."""

SHARED = {"lustre", "nfs", "nfs4", "cifs", "smb3", "beegfs", "gpfs", "ceph", "wekafs", "9p"}
"""Filesystems that several nodes mount."""


def filesystem(path: Path) -> str:
    """Type of the filesystem that holds `path`, as in /proc/self/mountinfo ("ext4", "lustre",
    "fuse.glusterfs", …), behind symbolic links; "" where that cannot be told. `path` need not exist
    yet."""
    if isinstance(path, ObjectPath):
        return ""
    path = Path(os.path.realpath(path))
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        if path.is_relative_to(point) and len(point) >= best:  # of equal ones the last is on top
            best, kind = len(point), after.split()[0]
    return kind


def is_shared(kind: str) -> bool:
    """Whether a filesystem of this type is one that several nodes write to."""
    return kind in SHARED or kind.startswith("fuse.")


def stripe(directory: Path) -> None:
    """Ask Lustre to spread files in `directory` over a few storage targets, by `lfs` if it is
    installed. A hint: failure is logged."""
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
