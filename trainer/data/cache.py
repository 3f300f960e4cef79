"""Copies of whole shards from an object store, on a local disk of each node.

[Note: copies] A companion process of the node (elastic/node/companion.py) copies all shards of the
recipe's data sets, if they fit into `data.cache.size`. Ranks read a shard from its copy once the
copy is complete, with the same checks as from the store.

    DIRECTORY/perdure-data-<uid>/     used only if closed to other users (0700)
      <fingerprint>/NAME.tokens       a shard, renamed to this name after its checksums were right
      <fingerprint>/.partial          the shard that is being copied

The companion holds an exclusive lock (flock) on the outer folder: only one process of a node
copies. Ranks share a lock on the folder of their data set, so that no companion of another run
removes it. The kernel releases the locks of a process that ends.

    python -m trainer.data.cache DIRECTORY BYTES URL …
"""

import os
import shutil
import stat
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from checkpointing.errors import CheckpointError
from checkpointing.storage.folders import LockedStorageFolder, hold, is_private
from checkpointing.storage.object_storage import store_of
from checkpointing.storage.place import ObjectPath
from elastic.node.companion import accompany, until_input_ends
from trainer.data.prepare.writer import synced
from trainer.data.shards import CHECKSUM_BLOCK, DataError, entries_of, read_index
from trainer.recipe.sections import DataSection

PIECE = 4 * CHECKSUM_BLOCK
"""Bytes that are read from the store at a time, in concurrent requests."""
AGAIN_SECONDS = 30.0
"""Seconds until the store, or a lock that another run holds, is tried again."""
PARTIAL = ".partial"


class DataShardCopies:
    """Local copies of one data set's shards, for reading. Callable from any thread."""

    def __init__(self, directory: str, fingerprint: str) -> None:
        self._path = home(directory) / folder_name(fingerprint)
        self._folders: dict[Path, LockedStorageFolder] = {}
        self._files: dict[str, int] = {}
        """File name → descriptor, which stays open."""

    def read(self, name: str, size: int, target: memoryview, offset: int) -> bool:
        """Fill `target` with the bytes of a shard from `offset` on; return False if there is no
        complete copy, or it cannot be read. `name`: file name of the shard; `size`: its bytes."""
        descriptor = self._open(name, size)
        try:
            return descriptor is not None and os.preadv(descriptor, [target], offset) == len(target)
        except OSError:  # the caller then reads from the store
            return False

    def discard(self, name: str) -> None:
        """Remove a damaged copy."""
        # The descriptor stays open, because another thread may be reading from it.
        self._files.pop(name, None)
        with suppress(OSError):
            for folder in self._folders.values():
                os.unlink(name, dir_fd=folder.lock)

    def _open(self, name: str, size: int) -> int | None:
        """Return a descriptor of a complete copy, or None. Several threads may open a file at once;
        all then use the first descriptor."""
        if name in self._files:
            return self._files[name]
        folder = self._folders.get(self._path) or hold(self._path, to_read=True)
        if folder is None:
            return None
        if (kept := self._folders.setdefault(self._path, folder)) is not folder:
            folder.close()
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(name, flags, dir_fd=kept.lock)
        except OSError:
            return None
        if os.fstat(descriptor).st_size != size:
            os.close(descriptor)
            return None
        if (found := self._files.setdefault(name, descriptor)) != descriptor:
            os.close(descriptor)
        return found


def home(directory: str | Path) -> Path:
    """Folder of this user's copies in `data.cache.directory`."""
    return Path(directory) / f"perdure-data-{os.geteuid()}"


def folder_name(fingerprint: str) -> str:
    """Name of a data set's folder in the cache: the beginning of its fingerprint."""
    return fingerprint.rpartition(":")[2][:32]


def hindrance(directory: str) -> str:
    """Why a directory cannot hold copies; "" if it can. Writes nothing."""
    place = Path(directory).absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return (
            f"{directory} cannot be created or written by this user (at {place}); set another "
            "directory"
        )
    return _stranger(home(directory))


def _stranger(path: Path) -> str:
    """Why a folder is not private to this user; "" if it is private or missing."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return ""
    if stat.S_ISDIR(status.st_mode) and is_private(status):
        return ""
    return (
        f"{path} belongs to uid {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):o}, so "
        "others may have written there; remove it, or set another directory"
    )


def keep_copies(data: DataSection) -> Callable[[], None]:
    """Start a process on this node that copies the shards of a recipe's data sets; do not wait for
    it. Return a function to call when this process stops training."""
    urls = [source.path for source in data.sources if "://" in source.path]
    if data.cache is None or not urls:
        return lambda: None
    directory = str(Path(data.cache.directory).absolute())
    return accompany(["trainer.data.cache", directory, str(data.cache.most_bytes), *urls])


# --- the companion --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ShardToCopy:
    """A shard in a store, with its folder in the cache."""

    source: ObjectPath
    folder: str
    size: int
    crc32s: Sequence[int]
    """CRC-32 of each 16 MiB block."""


def main(directory: str, size: str, *urls: str) -> None:
    """Copy the shards of the data sets `urls` to `directory`, if they take at most `size` bytes,
    until all are copied or standard input ends. If the store fails, or another run holds the lock,
    copying is tried again. Other errors are printed to stderr, and end it."""
    ended = until_input_ends(niceness=19)
    reported = ""
    while not ended.is_set():
        again = False
        try:
            text = copy_all(Path(directory), int(size), urls, ended)
        except BlockingIOError:  # another run holds the lock
            text, again = "", True
        except CheckpointError as error:  # the store may recover
            text, again = f"{error}; retrying", True
        except (OSError, DataError) as error:
            text = f"{error}; ranges are read from the store"
        if text and text != reported:
            print(f"data.cache: {text}", file=sys.stderr, flush=True)
            reported = text
        if not again:
            return
        ended.wait(AGAIN_SECONDS)


def copy_all(directory: Path, most: int, urls: Sequence[str], ended: threading.Event) -> str:
    """Copy the missing shards; return a message for the user, or "". Copying stops early once
    `ended` is set. `most`: largest number of bytes of all copies in the directory.

    Raises:
        BlockingIOError: another process holds the lock.
        DataError: a shard is damaged in the store.
        OSError: the disk fails, or the folder is not private to this user.
        CheckpointError: the store does not answer.
    """
    shards = [shard for url in urls for shard in _shards(ObjectPath.of(url))]
    needed = sum(shard.size for shard in shards)
    if needed > most:
        return (
            f"the shards take {_gb(needed)}, more than {_gb(most)}: no shard is copied; raise "
            "data.cache.size"
        )
    path = home(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    if why := _stranger(path):
        raise PermissionError(why)
    outer = hold(path)
    if outer is None:
        raise BlockingIOError
    with closing(outer):
        inside = Path(f"/proc/self/fd/{outer.lock}")  # stays valid if others rename the folder
        folders = {shard.folder for shard in shards}
        for name in folders:
            (inside / name).mkdir(mode=0o700, exist_ok=True)
            os.utime(inside / name)
            (inside / name / PARTIAL).unlink(missing_ok=True)
        taken = _make_room(inside, folders, most - needed)
        if taken > most - needed:
            return (
                f"other runs use {_gb(taken)} in {path}, so {_gb(needed)} more would exceed "
                f"{_gb(most)}: no shard is copied; raise data.cache.size"
            )
        missing = [shard for shard in shards if not _is_copied(inside, shard)]
        wanted = sum(shard.size for shard in missing)
        space = os.statvfs(inside)
        if wanted > space.f_bavail * space.f_frsize:
            return (
                f"the disk of {path} has no room for {_gb(wanted)}: no shard is copied; set "
                "data.cache.directory on a larger disk"
            )
        for shard in missing:
            if not _copy(inside, shard, ended):
                return ""
        return f"{len(shards)} shards, {_gb(needed)}, are in {path}" if missing else ""


def _shards(directory: ObjectPath) -> Iterator[_ShardToCopy]:
    index = read_index(directory)
    folder, width = folder_name(index["fingerprint"]), np.dtype(index["dtype"]).itemsize
    for entry in entries_of(index):
        place = directory / f"{entry['name']}.tokens"
        yield _ShardToCopy(place, folder, entry["tokens"] * width, entry["tokens_crc32"])


def _make_room(inside: Path, folders: set[str], most: int) -> int:
    """Remove copies of data sets that are not in `folders`, least recently used first, until they
    take at most `most` bytes. Copies that a run has locked stay. Return the bytes that remain."""
    others = sorted(
        (path for path in inside.iterdir() if path.name not in folders),
        key=lambda path: path.lstat().st_mtime,
    )
    sizes = {path: sum(file.lstat().st_size for file in path.iterdir()) for path in others}
    for path in others:
        if sum(sizes.values()) > most and (folder := hold(path)):
            with closing(folder):
                shutil.rmtree(path)
            del sizes[path]
    return sum(sizes.values())


def _is_copied(inside: Path, shard: _ShardToCopy) -> bool:
    with suppress(FileNotFoundError):
        return (inside / shard.folder / shard.source.name).lstat().st_size == shard.size
    return False


def _copy(inside: Path, shard: _ShardToCopy, ended: threading.Event) -> bool:
    """Copy a shard; return False if `ended` was set first."""
    folder = inside / shard.folder
    piece = memoryview(bytearray(min(PIECE, shard.size)))
    try:
        with synced(folder / PARTIAL) as file:
            for begin in range(0, shard.size, PIECE):
                if ended.is_set():
                    return False
                data = piece[: shard.size - begin]
                _fetch(shard, data, begin)
                file.write(data)
        (folder / PARTIAL).rename(folder / shard.source.name)
    finally:
        (folder / PARTIAL).unlink(missing_ok=True)
    return True


def _fetch(shard: _ShardToCopy, data: memoryview, begin: int) -> None:
    """Fill `data` with the bytes of a shard from `begin` on, checked."""
    blocks = range(0, len(data), CHECKSUM_BLOCK)
    expected = list(shard.crc32s)[begin // CHECKSUM_BLOCK :][: len(blocks)]
    for _ in range(2):
        store_of(shard.source).read_into(shard.source, [data], begin)
        if [zlib.crc32(data[at : at + CHECKSUM_BLOCK]) for at in blocks] == expected:
            return
    raise wrong_twice(shard.source, begin, len(data))


def wrong_twice(path: ObjectPath, begin: int, size: int) -> DataError:
    """Return the error of bytes whose checksum was wrong in two downloads."""
    return DataError(
        f"{path}: bytes {begin} to {begin + size - 1} have a wrong checksum, downloaded twice; "
        "copy the data set again with `perdure data copy`"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"


if __name__ == "__main__":
    main(*sys.argv[1:])
