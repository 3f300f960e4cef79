"""What a slot holds, said to a restart, and copies of slots of other nodes.

[Note: manifest] A manifest carries a MAC under the secret token of the run (memory.py): so a run
takes nothing for its own that another run left, of the same user and under the same path. The
checksums in it are CRC-32s, which find accidents: other users cannot write to these folders.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from isal.isal_zlib import crc32

from checkpointing.errors import StorageError
from checkpointing.save.room import fitting
from checkpointing.save.slots import Ranges, SlotFiles, portions
from checkpointing.storage import folders


@dataclass
class Manifest:
    """What a slot holds: one node's part of a step."""

    attempt: str
    """The same on all nodes, until the run is started again: it may come to the same step again,
    and not to the same bits."""
    step: int
    committed: int | None
    """The newest step in storage when this one was copied, or this one, once it is committed: by
    it a restart knows that nobody has deleted or added checkpoints since."""
    tensors: str
    """Digest of names, dtypes, shapes and file sizes, from which follows where every byte lies."""
    node: int
    nodes: int
    """Over how many nodes the step is spread."""
    ranges: Ranges
    """The bytes that are there."""
    checksums: dict[str, list[int]]
    """CRC-32 of each of the `portions` of these."""
    state: str
    """trainer_state.json."""


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
