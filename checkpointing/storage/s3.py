"""S3 and compatible stores (MinIO, Ceph, R2, …), through boto3.

Credentials, region and endpoint are found as by every AWS tool: AWS_ACCESS_KEY_ID, AWS_PROFILE,
AWS_ENDPOINT_URL, ~/.aws/config, the role of the machine, …. An old store that does not support
checksums of requests needs AWS_REQUEST_CHECKSUM_CALCULATION=when_required.

A tensor file is a multipart upload with one part for each block, begun by the coordinator. Whoever
removes a dead process's unfinished step aborts its uploads. An aborted upload cannot be finished.
So a writer that was wrongly thought dead cannot change a checkpoint that another run has committed
since."""

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from email.utils import parsedate_to_datetime
from threading import BoundedSemaphore
from typing import Any, TypeVar

import boto3
import tenacity
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    SSLError,
)
from botocore.exceptions import ConnectionError as UnconnectedError

from checkpointing.errors import StorageError
from checkpointing.format.layout import BLOCK_BYTES
from checkpointing.storage.interface import ObjectStat, StorageUpload
from checkpointing.storage.place import ObjectPath

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONNECTIONS = 16
"""Largest number of concurrent requests of one process, since one connection carries well below 100
MB/s. Also the largest number of blocks in memory that wait to be sent."""
READ_BYTES = 8 << 20
"""Longest read in bytes; longer reads are split into concurrent requests."""
MOST_PARTS = 10_000
"""Largest number of parts of a multipart upload."""

ATTEMPTS = 8
"""Largest number of attempts at a request that fails with transient errors."""
QUIET_ATTEMPTS = 3
"""Attempt from which on a failure is logged as a warning."""
_PASSING = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError",
    "OperationAborted", "RequestTimeout", "SlowDown", "Throttling", "ThrottlingException",
    "XAmzContentSHA256Mismatch",
}  # fmt: skip
_NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)


class _UploadGoneError(StorageError):
    """An upload was finished or aborted before."""


class S3:
    """A client of S3 and of compatible stores; implements ObjectStore."""

    def __init__(self) -> None:
        config = Config(
            retries={"total_max_attempts": 1},  # `_retrying` retries
            max_pool_connections=CONNECTIONS,
            connect_timeout=10,  # seconds; `_retrying` covers longer outages
            read_timeout=60,
            tcp_keepalive=True,
            response_checksum_validation="when_required",  # the commit record has checksums
        )
        self._client = boto3.session.Session().client("s3", config=config)
        self._endpoint = self._client.meta.endpoint_url
        self.pool = ThreadPoolExecutor(CONNECTIONS, "s3")
        self.room = BoundedSemaphore(CONNECTIONS)
        """Limits the blocks that wait to be sent."""

    def find(self, path: ObjectPath) -> ObjectStat | None:
        try:
            found = self._call("head_object", path)
        except FileNotFoundError:
            return None
        return ObjectStat(found["ContentLength"], found["LastModified"].timestamp())

    def now(self, path: ObjectPath) -> float:

        def work() -> str:
            # the smallest request that is permitted to everybody who may list objects below `path`
            answer = self._client.list_objects_v2(
                Bucket=path.bucket, Prefix=f"{path.key}/", MaxKeys=1
            )
            return str(answer["ResponseMetadata"]["HTTPHeaders"].get("date", ""))

        try:
            return parsedate_to_datetime(self._retrying(path, work)).timestamp()
        except ValueError:  # the answer has no date
            return time.time()

    def find_all(self, paths: Sequence[ObjectPath]) -> list[ObjectStat | None]:
        return list(self.pool.map(self.find, paths))

    def children(self, path: ObjectPath) -> list[ObjectPath]:
        prefix = f"{path.key}/" if path.key else ""
        names = []
        for page in self._pages("list_objects_v2", path, Prefix=prefix, Delimiter="/"):
            names += [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
            names += [entry["Key"] for entry in page.get("Contents", ())]
        # some tools write an empty object for a folder
        return [path / name[len(prefix) :].rstrip("/") for name in names if name != prefix]

    def walk(self, path: ObjectPath) -> dict[str, ObjectStat]:
        prefix = f"{path.key}/" if path.key else ""
        return {
            entry["Key"][len(prefix) :]: ObjectStat(
                entry["Size"], entry["LastModified"].timestamp()
            )
            for page in self._pages("list_objects_v2", path, Prefix=prefix)
            for entry in page.get("Contents", ())
        }

    def read(self, path: ObjectPath) -> bytes:
        def work() -> bytes:
            answer = self._client.get_object(Bucket=path.bucket, Key=path.key)
            return bytes(answer["Body"].read())

        return self._retrying(path, work)

    def read_into(self, path: ObjectPath, buffers: Sequence[memoryview], offset: int) -> None:
        runs = list(_runs(buffers, offset))
        if len(runs) == 1:
            self._read_run(path, *runs[0])
        else:
            list(self.pool.map(lambda run: self._read_run(path, *run), runs))

    def _read_run(self, path: ObjectPath, offset: int, buffers: Sequence[memoryview]) -> None:
        length = sum(map(len, buffers))

        def work() -> None:
            span = f"bytes={offset}-{offset + length - 1}"
            answer = self._client.get_object(Bucket=path.bucket, Key=path.key, Range=span)
            body = answer["Body"]
            for buffer in buffers:
                rest = buffer
                while rest:
                    count = body.readinto(rest)
                    if not count:
                        raise IncompleteReadError(actual_bytes=0, expected_bytes=length)
                    rest = rest[count:]
            body.read()  # read to the end of the stream, so that the connection can be reused

        self._retrying(path, work)

    def write(self, path: ObjectPath, data: bytes) -> None:
        self._call("put_object", path, Body=data)

    def write_new(self, path: ObjectPath, data: bytes) -> None:
        try:
            self._call("put_object", path, Body=data, IfNoneMatch="*")
        except FileExistsError:
            # An earlier attempt may have written the object, and only its answer was lost.
            if self.read(path) != data:
                raise

    def delete(self, paths: Sequence[ObjectPath]) -> None:
        """Delete objects one by one, as some stores have no bulk deletion."""
        list(self.pool.map(lambda path: self._call("delete_object", path), paths))

    def begin_uploads(self, sizes: Sequence[tuple[ObjectPath, int]]) -> list[str]:
        """Begin multipart uploads. Raises StorageError if a file would have too many parts."""
        # checked before the first upload begins, as each upload would have to be aborted
        for path, size in sizes:
            parts = -(-size // BLOCK_BYTES)
            if parts > MOST_PARTS:
                raise StorageError(
                    f"{path}: {size} bytes are {parts} parts of 16 MiB, and S3 takes {MOST_PARTS}; "
                    "set checkpoint.max_shard_size to at most 160 GB (a single tensor larger than "
                    "that cannot be stored there)"
                )

        def begin(path: ObjectPath) -> str:
            return str(self._call("create_multipart_upload", path)["UploadId"])

        return list(self.pool.map(begin, [path for path, _ in sizes]))

    def open_upload(self, path: ObjectPath, token: str, size: int) -> "_PartWriter":
        return _PartWriter(self, path, token, size)

    def send_part(self, path: ObjectPath, token: str, number: int, data: bytes) -> dict[str, Any]:
        """Upload one part; returns its entry for `complete`."""
        answer = self._call("upload_part", path, UploadId=token, PartNumber=number, Body=data)
        known = ("ETag", "ChecksumCRC32", "ChecksumCRC64NVME", "ChecksumCRC32C", "ChecksumSHA256")
        return {"PartNumber": number, **{name: answer[name] for name in known if name in answer}}

    def complete(
        self, path: ObjectPath, token: str, size: int, parts: Sequence[dict[str, Any]]
    ) -> None:
        made = {"Parts": list(parts)}
        try:
            self._call("complete_multipart_upload", path, UploadId=token, MultipartUpload=made)
        except _UploadGoneError:
            # An earlier attempt may have finished the upload, and only its answer was lost. Else
            # the object is missing, or not the result of this upload.
            found = self.find(path)
            if found is None or found.st_size != size:
                raise

    def uploads(self, path: ObjectPath) -> list[StorageUpload]:
        prefix = f"{path.key}/" if path.key else ""
        return [
            StorageUpload(
                ObjectPath(path.protocol, path.bucket, entry["Key"]),
                entry["UploadId"],
                entry["Initiated"].timestamp(),
            )
            for page in self._pages("list_multipart_uploads", path, Prefix=prefix)
            for entry in page.get("Uploads", ())
            if entry["Key"].startswith(prefix)  # not every store obeys Prefix
        ]

    def abort_uploads(self, uploads: Sequence[tuple[ObjectPath, str]]) -> None:
        def abort(upload: tuple[ObjectPath, str]) -> None:
            path, token = upload
            with suppress(_UploadGoneError):
                self._call("abort_multipart_upload", path, UploadId=token)

        list(self.pool.map(abort, uploads))

    def _call(self, method: str, path: ObjectPath, **arguments: Any) -> dict[str, Any]:
        call = getattr(self._client, method)
        where = {"Bucket": path.bucket, "Key": path.key}
        return self._retrying(path, lambda: dict(call(**where, **arguments)))

    def _pages(self, method: str, path: ObjectPath, **arguments: Any) -> list[dict[str, Any]]:
        paginate = self._client.get_paginator(method).paginate
        return self._retrying(path, lambda: list(paginate(Bucket=path.bucket, **arguments)))

    def _retrying(self, path: ObjectPath, work: Callable[[], T]) -> T:
        """Returns the result of work(), which is retried after transient errors for some 13 s in
        total: exponential back-off with full jitter (Brooker, "Exponential Backoff And Jitter")."""
        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_passing),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            before_sleep=lambda state: logger.log(
                # some stores constantly refuse a few requests
                logging.INFO if state.attempt_number < QUIET_ATTEMPTS else logging.WARNING,
                "%s: %s; trying again",
                path,
                state.outcome and state.outcome.exception(),
            ),
            reraise=True,
        )
        try:
            return again(work)
        except (ClientError, BotoCoreError) as error:
            raise self._explained(error, path) from error

    def _explained(self, error: Exception, path: ObjectPath) -> Exception:
        code, status = _code(error)
        if code == "NoSuchBucket":
            return StorageError(
                f"{path}: {self._endpoint} has no bucket {path.bucket!r}; create it, or correct "
                "the URL"
            )
        if code == "NoSuchUpload":
            return _UploadGoneError(
                f"{path}: its upload is gone: another process took over this step, or the store "
                "cleans up uploads too soon"
            )
        if status == 404:
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        if code == "PreconditionFailed":
            return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        if status in (401, 403) or isinstance(error, _NO_CREDENTIALS):
            return StorageError(
                f"{path}: {self._endpoint} gives no access ({code or error}); check "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile or role, and that it "
                "may list and read there, for checkpoints also write and delete"
            )
        if is_passing(error):
            return StorageError(
                f"{path}: {ATTEMPTS} requests to {self._endpoint} failed, the last with: {error}; "
                "check AWS_ENDPOINT_URL and the network, or try later"
            )
        return StorageError(f"{path}: {self._endpoint}: {error}")


def _code(error: BaseException) -> tuple[str, int]:
    """Returns (S3's error code, HTTP status); ("", 0) if the store did not answer."""
    if not isinstance(error, ClientError):
        return "", 0
    code = str(error.response.get("Error", {}).get("Code", ""))
    return code, int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_passing(error: BaseException) -> bool:
    if isinstance(error, ClientError):
        code, status = _code(error)
        return code in _PASSING or status == 429 or (status >= 500 and status != 501)
    if isinstance(error, SSLError):  # a wrong certificate stays wrong
        return False
    return isinstance(error, HTTPClientError | IncompleteReadError | UnconnectedError)


def _runs(buffers: Sequence[memoryview], offset: int) -> Iterator[tuple[int, list[memoryview]]]:
    """Yields (offset, buffers) of reads of at most READ_BYTES that together fill `buffers`."""
    run: list[memoryview] = []
    length = 0
    for buffer in buffers:
        rest = buffer
        while rest:
            part = rest[: READ_BYTES - length]
            run.append(part)
            length += len(part)
            rest = rest[len(part) :]
            if length == READ_BYTES:
                yield offset, run
                offset, run, length = offset + length, [], 0
    if run:
        yield offset, run


class _PartWriter(AbstractContextManager["_PartWriter"]):
    """Writes an object as a multipart upload, several parts at a time; implements
    StorageFileWriter."""

    def __init__(self, store: S3, path: ObjectPath, token: str, size: int) -> None:
        self._store, self._path, self._token, self._size = store, path, token, size
        self._under_way: set[Future[dict[str, Any]]] = set()
        self._parts: list[dict[str, Any]] = []

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Parts that are being sent are harmless, as the upload is aborted.
        for part in self._under_way:
            part.cancel()

    def write(self, data: memoryview, offset: int) -> None:
        """Copy a block, which another thread sends. Waits while too many blocks are queued."""
        self._gather({part for part in self._under_way if part.done()})
        self._store.room.acquire()
        number = offset // BLOCK_BYTES + 1
        part = self._store.pool.submit(
            self._store.send_part, self._path, self._token, number, bytes(data)
        )
        part.add_done_callback(lambda _: self._store.room.release())  # after an error, too
        self._under_way.add(part)

    def _gather(self, parts: set[Future[dict[str, Any]]]) -> None:
        for part in parts:
            self._parts.append(part.result())
            self._under_way.discard(part)

    def finish(self) -> None:
        self._gather(set(self._under_way))
        self._parts.sort(key=lambda part: part["PartNumber"])  # S3 requires ascending part numbers
        self._store.complete(self._path, self._token, self._size, self._parts)
