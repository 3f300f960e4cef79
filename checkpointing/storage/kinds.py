"""Which kind of storage a place is in."""

from typing import Any

from checkpointing.storage.interface import Storage
from checkpointing.storage.place import ObjectPath, P
from checkpointing.storage.posix_storage import PosixStorage

_POSIX: Storage[Any] = PosixStorage()


def storage_of(place: P) -> Storage[P]:
    """The storage that holds a file or directory."""
    storage = _POSIX
    if isinstance(place, ObjectPath):
        from checkpointing.storage.object_storage import ObjectStorage  # few runs need it

        storage = ObjectStorage()
    return storage
