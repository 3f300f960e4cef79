"""Names of files and directories: paths, or URLs of object stores. Does no I/O."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

from checkpointing.errors import StorageError
from checkpointing.wire import register


class StoragePlace(Protocol):
    """A file or directory: a pathlib.Path or an ObjectPath."""

    @property
    def name(self) -> str: ...

    @property
    def parent(self) -> Self: ...

    def __truediv__(self, name: str, /) -> Self:
        """Returns a place below this one; `name` may have several parts."""

    def with_name(self, name: str) -> Self: ...

    def absolute(self) -> Self:
        """Returns this place as an absolute path; a URL is returned unchanged."""


P = TypeVar("P", bound=StoragePlace)


@dataclass(frozen=True, order=True)
class ObjectPath:
    """An object, or a common prefix of objects, in a store."""

    protocol: str
    bucket: str
    key: str
    """Key without a slash at either end."""

    @staticmethod
    def of(url: str) -> "ObjectPath":
        """Parses "s3://bucket/some/folder". Raises StorageError if there is no bucket."""
        protocol, _, rest = url.partition("://")
        bucket, _, key = rest.partition("/")
        if not bucket:
            raise StorageError(f"{url!r} names no bucket; write s3://bucket/folder")
        # empty parts are dropped, as "a//b" and "a/b/" would be different keys in the store
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


def location(text: str | StoragePlace) -> StoragePlace:
    """Returns the place that a path or URL ("s3://bucket/folder") names. Raises StorageError if a
    URL contains no bucket."""
    if not isinstance(text, str):
        return text
    return ObjectPath.of(text) if "://" in text else Path(text)


def local(text: str | StoragePlace) -> Path:
    """Returns the path of a directory on a filesystem. Raises StorageError if it is in an object
    store."""
    place = location(text)
    if not isinstance(place, Path):
        raise StorageError(f"{place}: is in an object store; give a directory on a filesystem")
    return place
