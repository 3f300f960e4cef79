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
    """Size and time of a file, named as in os.stat_result."""

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
        """Fill `buffers` in turn from `offset` on; returns the bytes read, fewer at the end of the
        file."""


class FileWriter(Protocol):
    """A tensor file, or a part of it, being written by one thread. A context manager: leaving it
    without `finish` discards the file."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...

    def write(self, data: memoryview, offset: int) -> None:
        """Write one block, whose buffer is free again on return. `data` is page-aligned and
        BLOCK_BYTES long, or shorter at the end of the file. `offset` is a multiple of BLOCK_BYTES.
        Blocks come in order."""

    def finish(self) -> None:
        """Return once all written bytes are durable."""


class NewStep(Protocol):
    """A step that is being written. The coordinator creates it and calls `begin`; then it is sent
    (wire.py) to the writers of all nodes, who write tensor files through it; at last the
    coordinator commits or aborts it. Readers accept nothing of it before `commit` returns."""

    @property
    def final(self) -> Place:
        """Path of the checkpoint once it is committed."""

    @property
    def in_parts(self) -> bool:
        """Whether several writers of a node may write to one file at a time."""

    def begin(self, files: Sequence[TensorFile]) -> None:
        """Prepare the tensor files. Called by the coordinator."""

    def writer(self, file: str, size: int) -> FileWriter:
        """Open a tensor file of `size` bytes for writing. Called on any node, after `begin`."""

    def commit(
        self, files: Sequence[TensorFile], small: Mapping[str, bytes], record: bytes
    ) -> None:
        """Make it a checkpoint, once all writers have finished. Called by the coordinator.

        Args:
            files: the tensor files, whose sizes are checked.
            small: all other files but the commit record, by name.
            record: contents of the commit record, written last.
        """

    def abort(self) -> None:
        """Remove what was written, as far as possible. Called by the coordinator."""


class Storage(Protocol[P]):
    """One kind of storage. Methods raise OSError or StorageError, depending on the kind;
    FileNotFoundError only if it is certain that the file does not exist."""

    # --- files -----------------------------------------------------------------------------------

    def exists(self, path: P) -> bool: ...

    def exists_as(self, path: P) -> bool:
        """Whether the name is used, even by a broken link."""

    def is_directory(self, path: P) -> bool: ...

    def children(self, directory: P) -> list[P]:
        """Returns the files and directories in a directory; none if it does not exist."""

    def stat(self, path: P) -> Stat: ...

    def open(self, path: P) -> AbstractContextManager[StoredFile]:
        """Opens a file for reading; errors inside the block name the file."""

    def read(self, path: P, most: int | None = None, *, follow: bool = True) -> bytes:
        """Returns all bytes of a small file.

        Args:
            most: most bytes that it may have.
            follow: whether a link is followed; if not, it is an error.

        Raises:
            OSError: it cannot be read, or is larger than `most`.
        """

    def read_private(self, path: P) -> bytes:
        """Returns the first 65 bytes of a file; none if another user could read it, which a store
        cannot tell."""

    def own_size(self, directory: P, name: str) -> int:
        """Returns the bytes of a regular file in the directory itself, not behind a link.

        Raises:
            FileNotFoundError: it is missing.
            OSError: it is a link, or no regular file.
        """

    def sizes(self, directory: P, names: Iterable[str]) -> Iterator[tuple[str, int]]:
        """Yields (name, bytes) of several files in the given order; raises as `own_size`."""

    def create(self, path: P, data: bytes, mode: int = 0o666) -> None:
        """Create a small file, durable on return. A power cut before that may leave it empty.

        Raises:
            FileExistsError: it exists.
        """

    def remove(self, path: P) -> None: ...

    def append(self, path: P, data: bytes) -> None:
        """Append to a log that one process writes. An object is read and rewritten, so it should
        stay within some megabytes."""

    def make_directory(self, path: P) -> None:
        """Create a directory and its parents unless they exist, durable on return."""

    def filesystem(self, path: P) -> str:
        """Returns the type of the filesystem that holds `path`, which need not exist; "" if there
        is none or it is unknown."""

    # --- steps -----------------------------------------------------------------------------------

    def steps(self, directory: P) -> list[P]:
        """Returns the entries named as steps; they may be damaged."""

    def is_foreign(self, step: P) -> bool:
        """Whether an entry named as a step is a link, or of a user who is not trusted."""

    def new_step(self, final: P) -> NewStep:
        """Returns a step, to be `final`, that this process writes."""

    def delete_step(self, step: P) -> None:
        """Delete a step so that no reader sees half of it. After a crash or an error, `collect`
        deletes the rest. A link, or a step of a user who is not trusted, is set aside."""

    def collect(self, directory: P, lost: Collection[str] = ()) -> None:
        """Remove what dead processes left of steps that they wrote or deleted, and finish failed
        deletions of this process. Never touches a committed step.

        Args:
            lost: owners that may write here no more, dead or alive.
        """

    def reading_lock(self, step: P) -> AbstractContextManager[None]:
        """Implements `steps.reading_lock`."""

    def unless_read(self, step: P) -> AbstractContextManager[bool]:
        """Keep readers off a step during the block; yields False if it is being read. A step
        without a commit record, or where locks do not exist, counts as not being read."""


# --- object stores --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObjectStat:
    """Size and time of an object; implements Stat."""

    st_size: int
    """Bytes."""
    st_mtime: float
    """Unix time."""


@dataclass(frozen=True)
class Upload:
    """An unfinished upload of a tensor file; no object exists before it is finished."""

    path: ObjectPath
    token: str
    """Its name in the store."""
    began: float
    """Unix time."""


class ObjectStore(Protocol):
    """A client of an object store, callable from any thread.

    Names lead to objects: `s3://bucket/runs/a/step-00001000/index.json` is one object, and a
    directory is a common prefix of names. Nothing can be renamed; an object appears whole or not at
    all.

    All methods retry transient errors. They raise FileNotFoundError only if the store says that the
    object does not exist. They raise StorageError for all that retries cannot help (no such bucket,
    no permission, no answer), so a failing store never looks empty."""

    def find(self, path: ObjectPath) -> ObjectStat | None:
        """Returns an object's size and time; None if it does not exist."""

    def find_all(self, paths: Sequence[ObjectPath]) -> list[ObjectStat | None]:
        """Like `find` for several objects, concurrently."""

    def children(self, path: ObjectPath) -> list[ObjectPath]:
        """Returns objects and directories in a directory."""

    def walk(self, path: ObjectPath) -> dict[str, ObjectStat]:
        """Returns all objects below a directory, by relative name."""

    def read(self, path: ObjectPath) -> bytes: ...

    def read_into(self, path: ObjectPath, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill `buffers` in turn from `offset` on; the object has that many bytes."""

    def write(self, path: ObjectPath, data: bytes) -> None:
        """Create or replace an object."""

    def write_new(self, path: ObjectPath, data: bytes) -> None:
        """Create an object, by an atomic operation of the store.

        Raises:
            FileExistsError: it exists with other bytes.
        """

    def delete(self, paths: Sequence[ObjectPath]) -> None:
        """Delete objects; missing ones are no error."""

    def begin_uploads(self, sizes: Sequence[tuple[ObjectPath, int]]) -> list[str]:
        """Returns tokens of new uploads for objects of the given sizes."""

    def open_upload(self, path: ObjectPath, token: str, size: int) -> FileWriter:
        """Returns a writer for an upload that any process has begun."""

    def uploads(self, path: ObjectPath) -> list[Upload]:
        """Returns uploads below a directory that were neither finished nor aborted."""

    def abort_uploads(self, uploads: Sequence[tuple[ObjectPath, str]]) -> None:
        """Abort uploads (path, token), so that nobody can finish them."""
