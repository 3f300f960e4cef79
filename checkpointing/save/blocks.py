"""The blocks of a save: which node's writer writes each, and how.

A node writes the tensor files that it owns. It has a part of their bytes in a slot, and fetches all
other bytes from other nodes."""

import itertools
import math
import mmap
import os
import sys
import threading
import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from isal.isal_zlib import crc32

from checkpointing.format.layout import BLOCK_BYTES, TensorFile
from checkpointing.format.plan import (
    Nodes,
    SavePlanInput,
    assign_files,
    extents_of,
    merged,
    plan_file,
    plan_pieces,
)
from checkpointing.save.messages import Key, Position, SaveBlockRange, Slot
from checkpointing.save.peers import Pull
from checkpointing.save.slots import Ranges, SaveSlotFiles, ranges_of
from checkpointing.storage.interface import NewStoredStep
from checkpointing.storage.posix import is_shared

# --- which writer ---------------------------------------------------------------------------------

UNIT_BLOCKS = 16
"""Blocks in one grant if several writers may write to one file."""


@dataclass
class SaveFileLayout:
    """The tensor files of a plan, in order, and the node that owns each."""

    files: Sequence[TensorFile] = ()
    owners: Mapping[str, int] = field(default_factory=dict)
    """File name → node."""

    def __post_init__(self) -> None:
        self._numbers = {file.name: number for number, file in enumerate(self.files)}

    @property
    def end(self) -> Position:
        """Position after the last byte of the last file."""
        return len(self.files), 0

    def place(self, blocks: SaveBlockRange) -> Position:
        """Returns the position that all nodes must have staged before `blocks` can be written."""
        number = self._numbers[blocks.file]
        return number, min(blocks.stop * BLOCK_BYTES, self.files[number].size)

    def by_node(self, in_parts: bool) -> dict[int, deque[SaveBlockRange]]:
        """Returns node → the blocks that it owns, one range for each grant; `in_parts`: whether
        several writers may write to one file."""
        units: dict[int, deque[SaveBlockRange]] = {}
        for file in self.files:
            blocks = math.ceil(file.size / BLOCK_BYTES)
            # an object is one upload, so it has a single writer
            some = UNIT_BLOCKS if in_parts else blocks
            units.setdefault(self.owners[file.name], deque()).extend(
                SaveBlockRange(file.name, first, min(first + some, blocks))
                for first in range(0, blocks, some)
            )
        return units


class SaveGrants:
    """Grants that writers have not returned yet. Grants of a failed save count until its writers
    have stopped."""

    def __init__(self, nodes: int) -> None:
        self._nodes, self._turn = nodes, 0
        self._out: dict[tuple[Key, SaveBlockRange], int] = {}

    def __len__(self) -> int:
        return len(self._out)

    def choose(self, nodes: Sequence[int]) -> int:
        """Returns the node with the fewest grants. Nodes with equally many take turns."""
        busy = Counter(self._out.values())
        self._turn += 1  # otherwise node 0 would get most grants
        return min(nodes, key=lambda node: (busy[node], (node - self._turn) % self._nodes))

    def give(self, key: Key, blocks: SaveBlockRange, node: int) -> None:
        self._out[key, blocks] = node

    def take_back(self, key: Key, blocks: SaveBlockRange) -> bool:
        return self._out.pop((key, blocks), None) is not None

    def forget(self, node: int) -> None:
        self._out = {what: where for what, where in self._out.items() if where != node}

    def writes(self, key: Key) -> bool:
        return any(of == key for of, _ in self._out)

    @property
    def files(self) -> dict[int, str]:
        """Node → a file that it is writing."""
        return {node: blocks.file for (_, blocks), node in self._out.items()}


def default_writers(kind: str) -> int:
    """Returns a suitable number of writers for a kind of storage: 16 on Lustre and on object stores
    (""), 4 on other shared filesystems; on a local disk the number of cores, at most 4."""
    if kind in ("lustre", ""):
        return 16
    if is_shared(kind):
        return 4
    return min(4, len(os.sched_getaffinity(0)))


# --- writing --------------------------------------------------------------------------------------

_scratch = threading.local()
"""Buffers that each thread reuses for all its blocks."""


@dataclass
class SaveNodePlan:
    """A node's part in every save under one plan."""

    digest: str
    tensors: str
    """Digest of the tensors and of their positions, equal for all world sizes."""
    files: dict[str, TensorFile]
    ranges: Ranges
    """File → bytes that the node's ranks copy into a slot, rounded outwards to pages."""
    exact: Ranges
    """File → bytes that the node's ranks copy into a slot, without rounding."""
    sources: dict[str, list[tuple[int, int, int]]]
    """File that this node owns → (start, stop, node) of bytes that other nodes hold."""
    owners: dict[str, int]


def plan_node(plan: SavePlanInput, digest: str, nodes: Nodes, node: int) -> SaveNodePlan:
    owners = assign_files(plan.files, len(nodes))
    stored = {name: tensor for file in plan.files for name, tensor in file.tensors.items()}
    near = {file: nodes[owner] for file, owner in owners.items()}
    pieces = [
        piece for rank in nodes[node] for piece in plan_pieces(plan.specs, stored, near, rank)
    ]
    pages = ranges_of(pieces, mmap.PAGESIZE)
    sources: dict[str, list[tuple[int, int, int]]] = {}
    home = {rank: index for index, ranks in enumerate(nodes) for rank in ranks}
    for file in plan.files:
        if owners[file.name] != node:
            continue
        # The owner alone stages the header, as it writes the first block of the file.
        header = (0, -(-len(file.header) // mmap.PAGESIZE) * mmap.PAGESIZE)
        pages[file.name] = merged([header, *pages.get(file.name, [])])
        elsewhere = sources.setdefault(file.name, [])
        if len(nodes) == 1:  # no byte is on another node, so plan_file need not be called
            continue
        for rank, piece in plan_file(file, plan.specs, nodes[node]):
            if home[rank] != node:
                elsewhere += (
                    (start := piece.stored.begin + run.offset, start + run.length, home[rank])
                    for run in extents_of(piece.stored.meta, piece.box)
                )
        elsewhere[:] = _joined(elsewhere)
    files = {file.name: file for file in plan.files}
    return SaveNodePlan(digest, plan.tensors, files, pages, ranges_of(pieces), sources, owners)


def _joined(sources: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Returns `sources` (start, stop, node) sorted, with adjoining ranges of a node joined, as the
    ranks of a node often hold neighbouring rows."""
    joined: list[tuple[int, int, int]] = []
    for start, stop, node in sorted(sources):
        if joined and joined[-1][1:] == (start, node):
            joined[-1] = joined[-1][0], stop, node
        else:
            joined.append((start, stop, node))
    return joined


class SaveStoppedError(Exception):
    """Raised in a writer when the save that it writes has failed."""


def write_blocks(
    blocks: SaveBlockRange,
    plan: SaveNodePlan,
    slot: SaveSlotFiles,
    target: NewStoredStep,
    pull: Pull,
    address: Slot,
    rate: float | None,
    stopped: Callable[[], bool],
) -> tuple[dict[int, int], int]:
    """Write blocks of a file; returns (block → CRC-32, number of bytes written). Raises
    SaveStoppedError if `stopped`, which is called before each block, and StorageError if another
    node does not send its bytes.

    Args:
        address: address of the slot on other nodes.
        rate: largest number of bytes per second; None: no limit.
    """
    file = plan.files[blocks.file]
    image = memoryview(slot.maps[blocks.file])
    checksums, done, started = {}, 0, time.monotonic()
    # after an error `finish` is not called, so the part does not count as written
    with target.writer(file.name, file.size) as out:
        for block in range(blocks.first, blocks.stop):
            if stopped():
                raise SaveStoppedError
            start, stop = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, file.size)
            data = image[start:stop]
            elsewhere = _within(plan.sources[blocks.file], start, stop)
            if elsewhere:
                data = _assembled(file.name, data, start, elsewhere, plan, pull, address)
            checksums[block] = crc32(data)
            out.write(data, start)
            done += stop - start
            if rate:  # sleep if faster than the rate
                time.sleep(max(0.0, started + done / rate - time.monotonic()))
        out.finish()
    return checksums, done


def _within(
    sources: list[tuple[int, int, int]], start: int, stop: int
) -> list[tuple[int, int, int]]:
    first = max(0, bisect_right(sources, (start, sys.maxsize, 0)) - 1)
    found = itertools.takewhile(lambda source: source[0] < stop, sources[first:])
    return [(max(a, start), min(b, stop), node) for a, b, node in found if b > start]


def _assembled(
    file: str,
    image: memoryview,
    start: int,
    elsewhere: list[tuple[int, int, int]],
    plan: SaveNodePlan,
    pull: Pull,
    address: Slot,
) -> memoryview:
    """Returns a block, parts of which are fetched from other nodes: a page-aligned buffer, valid
    until this thread assembles the next block."""
    stop = start + len(image)
    if not hasattr(_scratch, "block"):
        _scratch.block = memoryview(mmap.mmap(-1, BLOCK_BYTES))  # page-aligned, for O_DIRECT
    block = _scratch.block[: len(image)]
    header = min(max(0, len(plan.files[file].header) - start), len(image))
    block[:header] = image[:header]
    # Exact bytes, not whole pages: other bytes of a page may belong to another node's piece.
    for a, b, _ in _within([(a, b, 0) for a, b in plan.exact.get(file, [])], start, stop):
        block[a - start : b - start] = image[a - start : b - start]
    by_node: dict[int, list[tuple[int, int]]] = {}
    for a, b, node in elsewhere:
        by_node.setdefault(node, []).append((a, b))
    for node, ranges in by_node.items():
        for (a, b), data in zip(ranges, pull(node, address, file, ranges), strict=True):
            block[a - start : b - start] = data
    return block
