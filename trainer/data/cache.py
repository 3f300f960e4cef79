"""Copies of whole shards of an object store, on a local disk of each node.

[Note: copies] A companion of the node (elastic/node/companion.py) makes them, if all shards of the
recipe fit. Ranks read a shard there once it is whole. What they read is checked like what comes
from the store, so a damaged copy costs one request.

    DIRECTORY/perdure-data-<uid>/     closed to other users (0700), else it is not used
      <fingerprint>/NAME.tokens       a shard, renamed to this once its checksums were right
      <fingerprint>/.partial          the shard that is being copied

The companion holds a lock (flock) on the outer folder: one process of a node copies. Ranks share a
lock on the folder of their data set: no companion of another run removes it. The kernel drops locks
with their process.

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
from typing import Any

import numpy as np

from checkpointing.errors import CheckpointError
from checkpointing.storage.folders import LockedFolder, hold, is_private
from checkpointing.storage.object_storage import store_of
from checkpointing.storage.place import ObjectPath
from elastic.node.companion import accompany, until_input_ends
from trainer.data.prepare.writer import synced
from trainer.data.shards import CHECKSUM_BLOCK, SPLITS, DataError, read_index
from trainer.recipe.sections import Data

PIECE = 4 * CHECKSUM_BLOCK
"""Bytes that are asked for at a time, in concurrent requests."""
AGAIN_SECONDS = 30.0
"""Pause before the store, or the lock of another run, is tried again."""
PARTIAL = ".partial"


class ShardCopies:
    """The copies of one data set, as ranks read them. Callable from any thread."""

    def __init__(self, directory: str, fingerprint: str) -> None:
        self._path = home(directory) / folder_name(fingerprint)
        self._folders: dict[Path, LockedFolder] = {}
        self._files: dict[str, int] = {}
        """Open files by name. Like the folder, each is opened by any thread, and kept once."""

    def read(self, name: str, size: int, target: memoryview, offset: int) -> bool:
        """Fill `target` with the bytes of a shard from `offset` on; returns False if there is no
        copy.

        Args:
            name: of the shard's file.
            size: its bytes.
        """
        descriptor = self._open(name, size)
        try:
            return descriptor is not None and os.preadv(descriptor, [target], offset) == len(target)
        except OSError:  # the disk fails, and the store is still there
            return False

    def discard(self, name: str) -> None:
        """Remove a copy that is damaged."""
        self._files.pop(name, None)  # it stays open: another thread may read it
        with suppress(OSError):
            for folder in self._folders.values():
                os.unlink(name, dir_fd=folder.lock)

    def close(self) -> None:
        """Let go of the folder: it may be removed."""
        while self._folders:
            self._folders.popitem()[1].close()

    def _open(self, name: str, size: int) -> int | None:
        """A descriptor of a whole copy; None if there is none."""
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
    """The folder of this user's copies in `data.cache.directory`."""
    return Path(directory) / f"perdure-data-{os.geteuid()}"


def folder_name(fingerprint: str) -> str:
    """The name of the folder of a data set."""
    return fingerprint.rpartition(":")[2][:32]


def hindrance(directory: str) -> str:
    """Why no copies can be kept in a directory; "" if nothing speaks against it. Writes nothing."""
    place = Path(directory).absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return f"{directory} cannot be made or written by this user (at {place}); name another"
    return _stranger(home(directory))


def _stranger(path: Path) -> str:
    """Why a folder is not private; "" if it is, or is missing."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return ""
    if stat.S_ISDIR(status.st_mode) and is_private(status):
        return ""
    return (
        f"{path} belongs to uid {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):o}, so "
        "others may have put something there; remove it, or name another directory"
    )


def keep_copies(data: Data) -> Callable[[], None]:
    """Have a companion of this node copy the shards of a recipe. Does not wait for it. Returns a
    function to call when this process trains no more."""
    urls = [source.path for source in data.sources if "://" in source.path]
    if data.cache is None or not urls:
        return lambda: None
    directory = str(Path(data.cache.directory).absolute())
    return accompany(["trainer.data.cache", directory, str(data.cache.most_bytes), *urls])


# --- the companion --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardToCopy:
    """A shard in a store, and where its copy belongs."""

    source: ObjectPath
    folder: str
    size: int
    crc32s: Sequence[int]
    """CRC-32 of each 16 MiB."""


def main(directory: str, size: str, *urls: str) -> None:
    """Copy shards until all are there, or standard input ends."""
    ended = until_input_ends(niceness=19)
    told = ""
    while not ended.is_set():
        again = False
        try:
            text = copy_all(Path(directory), int(size), urls, ended)
        except BlockingIOError:  # another run copies
            text, again = "", True
        except CheckpointError as error:  # the store may be back soon
            text, again = f"{error}; it is tried again", True
        except (OSError, DataError) as error:
            text = f"{error}; ranges are read from the store"
        if text and text != told:
            print(f"data.cache: {text}", file=sys.stderr, flush=True)
            told = text
        if not again:
            return
        ended.wait(AGAIN_SECONDS)


def copy_all(directory: Path, most: int, urls: Sequence[str], ended: threading.Event) -> str:
    """Copy what is not there yet; returns what is to be told, or "".

    Args:
        directory: of the recipe.
        most: bytes that copies may take there.
        urls: of the data sets.
        ended: ends it early.

    Raises:
        BlockingIOError: another process copies.
        DataError: a shard is damaged in the store.
        OSError: the disk fails, or the folder is not this user's alone.
        CheckpointError: the store does not answer.
    """
    shards = [one for url in urls for one in _shards(ObjectPath.of(url))]
    needed = sum(one.size for one in shards)
    if needed > most:
        return f"the shards take {_gb(needed)}, more than {_gb(most)}: nothing is copied"
    path = home(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    if why := _stranger(path):
        raise PermissionError(why)
    outer = hold(path)
    if outer is None:
        raise BlockingIOError
    with closing(outer):
        inside = Path(f"/proc/self/fd/{outer.lock}")  # leads there whatever others rename
        folders = {one.folder for one in shards}
        for name in folders:
            (inside / name).mkdir(mode=0o700, exist_ok=True)
            os.utime(inside / name)
            (inside / name / PARTIAL).unlink(missing_ok=True)
        taken = _make_room(inside, folders, most - needed)
        if taken > most - needed:
            return f"other runs have {_gb(taken)} in {path}: nothing is copied"
        missing = [one for one in shards if not _is_there(inside, one)]
        wanted = sum(one.size for one in missing)
        space = os.statvfs(inside)
        if wanted > space.f_bavail * space.f_frsize:
            return f"{path} has no room for {_gb(wanted)}: nothing is copied"
        for one in missing:
            if not _copy(inside, one, ended):
                return ""
        return f"{len(shards)} shards, {_gb(needed)}, lie in {path}" if missing else ""


def _shards(directory: ObjectPath) -> Iterator[ShardToCopy]:
    index = read_index(directory)
    folder, width = folder_name(index["fingerprint"]), np.dtype(index["dtype"]).itemsize
    entries: list[dict[str, Any]] = [
        entry for split in SPLITS for entry in index["splits"][split]["shards"]
    ]
    for entry in entries:
        place = directory / f"{entry['name']}.tokens"
        yield ShardToCopy(place, folder, entry["tokens"] * width, entry["tokens_crc32"])


def _make_room(inside: Path, folders: set[str], most: int) -> int:
    """Remove other data sets, those not used for longest first, until they take at most `most`
    bytes; returns what they take. One that is in use stays."""
    others = sorted(
        (one for one in inside.iterdir() if one.name not in folders),
        key=lambda one: one.lstat().st_mtime,
    )
    sizes = {one: sum(file.lstat().st_size for file in one.iterdir()) for one in others}
    for one in others:
        if sum(sizes.values()) > most and (folder := hold(one)):
            with closing(folder):
                shutil.rmtree(one)
            del sizes[one]
    return sum(sizes.values())


def _is_there(inside: Path, shard: ShardToCopy) -> bool:
    with suppress(FileNotFoundError):
        return (inside / shard.folder / shard.source.name).lstat().st_size == shard.size
    return False


def _copy(inside: Path, shard: ShardToCopy, ended: threading.Event) -> bool:
    """Copy a shard; returns False if that was ended early."""
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


def _fetch(shard: ShardToCopy, data: memoryview, begin: int) -> None:
    """Fill `data` with the bytes of a shard from `begin` on; raises DataError if a checksum is
    wrong twice."""
    blocks = range(0, len(data), CHECKSUM_BLOCK)
    expected = list(shard.crc32s)[begin // CHECKSUM_BLOCK :][: len(blocks)]
    for _ in range(2):
        store_of(shard.source).read_into(shard.source, [data], begin)
        if [zlib.crc32(data[one : one + CHECKSUM_BLOCK]) for one in blocks] == expected:
            return
    raise DataError(
        f"{shard.source}: bytes {begin} to {begin + len(data) - 1} have a wrong checksum, fetched "
        "twice; copy the data set again with `perdure data copy`"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"


if __name__ == "__main__":
    main(*sys.argv[1:])
