"""Where checkpoints lie: a path of a filesystem, or the URL of an object store. Touches neither."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

from checkpointing.errors import StorageError
from checkpointing.wire import register


class Place(Protocol):
    """A file or directory, wherever it lies: a pathlib.Path or an ObjectPath."""

    @property
    def name(self) -> str:
        """The last part."""

    @property
    def parent(self) -> Self:
        """The directory that holds it."""

    def __truediv__(self, name: str, /) -> Self:
        """What lies in it; `name` may have several parts."""

    def with_name(self, name: str) -> Self:
        """A neighbour."""

    def absolute(self) -> Self:
        """This place by a path that holds in any working directory."""


P = TypeVar("P", bound=Place)


@dataclass(frozen=True, order=True)
class ObjectPath:
    """An object, or a directory of objects, in a store."""

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
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        return ObjectPath(self.protocol, self.bucket, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> "ObjectPath":
        return self.parent / name

    def absolute(self) -> "ObjectPath":
        return self


register(ObjectPath)


def location(text: str | Place) -> Place:
    """Where checkpoints lie, by a path or the URL of an object store ("s3://bucket/folder").

    Raises:
        StorageError: a URL without a bucket.
    """
    if not isinstance(text, str):
        return text
    return ObjectPath.of(text) if "://" in text else Path(text)


def local(text: str | Place) -> Path:
    """A directory of a filesystem.

    Raises:
        StorageError: it is in an object store.
    """
    place = location(text)
    if not isinstance(place, Path):
        raise StorageError(f"{place}: is in an object store; give a directory, and copy that there")
    return place
