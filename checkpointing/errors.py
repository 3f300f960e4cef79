"""Errors of this package, sorted by what the caller does next.

CheckpointError
├── WrongModel         stop: the checkpoint is of another model, and so are older checkpoints
├── DamagedCheckpoint  load the previous checkpoint; raised to callers if there is none
│   └── UnreadableCheckpoint  likewise, and delete nothing: it may be readable later
├── StorageError       stop: checkpoints cannot be read here (permissions, a later format, …)
└── SaveFailed         continue training: this save is lost, earlier checkpoints are untouched"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EFBIG, EIO, EISDIR, ELOOP, ENOENT, ENOTDIR, ENXIO

from checkpointing.wire import register


class CheckpointError(Exception):
    """Base of all errors of this package. Messages are one line."""


class WrongModel(CheckpointError):
    """A checkpoint does not fit the objects to load into: names, shapes or parameter groups differ,
    or dtypes do not convert."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing, cut short or changed, or holds NaN or infinity where that
    is forbidden. The message names the file."""


class UnreadableCheckpoint(DamagedCheckpoint):
    """The system failed to read a file of a checkpoint (EIO). The file may be undamaged."""


class StorageError(CheckpointError):
    """Storage or memory cannot be used for a reason other than damage, such as no permission or too
    little memory. An older checkpoint does not help."""


class SaveFailed(CheckpointError):
    """A checkpoint could not be written. Raised on all ranks.

    Attributes: node: number of the node on which the save failed first. path: the file or directory
        concerned, if any. errno: the system's error number, if any.
    """

    def __init__(
        self, message: str, node: int, path: str | None = None, errno: int | None = None
    ) -> None:
        super().__init__(message, node, path, errno)
        self.node, self.path, self.errno = node, path, errno

    def __str__(self) -> str:
        return str(self.args[0])


_TRAVELLING: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError, WrongModel, DamagedCheckpoint, UnreadableCheckpoint, StorageError,
        ValueError, RuntimeError,
    )
}  # fmt: skip
"""Name → class of exceptions that all ranks raise if one rank does. Each takes one message."""


@dataclass(frozen=True)
class RankFailure:
    """An error on one rank, as sent to the other ranks."""

    rank: int
    name: str
    """Name of the exception class."""
    message: str

    @property
    def kind(self) -> type[Exception]:
        """Exception class that all ranks raise; RuntimeError for an unknown name."""
        return _TRAVELLING.get(self.name, RuntimeError)

    @staticmethod
    def of(rank: int, error: Exception) -> "RankFailure":
        # A subclass such as UnicodeDecodeError cannot be created from a message alone.
        if isinstance(error, ValueError):
            return RankFailure(rank, "ValueError", str(error))
        kind = StorageError if isinstance(error, OSError) else type(error)
        names = (one.__name__ for one in kind.__mro__)
        return RankFailure(rank, next(filter(_TRAVELLING.get, names), ""), explain(error))


register(RankFailure)


def explain(error: BaseException) -> str:
    """Returns one line about an exception. OSError: file, system message and symbol such as ENOSPC.
    CheckpointError: its message. Others: class and message."""
    if isinstance(error, OSError) and error.errno is not None:
        symbol = errno.errorcode.get(error.errno, str(error.errno))
        return f"{error.filename or ''}: {error.strerror} ({symbol})".lstrip(": ")
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


_DAMAGE = {ENOTDIR, EISDIR, ELOOP, ENXIO, EFBIG}


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Convert OSErrors in the block to DamagedCheckpoint, UnreadableCheckpoint or StorageError."""
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
