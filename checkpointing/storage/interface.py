"""Protocols of storage: files of checkpoints, whole steps, and clients of object stores.

posix_storage.py and object_storage.py implement them; `steps.storage_of` chooses."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from checkpointing.format.layout import TensorFile
from checkpointing.storage.place import ObjectPath, P, StoragePlace


class StorageStat(Protocol):
    """Size (bytes) and time (Unix time) of a file, named as in os.stat_result."""

    @property
    def st_size(self) -> int: ...

    @property
    def st_mtime(self) -> float: ...


class StorageFile(Protocol):
    """A file of a checkpoint, open for reading."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` in turn, from `offset` on. Returns the number of bytes read, which is
        smaller at the end of the file."""


class StorageFileWriter(AbstractContextManager["StorageFileWriter"], Protocol):
    """Writes a tensor file, or a part of it, in one thread. Without `finish`, what was written does
    not count as part of the step."""

    def write(self, data: memoryview, offset: int) -> None:
        """Write one block, whose buffer is free again on return. `data` is page-aligned and
        BLOCK_BYTES long, or shorter at the end of the file. `offset` is a multiple of BLOCK_BYTES.
        Blocks come in order."""

    def finish(self) -> None:
        """Return once all written bytes are durable."""


class NewStoredStep(Protocol):
    """A step that is being written. The coordinator creates this object and calls `begin`; then it
    is sent (wire.py) to the writers of all nodes, which write tensor files through it; at last the
    coordinator calls `commit` or `abort`. Readers see no part of the step before `commit`
    returns."""

    @property
    def final(self) -> StoragePlace:
        """Path of the checkpoint once it is committed."""

    @property
    def in_parts(self) -> bool:
        """Whether several writers of a node may write to one file at the same time."""

    def begin(self, files: Sequence[TensorFile]) -> None:
        """Prepare the tensor files. Called by the coordinator."""

    def writer(self, file: str, size: int) -> StorageFileWriter:
        """Open a tensor file of `size` bytes for writing. Called on any node, after `begin`."""

    def commit(
        self, files: Sequence[TensorFile], small: Mapping[str, bytes], record: bytes
    ) -> None:
        """Make the step a checkpoint, once all writers have finished. Called by the coordinator.

        Args:
            files: the tensor files, whose sizes are checked.
            small: name → contents of all other files except the commit record.
            record: contents of the commit record, written last.
        """

    def abort(self) -> None:
        """Remove the step's files, as far as possible. Called by the coordinator."""


class Storage(Protocol[P]):
    """A kind of storage. Methods raise OSError or StorageError, depending on the kind, and
    FileNotFoundError only if it is certain that the file does not exist."""

    # --- files -----------------------------------------------------------------------------------

    def exists(self, path: P) -> bool: ...

    def exists_as(self, path: P) -> bool:
        """Whether a file, directory or link of this name exists, even a broken link."""

    def is_directory(self, path: P) -> bool: ...

    def children(self, directory: P) -> list[P]:
        """Returns the files and directories in a directory; an empty list if it does not exist."""

    def stat(self, path: P) -> StorageStat: ...

    def open(self, path: P) -> AbstractContextManager[StorageFile]:
        """Open a file for reading. Errors inside the block name the file."""

    def read(self, path: P, most: int | None = None, *, follow: bool = True) -> bytes:
        """Returns all bytes of a small file. Raises OSError if the file cannot be read, has more
        than `most` bytes, or is a link and `follow` is false."""

    def read_private(self, path: P) -> bytes:
        """Returns the contents of a small secret file, of a filesystem at most 65 bytes. Returns
        b"" if another user could read the file, which is not checked in an object store."""

    def own_size(self, directory: P, name: str) -> int:
        """Returns the size in bytes of a regular file in the directory itself. Raises
        FileNotFoundError if it is missing, and OSError if it is a link, or not regular."""

    def sizes(self, directory: P, names: Iterable[str]) -> Iterator[tuple[str, int]]:
        """Yields (name, `own_size`) of files in the given order."""

    def create(self, path: P, data: bytes, mode: int = 0o666) -> None:
        """Create a small file, durable on return; raises FileExistsError if it exists. A power cut
        before the return may leave it empty."""

    def remove(self, path: P) -> None: ...

    def append(self, path: P, data: bytes) -> None:
        """Append to a log that only one process writes. An object is read and rewritten, so a log
        should not exceed some megabytes."""

    def make_directory(self, path: P) -> None:
        """Create a directory and its parents unless they exist, durable on return."""

    def filesystem(self, path: P) -> str:
        """Returns the type of the filesystem that holds `path`, which need not exist; "" for an
        object store or an unknown type."""

    # --- steps -----------------------------------------------------------------------------------

    def steps(self, directory: P) -> list[P]:
        """Returns paths of entries of a directory, including all committed steps: on a filesystem
        all entries, in an object store only the steps with a commit record. A step may be
        damaged."""

    def is_foreign(self, step: P) -> bool:
        """Whether an entry named as a step is a link, or of a user who is not trusted."""

    def new_step(self, final: P) -> NewStoredStep:
        """Returns a new step for writing, which becomes `final` when it is committed."""

    def delete_step(self, step: P) -> None:
        """Delete a step so that no reader sees half of it. After a crash or an error, `collect`
        deletes what is left. A link, or a step of an untrusted user, is renamed instead."""

    def collect(self, directory: P, lost: Collection[str] = ()) -> None:
        """Remove unfinished steps and deletions of dead processes and of the owners `lost`, who may
        no longer write to `directory`. Finish failed deletions of this process. Never touches a
        committed step."""

    def reading_lock(self, step: P) -> AbstractContextManager[None]:
        """Keep retention from deleting a step during the block. See `steps.reading_lock`."""

    def unless_read(self, step: P) -> AbstractContextManager[bool]:
        """Keep readers from a step during the block, and yield True. Where there are no locks,
        yields True all the same. If the step is being read, yields False and locks nothing."""


# --- object stores --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObjectStat:
    """Size (bytes) and time (Unix time) of an object; implements Stat."""

    st_size: int
    st_mtime: float


@dataclass(frozen=True)
class StorageUpload:
    """An unfinished upload of a tensor file. The object exists only once the upload is finished."""

    path: ObjectPath
    token: str
    """Identifier of the upload in the store."""
    began: float
    """Unix time of its begin."""


class ObjectStore(Protocol):
    """A client of an object store, callable from any thread.

    Names refer to objects: `s3://bucket/runs/a/step-00001000/index.json` is one object, and a
    directory is a common prefix of names. Objects cannot be renamed, and appear whole or not at
    all.

    All methods retry transient errors. They raise FileNotFoundError only if the store says that the
    object does not exist. They raise StorageError for errors that retries do not cure (no such
    bucket, no permission, no answer), so that a failing store never looks empty."""

    def find(self, path: ObjectPath) -> ObjectStat | None:
        """Returns an object's size and time; None if it does not exist."""

    def now(self, path: ObjectPath) -> float:
        """Returns the Unix time by the clock that gives objects their times, to a second or two; by
        this machine's clock if the store does not say its time."""

    def find_all(self, paths: Sequence[ObjectPath]) -> list[ObjectStat | None]:
        """Returns the results of `find` for several objects, concurrently."""

    def children(self, path: ObjectPath) -> list[ObjectPath]:
        """Returns objects and directories in a directory."""

    def walk(self, path: ObjectPath) -> dict[str, ObjectStat]:
        """Returns relative name → size and time of all objects below a directory."""

    def read(self, path: ObjectPath) -> bytes: ...

    def read_into(self, path: ObjectPath, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill `buffers` in turn, from `offset` on. The object must have so many bytes."""

    def write(self, path: ObjectPath, data: bytes) -> None:
        """Create or replace an object."""

    def write_new(self, path: ObjectPath, data: bytes) -> None:
        """Create an object, by an atomic operation of the store. Raises FileExistsError if it
        exists with other bytes."""

    def delete(self, paths: Sequence[ObjectPath]) -> None:
        """Delete objects; those that do not exist are no error."""

    def begin_uploads(self, sizes: Sequence[tuple[ObjectPath, int]]) -> list[str]:
        """Returns tokens of new uploads for objects of the given sizes."""

    def open_upload(self, path: ObjectPath, token: str, size: int) -> StorageFileWriter:
        """Returns a writer for an upload, begun by this or another process, of an object of `size`
        bytes."""

    def uploads(self, path: ObjectPath) -> list[StorageUpload]:
        """Returns the uploads below a directory that were neither finished nor aborted."""

    def abort_uploads(self, uploads: Sequence[tuple[ObjectPath, str]]) -> None:
        """Abort uploads (path, token), so that no process can finish them."""
