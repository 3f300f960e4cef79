"""Object stores as places for checkpoints: paths in them, and what a store must be able to do.

Names lead to objects: `s3://bucket/runs/a/step-00001000/index.json` is one object, and a directory
is nothing but the beginning of names. There is no rename; an object appears whole or not at all.
Nothing here imports a client of a store; that happens when the first object is asked for.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

from checkpointing.errors import StorageError


@dataclass(frozen=True)
class Stat:
    """Of an object, named as in os.stat_result."""

    st_size: int
    """Bytes."""
    st_mtime: float
    """Unix time."""


@dataclass(frozen=True, order=True)
class ObjectPath:
    """An object or a directory of objects, with the part of pathlib.Path that this package uses."""

    protocol: str
    bucket: str
    key: str
    """Without a slash at either end."""

    @staticmethod
    def of(url: str) -> "ObjectPath":
        """From "s3://bucket/some/folder".

        Raises:
            StorageError: there is no bucket in it.
        """
        protocol, _, rest = url.partition("://")
        bucket, _, key = rest.partition("/")
        if not bucket:
            raise StorageError(f"{url!r} names no bucket; write s3://bucket/folder")
        return ObjectPath(protocol, bucket, "/".join(filter(None, key.split("/"))))

    def __str__(self) -> str:
        return f"{self.protocol}://{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> "ObjectPath":
        key = "/".join(filter(None, (self.key, *name.split("/"))))
        return ObjectPath(self.protocol, self.bucket, key)

    @property
    def name(self) -> str:
        """The last part."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        """The directory that holds it."""
        return ObjectPath(self.protocol, self.bucket, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> "ObjectPath":
        """A neighbour."""
        return self.parent / name

    def absolute(self) -> "ObjectPath":
        """Itself: there is no working directory."""
        return self

    def is_relative_to(self, other: str | Path) -> bool:
        """Whether it lies in a directory of a filesystem: no."""
        return False

    def as_path(self) -> Path:
        """Itself, for functions that do not mind where files lie: what they use of Path is here."""
        return cast(Path, self)

    def exists(self) -> bool:
        """Whether there is an object of this name, or one in a directory of this name."""
        return store_of(self).find(self) is not None or self.is_dir()

    def is_dir(self) -> bool:
        """Whether any object lies in it."""
        return bool(store_of(self).children(self))

    def iterdir(self) -> Iterator["ObjectPath"]:
        """Objects and directories in it."""
        return iter(store_of(self).children(self))

    def stat(self) -> Stat:
        """Size and time of an object.

        Raises:
            FileNotFoundError: there is none.
        """
        found = store_of(self).find(self)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        return found


@dataclass(frozen=True)
class Upload:
    """A tensor file on its way; no object before it is finished."""

    path: ObjectPath
    token: str
    """By which the store knows it."""
    began: float
    """Unix time."""


class UploadWriter(Protocol):
    """A tensor file being uploaded, see `checkpointing.target.FileWriter`."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def write(self, data: memoryview, offset: int) -> None:
        """Upload one block. Blocks come in order; `data` is free again on return."""

    def finish(self) -> None:
        """The object exists, whole, when this returns."""


class Store(Protocol):
    """A client of a store; any thread may use it.

    All methods retry what may pass. They raise FileNotFoundError only if the store says that there
    is no such object, and StorageError for everything that cannot be helped (a bucket that does
    not exist, no permission, no answer): a store that fails is never taken for an empty one.
    """

    def find(self, path: ObjectPath) -> Stat | None:
        """An object; None if there is none."""

    def find_all(self, paths: Sequence[ObjectPath]) -> list[Stat | None]:
        """Several, side by side."""

    def children(self, path: ObjectPath) -> list[ObjectPath]:
        """Objects and directories in a directory."""

    def walk(self, path: ObjectPath) -> dict[str, Stat]:
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

    def open_upload(self, path: ObjectPath, token: str, size: int) -> UploadWriter:
        """A writer for an upload that any process has begun."""

    def uploads(self, path: ObjectPath) -> list[Upload]:
        """Uploads below a directory that were neither finished nor given up."""

    def abort_uploads(self, uploads: Sequence[tuple[ObjectPath, str]]) -> None:
        """Give up uploads (path, token), such that they can never be finished."""


def store_of(path: ObjectPath) -> Store:
    """The client that this process has for a path.

    Raises:
        StorageError: a package is missing; says which.
    """
    # Connections and threads of a client do not survive a fork.
    return _store(path.protocol, os.getpid())


@cache
def _store(protocol: str, process: int) -> Store:
    try:
        if protocol in ("s3", "s3a"):
            from checkpointing.s3 import S3

            return S3()
        from checkpointing.fsspec_store import FsspecStore

        return FsspecStore(protocol)
    except ImportError as error:
        package = "'perdure[s3]'" if protocol in ("s3", "s3a") else error.name
        raise StorageError(
            f"{protocol}:// needs {error.name}, which is not installed: pip install {package}"
        ) from error


class ObjectFile:
    """An object open for reading, see `checkpointing.storage.StoredFile`."""

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self.size = path.stat().st_size

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` in turn from `offset` on; returns how many bytes the object had."""
        left = wanted = max(0, min(sum(map(len, buffers)), self.size - offset))
        parts = []
        for buffer in buffers:
            if left:
                parts.append(buffer[:left])
                left -= len(parts[-1])
        if parts:
            store_of(self._path).read_into(self._path, parts, offset)
        return wanted
