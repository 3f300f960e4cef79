"""Reads tensor files into the tensors of all ranks, through memory that the ranks of a node share;
see read_plan.py [Note: reading]."""

import itertools
import mmap
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.errors import DamagedCheckpoint, StorageError
from checkpointing.format.digests import ONLY, CrcBlockSums
from checkpointing.format.layout import BLOCK_BYTES
from checkpointing.format.plan import Nodes, TensorSpec, extents_of, local_boxes, merged, not_finite
from checkpointing.format.tensors import TORCH_DTYPES
from checkpointing.load.read_plan import (
    ALIGNMENT,
    LoadUnit,
    ReadRound,
    blocks_and_gaps,
    plan_reads,
    read_rounds,
    slabs,
)
from checkpointing.load.segments import (
    LoadFiles,
    LoadJob,
    LoadSegment,
    LoadSegmentReader,
    LoadTarget,
    deliver,
    jobs,
)
from checkpointing.ranks import RankGroup, failing_alike
from checkpointing.storage.folders import is_private

HALF_BYTES = 32 << 20
"""Largest number of bytes that the ranks of a node fill in a round. They synchronise after each
round, so rounds must not be small."""
_FOLDERS = ("/dev/shm", tempfile.gettempdir())


def make_window(ranks: int, wanted: int, least: int) -> tuple[str, int]:
    """Create the file of a window, on one rank of the node. Returns (path for `LoadWindow` on all
    ranks of the node, bytes of an area). Raises StorageError if no folder has room for the file.

    Args:
        ranks: number of ranks of the node.
        wanted: preferred bytes of each rank's area.
        least: smallest usable area, in bytes.
    """
    for folder in _FOLDERS:
        try:
            status = os.statvfs(folder)
            # at most a quarter of the free space, as other processes use it, too
            free = status.f_bavail * status.f_frsize // 4
            area = min(-(-wanted // ALIGNMENT), free // (2 * ranks * ALIGNMENT)) * ALIGNMENT
            if area < least:
                continue
            descriptor, path = tempfile.mkstemp(prefix="perdure_window-", dir=folder)
            try:
                # reserved now, as a full folder would kill ranks by SIGBUS later
                os.posix_fallocate(descriptor, 0, 2 * ranks * area)
            finally:
                os.close(descriptor)
            return path, area
        except OSError:
            continue
    raise StorageError(
        f"ranks of a node share {2 * ranks * least / 1e6:.0f} MB while they load, a quarter of the "
        f"free space at most; {' and '.join(_FOLDERS)} have less or cannot be written; free some"
    )


class LoadWindow:
    """Memory that the ranks of a node share while they load, in two halves: ranks fill one half and
    copy from the other. Raises OSError or StorageError if the file is not the one that was created.

    Args:
        path: path of the file, which may be unlinked once all ranks have opened it.
        area: bytes of each rank's area in a half.
        ranks: global ranks of the node.
        group: process group that contains these ranks; it carries one word between them.
    """

    def __init__(
        self, path: str, area: int, ranks: Sequence[int], rank: int, group: dist.ProcessGroup
    ) -> None:
        self.area, self.places, self.place = area, len(ranks), ranks.index(rank)
        self._ranks, self._group = ranks, group
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if not is_private(os.fstat(descriptor)):
                raise StorageError(
                    f"{path} belongs to another user, or others can open it: somebody else has put "
                    "it there; remove it, and start again"
                )
            self._map = mmap.mmap(descriptor, 2 * area * len(ranks))
        finally:
            os.close(descriptor)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.halves: tuple[Tensor, ...] = whole.tensor_split(2)
        """uint8, shape (places · area,) each."""

    def meet(self, failed: bool) -> bool:
        """Wait for the other ranks of the node; returns whether any rank of the node failed. Called
        on all of them. Raises RuntimeError if a rank is gone."""
        # by way of the first rank, as a collective would need ranks of other nodes, too
        word = torch.tensor([int(failed)])
        first, *others = self._ranks
        if self.place:
            dist.send(word, first, group=self._group)
            dist.recv(word, first, group=self._group)
            return bool(word)
        said = torch.empty_like(word)
        for other in others:
            dist.recv(said, other, group=self._group)
            word |= said
        for other in others:
            dist.send(word, other, group=self._group)
        return bool(word)


STEP_BYTES = 4 << 20
"""Bytes read at a time: their checksum is computed while they are in the cache."""
MOST_THREADS = 8
"""Largest number of threads with which a rank reads; fewer if a node has fewer processors per
rank."""


def read_tensors(
    files: LoadFiles,
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    nodes: Nodes | None = None,
    *,
    finite: Collection[str] = (),
    step_bytes: int = STEP_BYTES,
    threads: int | None = None,
) -> None:
    """Fill the tensors of all ranks. Called on all ranks of the group. The ranks of a node together
    read the bytes that they hold once, except boxes below SMALL_BYTES, which each holder reads. A
    rank first reads the parts that it alone needs, then shared ones, each in the order of files and
    offsets. A checksum covers a whole block, of which each rank reads its parts; the combined
    checksums are compared at the end. So targets may have been written to when an error is raised.

    Args:
        specs: all tensors, the same on all ranks.
        tensors: the targets, of which this rank holds parts, on any device. Floating point numbers
            are converted where a file has another dtype.
        group: process group that carries CPU tensors. None: this process alone reads the parts that
            it holds, and the other bytes of their blocks, which the checksums need.
        nodes: ranks of each node, which share memory; None: the result of `RankGroup.nodes`.
        finite: names of tensors that must not hold NaN or infinity.
        threads: threads with which a rank reads; None: one per processor that a node has for each
            rank, at most MOST_THREADS.

    Raises:
        DamagedCheckpoint: a file is missing or short, a checksum is wrong, or a tensor of `finite`
            holds NaN or infinity.
        StorageError: a file cannot be read.
        ValueError: a target's local part contradicts its placement, so that its bytes would not be
            covered exactly once.
    """
    ranks = RankGroup(group)
    with failing_alike():
        nodes = nodes or ranks.nodes()
        read_together(ranks, files, specs, tensors, nodes, finite, step_bytes, threads)


def read_together(
    ranks: RankGroup,
    files: LoadFiles,
    specs: Mapping[str, TensorSpec],
    tensors: Mapping[str, Tensor],
    nodes: Nodes,
    finite: Collection[str] = (),
    step_bytes: int = STEP_BYTES,
    threads: int | None = None,
) -> None:
    """Like `read_tensors`, for an existing `RankGroup`. Raises on all ranks a RankError, whose
    `kind` is an error of `read_tensors`."""
    load = _Load(files, specs, tensors, ranks, nodes, finite, step_bytes, threads)
    try:
        windows = dict(zip(ranks.all, ranks.together(load.prepare), strict=True))
        if any(path for path, _ in windows.values()):
            ranks.together(lambda: load.open_window(windows))
    finally:
        # All ranks have mapped the window, or one has failed. Its file is removed now, so that no
        # later crash leaves it.
        load.remove_window()
    ranks.together(load.read)
    if load.has_checksums:  # otherwise no rank waits for a collective without a purpose
        ranks.together(load.check)


class _Load:
    """One rank's part of a load. Its methods are called in their order."""

    def __init__(
        self,
        files: LoadFiles,
        specs: Mapping[str, TensorSpec],
        tensors: Mapping[str, Tensor],
        ranks: RankGroup,
        nodes: Nodes,
        finite: Collection[str],
        step_bytes: int,
        threads: int | None,
    ) -> None:
        self._files, self._specs, self._tensors = files, specs, tensors
        self._ranks, self._nodes, self._step = ranks, nodes, step_bytes
        self._finite = finite
        self._bad: dict[str, str] = {}
        """Tensor with NaN or infinity → its file."""
        self._near = next(near for near in nodes if ranks.rank in near)
        names = sorted({files.tensors[name].file for name in specs})
        self._records = {name: files.records[name] for name in names if name in files.records}
        if threads is None:
            processors = len(os.sched_getaffinity(0)) // len(self._near)
            threads = max(1, min(MOST_THREADS, processors))
        self._sums = [CrcBlockSums(self._records, BLOCK_BYTES) for _ in range(threads)]
        """Contributions to the checksums, one object for each thread."""
        self._targets: dict[str, LoadTarget] = {}
        self._own: dict[str, list[LoadSegment]] = {name: [] for name in names}
        """File → segments that this rank reads alone."""
        self._shared: list[LoadUnit] = []
        self._checked: dict[str, list[int]] = {}
        """File → blocks whose checksums are compared."""
        self._created_window = "", 0
        """Path and area of the window that this rank created."""
        self._window: LoadWindow | None = None

    def prepare(self) -> tuple[str, int]:
        """Plan the reads. The first rank of a node that needs a window creates it, and returns the
        result of `make_window`. Other ranks return ("", 0)."""
        for name, tensor in self._tensors.items():
            shape, layouts = self._files.tensors[name].meta.shape, self._specs[name].layouts
            boxes = local_boxes(shape, layouts, self._ranks.rank)
            self._targets[name] = LoadTarget.of(name, tensor, boxes)
        plan = plan_reads(self._specs, self._files.tensors, self._ranks.rank, self._nodes)
        for unit in plan.own:
            self._own[unit.stored.file] += self._segments(unit)
        self._plan_checks()
        self._shared = plan.shared
        if not plan.shared or self._ranks.rank != self._near[0]:
            return "", 0
        share = sum(unit.nbytes for unit in plan.shared) // len(self._near)
        # room for at least one slab, and for no more bytes than are read
        area = min(max(HALF_BYTES // len(self._near), self._step), share + self._step)
        self._created_window = make_window(len(self._near), area, self._step)
        return self._created_window

    def _segments(self, unit: LoadUnit) -> Iterator[LoadSegment]:
        meta, target = unit.stored.meta, self._targets[unit.name]
        checked = unit if unit.name in self._finite else None
        data = target.memory(unit.box, TORCH_DTYPES[meta.dtype])
        # A target that cannot be read in place (on a GPU) is filled from the reader's memory.
        if data is None:
            for slab in slabs(unit, self._step):
                yield LoadSegment(slab.begin, slab.nbytes, None, unit.redundant, slab, checked)
            return
        for run in extents_of(meta, unit.box):
            part = data[run.box_offset : run.box_offset + run.length]
            begin = unit.stored.begin + run.offset
            yield LoadSegment(begin, run.length, part, unit.redundant, None, checked)

    def _plan_checks(self) -> None:
        """Choose the blocks to check: those that contain tensors or the header. All their bytes
        must be read, so bytes that no rank holds are divided among the ranks."""
        held: dict[str, list[tuple[int, int]]] = {file: [] for file in self._own}
        # The ranks of a group complete each other's blocks; a single process reads all.
        if self._ranks.group is None:
            for file, segments in self._own.items():
                held[file] = [(read.begin, read.begin + read.nbytes) for read in segments]
        else:
            for at in (self._files.tensors[name] for name in self._specs):
                held[at.file].append((at.begin, at.begin + at.meta.nbytes))
        headers: dict[str, int] = {}
        for at in self._files.tensors.values():
            # A header ends where the first tensor begins.
            headers[at.file] = min(at.begin, headers.get(at.file, at.begin))
        for file, record in self._records.items():
            spans = merged(held[file])
            if not spans:
                continue
            self._checked[file], gaps = blocks_and_gaps(spans, headers[file], record, BLOCK_BYTES)
            places = len(self._ranks.all)
            self._own[file] += [
                LoadSegment(start, stop - start, None, ONLY)
                for number, (start, stop) in enumerate(gaps)
                if number % places == self._ranks.place
            ]

    def open_window(self, windows: Mapping[int, tuple[str, int]]) -> None:
        path, area = windows[self._near[0]]
        if path and self._ranks.group is not None:
            self._window = LoadWindow(path, area, self._near, self._ranks.rank, self._ranks.group)

    def remove_window(self) -> None:
        """Unlink the window's file. Its memory stays while ranks have it mapped."""
        path, _ = self._created_window
        if path:
            Path(path).unlink(missing_ok=True)

    def read(self) -> None:
        """Read all segments of this rank. If there are no checksums to compare, then require finite
        numbers. Otherwise `check` requires them, after it has compared the checksums."""
        pinned = any(target.local.is_cuda for target in self._targets.values())
        with ExitStack() as stack:
            # Any thread can use any free reader, as each has its own buffers and open file.
            readers: SimpleQueue[LoadSegmentReader] = SimpleQueue()
            for sums in self._sums:
                reader = LoadSegmentReader(
                    self._files, sums, self._bad, self._targets, self._step, pinned=pinned
                )
                readers.put(stack.enter_context(reader))
            # If this process was forked after torch.set_num_threads, the first use of torch's
            # threads replaces their pool. Two threads at once would fail: "Invalid thread pool".
            torch.get_num_threads()
            pool = stack.enter_context(ThreadPoolExecutor(len(self._sums)))

            def work(job: LoadJob) -> None:
                reader = readers.get()
                try:
                    reader.read(job)
                finally:
                    readers.put(reader)

            def run(segments: Mapping[str, list[LoadSegment]]) -> None:
                try:
                    for _ in pool.map(work, jobs(segments, self._step)):
                        pass
                except BaseException:  # otherwise queued jobs would delay the error
                    pool.shutdown(cancel_futures=True)
                    raise

            if self._window is None:  # the ranks of this node share no reads
                run(self._own)
            else:
                self._read_with_others(self._window, run)
        if not self.has_checksums:
            self.refuse_not_finite()

    @torch.no_grad()
    def _read_with_others(
        self, window: LoadWindow, run: Callable[[Mapping[str, list[LoadSegment]]], None]
    ) -> None:
        """Read in rounds, together with the other ranks of this node. In each round the ranks read
        slabs (see read_plan.py) into one half of the window, the memory that they share. Each rank
        copies the slabs of the previous round from the other half into its tensors. A rank that
        fails still takes part in `meet` at the end of a round. There all ranks of the node learn of
        the failure."""
        rounds = read_rounds(
            self._shared, window.places, window.area, max(self._step, window.area // 4)
        )
        own, before = self._own, ReadRound()
        failure: Exception | None = None
        for half, other in itertools.cycle([window.halves, window.halves[::-1]]):
            now: ReadRound = []
            try:
                run(own)
                own, now = {}, next(rounds, [])
                run(_to_fill(now, window.place, half.numpy().data, self._finite))
                for slab, _, position in before:
                    deliver(slab, other[position : position + slab.nbytes], self._targets)
            except Exception as error:
                failure = error
            # all ranks of the node get the same rounds, so they leave the loop together
            if window.meet(failure is not None) or not now:
                break
            before = now
        if failure is not None:
            raise failure

    @property
    def has_checksums(self) -> bool:
        """Whether there are checksums to compare. Equal on all ranks."""
        return bool(self._records)

    def check(self) -> None:
        """Compare the checksums of all blocks, then require finite numbers. Called once all ranks
        have read. Raises DamagedCheckpoint, which names file and block, or tensors."""
        mine = np.bitwise_xor.reduce([sums.contribution() for sums in self._sums])
        total = torch.from_numpy(mine.astype(np.int64))  # gloo reduces no uint32
        if self._ranks.group is not None:
            dist.all_reduce(total, dist.ReduceOp.BXOR, group=self._ranks.group)
        bad = self._sums[0].differing(total.numpy(), self._checked)
        if bad:
            file, block = bad[0]
            more = f", and {len(bad) - 1} more blocks" if len(bad) > 1 else ""
            raise DamagedCheckpoint(
                f"{self._files.where / file}: checksum of block {block} (from byte "
                f"{block * BLOCK_BYTES} on) is wrong{more}; the file was changed after it was saved"
            )
        self.refuse_not_finite()  # checked last, as damaged bytes may look like NaN

    def refuse_not_finite(self) -> None:
        """Raises DamagedCheckpoint, which names a file and tensors, if this rank has read NaN or
        infinity that is forbidden."""
        if self._bad:
            file = min(self._bad.values())
            raise DamagedCheckpoint(f"{self._files.where / file}: {not_finite(sorted(self._bad))}")


def _to_fill(
    dealt: ReadRound, place: int, memory: memoryview, finite: Collection[str]
) -> dict[str, list[LoadSegment]]:
    segments: dict[str, list[LoadSegment]] = {}
    for slab, reader, position in dealt:
        if reader == place:
            data = memory[position : position + slab.nbytes]
            checked = slab.unit if slab.unit.name in finite else None
            segment = LoadSegment(slab.begin, slab.nbytes, data, slab.unit.redundant, None, checked)
            segments.setdefault(slab.unit.stored.file, []).append(segment)
    return segments
