"""The memory of a node that saves are copied into, and that outlives the processes that fill it.

[Note: slot] A slot holds what the ranks of a node contribute to one save: sparse files in shared
memory with the names, sizes and offsets of the checkpoint's tensor files. A rank copies its pieces
to where they lie in the finished file; a writer takes whole blocks from there, aligned as direct
I/O wants them; and what a checkpoint's reader can read, it can read from a slot. Pages that hold no
piece of this node take no memory.

    /dev/shm/perdure-<run>-<pid>-<random>/      closed to other users; see folders.py
      slot-0.manifest                   what slot 0 holds; replaced at once, never half written
      peer-1-0/, peer-1-0.manifest      a copy of slot 0 of node 1, if asked for
      shape.json                        for which plan the slots were made
      slot-0/model-00001-of-00004.safetensors …

Memory is made once, touched in the background, and used again by every save. Where shared memory is
small (64 MB in a container by default), the same files are anonymous and end with their writer.

[Note: manifest] A manifest carries a MAC under the secret token of the run (memory.py): so a run
takes nothing for its own that another run left, of the same user and under the same path. The
checksums in it are CRC-32s, which find accidents: other users cannot write to these folders.
"""

import ctypes
import hmac
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from isal.isal_zlib import crc32

from checkpointing import folders
from checkpointing.errors import StorageError, explain
from checkpointing.folders import Folder
from checkpointing.layout import TensorFile
from checkpointing.plan import Piece, box_runs, merged

RESERVE = 256 << 20
"""Bytes of memory that are left to others when slots are made."""

Ranges = dict[str, list[tuple[int, int]]]
"""Bytes (start, stop) by file, in order, not touching each other."""
Shape = list[object]
"""What slots are made for: plan, node, ranges."""


@dataclass(frozen=True)
class Slots:
    """Where a node's slots are; the same for its writer and its ranks."""

    paths: list[dict[str, str]]
    """By slot: path by file name."""
    nbytes: int
    """Memory of one slot."""
    note: str
    """What to tell people about it."""
    lasting: bool
    """Whether they outlive this node's processes."""
    in_memory: bool = True
    """Whether their pages should be touched before they are used: not those of files on a disk."""


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
    """CRC-32 of each range."""
    state: str
    """trainer_state.json."""


def ranges_of(pieces: Iterable[Piece], page: int = 1) -> Ranges:
    """Where pieces lie in their files, rounded outwards to multiples of `page` bytes."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for piece in pieces:
        of_file = spans.setdefault(piece.stored.file, [])
        for run in box_runs(piece.stored.meta, piece.box):
            start = piece.stored.begin + run.offset
            of_file.append((start // page * page, -(-(start + run.length) // page) * page))
    return {file: merged(of_file) for file, of_file in spans.items()}


# --- making memory ---------------------------------------------------------------------------


def make_slots(
    directory: str,
    files: Mapping[str, TensorFile],
    ranges: Ranges,
    wanted: int,
    plan: str,
    node: int,
    disk: str | None = None,
) -> tuple[Folder | None, Slots]:
    """Make the slots of this node, or take over those that a dead run of the same plan left.

    Args:
        directory: the checkpoint directory of the run.
        files: all tensor files by name.
        ranges: what this node's ranks contribute, in whole pages.
        wanted: how many slots.
        plan: digest of the plan.
        node: number of this node.
        disk: directory whose disk holds them instead, in files without a name.

    Returns:
        The folder in shared memory (None: files without a name), and the slots.

    Raises:
        StorageError: not even one fits.
    """
    nbytes = sum(stop - start for of_file in ranges.values() for start, stop in of_file)
    if disk is not None:
        return None, _slots_on_disk(files, ranges, wanted, nbytes, disk)
    spans = {file: [list(span) for span in of_file] for file, of_file in ranges.items()}
    shape: Shape = [plan, node, spans]
    shared = folders.SHARED_MEMORY
    where, why = f"in {shared}", "less than one slot is free there"
    folder = None
    try:
        folder = _folder(directory, shape)
        (folder.path / "shape.json").write_text(json.dumps(shape))
        kept = len(list(folder.path.glob("slot-?/")))
        count = max(kept, min(wanted, kept + _fitting(nbytes, shared)))
        paths = [_shared_slot(folder.path, slot, files, ranges) for slot in range(count)]
    except OSError as error:  # it is not there, not for us, or was filled by others just now
        count, why = 0, explain(error)
    if not count:
        if folder:
            folders.forget(folder)
            folder = None
        where = f"in anonymous memory, not {where}: {why}"
    if not count and _fitting(nbytes, None):
        paths, count = [_anonymous_slot(files, ranges, None)], 1
    if not count:
        free = available_bytes()
        raise StorageError(
            f"checkpoints are copied to memory before they are written, which takes "
            f"{nbytes / 1e9:.2f} GB on this node; only {free / 1e9:.2f} GB are free (and "
            f"{RESERVE / 1e9:.2f} GB of that stay free). Use more nodes or a node with more memory"
        )
    few = f"; {wanted} were asked for, but there is no memory for more" if count < wanted else ""
    note = f"{count} checkpoint slot(s) of {nbytes / 1e6:,.1f} MB {where}{few}"
    return folder, Slots(paths, nbytes, note, lasting=folder is not None)


def _slots_on_disk(
    files: Mapping[str, TensorFile], ranges: Ranges, wanted: int, nbytes: int, disk: str
) -> Slots:
    try:
        status = os.statvfs(disk)
        free = status.f_bavail * status.f_frsize
        count = min(wanted, free // max(1, nbytes))
        if not count:
            raise StorageError(
                f"slot_directory: {disk} has {free / 1e9:.2f} GB free; a copy of this node's part "
                f"of a checkpoint takes {nbytes / 1e9:.2f} GB. Make room, or name another directory"
            )
        paths = [_anonymous_slot(files, ranges, disk) for _ in range(count)]
    except OSError as error:
        raise StorageError(f"slot_directory: {disk}: {explain(error)}") from error
    note = f"{count} checkpoint slot(s) of {nbytes / 1e6:,.1f} MB in {disk}"
    return Slots(paths, nbytes, note, lasting=False, in_memory=False)


def _fitting(nbytes: int, shared: Path | None) -> int:
    """How many slots of `nbytes` fit into memory, and into the filesystem `shared`."""
    free = available_bytes() - RESERVE
    if shared:
        try:
            status = os.statvfs(shared)
        except OSError:
            return 0
        free = min(free, status.f_bavail * status.f_frsize)
    return max(0, free // max(1, nbytes))


def _shared_slot(
    folder: Path, slot: int, files: Mapping[str, TensorFile], ranges: Ranges
) -> dict[str, str]:
    paths = {}
    for name, of_file in ranges.items():
        path = folder / f"slot-{slot}" / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            _reserve(descriptor, files[name].size, of_file)
        finally:
            os.close(descriptor)
        paths[name] = str(path)
    return paths


def _anonymous_slot(
    files: Mapping[str, TensorFile], ranges: Ranges, disk: str | None
) -> dict[str, str]:
    """Files without a name, in memory or on the disk of a directory, reached through this process;
    they end with it."""
    paths = {}
    for name, of_file in ranges.items():
        if disk is None:
            descriptor = os.memfd_create(Path(name).name)
        else:
            with tempfile.TemporaryFile(dir=disk) as opened:
                descriptor = os.dup(opened.fileno())
        _reserve(descriptor, files[name].size, of_file)
        paths[name] = f"/proc/{os.getpid()}/fd/{descriptor}"
    return paths


def close_slots(slots: Slots) -> None:
    """Give files without a name back, in the process that made them."""
    if not slots.lasting:
        for paths in slots.paths:
            for path in paths.values():
                os.close(int(Path(path).name))


def _reserve(descriptor: int, size: int, ranges: Sequence[tuple[int, int]]) -> None:
    os.ftruncate(descriptor, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    for start, stop in ranges:
        os.posix_fallocate(descriptor, start, stop - start)


def available_bytes() -> int:
    """Memory that this process may still take: what the machine has, and what its control groups
    allow (page cache counts as free)."""
    free = [_meminfo("MemAvailable")]
    try:
        _, _, group = Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":", 2)
        path = Path("/sys/fs/cgroup") / group.lstrip("/")
        for level in (path, *path.parents):
            if (level / "memory.max").exists():
                limit = (level / "memory.max").read_text().strip()
                if limit != "max":
                    statistics = (level / "memory.stat").read_text().split()
                    cache = int(statistics[statistics.index("inactive_file") + 1])
                    used = int((level / "memory.current").read_text()) - cache
                    free.append(int(limit) - used)
    except (OSError, ValueError):  # no control groups, or of the first version
        pass
    return min(free)


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise StorageError(f"/proc/meminfo has no {key}")


# --- using memory ----------------------------------------------------------------------------


class SlotFiles:
    """The files of one slot, mapped into this process.

    Args:
        paths: path by file name.
    """

    def __init__(self, paths: Mapping[str, str], *, writable: bool = True) -> None:
        self.maps: dict[str, mmap.mmap] = {}
        for name, path in paths.items():
            descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            try:
                self.maps[name] = mmap.mmap(descriptor, 0, access=access)
            finally:
                os.close(descriptor)

    def checksums(self, ranges: Ranges) -> dict[str, list[int]]:
        """CRC-32 of each range."""
        return {
            name: [crc32(memoryview(self.maps[name])[start:stop]) for start, stop in spans]
            for name, spans in ranges.items()
        }

    def touch(self, ranges: Ranges) -> None:
        """Have every page of `ranges` at hand, so that the first save finds it as later ones do.
        Takes a second per GB or so, and leaves the interpreter to others."""
        for name, of_file in ranges.items():
            for start, stop in of_file:
                _populate(self.maps[name], start, stop)


_POPULATE_WRITE = 23
_PORTION = 64 << 20


def _populate(region: mmap.mmap, start: int, stop: int) -> None:
    """madvise(MADV_POPULATE_WRITE), of Linux 5.14; on older ones the pages come when used."""
    begin = ctypes.addressof(ctypes.c_char.from_buffer(region))
    libc = ctypes.CDLL(None, use_errno=True)
    start, stop = start // mmap.PAGESIZE * mmap.PAGESIZE, min(stop, len(region))
    for portion in range(start, stop, _PORTION):
        length = min(_PORTION, stop - portion)
        if libc.madvise(ctypes.c_void_p(begin + portion), ctypes.c_size_t(length), _POPULATE_WRITE):
            return


# --- what outlives a process -----------------------------------------------------------------


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
    return hmac.digest(token.encode(), body, "sha256").hex().encode()


def copy_slot(
    folder: Path,
    node: int,
    slot: int,
    manifest: Manifest,
    pull: Callable[[int, int, str, list[tuple[int, int]]], Iterator[bytes]],
    token: str,
) -> None:
    """Keep a copy of a slot of another node.

    Args:
        folder: of this node's slots.
        node: whose slot.
        slot: its number.
        manifest: what it holds.
        pull: (node, slot, file, ranges) → the bytes of each range.
        token: of the run.

    Raises:
        StorageError: there is no memory, the node does not answer, or has begun to overwrite it.
    """
    name = f"peer-{node}-{slot}"
    write_manifest(folder, name, None, token)
    spans = [span for of_file in manifest.ranges.values() for span in of_file]
    nbytes = sum(stop - start for start, stop in spans)
    if not (folder / name).exists() and not _fitting(nbytes, folders.SHARED_MEMORY):
        raise StorageError(f"its {nbytes / 1e6:,.1f} MB do not fit into memory")
    for file, ranges in manifest.ranges.items():
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            for (start, stop), expected in zip(ranges, manifest.checksums[file], strict=True):
                checksum = 0
                for part in range(start, stop, _PORTION):
                    span = (part, min(part + _PORTION, stop))
                    for data in pull(node, slot, file, [span]):
                        checksum = crc32(data, checksum)
                        os.pwrite(descriptor, data, part)
                if checksum != expected:
                    raise StorageError(f"{file} changed while it was copied")
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


def _folder(directory: str, shape: Shape) -> Folder:
    """The folder for slots of a shape: one that a dead process of this run left, else a new one.
    What was left for other plans is deleted."""
    mine: Folder | None = None
    for path in folders.of_run(directory):
        there: Shape = [""]
        with suppress(OSError, ValueError):
            there = json.loads((path / "shape.json").read_text())
        if there[0] == shape[0] and there != shape:  # that of another node, which may want it
            continue
        left = folders.hold(path)
        if left and there == shape and mine is None:
            mine = folders.take_over(left, directory)
        elif left:
            folders.forget(left)
    return mine or folders.make(directory)
