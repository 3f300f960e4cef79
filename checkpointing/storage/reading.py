"""What the system says of a file of a checkpoint, as errors of ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from errno import EFBIG, EIO, EISDIR, ELOOP, ENOENT, ENOTDIR, ENXIO

from checkpointing.errors import DamagedCheckpoint, StorageError, UnreadableCheckpoint, explain
from checkpointing.storage.place import Place

_DAMAGE = {ENOTDIR, EISDIR, ELOOP, ENXIO, EFBIG}


@contextmanager
def reading(path: Place) -> Iterator[None]:
    """Turn errors of the system inside into DamagedCheckpoint, UnreadableCheckpoint or
    StorageError."""
    try:
        yield
    except OSError as error:
        if error.errno == ENOENT:
            raise DamagedCheckpoint(f"{error.filename or path}: is missing") from error
        if error.errno in _DAMAGE:
            raise DamagedCheckpoint(f"cannot be read: {explain(error)}") from error
        if error.errno == EIO:
            raise UnreadableCheckpoint(f"cannot be read: {explain(error)}") from error
        raise StorageError(f"cannot read {explain(error)}") from error
