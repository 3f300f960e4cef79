"""A node's slots: shared memory that saves are copied into, and that outlives its processes.

[Note: slot] A slot holds the pieces that the ranks of a node contribute to one save: sparse files
in shared memory with the names, sizes and offsets of the checkpoint's tensor files. A rank copies
its pieces to their final offsets. A writer reads whole blocks from there, aligned for direct I/O.
Code that reads a checkpoint can read a slot. Pages without a piece of this node take no memory.

    /dev/shm/perdure-<run>-<pid>-<random>/      closed to other users; see folders.py
      slot-0.manifest                   what slot 0 holds; replaced at once, never half written
      peer-1-0/, peer-1-0.manifest      copy of slot 0 of node 1, with `peer_copy`
      shape.json                        the plan that the slots are laid out for
      slot-0/model-00001-of-00004.safetensors …

Slots are allocated once, touched in the background, and reused by every save. Where shared memory
is too small (64 MB in a container by default), the same files are anonymous and end with their
writer.

[Note: no slots] With `slots: 0` there is one anonymous file for each tensor file, empty between
saves. A node first checks that there is room when it joins a save. Pages are allocated as ranks
copy, and freed when the save has ended and all ranks of the node have copied."""

import ctypes
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from isal.isal_zlib import crc32

from checkpointing.errors import StorageError, explain
from checkpointing.format.layout import TensorFile
from checkpointing.format.plan import TensorPiece, extents_of, merged
from checkpointing.storage import folders
from checkpointing.storage.folders import LockedStorageFolder

_PORTION = 16 << 20
"""Bytes that are touched, sent to another node, or checksummed at a time."""
Ranges = dict[str, list[tuple[int, int]]]
"""File → (start, stop) of bytes, sorted, neither touching nor overlapping."""


@dataclass(frozen=True)
class SaveSlots:
    """Paths and properties of a node's slots; equal for its writer and its ranks."""

    paths: list[dict[str, str]]
    """For each slot: file name → path."""
    nbytes: int
    """Bytes of memory or disk that one slot takes."""
    note: str
    """Line for the log."""
    lasting: bool
    """Whether the slots outlive this node's processes."""
    resident: bool = True
    """Whether the slots are memory, which is touched and pinned before use."""
    transient: bool = False
    """Whether the slots are empty between saves; see [Note: no slots]."""


def portions(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns ranges (start, stop) of a file, cut to at most _PORTION bytes."""
    starts = ((at, stop) for start, stop in spans for at in range(start, stop, _PORTION))
    return [(at, min(at + _PORTION, stop)) for at, stop in starts]


def ranges_of(pieces: Iterable[TensorPiece], page: int = 1) -> Ranges:
    """Returns the positions of pieces in their files, rounded outwards to whole `page`s."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for piece in pieces:
        of_file = spans.setdefault(piece.stored.file, [])
        for run in extents_of(piece.stored.meta, piece.box):
            start = piece.stored.begin + run.offset
            of_file.append((start // page * page, -(-(start + run.length) // page) * page))
    return {file: merged(of_file) for file, of_file in spans.items()}


class SaveSlotFiles:
    """The files of one slot, mapped into this process."""

    def __init__(self, paths: Mapping[str, str], *, writable: bool = True) -> None:
        self.maps: dict[str, mmap.mmap] = {}
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        for name, path in paths.items():
            # the mapping outlives the descriptor, of which a process may have few
            with open(path, "rb+" if writable else "rb") as file:
                self.maps[name] = mmap.mmap(file.fileno(), 0, access=access)

    def checksums(self, ranges: Ranges, threads: int) -> dict[str, list[int]]:
        """Returns file → CRC-32 of each of its `portions`."""
        pieces = {
            name: [memoryview(self.maps[name])[slice(*one)] for one in portions(spans)]
            for name, spans in ranges.items()
        }
        nbytes = sum(len(piece) for of_file in pieces.values() for piece in of_file)
        threads = min(threads, nbytes // _PORTION)
        if threads <= 1:  # for a small piece, starting a thread takes longer than the checksum
            return {name: list(map(crc32, of_file)) for name, of_file in pieces.items()}
        with ThreadPoolExecutor(threads) as pool:
            coming = {name: pool.map(crc32, of_file) for name, of_file in pieces.items()}
            return {name: list(sums) for name, sums in coming.items()}

    def touch(self, ranges: Ranges, *, rest: float = 0.0) -> None:
        """Fault in every page of `ranges`, so that the first save is as fast as later ones.
        Releases the GIL. Sleeps `rest` times as long as it works, to leave the core to training."""
        for name, of_file in ranges.items():
            for start, stop in of_file:
                _populate(self.maps[name], start, stop, rest)


_POPULATE_WRITE = 23


def _populate(region: mmap.mmap, start: int, stop: int, rest: float) -> None:
    """Call madvise(MADV_POPULATE_WRITE) of Linux 5.14. On older kernels pages are allocated at
    their first use."""
    begin = ctypes.addressof(ctypes.c_char.from_buffer(region))
    libc = ctypes.CDLL(None, use_errno=True)
    start, stop = start // mmap.PAGESIZE * mmap.PAGESIZE, min(stop, len(region))
    for portion in range(start, stop, _PORTION):
        began, length = time.monotonic(), min(_PORTION, stop - portion)
        if libc.madvise(ctypes.c_void_p(begin + portion), ctypes.c_size_t(length), _POPULATE_WRITE):
            return
        time.sleep(rest * (time.monotonic() - began))


# --- free memory ----------------------------------------------------------------------------------

RESERVE = 256 << 20
"""Bytes of memory left free when slots are made."""


def no_memory(nbytes: int) -> StorageError:
    return StorageError(
        f"checkpoints are copied to memory before they are written, which takes "
        f"{nbytes / 1e9:.2f} GB on this node; only {available_bytes() / 1e9:.2f} GB are free (and "
        f"{RESERVE / 1e9:.2f} GB of that stay free). Use more nodes, a node with more memory, or "
        f"checkpoint.slot_directory"
    )


def fitting_on_disk(nbytes: int, disk: str) -> int:
    """Returns how many slots fit on the disk of a directory. Raises StorageError if none fits."""
    status = os.statvfs(disk)
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        raise StorageError(
            f"slot_directory: {disk} has {free / 1e9:.2f} GB free; a copy of this node's part "
            f"of a checkpoint takes {nbytes / 1e9:.2f} GB. Make room, or name another directory"
        )
    return free // max(1, nbytes)


def fitting(nbytes: int, shared: Path | None, wanted: int) -> int:
    """Returns how many slots of `nbytes` fit into memory and into the filesystem `shared`. While
    fewer than `wanted` fit, waits for memory that is being freed."""

    def free() -> int:
        free = available_bytes() - RESERVE
        if shared:
            try:
                status = os.statvfs(shared)
            except OSError:
                return 0
            free = min(free, status.f_bavail * status.f_frsize)
        return free

    return max(0, settled(free, wanted * nbytes) // max(1, nbytes))


SETTLE_SECONDS = 1.0
_GROWTH = 16 << 20


def settled(free: Callable[[], int], enough: int) -> int:
    """Wait until the free bytes are `enough`, or have not grown for SETTLE_SECONDS; return them.
    The kernel takes seconds to free pages of the previous run's ranks that GPUs had pinned."""
    now = most = free()
    since = time.monotonic()
    while now < enough and time.monotonic() - since < SETTLE_SECONDS:
        time.sleep(0.05)
        now = free()
        if now >= most + _GROWTH:
            most, since = now, time.monotonic()
    return now


def available_bytes() -> int:
    """Returns the bytes that this process can still allocate within the machine's memory and the
    limits of its control groups. Page cache counts as free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if not free:
        raise StorageError("/proc/meminfo has no MemAvailable")
    try:
        _, _, group = Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":", 2)
        path = Path("/sys/fs/cgroup") / group.lstrip("/")
        # each level limits all levels below it
        for level in (path, *path.parents):
            if (level / "memory.max").exists():
                limit = (level / "memory.max").read_text().strip()
                if limit != "max":
                    statistics = (level / "memory.stat").read_text().split()
                    # the kernel reclaims this cache before it kills a process
                    cache = int(statistics[statistics.index("inactive_file") + 1])
                    used = int((level / "memory.current").read_text()) - cache
                    free.append(int(limit) - used)
    except (OSError, ValueError):  # no control groups, or version 1
        pass
    return min(free)


MAKERS = 8
"""Threads that create the files of slots."""
Shape = list[object]
"""Parameters for which slots are laid out, as JSON: plan, node, ranges."""


def make_slots(
    directory: str,
    files: Mapping[str, TensorFile],
    ranges: Ranges,
    wanted: int,
    plan: str,
    node: int,
    disk: str | None = None,
) -> tuple[LockedStorageFolder | None, SaveSlots]:
    """Create the slots of this node, or reuse slots that a dead run with the same plan left.
    Returns (folder in shared memory, or None for unnamed files; slots). Raises StorageError if not
    even one slot fits.

    Args:
        files: all tensor files by name.
        ranges: bytes that this node's ranks contribute, in whole pages.
        wanted: number of slots; 0: see [Note: no slots].
        disk: directory whose disk holds the slots instead of memory, in unnamed files.
    """
    nbytes = sum(stop - start for of_file in ranges.values() for start, stop in of_file)
    if not wanted or disk is not None:
        return None, _unnamed_slots(files, ranges, wanted, nbytes, disk)
    spans = {file: [list(span) for span in of_file] for file, of_file in ranges.items()}
    shape: Shape = [plan, node, spans]
    shared = folders.SHARED_MEMORY
    where, why = f"in {shared}", "less than one slot is free there"
    folder = None
    try:
        folder = _folder(directory, shape)  # slots of a dead run have their pages already
        (folder.path / "shape.json").write_text(json.dumps(shape))
        # The pages of these slots are allocated: only further slots need free memory.
        kept = len(list(folder.path.glob("slot-?/")))
        count = max(kept, min(wanted, kept + fitting(nbytes, shared, wanted - kept)))
        paths = _shared_slots(folder.path, count, files, ranges)
    except OSError as error:  # /dev/shm is missing, not writable, or was filled just now
        count, why = 0, explain(error)
    if not count:
        if folder:
            folders.forget(folder)
            folder = None
        where = f"in anonymous memory, not {where}: {why}"
    # in a container often only /dev/shm is limited
    if not count and fitting(nbytes, None, 1):
        paths, count = [_anonymous_slot(files, ranges, None)], 1
    if not count:
        raise no_memory(nbytes)
    few = f"; {wanted} were asked for, but there is no memory for more" if count < wanted else ""
    note = f"{count} checkpoint slot(s) of {nbytes / 1e6:,.1f} MB {where}{few}"
    return folder, SaveSlots(paths, nbytes, note, lasting=folder is not None)


def _unnamed_slots(
    files: Mapping[str, TensorFile], ranges: Ranges, wanted: int, nbytes: int, disk: str | None
) -> SaveSlots:
    """Create `wanted` slots on a disk, or, if 0 are wanted, a transient slot there or in memory."""
    # Checked now, so that the job fails at its start, not at the first save.
    if disk is None and not fitting(nbytes, None, 1):
        raise no_memory(nbytes)
    with _on_disk(disk):
        count = min(wanted or 1, fitting_on_disk(nbytes, disk) if disk is not None else 1)
        paths = [_anonymous_slot(files, ranges, disk, empty=not wanted) for _ in range(count)]
    note = f"{count} checkpoint slot(s) of {nbytes / 1e6:,.1f} MB in {disk}"
    if not wanted:
        where = "memory" if disk is None else disk
        note = (
            f"no checkpoint slots: each save takes {nbytes / 1e6:,.1f} MB in {where} while it lasts"
        )
    return SaveSlots(paths, nbytes, note, lasting=False, resident=False, transient=not wanted)


@contextmanager
def _on_disk(disk: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"slot_directory: {disk}: {explain(error)}") from error


def make_room(slots: SaveSlots, ranges: Ranges, disk: str | None) -> None:
    """Reserve the memory or disk space of a transient slot. Raises StorageError if there is too
    little."""
    if disk is None and available_bytes() - RESERVE < slots.nbytes:
        raise no_memory(slots.nbytes)
    if disk is not None:  # otherwise a rank that copies to a full disk would be killed by SIGBUS
        fitting_on_disk(slots.nbytes, disk)
        for name, path in slots.paths[0].items():
            with _on_disk(disk), open(path, "rb+") as file:
                for start, stop in ranges[name]:
                    os.posix_fallocate(file.fileno(), start, stop - start)


def give_back(files: SaveSlotFiles, ranges: Ranges) -> None:
    for name, spans in ranges.items():
        region = files.maps[name]
        for start, stop in spans:
            with suppress(OSError):  # on a filesystem without holes the pages stay
                region.madvise(mmap.MADV_REMOVE, start, min(stop, len(region)) - start)


def _shared_slots(
    folder: Path, count: int, files: Mapping[str, TensorFile], ranges: Ranges
) -> list[dict[str, str]]:
    """Create the files in parallel, as the kernel clears the pages of a file on one core."""

    def make(slot: int, name: str) -> None:
        with created(folder / f"slot-{slot}" / name) as descriptor:
            _reserve(descriptor, files[name].size, ranges[name])

    jobs = [(slot, name) for slot in range(count) for name in ranges]
    with ThreadPoolExecutor(MAKERS) as pool:
        list(pool.map(lambda job: make(*job), jobs))
    return [{name: str(folder / f"slot-{slot}" / name) for name in ranges} for slot in range(count)]


@contextmanager
def created(path: Path) -> Iterator[int]:
    """Yields the descriptor of a slot's file, which is created unless it exists."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # O_NOFOLLOW: a planted link would make this process write elsewhere.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _anonymous_slot(
    files: Mapping[str, TensorFile], ranges: Ranges, disk: str | None, *, empty: bool = False
) -> dict[str, str]:
    """Create unnamed files, in memory or on the disk of a directory, that end with this process.
    Other processes open them through /proc/<pid>/fd."""
    paths = {}
    for name, of_file in ranges.items():
        if disk is None:
            descriptor = os.memfd_create(Path(name).name)
        else:
            with tempfile.TemporaryFile(dir=disk) as opened:
                # the unnamed file ends when its last descriptor is closed
                descriptor = os.dup(opened.fileno())
        _reserve(descriptor, files[name].size, () if empty else of_file)
        paths[name] = f"/proc/{os.getpid()}/fd/{descriptor}"
    return paths


def close_slots(slots: SaveSlots) -> None:
    """Close the unnamed files of slots, in the process that created them."""
    if not slots.lasting:
        for paths in slots.paths:
            for path in paths.values():
                os.close(int(Path(path).name))


def _reserve(descriptor: int, size: int, ranges: Sequence[tuple[int, int]]) -> None:
    os.ftruncate(descriptor, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    for start, stop in ranges:  # otherwise a full filesystem would kill the copying rank by SIGBUS
        os.posix_fallocate(descriptor, start, stop - start)


def _folder(directory: str, shape: Shape) -> LockedStorageFolder:
    """Returns a folder for slots of `shape`: a folder that a dead process of this run left, else a
    new one. Folders for other plans are deleted."""
    mine: LockedStorageFolder | None = None
    for path in folders.memory_folders(directory):
        there: Shape = [""]
        with suppress(OSError, ValueError):
            there = json.loads((path / "shape.json").read_text())
        # The folder belongs to another node, which may reuse it.
        if there[0] == shape[0] and there != shape:
            continue
        left = folders.hold(path)
        if left and there == shape and mine is None:
            mine = folders.take_over(left, directory)  # renamed to this process
        elif left:
            folders.forget(left)
    return mine or folders.make(directory)
