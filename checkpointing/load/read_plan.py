"""Who reads which bytes of a checkpoint. Pure: no files, no ranks asked, no torch.

[Note: reading] Ranks read what they hold, straight to where they hold it, so that together they
read each byte once. What several ranks of a node hold, or hold in too short stretches, they read in
turn into memory that they share, and copy from there: an object store, and another node's memory,
send every byte as often as it is asked for.

  unit   a box of a tensor that is read as a whole: by each rank by itself, or by a node together
  slab   a stretch of a unit that is a box, too, and whose bytes lie side by side in the file
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checkpointing.format.crc import Replica
from checkpointing.format.layout import DTYPE_BYTES, FileRecord, StoredTensor, TensorMeta
from checkpointing.format.plan import (
    Box,
    Layout,
    Nodes,
    TensorSpec,
    local_boxes,
    merged,
    replica_set,
)

SMALL_BYTES = 1 << 16
"""A box of fewer bytes is read by every rank that holds it; a tensor of which a rank holds shorter
stretches is read whole."""

Spans = list[tuple[int, int]]
"""Stretches (start, stop) of a file, in order, neither touching nor overlapping."""


@dataclass(frozen=True)
class Unit:
    """A box of a tensor that is read as a whole."""

    name: str
    stored: StoredTensor
    box: Box
    replica: Replica
    """Which of the readers of this box this one is."""

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return _nbytes(self.stored.meta, self.box)


@dataclass(frozen=True)
class Slab:
    """A box whose bytes lie side by side in the file."""

    unit: Unit
    box: Box
    begin: int
    """In the file."""
    nbytes: int


@dataclass(frozen=True)
class ReadPlan:
    """What one rank has to do with, in the order of files and offsets."""

    own: list[Unit]
    """What it reads by itself."""
    shared: list[Unit]
    """What the ranks of its node read together; the same on all of them."""


def plan_reads(
    specs: Mapping[str, TensorSpec], stored: Mapping[str, StoredTensor], rank: int, nodes: Nodes
) -> ReadPlan:
    """Distribute the reading of tensors.

    Args:
        specs: all tensors, the same on all ranks of `nodes`.
        stored: where each of them lies.
        rank: global rank.
        nodes: the ranks that load together. Others that hold parts of the tensors load by
            themselves, and do not count.
    """
    node_of = {other: number for number, ranks in enumerate(nodes) for other in ranks}
    near = nodes[node_of[rank]]
    known: dict[tuple[tuple[Layout, ...], int | None], _Holders] = {}

    def holders_of(layouts: tuple[Layout, ...], one: int | None) -> _Holders:
        if (layouts, one) not in known:
            known[layouts, one] = _holders(layouts, one, rank, node_of)
        return known[layouts, one]

    plan = ReadPlan([], [])
    for name in sorted(specs, key=lambda name: (stored[name].file, stored[name].begin)):
        spec, at = specs[name], stored[name]
        whole = _is_fine(at.meta, spec.layouts[0])
        for one in near:
            holders = holders_of(spec.layouts, None if whole else one)
            if one not in holders.near:
                continue
            boxes = [_whole(at.meta)] if whole else local_boxes(at.meta.shape, spec.layouts, one)
            for box in boxes:
                nbytes = _nbytes(at.meta, box)
                if 0 < nbytes < SMALL_BYTES and one == rank:
                    plan.own.append(Unit(name, at, box, holders.of_rank))
                elif nbytes >= SMALL_BYTES and len(holders.near) == 1 and one == rank:
                    plan.own.append(Unit(name, at, box, holders.of_node))
                elif nbytes >= SMALL_BYTES and len(holders.near) > 1 and one == holders.near[0]:
                    plan.shared.append(Unit(name, at, box, holders.of_node))
    return plan


@dataclass(frozen=True)
class _Holders:
    """The ranks that hold the same part of a tensor, as one of them sees it."""

    near: tuple[int, ...]
    """Those on its node."""
    of_rank: Replica
    """Its replica, if each rank reads by itself."""
    of_node: Replica
    """Its replica, if the ranks of a node read together."""


def _holders(
    layouts: tuple[Layout, ...], one: int | None, rank: int, node_of: Mapping[int, int]
) -> _Holders:
    """Who holds what `one` holds, or any part (None), seen from `rank`."""
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
        Replica(ranks.index(rank) if rank in ranks else 0, len(ranks)),
        Replica(nodes.index(node) if node in nodes else 0, len(nodes)),
    )


def _is_fine(meta: TensorMeta, layout: Layout) -> bool:
    """Whether a rank holds the tensor in many short stretches. The same for all ranks."""
    parts = [1] * len(meta.shape)
    for size, split in zip(layout.mesh_shape, layout.splits, strict=True):
        if split.dim is not None:
            parts[split.dim] *= size * split.factor
    cut = max((dim for dim, count in enumerate(parts) if count > 1), default=0)
    stretch = DTYPE_BYTES[meta.dtype] * math.prod(meta.shape[cut:]) // math.prod(parts[cut:])
    return math.prod(meta.shape[:cut]) > 1 and stretch < SMALL_BYTES


def _whole(meta: TensorMeta) -> Box:
    origin = (0,) * len(meta.shape)
    return Box(origin, meta.shape, origin)


def _nbytes(meta: TensorMeta, box: Box) -> int:
    return DTYPE_BYTES[meta.dtype] * math.prod(box.shape)


# --- slabs -----------------------------------------------------------------------------------


def slabs(unit: Unit, most: int) -> Iterator[Slab]:
    """A unit in slabs of at most `most` bytes (at least an element), in the order of the file."""
    meta, box = unit.stored.meta, unit.box
    itemsize = DTYPE_BYTES[meta.dtype]
    # Bytes from one index of a dimension to the next.
    strides = [itemsize * math.prod(meta.shape[dim + 1 :]) for dim in range(len(meta.shape))]
    # A slab has one index of the dimensions before `dim`, some of it, and all of those after it.
    dims = range(len(meta.shape))
    last_cut = max((dim for dim in dims if box.shape[dim] != meta.shape[dim]), default=0)
    fitting = next((dim for dim in dims if strides[dim] <= most), len(meta.shape) - 1)
    dim = max(last_cut, fitting)
    if not meta.shape:
        yield Slab(unit, box, unit.stored.begin, itemsize)
        return
    rows = max(1, most // strides[dim])
    for outer in itertools.product(*(range(length) for length in box.shape[:dim])):
        for row in range(0, box.shape[dim], rows):
            inner = (*outer, row, *(0 for _ in box.shape[dim + 1 :]))
            shape = (
                *(1 for _ in outer),
                min(rows, box.shape[dim] - row),
                *box.shape[dim + 1 :],
            )
            offset = tuple(map(sum, zip(box.offset, inner, strict=True)))
            local = tuple(map(sum, zip(box.local_offset, inner, strict=True)))
            begin = unit.stored.begin + sum(map(math.prod, zip(offset, strides, strict=True)))
            yield Slab(unit, Box(offset, shape, local), begin, itemsize * math.prod(shape))


Dealt = list[tuple[Slab, int, int]]
"""Slabs with who reads it (place in the node) and where it lies in the shared memory."""


def deal(units: Sequence[Unit], places: int, area: int, most: int) -> Iterator[Dealt]:
    """What the ranks of a node read together, in rounds: in each, every rank fills its area of the
    shared memory, of `area` bytes, with slabs of at most `most`."""
    dealt: Dealt = []
    place, position = 0, 0
    for slab in itertools.chain.from_iterable(slabs(unit, most) for unit in units):
        if position + slab.nbytes > area:
            place, position = place + 1, 0
        if place == places:
            yield dealt
            dealt, place = [], 0
        dealt.append((slab, place, place * area + position))
        position += -(-slab.nbytes // ALIGNMENT) * ALIGNMENT
    if dealt:
        yield dealt


ALIGNMENT = 64
"""Where slabs begin in memory: fit for any dtype, and a line of the processor's cache."""


def intersection(slab: Box, held: Box) -> tuple[Box, Box] | None:
    """What a rank holds of a slab, with its place in the local tensor, and again with its place in
    the slab; None if nothing.

    Args:
        slab: its place in the whole tensor counts.
        held: one of the rank's boxes.
    """
    starts = tuple(map(max, zip(slab.offset, held.offset, strict=True)))
    stops = tuple(
        min(one + length, other + other_length)
        for one, length, other, other_length in zip(
            slab.offset, slab.shape, held.offset, held.shape, strict=True
        )
    )
    shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    if any(length <= 0 for length in shape):
        return None
    local = tuple(
        place + start - offset
        for place, start, offset in zip(held.local_offset, starts, held.offset, strict=True)
    )
    within = tuple(start - offset for start, offset in zip(starts, slab.offset, strict=True))
    return Box(starts, shape, local), Box(starts, shape, within)


# --- checks ----------------------------------------------------------------------------------


def blocks_and_gaps(
    spans: Spans, header: int, record: FileRecord, block_bytes: int
) -> tuple[list[int], Spans]:
    """The blocks of a file that `spans` and the first `header` bytes touch, and the bytes of these
    that are not in `spans`: what has to be read besides for their checksums."""
    blocks = sorted(
        {
            block
            for start, stop in ((0, header), *spans)
            for block in range(start // block_bytes, -(-stop // block_bytes))
        }
    )
    whole = merged((block * block_bytes, (block + 1) * block_bytes) for block in blocks)
    # Spans lie in the blocks, so that of all edges in order each second one ends a gap.
    edges = sorted(min(edge, record.size) for span in (*whole, *spans) for edge in span)
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return blocks, [(start, stop) for start, stop in gaps if start < stop]
