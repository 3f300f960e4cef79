"""Which rank reads which bytes of a checkpoint. Pure: no I/O, no torch.

[Note: reading] Ranks read the parts that they hold straight into their tensors, so that together
they read each byte once, except for boxes below SMALL_BYTES. Parts that several ranks of a node
hold, or that consist of short stretches, are read into memory that the ranks of the node share, and
copied from there. Otherwise an object store, or another node's memory, would send the same bytes
several times.

  unit   a box of a tensor that is read as a whole: by one rank alone, or by a node together
  slab   a box inside a unit whose bytes are contiguous in the file"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from checkpointing.format.digests import CrcReader
from checkpointing.format.layout import DTYPE_BYTES, FileRecord, LayoutTensor, TensorMeta
from checkpointing.format.plan import (
    Nodes,
    TensorBox,
    TensorLayout,
    TensorSpec,
    local_boxes,
    merged,
    replica_set,
)

SMALL_BYTES = 1 << 16
"""Limit in bytes. A smaller box is read by every rank that holds it. A tensor that ranks hold in
shorter contiguous stretches is read whole."""

Spans = list[tuple[int, int]]
"""Stretches (start, stop) of a file, sorted, neither touching nor overlapping."""


@dataclass(frozen=True)
class LoadUnit:
    """A box of a tensor that is read as a whole."""

    name: str
    stored: LayoutTensor
    box: TensorBox
    redundant: CrcReader
    """Number of this reader among all readers of these bytes."""

    @property
    def nbytes(self) -> int:
        return self.box.nbytes(self.stored.meta)


@dataclass(frozen=True)
class LoadSlab:
    """A box whose bytes are contiguous in the file."""

    unit: LoadUnit
    box: TensorBox
    begin: int
    """Offset in the file, in bytes."""
    nbytes: int


@dataclass(frozen=True)
class _ReadPlan:
    """The boxes that one rank reads, in the order of files and offsets."""

    own: list[LoadUnit]
    """Boxes that the rank reads alone."""
    shared: list[LoadUnit]
    """Boxes that the ranks of its node read together; equal on all these ranks."""


def plan_reads(
    specs: Mapping[str, TensorSpec], stored: Mapping[str, LayoutTensor], rank: int, nodes: Nodes
) -> _ReadPlan:
    """Divide the reading of tensors among ranks. `specs` has all tensors, and is the same on all
    ranks of `nodes`: the ranks of each node that load together. Other ranks that hold parts of the
    tensors load on their own, and are ignored."""
    node_of = {other: number for number, ranks in enumerate(nodes) for other in ranks}
    near = nodes[node_of[rank]]

    @cache  # most tensors share a few layouts
    def holders_of(layouts: tuple[TensorLayout, ...], whole: bool) -> list[tuple[int, _Holders]]:
        """Returns (rank of this node, ranks that hold the same part of a tensor as that rank), for
        each part that `rank` may read."""
        found = ((one, _holders(layouts, None if whole else one, rank, node_of)) for one in near)
        # Parts of other ranks of the node are included, as `_ReadPlan.shared` must be equal on all.
        return [
            (one, holders)
            for one, holders in found
            if one in holders.near and (one == rank or one == holders.near[0] != holders.near[-1])
        ]

    plan = _ReadPlan([], [])
    for name in sorted(specs, key=lambda name: (stored[name].file, stored[name].begin)):
        spec, at = specs[name], stored[name]
        whole = _is_fine(at.meta, spec.layouts[0])
        for one, holders in holders_of(spec.layouts, whole):
            shape = at.meta.shape
            boxes = [TensorBox.whole(shape)] if whole else local_boxes(shape, spec.layouts, one)
            for box in boxes:
                nbytes = box.nbytes(at.meta)
                if 0 < nbytes < SMALL_BYTES and one == rank:
                    plan.own.append(LoadUnit(name, at, box, holders.of_rank))
                elif nbytes >= SMALL_BYTES and len(holders.near) == 1:
                    plan.own.append(LoadUnit(name, at, box, holders.of_node))
                elif nbytes >= SMALL_BYTES and one == holders.near[0]:
                    plan.shared.append(LoadUnit(name, at, box, holders.of_node))
    return plan


@dataclass(frozen=True)
class _Holders:
    """The ranks that hold the same part of a tensor, as seen by one rank."""

    near: tuple[int, ...]
    """Ranks on the node of this rank."""
    of_rank: CrcReader
    """Number of this rank among the readers, if each rank reads alone."""
    of_node: CrcReader
    """Number of this rank's node among the readers, if the ranks of a node read together."""


def _holders(
    layouts: tuple[TensorLayout, ...], one: int | None, rank: int, node_of: Mapping[int, int]
) -> _Holders:
    """Returns the ranks that hold the same part of a tensor as rank `one`, as seen by `rank`. With
    `one` None: the ranks that hold any part."""
    everyone: Iterable[int] = (
        itertools.chain.from_iterable(layout.ranks for layout in layouts)
        if one is None
        else replica_set(layouts, one)
    )
    ranks = list(dict.fromkeys(other for other in everyone if other in node_of))
    nodes = list(dict.fromkeys(node_of[other] for other in ranks))
    node = node_of[rank]
    return _Holders(
        tuple(other for other in ranks if node_of[other] == node),
        CrcReader(ranks.index(rank) if rank in ranks else 0, len(ranks)),
        CrcReader(nodes.index(node) if node in nodes else 0, len(nodes)),
    )


def _is_fine(meta: TensorMeta, layout: TensorLayout) -> bool:
    """Whether each rank holds the tensor in many short stretches. Equal for all ranks."""
    parts = [1] * len(meta.shape)
    for size, split in zip(layout.mesh_shape, layout.splits, strict=True):
        if split.dim is not None:
            parts[split.dim] *= size * split.factor
    cut = max((dim for dim, count in enumerate(parts) if count > 1), default=0)
    stretch = DTYPE_BYTES[meta.dtype] * math.prod(meta.shape[cut:]) // math.prod(parts[cut:])
    return math.prod(meta.shape[:cut]) > 1 and stretch < SMALL_BYTES


def slabs(unit: LoadUnit, most: int) -> Iterator[LoadSlab]:
    """Yields a unit in slabs of at most `most` bytes, or one element, in the file's order."""
    meta, box = unit.stored.meta, unit.box
    itemsize = DTYPE_BYTES[meta.dtype]
    # bytes from one index of a dimension to the next
    strides = [itemsize * math.prod(meta.shape[dim + 1 :]) for dim in range(len(meta.shape))]
    # A slab: one index of dimensions before `dim`, some of `dim`, all of later dimensions.
    dims = range(len(meta.shape))
    last_cut = max((dim for dim in dims if box.shape[dim] != meta.shape[dim]), default=0)
    fitting = next((dim for dim in dims if strides[dim] <= most), len(meta.shape) - 1)
    dim = max(last_cut, fitting)
    if not meta.shape:
        yield LoadSlab(unit, box, unit.stored.begin, itemsize)
        return
    rows = max(1, most // strides[dim])
    for outer in itertools.product(*(range(length) for length in box.shape[:dim])):
        for row in range(0, box.shape[dim], rows):
            inner = (*outer, row, *(0 for _ in box.shape[dim + 1 :]))
            shape = (*(1 for _ in outer), min(rows, box.shape[dim] - row), *box.shape[dim + 1 :])
            offset = tuple(map(sum, zip(box.offset, inner, strict=True)))
            local = tuple(map(sum, zip(box.local_offset, inner, strict=True)))
            begin = unit.stored.begin + sum(map(math.prod, zip(offset, strides, strict=True)))
            yield LoadSlab(
                unit, TensorBox(offset, shape, local), begin, itemsize * math.prod(shape)
            )


ReadRound = list[tuple[LoadSlab, int, int]]
"""(slab, position of its reader among the ranks of the node, offset in the shared memory)."""


def read_rounds(
    units: Sequence[LoadUnit], places: int, area: int, most: int
) -> Iterator[ReadRound]:
    """Yields the slabs that the ranks of a node read together, round by round. In a round, every
    rank fills its `area` bytes of the shared memory with slabs of at most `most` bytes."""
    dealt: ReadRound = []
    place, position = 0, 0
    for slab in itertools.chain.from_iterable(slabs(unit, most) for unit in units):
        if position + slab.nbytes > area:
            place, position = place + 1, 0
        if place == places:
            yield dealt
            dealt, place = [], 0
        dealt.append((slab, place, place * area + position))
        # Aligned, as a torch view of another dtype requires it.
        position += -(-slab.nbytes // ALIGNMENT) * ALIGNMENT
    if dealt:
        yield dealt


ALIGNMENT = 64
"""Alignment of slabs in memory, in bytes: suits every dtype, and is a cache line."""


def intersection(slab: TensorBox, held: TensorBox) -> tuple[TensorBox, TensorBox] | None:
    """Returns the overlap of a slab and a box that a rank holds; None without overlap. The overlap
    is given as two boxes: `local_offset` is the offset in the local tensor in the first, and the
    offset in the slab in the second."""
    starts = tuple(map(max, zip(slab.offset, held.offset, strict=True)))
    slab_stops = map(sum, zip(slab.offset, slab.shape, strict=True))
    held_stops = map(sum, zip(held.offset, held.shape, strict=True))
    stops = map(min, zip(slab_stops, held_stops, strict=True))
    shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    if any(length <= 0 for length in shape):
        return None
    local = tuple(
        place + start - offset
        for place, start, offset in zip(held.local_offset, starts, held.offset, strict=True)
    )
    within = tuple(start - offset for start, offset in zip(starts, slab.offset, strict=True))
    return TensorBox(starts, shape, local), TensorBox(starts, shape, within)


def blocks_and_gaps(
    spans: Spans, header: int, record: FileRecord, block_bytes: int
) -> tuple[list[int], Spans]:
    """Returns the blocks of a file that `spans` and the first `header` bytes touch, and the bytes
    of these blocks outside `spans`, which must be read for the checksums."""
    touched = (
        range(start // block_bytes, -(-stop // block_bytes))
        for start, stop in ((0, header), *spans)
    )
    blocks = sorted(set(itertools.chain.from_iterable(touched)))
    whole = merged((block * block_bytes, (block + 1) * block_bytes) for block in blocks)
    # Spans lie in blocks, so in the sorted list of all edges every second one ends a gap.
    edges = sorted(min(edge, record.size) for span in (*whole, *spans) for edge in span)
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return blocks, [(start, stop) for start, stop in gaps if start < stop]
