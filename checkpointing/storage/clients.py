"""The client that a process has for an object store. Its package is imported when the first object
is asked for."""

import os
from functools import cache

from checkpointing.errors import StorageError
from checkpointing.storage.objects import Store
from checkpointing.storage.place import ObjectPath


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
            from checkpointing.storage.s3 import S3

            return S3()
        from checkpointing.storage.fsspec_store import FsspecStore

        return FsspecStore(protocol)
    except ImportError as error:
        package = "'perdure[s3]'" if protocol in ("s3", "s3a") else error.name
        raise StorageError(
            f"{protocol}:// needs {error.name}, which is not installed: pip install {package}"
        ) from error
