"""Restarting from the memory that a run left: which step all of it makes up, and its bytes.

A worker that is killed leaves its node's slots (slots.py). When the run starts again, in whatever
world, the ranks put together what is on their machines; the newest step of which every byte is
there is loaded, unless storage has a newer one, or has changed since: a step was removed or added,
or the whole run, whose token is then gone.

[Note: token] A secret of the run in its checkpoint directory, made before the first step is copied
to memory. What is in memory carries a MAC under it (manifest.py), so that only memory of this very
run is loaded. On a filesystem nobody but its user can read it; in an object store it is as secret
as whoever may read the bucket keeps it, and guards against mistakes alone.
"""

import logging
import os
import re
import secrets
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from errno import EACCES, ELOOP, EPERM

import numpy as np

from checkpointing.errors import DamagedCheckpoint, StorageError
from checkpointing.save.messages import Manifest, SlotLeft
from checkpointing.save.peers import Pull, open_left, read_manifest
from checkpointing.storage.folders import hold, living_folders, of_run
from checkpointing.storage.interface import StoredFile
from checkpointing.storage.place import Place
from checkpointing.storage.steps import storage_of
from checkpointing.wire import register

logger = logging.getLogger(__name__)

DYING_SECONDS = 2.0
MOST_CHECKS = 16
"""Threads that take checksums while all ranks wait for them."""
TOKEN = ".run"
"""The file that holds the token."""
_TOKEN = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True)
class LeftSlot:
    """A slot that a dead run left, and the node (of the run that is starting) it is on."""

    slot: str
    """Its folder."""
    home: int
    manifest: Manifest


register(LeftSlot)


def token(directory: Place) -> str | None:
    """The token of the run; None: nothing was ever saved here, or it is not one to rely on."""
    try:
        found = storage_of(directory).read_private(directory / TOKEN)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in (EACCES, EPERM, ELOOP):
            raise
        return None  # another user's, or a link
    return found.decode() if _TOKEN.fullmatch(found) else None


def make_token(directory: Place) -> str:
    """The token, made if there is none to rely on.

    Raises:
        OSError: the directory cannot be written.
        StorageError: it does not keep secrets.
    """
    storage = storage_of(directory)
    storage.make_directory(directory)
    path, new = directory / TOKEN, secrets.token_hex(32).encode()
    if token(directory) is None:
        with suppress(FileExistsError):
            storage.create(path, new, 0o600)
    if token(directory) is None:
        logger.warning(
            "%s is replaced: a power cut has left it empty, or others may have read it. What was "
            "left in memory under it is not used",
            path,
        )
        storage.remove(path)
        storage.create(path, new, 0o600)
    found = token(directory)
    if found is None:
        raise StorageError(f"{path} is not closed to other users, though it was made so")
    return found


def survey(directory: str, home: int, run: str, held: ExitStack) -> list[LeftSlot]:
    """What dead processes of a run left on this machine.

    The writer of a killed rank dies a moment after it, and before this run has writers of its own:
    whatever lives is waited for.

    Args:
        directory: of the checkpoints.
        home: node of the caller.
        run: token of the run.
        held: until it is closed, nobody takes over or deletes what was found.
    """
    deadline = time.monotonic() + DYING_SECONDS
    while living_folders(directory) and time.monotonic() < deadline:
        time.sleep(0.01)
    found = []
    for place in of_run(directory):
        folder = hold(place, to_read=True)
        if folder is None:
            continue
        held.callback(folder.close)
        for path in sorted(folder.path.glob("*.manifest")):
            manifest = read_manifest(path, run)
            if manifest:
                found.append(LeftSlot(str(path.with_suffix("")), home, manifest))
    return found


def newest_whole(
    left: Sequence[LeftSlot], tensors: str, listed: int | None, good: int | None
) -> tuple[int, list[LeftSlot]] | None:
    """The newest step that is whole, and its parts, one for each node of the run that left it. Of a
    part and its copy that which is on the node of the same number: there its ranks are again, who
    then read it where they are. None, too, if any memory tells of a later step in storage than
    there is: somebody has deleted that, and nothing before it is to come in its place.

    Args:
        left: of all machines.
        tensors: digest of what is to be loaded.
        listed: newest step in storage, whether it is good or not.
        good: newest good one.
    """
    if max((part.manifest.committed or 0 for part in left), default=0) > (listed or 0):
        return None
    parts: dict[tuple[int, int, str], dict[int, LeftSlot]] = {}
    for part in left:
        found = part.manifest
        follows = listed in (found.committed, found.step) and (good is None or found.step >= good)
        if found.tensors == tensors and follows:
            key = found.step, found.nodes, found.attempt
            by_node = parts.setdefault(key, {})
            if part.home == found.node or found.node not in by_node:
                by_node[found.node] = part
    whole = [key for key, by_node in parts.items() if len(by_node) == key[1]]
    if not whole:
        return None
    best = max(whole)
    return best[0], [parts[best][node] for node in range(best[1])]


def check(part: LeftSlot, run: str) -> None:
    """Compare a part on this machine with its checksums, on all cores: the ranks wait for it.

    Raises:
        DamagedCheckpoint: it is not what was written there.
    """
    threads = min(MOST_CHECKS, len(os.sched_getaffinity(0)))
    for file, spans in part.manifest.ranges.items():
        files = open_left(part.slot, file, run)
        if files.checksums({file: spans}, threads)[file] != part.manifest.checksums[file]:
            raise DamagedCheckpoint(f"{part.slot}/{file}: its checksum is wrong")


@contextmanager
def open_parts(
    file: str, parts: Sequence[LeftSlot], home: int, pull: Pull, run: str
) -> Iterator[StoredFile]:
    """A tensor file put together from slots.

    Args:
        file: its name in the checkpoint.
        parts: slots that make up the step.
        home: the node of the caller; slots of others are reached by `pull`.
        pull: fetches from other nodes.
        run: the token of the run.
    """
    yield _Parts(file, parts, home, pull, run)


class _Parts:
    def __init__(
        self, file: str, parts: Sequence[LeftSlot], home: int, pull: Pull, run: str
    ) -> None:
        self._file, self._pull = file, pull
        self._spans = sorted(
            (start, stop, number)
            for number, part in enumerate(parts)
            for start, stop in part.manifest.ranges.get(file, [])
        )
        self._parts = parts
        self._maps = {
            number: memoryview(open_left(part.slot, file, run).maps[file])
            for number, part in enumerate(parts)
            if part.home == home and file in part.manifest.ranges
        }
        self.size = max((stop for _, stop, _ in self._spans), default=0)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """See StoredFile; ends at the first byte that is in no slot."""
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
            # Unlike an assignment to a memoryview it leaves the interpreter to other threads.
            np.copyto(np.frombuffer(buffer, np.uint8, count), source)
        else:
            part, span = self._parts[number], [(offset, offset + count)]
            for data in self._pull(part.home, SlotLeft(part.slot), self._file, span):
                buffer[:count] = data
        return count
