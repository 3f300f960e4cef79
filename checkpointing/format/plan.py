"""Which rank holds which bytes of a tensor, and which rank writes them. Pure: no I/O, no torch; nor
numpy, with which a writer process would take 0.1 s longer to start.

A checkpoint has two sections, model and optimizer. In a collection of both, the joint name of a
tensor is model/<name> or optimizer/<name>."""

import hashlib
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeVar

from isal.isal_zlib import crc32

from checkpointing.format.layout import (
    DTYPE_BYTES,
    MODEL,
    OPTIMIZER,
    FileLayoutPart,
    LayoutTensor,
    TensorFile,
    TensorMeta,
    index_json,
    lay_out,
)
from checkpointing.wire import register


@dataclass(frozen=True)
class TensorSplit:
    """How one mesh dimension splits a tensor."""

    dim: int | None
    """Tensor dimension that is split, like torch.chunk; None: the tensor is replicated."""
    factor: int = 1
    """Number of parts into which the dimension is cut first; each part is then split over the mesh
    dimension (`_StridedShard.split_factor`)."""


REPLICATE = TensorSplit(None)

Nodes = tuple[tuple[int, ...], ...]
"""Global ranks of each node."""


@dataclass(frozen=True, eq=False)
class TensorLayout:
    """How a whole tensor is spread over the ranks of a mesh. Equality and hash use a digest that is
    computed once, because a plan compares layouts several times per tensor, and a layout may list
    tens of thousands of ranks."""

    ranks: tuple[int, ...]
    """Global ranks of the mesh, row-major."""
    mesh_shape: tuple[int, ...]
    splits: tuple[TensorSplit, ...]
    """One split per mesh dimension, applied from left to right."""

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        index = self._places.get(rank)
        if index is None:
            return None
        coordinate = []
        for size in reversed(self.mesh_shape):
            index, place = divmod(index, size)
            coordinate.append(place)
        return tuple(reversed(coordinate))

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    @cached_property
    def _digest(self) -> bytes:
        content = repr((self.ranks, self.mesh_shape, self.splits))
        return hashlib.sha256(content.encode()).digest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, TensorLayout) and self._digest == other._digest)

    def __hash__(self) -> int:
        return hash(self._digest)


def replicated(ranks: Sequence[int]) -> TensorLayout:
    """Returns the layout of a tensor that each of `ranks` holds whole."""
    return TensorLayout(tuple(ranks), (len(ranks),), (REPLICATE,))


@dataclass(frozen=True)
class TensorSpec:
    """A whole tensor and its distribution. With several layouts, disjoint meshes hold copies, and
    each mesh is known only to its own ranks."""

    meta: TensorMeta
    layouts: tuple[TensorLayout, ...]


register(TensorLayout, shared=True)  # layouts are few, but large: each lists all ranks of its mesh
register(TensorSpec)


@dataclass(frozen=True)
class TensorBox:
    """A rectangle of a whole tensor."""

    offset: tuple[int, ...]
    """First index in the whole tensor."""
    shape: tuple[int, ...]
    local_offset: tuple[int, ...]
    """First index in the rank's local tensor."""

    @staticmethod
    def whole(shape: tuple[int, ...]) -> "TensorBox":
        origin = (0,) * len(shape)
        return TensorBox(origin, shape, origin)

    def nbytes(self, meta: TensorMeta) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[meta.dtype]


@dataclass(frozen=True)
class TensorPiece:
    """A part of a tensor that one rank contributes to a save."""

    name: str
    stored: LayoutTensor
    """Position of the whole tensor in the checkpoint."""
    box: TensorBox


def merge_specs(specs_of_ranks: Mapping[int, Mapping[str, TensorSpec]]) -> dict[str, TensorSpec]:
    """Merge the specs of all ranks, global rank → name → spec, into one per name, in the order in
    which names first appear. A replicated tensor is held by the ranks that list it, whatever its
    mesh says. Raises ValueError if ranks disagree about a tensor's shape, dtype or splits, or a
    rank lacks a tensor of which it must hold a part."""
    holders: dict[str, list[int]] = {}
    merged: dict[str, TensorSpec] = {}
    for rank, specs in specs_of_ranks.items():
        for name, spec in specs.items():
            holders.setdefault(name, []).append(rank)
            known = merged.setdefault(name, spec)
            if known.meta != spec.meta:
                raise ValueError(f"{name} is {known.meta} on one rank and {spec.meta} on another")
            # A rank knows only its own mesh; copies may be on another mesh.
            layouts = tuple(dict.fromkeys((*known.layouts, *spec.layouts)))
            if len({(layout.mesh_shape, layout.splits) for layout in layouts}) > 1:
                raise ValueError(f"{name} is split differently on different ranks: {layouts}")
            merged[name] = TensorSpec(known.meta, layouts)
    for name, spec in merged.items():
        meshes = {rank for layout in spec.layouts for rank in layout.ranks}
        if meshes == set(holders[name]):
            continue
        if any(split != REPLICATE for split in spec.layouts[0].splits):
            missing = sorted(meshes - set(holders[name]))
            raise ValueError(f"{name} is missing on ranks {missing}, which must hold parts of it")
        # A replicated tensor is held by the ranks that list it, whatever its mesh says.
        merged[name] = TensorSpec(spec.meta, (replicated(holders[name]),))
    return merged


def assign_files(files: Sequence[TensorFile], nodes: int) -> dict[str, int]:
    """Returns the node that owns each file: the largest file first, to the node with the fewest
    bytes so far (Graham's LPT rule, within 4/3 of the optimum). Equal on all ranks."""
    loads = [(0, node) for node in range(nodes)]
    owners = {}
    # the name breaks ties, so that all ranks get the same result
    for file in sorted(files, key=lambda file: (-file.size, file.name)):
        load, node = loads[0]
        heapq.heapreplace(loads, (load + file.size, node))
        owners[file.name] = node
    return owners


def plan_pieces(
    specs: Mapping[str, TensorSpec],
    stored: Mapping[str, LayoutTensor],
    owners: Mapping[str, tuple[int, ...]],
    rank: int,
) -> list[TensorPiece]:
    """Returns the pieces that `rank` contributes. Over all ranks every byte of every tensor occurs
    exactly once.

    The ranks that hold a box divide it among them. If some of them are on the node that owns the
    file, only these do, so that no bytes are sent. Each contributes a slab of equal size. The
    tensor's name decides which of them contributes a remaining row, or a small tensor as a whole.
    So the division of a tensor does not depend on other tensors.

    `specs` has all tensors, and is the same on all ranks; `owners`: file → ranks of the node that
    owns it."""
    pieces = []
    for name, spec in specs.items():
        boxes = local_boxes(spec.meta.shape, spec.layouts, rank)
        if not boxes:
            continue
        contributors = _contributors(spec.layouts, rank, owners[stored[name].file])
        if rank not in contributors:
            continue
        turn = contributors.index(rank) - _first(name, contributors)
        for box in boxes:
            slab = _share(spec, box, turn % len(contributors), len(contributors))
            if slab:
                pieces.append(TensorPiece(name, stored[name], slab))
    return pieces


def plan_file(
    file: TensorFile, specs: Mapping[str, TensorSpec], owner: tuple[int, ...]
) -> Iterator[tuple[int, TensorPiece]]:
    """Yields (rank, piece) for all pieces of one file, as `plan_pieces` assigns them."""
    for name, stored in file.tensors.items():
        spec = specs[name]
        done: set[int] = set()
        for rank in itertools.chain.from_iterable(layout.ranks for layout in spec.layouts):
            # one rank represents all ranks that hold the same boxes
            if rank in done:
                continue
            done.update(replica_set(spec.layouts, rank))
            contributors = _contributors(spec.layouts, rank, owner)
            count, first = len(contributors), _first(name, contributors)
            for box in local_boxes(spec.meta.shape, spec.layouts, rank):
                for turn in range(count):
                    slab = _share(spec, box, turn, count)
                    if slab:
                        yield contributors[(first + turn) % count], TensorPiece(name, stored, slab)


SMALL_BYTES = 1 << 16
"""Smallest box in bytes that is divided among the ranks that hold it."""


def _first(name: str, contributors: Sequence[int]) -> int:
    return crc32(name.encode()) % len(contributors)


def _share(spec: TensorSpec, box: TensorBox, turn: int, count: int) -> TensorBox | None:
    """Returns the slab of a box that contributor `turn` of `count` contributes; None if empty."""
    if count == 1:
        return box
    if box.nbytes(spec.meta) < SMALL_BYTES:
        return None if turn else box
    # the first dimension that can be divided gives the longest contiguous slabs
    dim = next(dim for dim, length in enumerate(box.shape) if length > 1)
    rows, more = divmod(box.shape[dim], count)
    start, length = turn * rows + min(turn, more), rows + (turn < more)
    if length == 0:
        return None

    def moved(offset: tuple[int, ...]) -> tuple[int, ...]:
        return (*offset[:dim], offset[dim] + start, *offset[dim + 1 :])

    shape = (*box.shape[:dim], length, *box.shape[dim + 1 :])
    return TensorBox(moved(box.offset), shape, moved(box.local_offset))


@lru_cache(maxsize=4096)
def replica_set(layouts: tuple[TensorLayout, ...], rank: int) -> tuple[int, ...]:
    """Returns the ranks that hold the same boxes as `rank`, with `rank`; () if it holds none."""
    coordinate = _coordinate(layouts, rank)
    if coordinate is None:
        return ()
    ranks: list[int] = []
    for layout in layouts:
        places = [
            range(size) if split.dim is None else [place]
            for size, split, place in zip(layout.mesh_shape, layout.splits, coordinate, strict=True)
        ]
        for place in itertools.product(*places):
            index = 0
            for size, position in zip(layout.mesh_shape, place, strict=True):
                index = index * size + position
            ranks.append(layout.ranks[index])
    return tuple(dict.fromkeys(ranks))


# cached, as thousands of tensors share a few layouts
@lru_cache(maxsize=65536)
def _contributors(
    layouts: tuple[TensorLayout, ...], rank: int, owner: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the ranks that hold the same boxes as `rank` and are in `owner`, the ranks of the
    node that owns the file. If there are none, returns all ranks that hold these boxes. `rank`
    holds at least one box."""

    def shard(of: int) -> list[int] | None:
        coordinate = _coordinate(layouts, of)
        if coordinate is None:
            return None
        splits = layouts[0].splits
        return [
            place for place, split in zip(coordinate, splits, strict=True) if split.dim is not None
        ]

    mine = shard(rank)
    return tuple(other for other in owner if shard(other) == mine) or replica_set(layouts, rank)


@lru_cache(maxsize=65536)
def _coordinate(layouts: tuple[TensorLayout, ...], rank: int) -> tuple[int, ...] | None:
    # a rank is on at most one of several meshes
    coordinates = (layout.coordinate(rank) for layout in layouts)
    return next((coordinate for coordinate in coordinates if coordinate is not None), None)


@lru_cache(maxsize=4096)
def local_boxes(
    shape: tuple[int, ...], layouts: tuple[TensorLayout, ...], rank: int
) -> tuple[TensorBox, ...]:
    """Returns the boxes of a whole tensor of `shape` that `rank` holds, none of them empty. Each
    dimension is split like torch.chunk: parts of ceil(size / count), the last parts shorter or
    empty."""
    coordinate = _coordinate(layouts, rank)
    if coordinate is None:
        return ()
    # for each tensor dimension: stretches (start, stop) of the whole, in local order
    stretches = [[(0, size)] for size in shape]
    for size, split, place in zip(
        layouts[0].mesh_shape, layouts[0].splits, coordinate, strict=True
    ):
        if split.dim is not None:
            stretches[split.dim] = [
                stretch
                for part in range(split.factor)
                for stretch in _chunk(_chunk(stretches[split.dim], split.factor, part), size, place)
            ]
    dims = [_with_local_start(merged(stretch)) for stretch in stretches]
    return tuple(
        TensorBox(
            offset=tuple(start for start, _, _ in choice),
            shape=tuple(stop - start for start, stop, _ in choice),
            local_offset=tuple(local for _, _, local in choice),
        )
        for choice in itertools.product(*dims)
    )


def _chunk(stretches: list[tuple[int, int]], count: int, which: int) -> list[tuple[int, int]]:
    """Returns part `which` of `count` of the concatenated stretches."""
    total = sum(stop - start for start, stop in stretches)
    part = -(-total // count)
    first, last = part * which, min(part * (which + 1), total)
    chunk, position = [], 0
    for start, stop in stretches:
        cut = max(start, start + first - position), min(stop, start + last - position)
        if cut[0] < cut[1]:
            chunk.append(cut)
        position += stop - start
    return chunk


def _with_local_start(stretches: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    starts = itertools.accumulate((stop - start for start, stop in stretches), initial=0)
    return [(start, stop, local) for (start, stop), local in zip(stretches, starts, strict=False)]


@dataclass(frozen=True)
class TensorExtent:
    """Bytes that are contiguous both in a box and in the whole tensor."""

    offset: int
    """Bytes from the start of the whole tensor."""
    box_offset: int
    """Bytes from the start of the box."""
    length: int


def extents_of(meta: TensorMeta, box: TensorBox) -> Iterator[TensorExtent]:
    """Yields where the bytes of a box lie, as extents in the order of the box."""
    itemsize = DTYPE_BYTES[meta.dtype]
    strides = [itemsize * math.prod(meta.shape[dim + 1 :]) for dim in range(len(meta.shape))]
    origin = sum(map(math.prod, zip(box.offset, strides, strict=True)))
    # Dimensions after the last one in which the box is cut are whole, so they belong to the extent.
    cut = [dim for dim in range(len(box.shape)) if box.shape[dim] != meta.shape[dim]]
    outer = cut[-1] if cut else 0
    length = itemsize * math.prod(box.shape[outer:])
    for number in range(math.prod(box.shape[:outer])):
        offset, rest = origin, number
        for dim in reversed(range(outer)):
            rest, position = divmod(rest, box.shape[dim])
            offset += position * strides[dim]
        yield TensorExtent(offset, number * length, length)


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns stretches (start, stop), sorted. Touching and overlapping stretches are joined; empty
    ones are dropped."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if start < stop and result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(stop, result[-1][1])
        elif start < stop:
            result.append((start, stop))
    return result


T = TypeVar("T")


Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True)
class SavePlanInput:
    """Specs and files from which every rank and every writer derives the same plan."""

    specs: Specs
    files: Sequence[TensorFile]
    indexes: Mapping[str, bytes]
    tensors: str
    """Digest of names, dtypes, shapes and files."""


def by_section(model: Mapping[str, T], optimizer: Mapping[str, T]) -> dict[str, T]:
    """Returns the values of both sections in one dictionary, as model/<name> and
    optimizer/<name>."""
    return {**_prefixed(MODEL.stem, model), **_prefixed(OPTIMIZER.stem, optimizer)}


def _prefixed(section: str, values: Mapping[str, T]) -> dict[str, T]:
    return {f"{section}/{name}": value for name, value in values.items()}


def plan_input(
    model: Specs,
    optimizer: Specs,
    max_shard_bytes: int,
    of_model: FileLayoutPart = MODEL,
) -> SavePlanInput:
    """Decide in which file and where each tensor is stored, from names, dtypes and shapes alone.
    `of_model` is MODEL or ADAPTER."""
    files: list[TensorFile] = []
    indexes: dict[str, bytes] = {}
    sections = (MODEL.stem, of_model), (OPTIMIZER.stem, OPTIMIZER)
    for (prefix, section), specs in zip(sections, (model, optimizer), strict=True):
        metas = {name: spec.meta for name, spec in specs.items()}
        of_section = lay_out(section, metas, max_shard_bytes)
        indexes[section.index] = index_json(of_section)
        files += [replace(file, tensors=_prefixed(prefix, file.tensors)) for file in of_section]
    digest = hashlib.sha256(b"".join(file.header for file in files)).hexdigest()
    return SavePlanInput(by_section(model, optimizer), files, indexes, digest)


def stored_by_name(files: Sequence[TensorFile]) -> dict[str, LayoutTensor]:
    return {name: tensor for file in files for name, tensor in file.tensors.items()}


_MASK = (1 << 64) - 1


def not_finite(names: Sequence[str]) -> str:
    """Returns the message about tensors that hold NaN or infinity and must not."""
    more = " and other tensors" if len(names) > 1 else ""
    return f"NaN or infinity in {names[0]}{more}"


@dataclass(frozen=True)
class SectionNumbers:
    """Digests and non-finite tensors of a step or of a part of it. Summaries can be added."""

    weights: int = 0
    """Digest of the model's tensors; see digests.py [Note: digest]."""
    moments: int = 0
    """Digest of the optimizer's tensors."""
    bad: tuple[str, ...] = ()
    """The first two tensors that hold NaN or infinity although they must be finite."""
    odd: tuple[str, ...] = ()
    """All tensors that hold NaN or infinity and need not be finite."""

    def __add__(self, other: "SectionNumbers") -> "SectionNumbers":
        return SectionNumbers(
            (self.weights + other.weights) & _MASK,
            (self.moments + other.moments) & _MASK,
            # the message names one tensor, and says whether there are others
            tuple(dict.fromkeys(self.bad + other.bad))[:2],
            tuple(dict.fromkeys(self.odd + other.odd)),
        )
