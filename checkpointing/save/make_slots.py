"""Makes a node's slots, and gives them back; see slots.py [Note: slot]."""

import json
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from checkpointing.errors import StorageError, explain
from checkpointing.format.layout import TensorFile
from checkpointing.save import room
from checkpointing.save.room import RESERVE, fitting, fitting_on_disk, no_memory
from checkpointing.save.slots import Ranges, SlotFiles, Slots
from checkpointing.storage import folders
from checkpointing.storage.folders import Folder

MAKERS = 8
"""Threads that make files of slots."""

Shape = list[object]
"""What slots are made for: plan, node, ranges."""


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
        wanted: how many slots; 0: see [Note: no slots].
        plan: digest of the plan.
        node: number of this node.
        disk: directory whose disk holds them instead, in files without a name.

    Returns:
        The folder in shared memory (None: files without a name), and the slots.

    Raises:
        StorageError: not even one fits.
    """
    nbytes = sum(stop - start for of_file in ranges.values() for start, stop in of_file)
    if not wanted:
        return None, _no_slots(files, ranges, nbytes, disk)
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
        count = max(kept, min(wanted, kept + fitting(nbytes, shared, wanted - kept)))
        paths = _shared_slots(folder.path, count, files, ranges)
    except OSError as error:  # it is not there, not for us, or was filled by others just now
        count, why = 0, explain(error)
    if not count:
        if folder:
            folders.forget(folder)
            folder = None
        where = f"in anonymous memory, not {where}: {why}"
    if not count and fitting(nbytes, None, 1):
        paths, count = [_anonymous_slot(files, ranges, None)], 1
    if not count:
        raise no_memory(nbytes)
    few = f"; {wanted} were asked for, but there is no memory for more" if count < wanted else ""
    note = f"{count} checkpoint slot(s) of {nbytes / 1e6:,.1f} MB {where}{few}"
    return folder, Slots(paths, nbytes, note, lasting=folder is not None)


def _no_slots(
    files: Mapping[str, TensorFile], ranges: Ranges, nbytes: int, disk: str | None
) -> Slots:
    if disk is None and not fitting(nbytes, None, 1):  # else the run learns of it when it is over
        raise no_memory(nbytes)
    try:
        if disk is not None:
            fitting_on_disk(nbytes, disk)
        paths = [_anonymous_slot(files, ranges, disk, empty=True)]
    except OSError as error:
        raise StorageError(f"slot_directory: {disk}: {explain(error)}") from error
    where = "memory" if disk is None else disk
    note = f"no checkpoint slots: each save takes {nbytes / 1e6:,.1f} MB in {where} while it lasts"
    return Slots(paths, nbytes, note, lasting=False, resident=False, transient=True)


def make_room(slots: Slots, ranges: Ranges, disk: str | None) -> None:
    """Before a transient slot is filled.

    Raises:
        StorageError: memory, or the disk, has no room for it.
    """
    if disk is None and room.available_bytes() - RESERVE < slots.nbytes:
        raise no_memory(slots.nbytes)
    if disk is not None:  # copying to a full disk would be the end of whoever copies
        fitting_on_disk(slots.nbytes, disk)
        for name, path in slots.paths[0].items():
            descriptor = os.open(path, os.O_RDWR)
            try:
                for start, stop in ranges[name]:
                    os.posix_fallocate(descriptor, start, stop - start)
            except OSError as error:
                raise StorageError(f"slot_directory: {disk}: {explain(error)}") from error
            finally:
                os.close(descriptor)


def give_back(files: SlotFiles, ranges: Ranges) -> None:
    """Give back what a transient slot takes."""
    for name, spans in ranges.items():
        region = files.maps[name]
        for start, stop in spans:
            with suppress(OSError):  # a filesystem without holes keeps it to the end
                region.madvise(mmap.MADV_REMOVE, start, min(stop, len(region)) - start)


def _slots_on_disk(
    files: Mapping[str, TensorFile], ranges: Ranges, wanted: int, nbytes: int, disk: str
) -> Slots:
    try:
        count = min(wanted, fitting_on_disk(nbytes, disk))
        paths = [_anonymous_slot(files, ranges, disk) for _ in range(count)]
    except OSError as error:
        raise StorageError(f"slot_directory: {disk}: {explain(error)}") from error
    note = f"{count} checkpoint slot(s) of {nbytes / 1e6:,.1f} MB in {disk}"
    return Slots(paths, nbytes, note, lasting=False, resident=False)


def _shared_slots(
    folder: Path, count: int, files: Mapping[str, TensorFile], ranges: Ranges
) -> list[dict[str, str]]:
    """Files are made side by side: the kernel clears their pages with one core each."""

    def make(slot: int, name: str) -> None:
        path = folder / f"slot-{slot}" / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            _reserve(descriptor, files[name].size, ranges[name])
        finally:
            os.close(descriptor)

    jobs = [(slot, name) for slot in range(count) for name in ranges]
    with ThreadPoolExecutor(MAKERS) as pool:
        list(pool.map(lambda job: make(*job), jobs))
    return [{name: str(folder / f"slot-{slot}" / name) for name in ranges} for slot in range(count)]


def _anonymous_slot(
    files: Mapping[str, TensorFile], ranges: Ranges, disk: str | None, *, empty: bool = False
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
        _reserve(descriptor, files[name].size, () if empty else of_file)
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
