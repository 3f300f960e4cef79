"""The plan covers every byte once and spreads replicas evenly; boxes are torch's own splits."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from checkpointing.format.layout import MODEL, TensorMeta, lay_out
from checkpointing.format.plan import (
    REPLICATE,
    TensorLayout,
    TensorSpec,
    TensorSplit,
    assign_files,
    extents_of,
    local_boxes,
    merge_specs,
    plan_file,
    plan_pieces,
    replicated,
)
from checkpointing.wire import pack, unpack


@st.composite
def layouts(draw, dims: int, world_size: int) -> TensorLayout:
    shape = draw(st.sampled_from([s for s in MESHES if math.prod(s) == world_size]))
    splits = [
        draw(
            st.just(REPLICATE) | st.builds(TensorSplit, st.integers(0, dims - 1), st.integers(1, 3))
        )
        if dims
        else REPLICATE
        for _ in shape
    ]
    return TensorLayout(tuple(range(world_size)), shape, tuple(splits))


MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 3), (6,), (2, 3), (3, 2), (8,), (2, 2, 2), (4, 2)]


@st.composite
def worlds(draw) -> tuple[int, dict[str, TensorSpec]]:
    world_size = math.prod(draw(st.sampled_from(MESHES)))
    specs = {}
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        layout = draw(st.just(replicated(range(world_size))) | layouts(len(shape), world_size))
        meta = TensorMeta(draw(st.sampled_from(["F32", "BF16", "I64", "BOOL"])), shape)
        specs[f"t{number}"] = TensorSpec(meta, (layout,))
    return world_size, specs


@given(worlds(), st.integers(1, 2000), st.integers(1, 4))
def test_every_byte_is_contributed_exactly_once(world, max_bytes, ranks_per_node):
    world_size, specs = world
    files = lay_out(MODEL, {name: spec.meta for name, spec in specs.items()}, max_bytes)
    stored = {name: tensor for file in files for name, tensor in file.tensors.items()}
    nodes = [
        tuple(range(first, min(first + ranks_per_node, world_size)))
        for first in range(0, world_size, ranks_per_node)
    ]
    owners = {file: nodes[node] for file, node in assign_files(files, len(nodes)).items()}
    written = {file.name: bytearray(file.size) for file in files}
    for file in files:
        written[file.name][: len(file.header)] = b"\1" * len(file.header)
    contributed = set()
    for rank in range(world_size):
        for piece in plan_pieces(specs, stored, owners, rank):
            contributed.add((rank, piece))
            for run in extents_of(piece.stored.meta, piece.box):
                start = piece.stored.begin + run.offset
                for byte in range(start, start + run.length):
                    written[piece.stored.file][byte] += 1
    assert all(set(data) <= {1} for data in written.values())
    # The owner of a file sees the same pieces.
    seen = [pair for file in files for pair in plan_file(file, specs, owners[file.name])]
    assert set(seen) == contributed
    assert len(seen) == len(contributed)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_replicas_share_the_work_evenly_on_the_node_that_writes(nodes):
    world_size = 8
    specs = {
        f"layers.{number}.weight": TensorSpec(
            TensorMeta("F32", (1001, 64)), (replicated(range(world_size)),)
        )
        for number in range(64)
    }
    files = lay_out(MODEL, {name: spec.meta for name, spec in specs.items()}, 4 * 1001 * 64 * 4)
    stored = {name: tensor for file in files for name, tensor in file.tensors.items()}
    per_node = world_size // nodes
    ranks = [tuple(range(node * per_node, (node + 1) * per_node)) for node in range(nodes)]
    owners = {file: ranks[node] for file, node in assign_files(files, nodes).items()}
    loads = []
    for rank in range(world_size):
        pieces = plan_pieces(specs, stored, owners, rank)
        assert all(rank in owners[piece.stored.file] for piece in pieces), "nothing is sent"
        loads.append(sum(math.prod(piece.box.shape) for piece in pieces))
    assert max(loads) <= 1.02 * sum(loads) / world_size


@given(
    st.lists(st.integers(0, 11), min_size=1, max_size=3),
    st.sampled_from([s for s in MESHES if len(s) < 3]),
    st.data(),
)
def test_boxes_are_what_torch_gives_each_rank(shape, mesh, data):
    whole = torch.arange(math.prod(shape)).reshape(shape)
    layout = data.draw(
        layouts(len(shape), math.prod(mesh)).filter(lambda drawn: drawn.mesh_shape == mesh)
    )
    for rank, place in enumerate(itertools.product(*map(range, mesh))):
        local = whole
        for size, split, position in zip(mesh, layout.splits, place, strict=True):
            if split.dim is not None:
                shard = (
                    Shard(split.dim)
                    if split.factor == 1
                    else _StridedShard(split.dim, split_factor=split.factor)
                )
                parts, _ = shard._split_tensor(local, size, with_padding=False)
                local = parts[position]
        ours = torch.full_like(local, -1)
        boxes = local_boxes(tuple(shape), (layout,), rank)
        for box in boxes:
            there = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            here = tuple(slice(o, o + n) for o, n in zip(box.local_offset, box.shape, strict=True))
            ours[here] = whole[there]
        assert torch.equal(ours, local)
        assert sum(math.prod(box.shape) for box in boxes) == local.numel()


def test_layouts_are_equal_by_what_they_say_in_any_process():
    def layout():
        return TensorLayout(tuple(range(8)), (4, 2), (REPLICATE, TensorSplit(0)))

    one = layout()
    assert one.coordinate(5) == (2, 1)
    sent = unpack(pack(TensorSpec(TensorMeta("F32", (8,)), (one,)))).layouts[0]
    assert len({one, layout(), sent}) == 1
    assert one != TensorLayout(tuple(range(8)), (4, 2), (TensorSplit(0), REPLICATE))


def test_ranks_that_disagree_are_told():
    meta = TensorMeta("F32", (4, 4))
    rows = TensorLayout((0, 1), (2,), (TensorSplit(0),))
    columns = TensorLayout((0, 1), (2,), (TensorSplit(1),))
    one = {"w": TensorSpec(meta, (rows,))}
    with pytest.raises(ValueError, match=r"w is F32\[4, 4\] on one rank and F32\[4\] on another"):
        merge_specs({0: one, 1: {"w": TensorSpec(TensorMeta("F32", (4,)), (rows,))}})
    with pytest.raises(ValueError, match="w is split differently"):
        merge_specs({0: one, 1: {"w": TensorSpec(meta, (columns,))}})
    with pytest.raises(ValueError, match=r"w is missing on ranks \[1\]"):
        merge_specs({0: one, 1: {}})
