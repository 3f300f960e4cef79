"""Stores other than S3 through fsspec: gs:// by gcsfs, az:// and abfs:// by adlfs, memory://, …

Credentials and settings come from fsspec's configuration and from the implementation. Unlike with
S3, one thread sends a tensor file block by block, and no other process can abort its upload. But
the store creates the file only if it does not exist (ifGenerationMatch=0, If-None-Match). So a
writer that was wrongly thought dead cannot change a checkpoint."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from functools import partial
from textwrap import shorten
from typing import Any, TypeVar

import fsspec
import tenacity

from checkpointing.errors import StorageError, explain
from checkpointing.format.layout import BLOCK_BYTES
from checkpointing.storage.interface import ObjectStat, StorageUpload
from checkpointing.storage.place import ObjectPath
from checkpointing.storage.posix import is_transient

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONNECTIONS = 16
"""Largest number of concurrent requests of one process."""
ATTEMPTS = 6
"""Attempts at a request, in addition to those of the implementation."""
GOOGLE, AZURE = ("gs", "gcs"), ("az", "abfs", "abfss")
"""Protocols of gcsfs, and of adlfs. gcsfs tries a request 6 times, adlfs 4 times, for some 20 s."""
_CURES = {
    **dict.fromkeys(GOOGLE, "GOOGLE_APPLICATION_CREDENTIALS or `gcloud auth`, and the network"),
    **dict.fromkeys(
        AZURE,
        "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and _KEY, and the network",
    ),
}
"""Protocol → what to check after a failure."""
MOST_SHOWN = 300
"""Largest number of characters that are shown of an implementation's message. Some messages fill a
page."""
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
"""Keys that implementations use for the time of an object."""


class FsspecStorage:
    """A client of any store that fsspec supports; implements ObjectStore."""

    def __init__(self, protocol: str) -> None:
        self._protocol, self._files = protocol, _open(protocol)
        self.pool = ThreadPoolExecutor(CONNECTIONS, protocol)

    def find(self, path: ObjectPath) -> ObjectStat | None:
        try:
            found = self._retrying(path, lambda: self._files.info(_name(path)))
        except FileNotFoundError:
            return None
        return None if found["type"] == "directory" else _stat(found)

    def now(self, path: ObjectPath) -> float:
        """Returns the time of this machine, as fsspec does not give the store's."""
        return time.time()

    def find_all(self, paths: Sequence[ObjectPath]) -> list[ObjectStat | None]:
        return list(self.pool.map(self.find, paths))

    def children(self, path: ObjectPath) -> list[ObjectPath]:
        try:
            found = self._retrying(path, lambda: self._files.ls(_name(path), detail=False))
        except FileNotFoundError as missing:
            self._check_bucket(path, missing)
            return []
        names = {name.rstrip("/").rpartition("/")[2] for name in found}
        return [path / name for name in sorted(names)]

    def walk(self, path: ObjectPath) -> dict[str, ObjectStat]:
        try:
            found = self._retrying(path, lambda: self._files.find(_name(path), detail=True))
        except FileNotFoundError as missing:
            self._check_bucket(path, missing)
            return {}
        start = len(_name(path).strip("/")) + 1
        return {name.lstrip("/")[start:]: _stat(info) for name, info in found.items()}

    def read(self, path: ObjectPath) -> bytes:
        return self._retrying(path, lambda: bytes(self._files.cat_file(_name(path))))

    def read_into(self, path: ObjectPath, buffers: Sequence[memoryview], offset: int) -> None:
        stop = offset + sum(map(len, buffers))
        cat = partial(self._files.cat_file, _name(path), start=offset, end=stop)
        data = memoryview(self._retrying(path, cat))
        for buffer in buffers:
            buffer[:], data = data[: len(buffer)], data[len(buffer) :]

    def write(self, path: ObjectPath, data: bytes) -> None:
        try:
            self._retrying(path, lambda: self._files.pipe_file(_name(path), data))
        except FileNotFoundError as error:
            raise _no_bucket(path) from error

    def write_new(self, path: ObjectPath, data: bytes) -> None:
        try:
            self._retrying(path, lambda: self._files.pipe_file(_name(path), data, mode="create"))
        except FileNotFoundError as error:
            raise _no_bucket(path) from error
        except FileExistsError:
            # An earlier attempt may have written the object, and only its answer was lost.
            if self.read(path) != data:
                raise

    def delete(self, paths: Sequence[ObjectPath]) -> None:
        def remove(path: ObjectPath) -> None:
            with suppress(FileNotFoundError):
                self._retrying(path, lambda: self._files.rm_file(_name(path)))

        list(self.pool.map(remove, paths))

    def begin_uploads(self, sizes: Sequence[tuple[ObjectPath, int]]) -> list[str]:
        """Returns empty tokens, as an upload begins only with its first block."""
        return ["" for _ in sizes]

    def open_upload(self, path: ObjectPath, token: str, size: int) -> "FsspecStorageWriter":
        name = _name(path)
        begin = partial(self._files.open, name, "xb", block_size=BLOCK_BYTES)
        return FsspecStorageWriter(self._retrying(path, begin), path)

    def uploads(self, path: ObjectPath) -> list[StorageUpload]:
        """Returns an empty list, as fsspec cannot list uploads. Stores drop unfinished uploads."""
        return []

    def abort_uploads(self, uploads: Sequence[tuple[ObjectPath, str]]) -> None:
        """Does nothing, as only the writer itself can abort an upload."""

    def _check_bucket(self, path: ObjectPath, missing: FileNotFoundError) -> None:
        """Raises StorageError if `missing` was raised because there is no such bucket."""
        try:
            if self._protocol in GOOGLE:  # gcsfs raises the same error for a missing object
                self._retrying(path, lambda: self._files.ls(path.bucket, max_results=1))
            elif _lacks_container(missing.__context__):
                raise missing
        except FileNotFoundError as error:
            raise _no_bucket(path) from error

    def _retrying(self, path: ObjectPath, work: Callable[[], T]) -> T:
        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_passing),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
            reraise=True,
        )
        try:
            return again(work)
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:  # each implementation defines its own exceptions
            if _lacks_container(error):
                raise _no_bucket(path) from error
            cure = _CURES.get(self._protocol, "the credentials and settings")
            why = shorten(explain(error), MOST_SHOWN, placeholder="…")
            raise StorageError(
                f"{path}: {why}; check {cure} ({type(self._files).__name__})"
            ) from error


class FsspecStorageWriter(AbstractContextManager["FsspecStorageWriter"]):
    """Writes an object from start to end; implements StorageFileWriter."""

    def __init__(self, file: Any, path: ObjectPath) -> None:
        self._file, self._path, self._done = file, path, False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._done:
            self._file.discard()
            with suppress(AttributeError):
                self._file.closed = True  # else adlfs would store the file when Python frees it

    def write(self, data: memoryview, offset: int) -> None:
        if self._file.tell() != offset:
            raise ValueError(f"{self._path}: blocks must come in order")
        self._file.write(bytes(data))  # a copy, as the caller reuses the block's buffer

    def finish(self) -> None:
        try:
            self._file.close()
        except FileExistsError as error:
            raise StorageError(
                f"{self._path}: another process has written it; two runs write to "
                f"{self._path.parent}: end one of them"
            ) from error
        self._done = True


def _open(protocol: str) -> Any:
    # a cached listing would hide steps that other processes write
    options: dict[str, Any] = {"use_listings_cache": False}
    if protocol in GOOGLE:
        from aiohttp import ClientTimeout
        from gcsfs.core import GCSFileSystem

        # gcsfs logs a stack trace of each error, although `_retrying` reports the error
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        options["requests_timeout"] = ClientTimeout(sock_connect=10, sock_read=60)  # seconds
        # fsspec.filesystem returns a subclass that asks for a bucket's type over gRPC, which does
        # not survive a fork, and that overwrites objects of zonal buckets despite mode="create".
        return GCSFileSystem(**options)
    files = fsspec.filesystem(protocol, **options)
    if protocol in AZURE:
        # The first pause would be 15 s, too long for programs that must write at short intervals.
        files.service_client._config.retry_policy.initial_backoff = 1
    return files


def _lacks_container(error: BaseException | None) -> bool:
    """Whether `error` is Azure's for a missing container."""
    return getattr(error, "error_code", "") == "ContainerNotFound"


def _no_bucket(path: ObjectPath) -> StorageError:
    return StorageError(
        f"{path}: the store has no bucket {path.bucket!r}; create it, or correct the URL"
    )


def _name(path: ObjectPath) -> str:
    return f"{path.bucket}/{path.key}".rstrip("/")


def _stat(info: dict[str, Any]) -> ObjectStat:
    moment = next((info[name] for name in _TIMES if info.get(name)), 0.0)
    if isinstance(moment, str):
        moment = datetime.fromisoformat(moment)
    return ObjectStat(info["size"], moment.timestamp() if isinstance(moment, datetime) else moment)


def _is_passing(error: BaseException) -> bool:
    return isinstance(error, ConnectionError | TimeoutError) or is_transient(error)
