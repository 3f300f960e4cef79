"""Slots of other nodes and of earlier runs: their manifests, their copies and their bytes.

[Note: manifest] A manifest carries a MAC under the secret token of the run (memory.py). So a run
ignores what another run of the same user left under the same path. The checksums in it are CRC-32s,
which detect accidents: other users cannot write to these folders.
"""

import hashlib
import hmac
import json
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from isal.isal_zlib import crc32

from checkpointing.errors import StorageError, explain
from checkpointing.save.channel import SILENT_SECONDS, Channel, call
from checkpointing.save.messages import (
    Caller,
    Fetch,
    Key,
    Manifest,
    Slot,
    SlotInUse,
    SlotLeft,
)
from checkpointing.save.slots import SlotFiles, fitting, portions
from checkpointing.storage import folders

logger = logging.getLogger(__name__)


# --- manifests ------------------------------------------------------------------------------------


def write_manifest(folder: Path, slot: str, manifest: Manifest | None, token: str) -> None:
    """Say what a slot holds, under the token of the run; None: nothing that may be used."""
    path = folder / f"{slot}.manifest"
    if manifest is None:
        path.unlink(missing_ok=True)
        return
    body = json.dumps(asdict(manifest)).encode()
    aside = path.with_suffix(".tmp")
    aside.write_bytes(_mac(body, token) + b"\n" + body)
    os.replace(aside, path)


def read_manifest(path: Path, token: str) -> Manifest | None:
    """A slot's manifest; None if there is none, it is damaged, or of another run."""
    try:
        mac, _, body = path.read_bytes().partition(b"\n")
        if not token or not hmac.compare_digest(mac, _mac(body, token)):
            return None
        found = json.loads(body)
        found["ranges"] = {
            file: [(start, stop) for start, stop in of_file]
            for file, of_file in found["ranges"].items()
        }
        return Manifest(**found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _mac(body: bytes, token: str) -> bytes:
    return hashlib.blake2b(body, key=token.encode(), digest_size=32).hexdigest().encode()


def copy_slot(
    folder: Path,
    name: str,
    manifest: Manifest,
    pull: Callable[[str, list[tuple[int, int]]], Generator[bytes]],
    token: str,
) -> None:
    """Keep a copy of a slot of another node.

    Args:
        folder: of this node's slots.
        name: of the copy there.
        manifest: what the slot holds.
        pull: (file, ranges) → the bytes of each range.
        token: of the run.

    Raises:
        StorageError: there is no memory, the node does not answer, or has begun to overwrite it.
    """
    write_manifest(folder, name, None, token)
    spans = [span for of_file in manifest.ranges.values() for span in of_file]
    nbytes = sum(stop - start for start, stop in spans)
    if not (folder / name).exists() and not fitting(nbytes, folders.SHARED_MEMORY, 1):
        raise StorageError(f"its {nbytes / 1e6:,.1f} MB do not fit into memory")
    for file, ranges in manifest.ranges.items():
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            cut = portions(ranges)
            with closing(pull(file, cut)) as coming:
                for (at, _), expected in zip(cut, manifest.checksums[file], strict=True):
                    data = next(coming)
                    if crc32(data) != expected:
                        raise StorageError(f"{file} changed while it was copied")
                    os.pwrite(descriptor, data, at)
        finally:
            os.close(descriptor)
    write_manifest(folder, name, manifest, token)


def open_left(slot: str, file: str, token: str) -> SlotFiles:
    """A file of a slot that a dead process of this run left, to read from.

    Args:
        slot: folder of the slot; perhaps another node's word.
        file: name in it.
        token: of the run.

    Raises:
        StorageError: that is no slot of this run, or it has no such file.
    """
    path = Path(slot)
    manifest = None
    if path.parent.parent == folders.SHARED_MEMORY and ".." not in path.parts:
        held = folders.hold(path.parent, to_read=True)
        if held:
            manifest = read_manifest(path.with_suffix(".manifest"), token)
            held.close()
    if manifest is None or file not in manifest.ranges:
        raise StorageError(f"{slot} holds no {file} of this run")
    return SlotFiles({file: str(path / file)}, writable=False)


# --- bytes between nodes --------------------------------------------------------------------------

BUNDLE_BYTES = 1 << 20
"""Ranges that are smaller together travel as one message: a shard of many tensors is many ranges,
and each message costs a MAC and two calls of the system on either side."""

Pull = Callable[[int, Slot, str, Sequence[tuple[int, int]]], Generator[bytes]]
"""(node, slot, file, ranges) → the bytes of each range; see Puller."""


class Puller:
    """Fetches bytes of slots from the writers of other nodes; each thread over connections of its
    own, so that none takes what another asked for.

    Args:
        addresses: of the writers, by node.
        secret: of the job.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], secret: bytes) -> None:
        self._addresses, self._secret = addresses, secret
        self._of_thread = threading.local()

    @property
    def _connections(self) -> dict[int, Channel]:
        """Those of this thread, by node."""
        connections: dict[int, Channel] = self._of_thread.__dict__.setdefault("by_node", {})
        return connections

    def __call__(
        self, node: int, slot: Slot, file: str, ranges: Sequence[tuple[int, int]]
    ) -> Generator[bytes]:
        """The bytes of each range. Whoever does not take all of them closes it, and with it the
        connection, where the others are on their way.

        Args:
            node: whose slot.
            slot: which one.
            file: in the slot.
            ranges: start and stop of each.

        Raises:
            StorageError: that node does not send them, or sent nothing for SILENT_SECONDS.
        """
        used_before = node in self._connections
        left = list(ranges)
        while left:
            try:
                connection = self._connection(node)
                connection.send(Fetch(slot, file, left))
                for bundle in bundles(tuple(left)):
                    data, at = connection.recv_bytes(), 0
                    for start, stop in bundle:
                        del left[0]
                        yield data[at : at + stop - start]
                        at += stop - start
            except GeneratorExit:
                self._connections.pop(node).close()
                raise
            except (EOFError, OSError) as error:
                self._connections.pop(node, None)
                if not used_before:
                    raise StorageError(
                        f"node {node} does not send its part of {file}: {explain(error)}"
                    ) from error
                used_before = False  # its process may be another one by now

    def _connection(self, node: int) -> Channel:
        if node not in self._connections:
            connection = self._connections[node] = call(self._addresses[node], self._secret)
            connection.limit(SILENT_SECONDS)
            connection.send(Caller("pull", node))
        return self._connections[node]


def serve_pulls(
    connection: Channel, slots: Callable[[int, Key | None], SlotFiles], run: str
) -> None:
    """Answer a Puller until it leaves.

    Args:
        connection: of the Puller.
        slots: a slot in use, by number and the save that it must hold (None: any); raises EOFError
            if it holds another.
        run: token of the run.

    Raises:
        EOFError, OSError: it has left, or asked for what is not there.
    """
    left: dict[str, SlotFiles] = {}
    while True:
        wanted: Fetch = connection.recv()
        file = wanted.file
        match wanted.slot:
            case SlotInUse(number, key):
                files = slots(number, key)
            case SlotLeft(folder):
                path = f"{folder}/{file}"
                if path not in left:
                    try:
                        left[path] = open_left(folder, file, run)
                    except StorageError as error:
                        logger.warning("refused to another node: %s", error)
                        raise EOFError from error
                files = left[path]
        image = memoryview(files.maps[file])
        for first, *more in bundles(wanted.ranges):
            data = image[slice(*first)]
            joined = b"".join([data, *(image[slice(*one)] for one in more)]) if more else data
            connection.send_bytes(joined)


def bundles(ranges: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Ranges by the message that they travel in: in their order, and as many as fit into
    BUNDLE_BYTES, but at least one."""
    bundle: list[tuple[int, int]] = []
    size = 0
    for start, stop in ranges:
        if bundle and size + stop - start > BUNDLE_BYTES:
            yield bundle
            bundle, size = [], 0
        bundle.append((start, stop))
        size += stop - start
    if bundle:
        yield bundle
