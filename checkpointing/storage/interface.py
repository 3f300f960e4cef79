"""Protocols of storage: files of checkpoints, whole steps, and clients of object stores.

posix_storage.py and object_storage.py implement them; `steps.storage_of` chooses.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, Self

from checkpointing.format.layout import TensorFile
from checkpointing.storage.place import ObjectPath, P, Place


class Stat(Protocol):
    """What is known of a file, named as in os.stat_result."""

    @property
    def st_size(self) -> int:
        """Bytes."""

    @property
    def st_mtime(self) -> float:
        """Unix time."""


class StoredFile(Protocol):
    """A file of a checkpoint, open for reading."""

    @property
    def size(self) -> int:
        """Bytes."""

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` in turn from `offset` on; returns how many bytes the file had."""


class FileWriter(Protocol):
    """One tensor file, or a part of it, being written by one thread. A context manager: leaving it
    without `finish` gives the file up."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...

    def write(self, data: memoryview, offset: int) -> None:
        """Write one block, which is free again on return: `data` begins at a page boundary in
        memory and is BLOCK_BYTES long, or shorter at the end of the file; `offset` is a multiple of
        BLOCK_BYTES. Blocks come in order."""

    def finish(self) -> None:
        """Everything written is durable when this returns."""


class NewStep(Protocol):
    """A step that is being written. Made and begun by the coordinator, then sent (wire.py) to the
    writers of all nodes, who write tensor files through it; at the end the coordinator commits or
    aborts it. Nothing that readers accept exists before `commit` returns."""

    @property
    def final(self) -> Place:
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


class Storage(Protocol[P]):
    """One kind of storage. Methods raise OSError or StorageError, as the kind has it; and
    FileNotFoundError only if it is known that there is no such file."""

    # --- files -----------------------------------------------------------------------------------

    def exists(self, path: P) -> bool:
        """Whether there is a file or a directory."""

    def exists_as(self, path: P) -> bool:
        """Whether something has this name, be it a link that leads nowhere."""

    def is_directory(self, path: P) -> bool:
        """Whether there is a directory."""

    def children(self, directory: P) -> list[P]:
        """Files and directories in a directory; none if there is no such directory."""

    def stat(self, path: P) -> Stat:
        """Size and time of a file."""

    def open(self, path: P) -> AbstractContextManager[StoredFile]:
        """A file to read from; errors inside name the file."""

    def read(self, path: P, most: int | None = None, *, follow: bool = True) -> bytes:
        """All bytes of a small file.

        Args:
            path: of the file.
            most: bytes that it may have.
            follow: where it is a link; else a link is an error.

        Raises:
            OSError: it cannot be read, or has more.
        """

    def read_private(self, path: P) -> bytes:
        """The first 65 bytes of a file, or none where others than this user may have read it; a
        store cannot tell."""

    def own_size(self, directory: P, name: str) -> int:
        """Bytes of a file that lies in a directory itself, not elsewhere behind a link.

        Raises:
            FileNotFoundError: it is missing.
            OSError: it is a link, or no regular file.
        """

    def sizes(self, directory: P, names: Iterable[str]) -> Iterator[tuple[str, int]]:
        """(name, bytes) of several, in the order given; raises as `own_size`."""

    def create(self, path: P, data: bytes, mode: int = 0o666) -> None:
        """Make a small file, and see it and its name to the disk. A power cut before that may leave
        it empty.

        Raises:
            FileExistsError: there is one.
        """

    def remove(self, path: P) -> None:
        """Remove a file, if it is there."""

    def append(self, path: P, data: bytes) -> None:
        """Add to a log that one process writes. An object is read and written anew, which is for
        some megabytes at most."""

    def make_directory(self, path: P) -> None:
        """Make a directory, unless it is there, and see all names that lead to it to the disk."""

    def filesystem(self, path: P) -> str:
        """Type of the filesystem that holds `path`, which need not exist yet; "" where there is
        none, or it cannot be told."""

    # --- steps -----------------------------------------------------------------------------------

    def steps(self, directory: P) -> list[P]:
        """What is named as a committed step; whether it is good is not known."""

    def is_foreign(self, step: P) -> bool:
        """Whether what has the name of a step is a link, or of a user who is not trusted."""

    def new_step(self, final: P) -> NewStep:
        """A step that is going to be `final`, written by this process."""

    def delete_step(self, step: P) -> None:
        """Delete a step such that it is never seen half deleted. What a crash or an error leaves of
        it, `collect` deletes. A link, or a step of a user who is not trusted, is put aside."""

    def collect(self, directory: P, lost: Collection[str] = ()) -> None:
        """Remove what processes that are dead have left of steps that they wrote or deleted, and
        finish deletions that this process did not; never anything of a committed step.

        Args:
            directory: of the checkpoints.
            lost: owners that may write here no more, whether or not they live.
        """

    def reading_lock(self, step: P) -> AbstractContextManager[None]:
        """See `steps.reading_lock`."""

    def unless_read(self, step: P) -> AbstractContextManager[bool]:
        """Keep readers off a step; False if there are some. What has no commit record, or lies
        where there are no locks, counts as not being read."""


# --- object stores --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObjectStat:
    """See `interface.Stat`."""

    st_size: int
    """Bytes."""
    st_mtime: float
    """Unix time."""


@dataclass(frozen=True)
class Upload:
    """A tensor file on its way; no object before it is finished."""

    path: ObjectPath
    token: str
    """By which the store knows it."""
    began: float
    """Unix time."""


class Store(Protocol):
    """A client of a store; any thread may use it.

    All methods retry what may pass. They raise FileNotFoundError only if the store says that there
    is no such object, and StorageError for everything that cannot be helped (a bucket that does
    not exist, no permission, no answer): a store that fails is never taken for an empty one.
    """

    def find(self, path: ObjectPath) -> ObjectStat | None:
        """An object; None if there is none."""

    def find_all(self, paths: Sequence[ObjectPath]) -> list[ObjectStat | None]:
        """Several, side by side."""

    def children(self, path: ObjectPath) -> list[ObjectPath]:
        """Objects and directories in a directory."""

    def walk(self, path: ObjectPath) -> dict[str, ObjectStat]:
        """All objects below a directory, by name relative to it."""

    def read(self, path: ObjectPath) -> bytes:
        """All bytes of an object."""

    def read_into(self, path: ObjectPath, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill `buffers` in turn from `offset` on; the object holds as much."""

    def write(self, path: ObjectPath, data: bytes) -> None:
        """Make or replace an object."""

    def write_new(self, path: ObjectPath, data: bytes) -> None:
        """Make an object, where the store compares and writes in one step.

        Raises:
            FileExistsError: there is one already, with other bytes.
        """

    def delete(self, paths: Sequence[ObjectPath]) -> None:
        """Delete objects; those that do not exist are no error."""

    def begin_uploads(self, sizes: Sequence[tuple[ObjectPath, int]]) -> list[str]:
        """Tokens for uploads of objects of so many bytes."""

    def open_upload(self, path: ObjectPath, token: str, size: int) -> FileWriter:
        """A writer for an upload that any process has begun."""

    def uploads(self, path: ObjectPath) -> list[Upload]:
        """Uploads below a directory that were neither finished nor given up."""

    def abort_uploads(self, uploads: Sequence[tuple[ObjectPath, str]]) -> None:
        """Give up uploads (path, token), such that they can never be finished."""
