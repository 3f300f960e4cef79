"""RankGroup of any layout read any file together: right to the bit, each byte once, checked."""

import errno
import itertools
import math
import os
import shutil
import time
import zlib
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing import DamagedCheckpoint, StorageError
from checkpointing.format.digests import CrcBlockSums, CrcReader
from checkpointing.format.layout import MODEL, FileRecord, TensorMeta, lay_out
from checkpointing.format.plan import local_boxes, merged
from checkpointing.format.tensors import TORCH_DTYPES, as_bytes
from checkpointing.load import fill, read_plan
from checkpointing.load.fill import LoadWindow, make_window, read_tensors
from checkpointing.load.read_plan import blocks_and_gaps, intersection, plan_reads, slabs
from checkpointing.load.segments import LoadFiles
from checkpointing.ranks import RankGroup
from checkpointing.storage.steps import storage_of
from tests.checkpointing.format.test_plan import worlds
from tests.checkpointing.worlds import STRATEGIES, local, run_ranks, same_bits, spread, whole_state

DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


# --- plans -----------------------------------------------------------------------------------


@given(worlds(), st.data())
def test_every_rank_gets_every_byte_it_holds_and_every_byte_is_accounted_for_once(world, data):
    world_size, specs = world
    per_node = data.draw(st.integers(1, world_size))
    nodes = nodes_of(world_size, per_node)
    most = data.draw(st.sampled_from([8, 50, 1000]))
    (file, *_) = lay_out(MODEL, {name: spec.meta for name, spec in specs.items()}, 10**9)
    accounted = np.zeros(file.size, int)

    def account(unit):
        end = 0
        for slab in slabs(unit, most):
            assert slab.nbytes <= most
            assert slab.begin >= end  # in the order of the file
            end = slab.begin + slab.nbytes
            if unit.redundant.index == 0:
                accounted[slab.begin : end] += 1

    with patch.object(read_plan, "SMALL_BYTES", data.draw(st.sampled_from([1, 40, 10**6]))):
        for node in nodes:
            plans = {rank: plan_reads(specs, file.tensors, rank, nodes) for rank in node}
            shared = plans[node[0]].shared
            for unit in (*shared, *(unit for rank in node for unit in plans[rank].own)):
                account(unit)
            for rank, plan in plans.items():
                assert plan.shared == shared
                for name, spec in specs.items():
                    boxes = local_boxes(spec.meta.shape, spec.layouts, rank)
                    got = np.zeros(spec.meta.shape, int)
                    for unit in (*plan.own, *shared):
                        if unit.name == name:
                            for slab, box in itertools.product(slabs(unit, most), boxes):
                                common = intersection(slab.box, box)
                                if common:
                                    got[slices(common[0].offset, common[0].shape)] += 1
                    held = np.zeros(spec.meta.shape, int)
                    for box in boxes:
                        held[slices(box.offset, box.shape)] += 1
                    assert (got == held).all()
    assert (accounted[len(file.header) :] == 1).all()


def nodes_of(world_size, per_node):
    ranks = tuple(range(world_size))
    return tuple(ranks[start : start + per_node] for start in range(0, world_size, per_node))


def slices(offset, shape):
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


@given(st.data())
def test_checksums_of_parts_add_up_to_those_of_blocks(data):
    content = data.draw(st.binary(min_size=1, max_size=300))
    block = data.draw(st.sampled_from([1, 7, 64, 1000]))
    starts = range(0, len(content), block)
    record = FileRecord(
        len(content), tuple(zlib.crc32(content[start : start + block]) for start in starts)
    )
    cuts = sorted({0, len(content), *data.draw(st.lists(st.integers(0, len(content))))})
    ranks = [CrcBlockSums({"f": record}, block) for _ in range(3)]
    wrong = data.draw(st.integers(0, len(cuts) - 2)) if data.draw(st.booleans()) else None
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        count = data.draw(st.integers(1, 3))
        liar = data.draw(st.integers(0, count - 1))
        for index, rank in enumerate(data.draw(st.permutations(range(3)))[:count]):
            part = bytearray(content[start:stop])
            part[0] ^= number == wrong and index == liar
            ranks[rank].take("f", start, memoryview(part), CrcReader(index, count))
    total = np.bitwise_xor.reduce([rank.contribution() for rank in ranks])
    bad = ranks[0].differing(total, {"f": range(len(starts))})
    assert bad == ([] if wrong is None else [("f", cuts[wrong] // block)])


@given(st.data())
def test_gaps_are_what_blocks_hold_besides(data):
    size, block = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 50))
    edges = sorted(data.draw(st.lists(st.integers(0, size), max_size=8)))
    spans = merged(zip(edges[::2], edges[1::2], strict=False))
    header = data.draw(st.integers(0, size))
    blocks, gaps = blocks_and_gaps(spans, header, FileRecord(size, ()), block)
    read = np.zeros(size, int)
    for start, stop in (*spans, *gaps):
        read[start:stop] += 1
    touched = {
        byte // block for start, stop in (*spans, (0, header)) for byte in range(start, stop)
    }
    assert blocks == sorted(touched)
    assert [int(byte // block in touched) for byte in range(size)] == list(read)


# --- real files, real ranks ------------------------------------------------------------------


class Written:
    """Tensors in files of a folder, with checksums of blocks of `block` bytes."""

    def __init__(self, folder: Path, whole, block: int, max_bytes: int = 10**9) -> None:
        metas = {
            name: TensorMeta(DTYPES[tensor.dtype], tuple(tensor.shape))
            for name, tensor in whole.items()
        }
        self.folder, self.block = folder, block
        self.files = lay_out(MODEL, metas, max_bytes)
        self.stored = {name: at for file in self.files for name, at in file.tensors.items()}
        self.records = {}
        folder.mkdir(parents=True, exist_ok=True)
        for file in self.files:
            parts = sorted(file.tensors.items(), key=lambda item: item[1].begin)
            data = (as_bytes(whole[name]).numpy().tobytes() for name, _ in parts)
            content = file.header + b"".join(data)
            (folder / file.name).write_bytes(content)
            crcs = (zlib.crc32(content[i : i + block]) for i in range(0, len(content), block))
            self.records[file.name] = FileRecord(len(content), tuple(crcs))

    def open(self, name: str):
        return storage_of(self.folder).open(self.folder / name)

    def load(self, tensors, group, nodes=None, open_it=None, records=None, **options) -> None:
        (specs,) = RankGroup(group).specs(lambda: [tensors])
        records = self.records if records is None else records
        with patch.object(fill, "BLOCK_BYTES", self.block):
            files = LoadFiles(self.folder, open_it or self.open, self.stored, records)
            read_tensors(files, specs, tensors, group, nodes, **options)


def world_of(strategy: str) -> int:
    return math.prod(STRATEGIES[strategy][0]) if STRATEGIES[strategy][0] else 3


def zeros(tensors, dtype=None):
    return {
        name: torch.zeros_like(
            tensor, dtype=dtype if dtype and tensor.is_floating_point() else None
        )
        for name, tensor in tensors.items()
    }


@settings(max_examples=6, deadline=None)
@given(
    strategy=st.sampled_from(sorted(STRATEGIES)),
    per_node=st.integers(1, 4),
    block=st.sampled_from([16, 100, 5000]),
    small=st.sampled_from([1, 50, 1 << 16]),
    step=st.sampled_from([16, 64, 1 << 20]),
    threads=st.sampled_from([1, 3]),
    dtype=st.sampled_from([None, torch.float32, torch.bfloat16]),
    checked=st.booleans(),
)
def test_any_layout_reads_what_was_written(
    tmp_path_factory, strategy, per_node, block, small, step, threads, dtype, checked
):
    folder = tmp_path_factory.mktemp("any")
    model, optimizer = whole_state()
    whole = {**model, **optimizer}
    written = Written(folder / "files", whole, block, max_bytes=700)
    world_size = world_of(strategy)
    nodes = nodes_of(world_size, per_node)

    def work(rank):
        wanted = spread(whole, strategy)
        targets, alone = zeros(wanted, dtype), zeros(wanted, dtype)
        options = {"step_bytes": step, "threads": threads}
        if not checked:
            options["records"] = {}
        written.load(targets, dist.group.WORLD, nodes, **options)
        written.load(alone, None, **options)
        for name in wanted:
            for found in (local(targets[name]), local(alone[name])):
                right = local(wanted[name])
                if found.dtype == right.dtype:
                    assert same_bits(found, right), name
                else:  # which bits a converted NaN has is nobody's promise
                    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
                    torch.testing.assert_close(found, right.to(found.dtype), **exact)
        return "good"

    with (
        patch.object(read_plan, "SMALL_BYTES", small),
        patch.object(fill, "HALF_BYTES", 512),  # many rounds
    ):
        assert run_ranks(world_size, work, folder / "ranks") == ["good"] * world_size


class Counting:
    """Opens files; counts what is read, and does as told with it."""

    def __init__(self, written: Written, hook=None) -> None:
        self.written, self.hook, self.bytes = written, hook, 0

    @contextmanager
    def __call__(self, name: str):
        with self.written.open(name) as file:
            yield CountingFile(file, name, self)


class CountingFile:
    def __init__(self, file, name, counting) -> None:
        self.file, self.name, self.counting = file, name, counting
        self.size = file.size

    def read_into(self, buffers, offset):
        count = self.file.read_into(buffers, offset)
        self.counting.bytes += count
        if self.counting.hook:
            self.counting.hook(self.name, buffers, offset)
        return count


def big_state():
    """10 MB in tensors of all sizes; blocks are shared by ranks."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"a": (1001, 1003), "b": (64, 130, 100), "c": (900,), "d": (), "e": (333, 1200)}
    model = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    return {**model, "f": torch.randn(700, 900, generator=draw).bfloat16()}


@pytest.fixture(scope="session")
def big(tmp_path_factory):
    return Written(tmp_path_factory.mktemp("big"), big_state(), 1 << 18, max_bytes=6_000_000)


@pytest.mark.parametrize(
    ("strategy", "per_node"),
    [
        ("rows-1", 1), ("rows-2", 2), ("rows-2", 1), ("rows-4", 4), ("rows-4", 2),
        ("replicated", 3), ("hybrid-2x2", 4), ("columns-2", 2), ("strided-2x2", 4),
    ],
)  # fmt: skip
def test_a_node_reads_what_it_holds_once(big, strategy, per_node, tmp_path):
    world_size = world_of(strategy)
    nodes = nodes_of(world_size, per_node)

    def work(rank):
        counting = Counting(big)
        targets = zeros(spread(big_state(), strategy))
        big.load(targets, dist.group.WORLD, nodes, counting)
        return counting.bytes, sum(as_bytes(local(target)).numel() for target in targets.values())

    results = run_ranks(world_size, work, tmp_path)
    read = sum(count for count, _ in results)
    whole = sum(at.meta.nbytes for at in big.stored.values())
    assert read <= 1.01 * whole
    if "rows" in strategy and len(nodes) == 1:  # each rank reads its own
        assert all(count <= 1.01 * held for count, held in results)


def all_fail(world_size, work, folder, *messages):
    """Every rank raises the same damage, and nothing stays behind."""
    before = set(Path("/dev/shm").glob("*window*"))
    results = run_ranks(world_size, work, folder)
    assert all(isinstance(result, DamagedCheckpoint) for result in results), results
    assert len({str(result) for result in results}) == 1
    for message in messages:
        assert message in str(results[0])
    deadline = time.monotonic() + 20
    while any(left.exists() for left in set(Path("/dev/shm").glob("*window*")) - before):
        assert time.monotonic() < deadline  # those of tests that run beside this one go soon
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("strategy", "per_node", "name"),
    [
        ("rows-2", 2, "a"),  # each rank reads its rows
        ("rows-2", 1, "a"),
        ("replicated", 3, "b"),  # through the window
        ("replicated", 1, "b"),  # every node by itself
        ("columns-2", 2, "e"),
        ("replicated", 3, "d"),  # every rank by itself
        ("rows-2", 2, None),  # the header
    ],
)
def test_a_flipped_bit_is_found_on_all_ranks(strategy, per_node, name, tmp_path):
    written = Written(tmp_path / "files", big_state(), 1 << 18, max_bytes=6_000_000)
    at = written.stored[name or "a"]
    # Of tensor "a": in the middle, where the block is shared by both ranks.
    offset = at.begin + at.meta.nbytes // 2 if name else 9
    flip(written.folder / at.file, offset)
    nodes = nodes_of(world_of(strategy), per_node)

    def work(rank):
        written.load(zeros(spread(big_state(), strategy)), dist.group.WORLD, nodes)

    block = f"{at.file}: checksum of block {offset >> 18} (from byte {offset >> 18 << 18} on)"
    all_fail(world_of(strategy), work, tmp_path / "ranks", str(written.folder), block)


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("liar", [0, 1, 2])
def test_a_replica_that_gets_other_bytes_than_the_rest_is_found(big, liar, tmp_path):
    at = big.stored["b"]

    def lie(name, buffers, offset):
        if name == at.file and offset <= at.begin + 4000 < offset + sum(map(len, buffers)):
            buffers[-1][-1] ^= 1

    def work(rank):
        opener = Counting(big, lie if rank == liar else None)
        targets = zeros(spread(big_state(), "replicated"))
        big.load(targets, dist.group.WORLD, nodes_of(3, 1), opener)

    all_fail(3, work, tmp_path, f"{at.file}: checksum of block ")


@pytest.mark.parametrize("strategy", ["rows-3", "replicated"])
@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_cannot_read_fails_all(big, strategy, failing, tmp_path):
    at = big.stored["b"]

    def fail(name, buffers, offset):
        if name == at.file and offset >= at.begin:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(big.folder / name))

    def work(rank):
        opener = Counting(big, fail if rank == failing else None)
        big.load(zeros(spread(big_state(), strategy)), dist.group.WORLD, None, opener)

    all_fail(3, work, tmp_path, f"cannot be read: {big.folder / at.file}: Input/output error (EIO)")


def test_a_file_that_ends_too_early_is_refused(tmp_path):
    written = Written(tmp_path, big_state(), 1 << 18)
    (path,) = tmp_path.iterdir()
    os.truncate(path, path.stat().st_size - 1)
    for records in ({}, written.records):
        with pytest.raises(DamagedCheckpoint, match=r"model-.*: ends too early; it was cut short"):
            written.load(zeros(big_state()), None, records=records)


def test_what_is_neither_contiguous_nor_on_its_own_is_filled_too(big):
    whole = big_state()
    targets = zeros(whole)
    targets["a"] = torch.zeros(1003, 1001).t()
    targets["e"] = torch.zeros(333, 2400)[:, ::2]
    big.load(targets, None)
    assert all(torch.equal(targets[name], whole[name]) for name in whole)


def test_without_a_group_a_rank_checks_the_blocks_of_its_rows_and_no_others(tmp_path):
    written = Written(tmp_path / "files", big_state(), 1 << 18)
    at = written.stored["a"]
    flip(tmp_path / "files" / at.file, at.begin + at.meta.nbytes // 4)  # in the rows of rank 0

    def work(rank):
        counting = Counting(written)
        targets = zeros(spread({"a": big_state()["a"]}, "rows-2"))
        (specs,) = RankGroup(None).specs(lambda: [targets])
        with patch.object(fill, "BLOCK_BYTES", written.block):
            files = LoadFiles(tmp_path, counting, {"a": at}, written.records)
            read_tensors(files, specs, targets, None)
        return counting.bytes

    first, second = run_ranks(2, work, tmp_path / "ranks")
    assert isinstance(first, DamagedCheckpoint)
    assert second <= at.meta.nbytes / 2 + at.begin + 3 * written.block


def test_a_window_that_somebody_has_exchanged_is_not_opened(tmp_path):
    """RankGroup open it by its name, in a folder that others write to."""
    path, area = make_window(1, 1, 1)
    aside = tmp_path / "aside"
    try:
        LoadWindow(path, area, [0], 0, None)
        os.chmod(path, 0o666)
        with pytest.raises(StorageError, match="somebody else has put it there"):
            LoadWindow(path, area, [0], 0, None)
        os.chmod(path, 0o600)
        shutil.move(path, aside)
        os.symlink(aside, path)
        with pytest.raises(OSError, match="symbolic link"):
            LoadWindow(path, area, [0], 0, None)
    finally:
        Path(path).unlink()
