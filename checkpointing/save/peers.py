"""Slots of other nodes, and slots that dead processes of this run left: manifests, copies, bytes.

[Note: manifest] A manifest carries a MAC under the token of the run, see [Note: token] in
load/memory.py. So a run ignores slots that another run of the same user left under the same path.
The checksums in a manifest are CRC-32s. They detect accidents only: other users cannot write to the
folders of slots."""

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
from checkpointing.save import messages as msg
from checkpointing.save.channel import SILENT_SECONDS, SaveChannel, call
from checkpointing.save.slots import SaveSlotFiles, created, fitting, portions
from checkpointing.storage import folders

logger = logging.getLogger(__name__)


def write_manifest(folder: Path, slot: str, manifest: msg.SaveManifest | None, token: str) -> None:
    """Write the manifest of a slot. None removes it, so that no restart uses the slot."""
    path = folder / f"{slot}.manifest"
    if manifest is None:
        path.unlink(missing_ok=True)
        return
    body = json.dumps(asdict(manifest)).encode()
    # Renamed when complete, so that a restart never reads half a manifest.
    aside = path.with_suffix(".tmp")
    aside.write_bytes(_mac(body, token) + b"\n" + body)
    os.replace(aside, path)


def read_manifest(path: Path, token: str) -> msg.SaveManifest | None:
    """Returns a slot's manifest; None if it is missing, damaged, or of another run."""
    try:
        mac, _, body = path.read_bytes().partition(b"\n")
        # Without a token the key would be empty, and anybody could compute the MAC.
        if not token or not hmac.compare_digest(mac, _mac(body, token)):
            return None
        found = json.loads(body)
        found["ranges"] = {
            file: [(start, stop) for start, stop in of_file]
            for file, of_file in found["ranges"].items()
        }
        return msg.SaveManifest(**found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _mac(body: bytes, token: str) -> bytes:
    return hashlib.blake2b(body, key=token.encode(), digest_size=32).hexdigest().encode()


def copy_slot(
    folder: Path,
    name: str,
    manifest: msg.SaveManifest,
    pull: Callable[[str, list[tuple[int, int]]], Generator[bytes]],
    token: str,
) -> None:
    """Keep a copy of another node's slot in `folder`. Raises StorageError if there is no memory,
    the other node does not answer, or it has begun to overwrite the slot.

    Args:
        pull: (file, ranges) → the bytes of each range.
    """
    write_manifest(folder, name, None, token)  # the copy is invalid until it is complete
    spans = [span for of_file in manifest.ranges.values() for span in of_file]
    nbytes = sum(stop - start for start, stop in spans)
    if not (folder / name).exists() and not fitting(nbytes, folders.SHARED_MEMORY, 1):
        raise StorageError(f"its {nbytes / 1e6:,.1f} MB do not fit into memory")
    for file, ranges in manifest.ranges.items():
        cut = portions(ranges)
        with created(folder / name / file) as descriptor, closing(pull(file, cut)) as coming:
            for (at, _), expected in zip(cut, manifest.checksums[file], strict=True):
                data = next(coming)
                if crc32(data) != expected:  # the other node has begun the next save
                    raise StorageError(f"{file} changed while it was copied")
                os.pwrite(descriptor, data, at)
    write_manifest(folder, name, manifest, token)


def open_leftover(slot: str, files: Sequence[str], token: str) -> SaveSlotFiles:
    """Open files of a slot that an earlier process of this run left. Raises StorageError if the
    folder `slot` is no slot of this run, or lacks one of the files."""
    path = Path(slot)  # it may come from another node, so it is checked
    manifest = None
    # Only in shared memory: a forged address must not open any other file.
    if path.parent.parent == folders.SHARED_MEMORY and ".." not in path.parts:
        held = folders.hold(path.parent, to_read=True)
        if held:
            manifest = read_manifest(path.with_suffix(".manifest"), token)
            held.close()
    for file in files:
        if manifest is None or file not in manifest.ranges:
            raise StorageError(f"{slot} holds no {file} of this run")
    return SaveSlotFiles({file: str(path / file) for file in files}, writable=False)


BUNDLE_BYTES = 1 << 20
"""Largest number of bytes of ranges that are sent as one message. A shard of many tensors has many
ranges, and each message costs a MAC and two system calls on either side."""

Pull = Callable[[int, msg.Slot, str, Sequence[tuple[int, int]]], Generator[bytes]]
"""(node, slot, file, ranges) → the bytes of each range; see Puller."""


class SavePuller:
    """Fetches bytes of slots from the writers of other nodes. Each thread has its own connections,
    so that it reads only its own answers."""

    def __init__(self, addresses: Sequence[tuple[str, int]], secret: bytes) -> None:
        self._addresses, self._secret = addresses, secret
        self._of_thread = threading.local()

    @property
    def _connections(self) -> dict[int, SaveChannel]:
        connections: dict[int, SaveChannel] = self._of_thread.__dict__.setdefault("by_node", {})
        return connections

    def __call__(
        self, node: int, slot: msg.Slot, file: str, ranges: Sequence[tuple[int, int]]
    ) -> Generator[bytes]:
        """Yields the bytes of each range (start, stop). Closing the generator early closes the
        connection, as the remaining bytes have been sent already. Raises StorageError if `node`
        does not send the bytes, or is silent for SILENT_SECONDS."""
        used_before = node in self._connections
        left = list(ranges)
        while left:
            try:
                connection = self._connection(node)
                connection.send(msg.SaveFetch(slot, file, left))
                for bundle in bundles(tuple(left)):
                    data, at = connection.recv_bytes(), 0
                    for start, stop in bundle:
                        # removed first: a second attempt requests only the remaining ranges
                        del left[0]
                        yield data[at : at + stop - start]
                        at += stop - start
            # Otherwise the next request would read the remaining answers of this one.
            except GeneratorExit:
                self._connections.pop(node).close()
                raise
            except (EOFError, OSError) as error:
                self._connections.pop(node, None)
                if not used_before:
                    raise StorageError(
                        f"node {node} does not send its part of {file}: {explain(error)}"
                    ) from error
                used_before = False  # its writer may have restarted: connect once more

    def _connection(self, node: int) -> SaveChannel:
        if node not in self._connections:
            connection = self._connections[node] = call(self._addresses[node], self._secret)
            # A machine that has failed does not close its connections, so limit the wait.
            connection.limit(SILENT_SECONDS)
            connection.send(msg.SaveCallerGreeting("pull", node))
        return self._connections[node]


def serve_pulls(
    connection: SaveChannel, slots: Callable[[int, msg.Key | None], SaveSlotFiles], run: str
) -> None:
    """Answer a Puller. Raises EOFError or OSError when it disconnects, or requests a slot that does
    not exist.

    Args:
        slots: (number, save that it must hold or None) → a slot in use; raises EOFError if it holds
            another save.
    """
    left: dict[str, SaveSlotFiles] = {}
    while True:
        wanted: msg.SaveFetch = connection.recv()
        file = wanted.file
        match wanted.slot:
            case msg.SlotInUse(number, key):
                files = slots(number, key)
            case msg.SaveLeftoverAddress(folder):
                path = f"{folder}/{file}"
                # Opened once, as a load reads many ranges of each file.
                if path not in left:
                    try:
                        left[path] = open_leftover(folder, [file], run)
                    except StorageError as error:
                        logger.warning("another node requested what is not sent: %s", error)
                        raise EOFError from error
                files = left[path]
        image = memoryview(files.maps[file])
        for first, *more in bundles(wanted.ranges):
            data = image[slice(*first)]
            joined = b"".join([data, *(image[slice(*one)] for one in more)]) if more else data
            connection.send_bytes(joined)


def bundles(ranges: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Group ranges, in order, into messages of at most BUNDLE_BYTES, but of at least one range."""
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
