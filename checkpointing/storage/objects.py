"""What the client of an object store must be able to do.

Names lead to objects: `s3://bucket/runs/a/step-00001000/index.json` is one object, and a directory
is nothing but the beginning of names. There is no rename; an object appears whole or not at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from checkpointing.storage.interface import FileWriter
from checkpointing.storage.place import ObjectPath


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
