"""Restart from the memory that a run left: finds the newest complete step in it, and reads its
bytes.

A killed rank leaves its node's slots (slots.py). When the run starts again, with any world size,
the ranks combine the slots on their machines. They load the newest step of which every byte exists,
unless storage has a newer step. Memory is not used if another step was added to storage or removed
from it since the copy, or if the directory of the run was deleted, and the token with it.

[Note: token] The token is a secret of the run. It is stored in the checkpoint directory before the
first step is copied to memory. Manifests carry a MAC under this token (peers.py), so that only
memory of this very run is loaded. On a filesystem only the run's user can read the token. In an
object store every reader of the bucket can read it, so there it prevents mistakes, not attacks."""

import logging
import os
import re
import secrets
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from errno import EACCES, ELOOP, EPERM

import numpy as np

from checkpointing.errors import DamagedCheckpoint, StorageError
from checkpointing.save.messages import SaveLeftoverAddress, SaveManifest
from checkpointing.save.peers import Pull, open_leftover, read_manifest
from checkpointing.storage.folders import hold, living_folders, memory_folders
from checkpointing.storage.place import StoragePlace
from checkpointing.storage.steps import storage_of
from checkpointing.wire import register

logger = logging.getLogger(__name__)

DYING_SECONDS = 2.0
"""Seconds to wait until the writers of killed ranks have ended."""
MOST_CHECKS = 16
"""Largest number of threads that compute checksums while all ranks wait for them."""
TOKEN = ".run"
"""Name of the file that holds the token."""
_TOKEN = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True)
class LoadLeftoverSlot:
    """A slot left by a dead process of the run, and the node of the new start that has it."""

    slot: str
    """Path of the slot's folder."""
    home: int
    manifest: SaveManifest


register(LoadLeftoverSlot)


def token(directory: StoragePlace) -> str | None:
    """Returns the token of the run; None if there is none, or another user may know it."""
    try:
        found = storage_of(directory).read_private(directory / TOKEN)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in (EACCES, EPERM, ELOOP):
            raise
        return None  # the file is another user's, or a link
    return found.decode() if _TOKEN.fullmatch(found) else None


def make_token(directory: StoragePlace) -> str:
    """Returns the token of the run. Creates one if it is missing, or another user may know it.
    Raises OSError if the directory cannot be written, and StorageError if it does not keep files
    private."""
    storage = storage_of(directory)
    storage.make_directory(directory)
    path, new = directory / TOKEN, secrets.token_hex(32).encode()
    if token(directory) is None:
        with suppress(FileExistsError):  # another start of the run has created the file
            storage.create(path, new, 0o600)
    if token(directory) is None:
        logger.warning(
            "%s is replaced: a power cut has left it empty, or others may have read it. Copies in "
            "memory that belong to the old file are not used",
            path,
        )
        storage.remove(path)
        storage.create(path, new, 0o600)
    found = token(directory)
    if found is None:
        raise StorageError(
            f"{path} was created with mode 600, but the filesystem lets other users read it; use "
            "another checkpoint.directory"
        )
    return found


def leftover_slots(directory: str, home: int, run: str, held: ExitStack) -> list[LoadLeftoverSlot]:
    """Returns the slots that dead processes of a run left on this machine, which is node `home`.
    Locks keep other processes from taking over or deleting the slots, until `held` is closed.

    The writer of a killed rank dies a moment after it. This start has no writers yet, so living
    processes of the run are such writers, and their end is awaited."""
    deadline = time.monotonic() + DYING_SECONDS
    # limited, as a writer that hangs in storage may not die for a long time
    while living_folders(directory) and time.monotonic() < deadline:
        time.sleep(0.01)
    found = []
    for place in memory_folders(directory):
        folder = hold(place, to_read=True)
        if folder is None:
            continue
        # closing the descriptor would end the lock, and the bytes are read later
        held.callback(folder.close)
        for path in sorted(folder.path.glob("*.manifest")):
            manifest = read_manifest(path, run)
            if manifest:
                found.append(LoadLeftoverSlot(str(path.with_suffix("")), home, manifest))
    return found


def newest_whole(
    left: Sequence[LoadLeftoverSlot], tensors: str, listed: int | None, good: int | None
) -> tuple[int, list[LoadLeftoverSlot]] | None:
    """Returns (step, slots) of the newest complete step, with one slot for each node of the run
    that left it; None if there is none. Of a slot and its copy, the one on the node of the same
    number is preferred, as the same ranks run on that node and read it locally. The result is also
    None if any slot recorded a later step in storage than storage has now: somebody has deleted
    that step, and memory must not restore an earlier one.

    Args:
        left: leftover slots of all machines.
        tensors: digest of the tensors to be loaded.
        listed: newest step in storage, good or not.
        good: newest good step in storage.
    """
    if max((part.manifest.committed or 0 for part in left), default=0) > (listed or 0):
        return None
    parts: dict[tuple[int, int, str], dict[int, LoadLeftoverSlot]] = {}
    for part in left:
        found = part.manifest
        # storage is as it was at the copy, or this very step has been committed since
        follows = listed in (found.committed, found.step) and (good is None or found.step >= good)
        if found.tensors == tensors and follows:
            # Slots of different attempts must not be mixed: their bits may differ at the same step.
            key = found.step, found.nodes, found.attempt
            by_node = parts.setdefault(key, {})
            if part.home == found.node or found.node not in by_node:
                by_node[found.node] = part
    whole = [key for key, by_node in parts.items() if len(by_node) == key[1]]
    if not whole:
        return None
    best = max(whole)
    return best[0], [parts[best][node] for node in range(best[1])]


def check(part: LoadLeftoverSlot, run: str) -> None:
    """Compare a slot on this machine with its checksums, with up to MOST_CHECKS threads, since all
    ranks wait for the result. Raises DamagedCheckpoint if a checksum is wrong."""
    threads = min(MOST_CHECKS, len(os.sched_getaffinity(0)))
    ranges = part.manifest.ranges
    found = open_leftover(part.slot, [*ranges], run).checksums(ranges, threads)
    for file, sums in found.items():
        if sums != part.manifest.checksums[file]:
            raise DamagedCheckpoint(f"{part.slot}/{file}: its checksum is wrong")


class LoadSlotsFile:
    """A tensor file assembled from the slots `parts`; implements StorageFile. `home` is the node of
    this process, `pull` fetches from other nodes."""

    def __init__(
        self, file: str, parts: Sequence[LoadLeftoverSlot], home: int, pull: Pull, run: str
    ) -> None:
        self._file, self._pull = file, pull
        self._spans = sorted(
            (start, stop, number)
            for number, part in enumerate(parts)
            for start, stop in part.manifest.ranges.get(file, [])
        )
        self._parts = parts
        self._maps = {
            number: memoryview(open_leftover(part.slot, [file], run).maps[file])
            for number, part in enumerate(parts)
            if part.home == home and file in part.manifest.ranges
        }
        self.size = max((stop for _, stop, _ in self._spans), default=0)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` up to the first byte that no slot holds; returns the bytes read."""
        done = 0
        for buffer in buffers:
            filled = 0
            while filled < len(buffer):
                count = self._read(buffer[filled:], offset + done)
                if count == 0:
                    return done
                filled += count
                done += count
        return done

    def _read(self, buffer: memoryview, offset: int) -> int:
        place = bisect_right(self._spans, offset, key=lambda span: span[0]) - 1
        if place < 0 or self._spans[place][1] <= offset:
            return 0
        _, stop, number = self._spans[place]
        count = min(len(buffer), stop - offset)
        if number in self._maps:
            source = np.frombuffer(self._maps[number][offset : offset + count], np.uint8)
            # Unlike an assignment to a memoryview, copyto releases the GIL.
            np.copyto(np.frombuffer(buffer, np.uint8, count), source)
        else:
            part, span = self._parts[number], [(offset, offset + count)]
            for data in self._pull(part.home, SaveLeftoverAddress(part.slot), self._file, span):
                buffer[:count] = data
        return count
