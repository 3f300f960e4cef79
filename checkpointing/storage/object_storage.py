"""Steps in an object store: writing, deletion, and removal of what dead processes left."""

import errno
import logging
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from checkpointing.errors import CheckpointError, StorageError, explain
from checkpointing.format.layout import COMMIT_RECORD, LATEST, TensorFile, parse_step
from checkpointing.format.untrusted import printable
from checkpointing.storage.interface import (
    ObjectStat,
    ObjectStore,
    StorageFileWriter,
    StorageUpload,
)
from checkpointing.storage.ownership import is_alive, is_owner, owner
from checkpointing.storage.place import ObjectPath
from checkpointing.wire import register

logger = logging.getLogger(__name__)


_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), ("boto3", "'perdure[s3]'")),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", "'perdure[gs]'")),
    **dict.fromkeys(("az", "abfs", "abfss"), ("adlfs", "'perdure[az]'")),
}
"""Protocol → (package that its client needs, what pip installs)."""


def store_of(path: ObjectPath) -> ObjectStore:
    """Returns this process's client for the store of a path, creating it at the first call. Raises
    StorageError if a package is not installed."""
    # one client per process, as connections and threads of a client do not survive a fork
    return _store(path.protocol, os.getpid())


@cache
def _store(protocol: str, process: int) -> ObjectStore:
    try:
        if protocol in ("s3", "s3a"):
            from checkpointing.storage.s3 import S3

            return S3()
        from checkpointing.storage.fsspec_store import FsspecStorage

        return FsspecStorage(protocol)
    except ImportError as error:
        package, wanted = _PACKAGES.get(protocol, (error.name, error.name))
        raise StorageError(
            f"{protocol}:// needs {package}, which is not installed: pip install {wanted}"
        ) from error


FOREIGN_SECONDS = 6 * 3600
"""Seconds without a new object or upload after which an unfinished step of another machine counts
as abandoned, as this machine cannot see its processes. An upload shows no activity until it is
finished, so this must exceed the longest upload of a file."""

_MARKER = re.compile(r"(?P<step>step-\d{8,})\.(?:tmp|trash)-.+")


@dataclass
class NewObjectStep:
    """A step that is being written to an object store; implements NewStoredStep."""

    final: ObjectPath
    marker: ObjectPath
    uploads: dict[str, str] = field(default_factory=dict)
    """File → token of its upload."""
    in_parts = False

    @staticmethod
    def of(final: ObjectPath) -> "NewObjectStep":
        return NewObjectStep(final, final.with_name(f"{final.name}.tmp-{owner()}"))

    def begin(self, files: Sequence[TensorFile]) -> None:
        """Take the step over, remove objects and uploads of earlier writers, and begin all uploads.
        Raises StorageError if the step is committed, or another process here is writing it."""
        store = store_of(self.final)
        if store.find(self.final / COMMIT_RECORD) is not None:
            raise StorageError(
                f"{self.final}: another process has just committed this step; end one of the two "
                "runs that write here"
            )
        others = _markers(store.children(self.final.parent)).get(self.final.name, [])
        others = [marker for marker in others if marker != self.marker]
        for marker in others:
            if is_alive(marker.name):
                raise StorageError(
                    f"{self.final}: another process of this machine writes it at this moment "
                    f"({printable(marker.name)}); end that run, or give this one a "
                    "checkpoint.directory of its own"
                )
        # in this order: `collect` would remove a step without a marker
        store.write(self.marker, b"")
        store.delete(others)
        _remove(self.final, store.uploads(self.final))
        tokens = store.begin_uploads([(self.final / file.name, file.size) for file in files])
        self.uploads = dict(zip((file.name for file in files), tokens, strict=True))

    def writer(self, file: str, size: int) -> StorageFileWriter:
        place = self.final / file
        return store_of(place).open_upload(place, self.uploads[file], size)

    def commit(
        self, files: Sequence[TensorFile], small: Mapping[str, bytes], record: bytes
    ) -> None:
        """Make the step a checkpoint. Raises StorageError if another process has taken it over or
        committed it."""
        store = store_of(self.final)
        found = store.walk(self.final)
        for file in files:
            size = found[file.name].st_size if file.name in found else 0
            if size != file.size:
                raise StorageError(
                    f"{self.final / file.name}: has {size} bytes, {file.size} were written"
                )
        taken = f"{self.final}: another process has taken over this step; two runs write to "
        taken += f"{self.final.parent}: end one of them"
        # a process that takes the step over removes this marker
        if store.find(self.marker) is None:
            raise StorageError(taken)
        try:
            for name, data in small.items():
                store.write_new(self.final / name, data)  # fails if another process also commits
            store.write_new(self.final / COMMIT_RECORD, record)
        except FileExistsError as error:
            raise StorageError(taken) from error
        try:
            store.write(self.final.with_name(LATEST), f"{self.final.name}\n".encode())
            store.delete([self.marker])
        except CheckpointError as error:  # the checkpoint itself is committed
            logger.warning("%s is committed, but: %s", self.final, error)

    def abort(self) -> None:
        """Abort this step's uploads and remove its objects, unless another process has taken the
        step over. Errors of the storage are logged; `collect` later removes what is left."""
        store = store_of(self.final)
        try:
            store.abort_uploads(
                [(self.final / file, token) for file, token in self.uploads.items()]
            )
            if store.find(self.marker) is None:  # another process has taken the step over
                return
            if store.find(self.final / COMMIT_RECORD) is None:
                _remove(self.final, ())
            store.delete([self.marker])
        except (CheckpointError, OSError) as error:
            logger.warning("could not remove all of %s: %s", self.final, explain(error))


register(NewObjectStep)


class ObjectStorage:
    """Checkpoints in an object store; implements Storage."""

    def exists(self, path: ObjectPath) -> bool:
        return store_of(path).find(path) is not None or self.is_directory(path)

    def exists_as(self, path: ObjectPath) -> bool:
        return self.exists(path)

    def is_directory(self, path: ObjectPath) -> bool:
        return bool(store_of(path).children(path))

    def children(self, directory: ObjectPath) -> list[ObjectPath]:
        return store_of(directory).children(directory)

    def stat(self, path: ObjectPath) -> ObjectStat:
        found = store_of(path).find(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return found

    @contextmanager
    def open(self, path: ObjectPath) -> Iterator["_ObjectFile"]:
        yield _ObjectFile(path, self.stat(path).st_size)

    def read(self, path: ObjectPath, most: int | None = None, *, follow: bool = True) -> bytes:
        if most is not None and (size := self.stat(path).st_size) > most:
            raise OSError(errno.EFBIG, f"has {size} bytes, at most {most} are read", str(path))
        return store_of(path).read(path)

    def read_private(self, path: ObjectPath) -> bytes:
        return self.read(path)

    def own_size(self, directory: ObjectPath, name: str) -> int:
        return self.stat(directory / name).st_size

    def sizes(self, directory: ObjectPath, names: Iterable[str]) -> Iterator[tuple[str, int]]:
        # one request per thousand files
        found = store_of(directory).walk(directory)
        for name in names:
            yield name, (found.get(name) or self.stat(directory / name)).st_size

    def create(self, path: ObjectPath, data: bytes, mode: int = 0o666) -> None:
        store_of(path).write_new(path, data)

    def remove(self, path: ObjectPath) -> None:
        store_of(path).delete([path])

    def append(self, path: ObjectPath, data: bytes) -> None:
        store = store_of(path)
        before = store.read(path) if store.find(path) else b""
        store.write(path, before + data)

    def make_directory(self, path: ObjectPath) -> None:
        """Does nothing, as a directory is only a common prefix."""

    def filesystem(self, path: ObjectPath) -> str:
        return ""

    def steps(self, directory: ObjectPath) -> list[ObjectPath]:
        """Returns the committed steps only, as unfinished steps have their final names already."""
        children = self.children(directory)
        return _committed([path for path in children if parse_step(path.name) is not None])

    def is_foreign(self, step: ObjectPath) -> bool:
        """Returns False, as the permissions of the bucket decide who may write."""
        return False

    def new_step(self, final: ObjectPath) -> NewObjectStep:
        return NewObjectStep.of(final)

    def delete_step(self, step: ObjectPath) -> None:
        store = store_of(step)
        record = step / COMMIT_RECORD
        if store.find(record) is None:
            return
        marker = step.with_name(f"{step.name}.trash-{owner()}")
        store.write(marker, b"")
        store.delete([record])  # first, so that no checkpoint ever lacks files
        _remove(step, ())
        store.delete([marker])

    def collect(self, directory: ObjectPath, lost: Collection[str] = ()) -> None:
        store = store_of(directory)
        children = store.children(directory)
        markers = _markers(children)
        uploads: dict[str, list[StorageUpload]] = {}
        for upload in store.uploads(directory):
            below = upload.path.key[len(directory.key) :].lstrip("/")
            uploads.setdefault(below.partition("/")[0], []).append(upload)
        names = {child.name for child in children} | set(markers) | set(uploads)
        steps = [directory / name for name in sorted(names) if parse_step(name) is not None]
        good = set(_committed(steps))
        for step in steps:
            theirs, begun = markers.get(step.name, []), uploads.get(step.name, [])
            if step in good and not theirs and not begun:
                continue
            given_up = bool(theirs) and all(is_owner(marker.name, lost) for marker in theirs)
            if not given_up and not _is_abandoned(step, theirs, begun, step in good):
                continue
            logger.info("removing what a dead run left of %s", step)
            # the checkpoint is complete, so only uploads and markers beside it are removed
            if step in good:
                store.abort_uploads([(upload.path, upload.token) for upload in begun])
            else:
                _remove(step, begun)
            store.delete(theirs)

    @contextmanager
    def reading_lock(self, step: ObjectPath) -> Iterator[None]:
        """Does nothing, as stores have no locks."""
        yield

    @contextmanager
    def unless_read(self, step: ObjectPath) -> Iterator[bool]:
        """Yields True, as stores have no locks."""
        yield True


class _ObjectFile:
    """An object open for reading; implements StorageFile."""

    def __init__(self, path: ObjectPath, size: int) -> None:
        self._path, self.size = path, size

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        left = wanted = max(0, min(sum(map(len, buffers)), self.size - offset))
        parts = []
        for buffer in buffers:
            if left:
                parts.append(buffer[:left])
                left -= len(parts[-1])
        if parts:
            store_of(self._path).read_into(self._path, parts, offset)
        return wanted


def _committed(steps: Sequence[ObjectPath]) -> list[ObjectPath]:
    if not steps:
        return []
    records = store_of(steps[0]).find_all([step / COMMIT_RECORD for step in steps])
    return [step for step, record in zip(steps, records, strict=True) if record is not None]


def _is_abandoned(
    step: ObjectPath, markers: Sequence[ObjectPath], uploads: Sequence[StorageUpload], good: bool
) -> bool:
    """Whether no process is writing or deleting a step."""
    mine = [marker.name.endswith(f".trash-{owner()}") for marker in markers]
    alive = [is_alive(marker.name) for marker in markers]
    if any(life and not own for life, own in zip(alive, mine, strict=True)):
        return False
    if markers and None not in alive:
        # Each marker's process ran on this machine. It is dead, or it is this process.
        return True
    store = store_of(step)
    times = [upload.began for upload in uploads]
    times += [found.st_mtime for found in store.find_all(markers) if found]
    if not good:
        times += [found.st_mtime for found in store.walk(step).values()]
    return time.time() - max(times, default=0.0) > FOREIGN_SECONDS


def _remove(step: ObjectPath, uploads: Collection[StorageUpload]) -> None:
    store: ObjectStore = store_of(step)
    store.abort_uploads([(upload.path, upload.token) for upload in uploads])
    store.delete([step / name for name in store.walk(step)])


def _markers(children: Sequence[ObjectPath]) -> dict[str, list[ObjectPath]]:
    """Returns name of a step → its markers in a directory."""
    found: dict[str, list[ObjectPath]] = {}
    for child in children:
        match = _MARKER.fullmatch(child.name)
        if match:
            found.setdefault(match["step"], []).append(child)
    return found
