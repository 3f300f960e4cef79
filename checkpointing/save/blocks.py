"""The blocks of a save: which writer gets them, and how a node writes them.

A node writes the tensor files that it owns. It holds some of their bytes in a slot and fetches the
rest from other nodes.
"""

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
    extents_of,
    merged,
    own_files,
    plan_file,
    plan_pieces,
)
from checkpointing.format.sections import PlanInput
from checkpointing.save.messages import BlockRange, Key, Position, Slot
from checkpointing.save.peers import Pull
from checkpointing.save.slots import Ranges, SlotFiles, ranges_of
from checkpointing.storage.interface import NewStep
from checkpointing.storage.posix import is_shared

# --- which writer ---------------------------------------------------------------------------------

UNIT_BLOCKS = 16
"""Blocks that a writer takes at a time where a file may be written in parts."""


@dataclass
class FileLayout:
    """The tensor files of a plan."""

    files: Sequence[TensorFile] = ()
    owners: Mapping[str, int] = field(default_factory=dict)
    """The node that writes each file."""

    def __post_init__(self) -> None:
        self._numbers = {file.name: number for number, file in enumerate(self.files)}

    @property
    def end(self) -> Position:
        """After all bytes."""
        return len(self.files), 0

    def place(self, blocks: BlockRange) -> Position:
        """Up to where must be staged for these blocks to be written."""
        number = self._numbers[blocks.file]
        return number, min(blocks.stop * BLOCK_BYTES, self.files[number].size)

    def by_node(self, in_parts: bool) -> dict[int, deque[BlockRange]]:
        """All blocks, in units of work, by the node that writes them.

        Args:
            in_parts: whether several writers may write to one file.
        """
        units: dict[int, deque[BlockRange]] = {}
        for file in self.files:
            blocks = math.ceil(file.size / BLOCK_BYTES)
            some = UNIT_BLOCKS if in_parts else blocks
            units.setdefault(self.owners[file.name], deque()).extend(
                BlockRange(file.name, first, min(first + some, blocks))
                for first in range(0, blocks, some)
            )
        return units


class Grants:
    """Blocks that are out at writers; also those of saves that were given up, until their writers
    have stopped.

    Args:
        nodes: how many there are.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes, self._turn = nodes, 0
        self._out: dict[tuple[Key, BlockRange], int] = {}

    def __len__(self) -> int:
        return len(self._out)

    def choose(self, nodes: Sequence[int]) -> int:
        """The node with the fewest units out; among those in turn."""
        busy = Counter(self._out.values())
        self._turn += 1
        return min(nodes, key=lambda node: (busy[node], (node - self._turn) % self._nodes))

    def give(self, key: Key, blocks: BlockRange, node: int) -> None:
        """Blocks go out."""
        self._out[key, blocks] = node

    def take_back(self, key: Key, blocks: BlockRange) -> bool:
        """They are not out any more; whether they were."""
        return self._out.pop((key, blocks), None) is not None

    def forget(self, node: int) -> None:
        """A node's writer is gone."""
        self._out = {what: where for what, where in self._out.items() if where != node}

    def writes(self, key: Key) -> bool:
        """Whether blocks of a save are out."""
        return any(of == key for of, _ in self._out)

    @property
    def files(self) -> dict[int, str]:
        """By node, a file that it writes."""
        return {node: blocks.file for (_, blocks), node in self._out.items()}


def default_writers(kind: str) -> int:
    """How many writers a kind of storage takes gladly: 16 on Lustre and on object stores (""),
    which are made for many clients; 4 on other shared filesystems; on a local disk as many as there
    are cores to serve it, up to 4."""
    if kind in ("lustre", ""):
        return 16
    if is_shared(kind):
        return 4
    return min(4, len(os.sched_getaffinity(0)))


# --- writing --------------------------------------------------------------------------------------

_scratch = threading.local()
"""Room that a thread keeps from block to block."""


@dataclass
class NodePlan:
    """A node's part in every save."""

    digest: str
    tensors: str
    """Digest of what is stored where, whatever the world."""
    files: dict[str, TensorFile]
    ranges: Ranges
    """What its ranks put into a slot, in whole pages."""
    exact: Ranges
    """The same to the byte."""
    sources: dict[str, list[tuple[int, int, int]]]
    """By file that it owns, the bytes that are elsewhere: start, stop, node."""
    owners: dict[str, int]


def plan_node(plan: PlanInput, digest: str, nodes: Nodes, node: int) -> NodePlan:
    """What a node does in every save."""
    owners = own_files(plan.files, len(nodes))
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
        header = (0, -(-len(file.header) // mmap.PAGESIZE) * mmap.PAGESIZE)
        pages[file.name] = merged([header, *pages.get(file.name, [])])
        elsewhere = sources.setdefault(file.name, [])
        if len(nodes) == 1:
            continue
        for rank, piece in plan_file(file, plan.specs, nodes[node]):
            if home[rank] != node:
                elsewhere += (
                    (start := piece.stored.begin + run.offset, start + run.length, home[rank])
                    for run in extents_of(piece.stored.meta, piece.box)
                )
        elsewhere[:] = _joined(elsewhere)
    files = {file.name: file for file in plan.files}
    return NodePlan(digest, plan.tensors, files, pages, ranges_of(pieces), sources, owners)


def _joined(sources: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Sources (start, stop, node) in order; those of a node that touch are one: the ranks of a node
    often hold neighbouring rows."""
    joined: list[tuple[int, int, int]] = []
    for start, stop, node in sorted(sources):
        if joined and joined[-1][1:] == (start, node):
            joined[-1] = joined[-1][0], stop, node
        else:
            joined.append((start, stop, node))
    return joined


class StoppedError(Exception):
    """The save that this writer works on was given up."""


def write_blocks(
    blocks: BlockRange,
    plan: NodePlan,
    slot: SlotFiles,
    target: NewStep,
    pull: Pull,
    there: Slot,
    rate: float | None,
    stopped: Callable[[], bool],
) -> tuple[dict[int, int], int]:
    """Write some blocks of a file; returns the CRC-32 of each, and how many bytes they were.

    Args:
        blocks: which.
        plan: of this node.
        slot: what this node holds.
        target: where to.
        pull: fetches bytes from other nodes.
        there: the slot as other nodes know it.
        rate: most bytes per second.
        stopped: whether to give up, asked before each block.
    """
    file = plan.files[blocks.file]
    image = memoryview(slot.maps[blocks.file])
    checksums, done, started = {}, 0, time.monotonic()
    with target.writer(file.name, file.size) as out:
        for block in range(blocks.first, blocks.stop):
            if stopped():
                raise StoppedError
            start, stop = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, file.size)
            data = image[start:stop]
            elsewhere = _within(plan.sources[blocks.file], start, stop)
            if elsewhere:
                data = _assembled(file.name, data, start, elsewhere, plan, pull, there)
            checksums[block] = crc32(data)
            out.write(data, start)
            done += stop - start
            if rate:
                time.sleep(max(0.0, started + done / rate - time.monotonic()))
        out.finish()
    return checksums, done


def _within(
    sources: list[tuple[int, int, int]], start: int, stop: int
) -> list[tuple[int, int, int]]:
    """The parts of sources (in order, apart) that lie between `start` and `stop`."""
    first = max(0, bisect_right(sources, (start, sys.maxsize, 0)) - 1)
    found = itertools.takewhile(lambda source: source[0] < stop, sources[first:])
    return [(max(a, start), min(b, stop), node) for a, b, node in found if b > start]


def _assembled(
    file: str,
    image: memoryview,
    start: int,
    elsewhere: list[tuple[int, int, int]],
    plan: NodePlan,
    pull: Pull,
    there: Slot,
) -> memoryview:
    """A block of which other nodes hold parts: a copy, at a page boundary, good until this thread
    makes the next."""
    stop = start + len(image)
    if not hasattr(_scratch, "block"):
        _scratch.block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
    block = _scratch.block[: len(image)]
    header = min(max(0, len(plan.files[file].header) - start), len(image))
    block[:header] = image[:header]
    for a, b, _ in _within([(a, b, 0) for a, b in plan.exact.get(file, [])], start, stop):
        block[a - start : b - start] = image[a - start : b - start]
    by_node: dict[int, list[tuple[int, int]]] = {}
    for a, b, node in elsewhere:
        by_node.setdefault(node, []).append((a, b))
    for node, ranges in by_node.items():
        for (a, b), data in zip(ranges, pull(node, there, file, ranges), strict=True):
            block[a - start : b - start] = data
    return block
