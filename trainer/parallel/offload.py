"""Weights, gradients and optimizer state in a file on a local disk, for models that exceed memory,
as in ZeRO-Infinity (Rajbhandari et al. 2021).

[Note: offload file] Each rank has one file, and its tensors are views of the mapped file. FSDP and
checkpoints see ordinary CPU tensors; the kernel's page cache holds what fits in memory.

The optimizer updates the file in portions, which are read into buffers: while one portion is
updated, one thread reads the next and another thread writes the previous. Moments, which only the
update uses, bypass the page cache (O_DIRECT). This takes half the time and a fifth of the CPU time
that mapped memory takes. Weights and gradients are flushed as soon as they are written, so that the
kernel finds clean pages when it needs memory.

The file has no name. So its space is freed however the process ends, and nothing else can read it.
"""

import ctypes
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from checkpointing.format.tensors import local_tensor
from trainer.optim.formats import placed
from trainer.recipe import RecipeError

PORTION_BYTES = 8 << 20
"""Largest number of bytes of weights in a portion of the update, a multiple of the page size."""
BUFFERS = 3
"""Number of buffers: one is read into, one is updated, one is written to the file."""
WRITES_AHEAD = 4
"""Unfinished gradient writes beyond which backward waits for the oldest."""

_WRITE_AND_WAIT = 4  # MS_SYNC of msync
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of mallopt
_libc = ctypes.CDLL(None, use_errno=True)  # ctypes releases the GIL during a call


class OffloadFile:
    """A file of this rank, of `nbytes` bytes, that holds tensors, see [Note: offload file].
    `directory`: on a local disk, created if missing; `moments`: names of the optimizer's moments.
    Raises RecipeError if the disk has no room, or the directory cannot be written."""

    def __init__(self, directory: str, nbytes: int, moments: Sequence[str]) -> None:
        try:
            os.makedirs(directory, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory) as file:
                # Reserve the space, so that a full disk fails here, not in a step.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                self._map = mmap.mmap(file.fileno(), nbytes)
                self._direct = _open_direct(file.fileno())
        except OSError as error:
            raise RecipeError(
                f"strategy.offload_directory: {directory} cannot take the {nbytes / 1e9:.2f} GB of "
                f"this rank: {error.strerror}; make room, or name another directory"
            ) from error
        # Make malloc return freed blocks of 1 MiB and more to the kernel. By default it keeps the
        # memory of FSDP's gathers and reductions: a fifth of this process's memory.
        _libc.mallopt(_MMAP_THRESHOLD, 1 << 20)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0
        self._moments = tuple(moments)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="offload-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="offload-writer")
        self._writes: deque[Future[None]] = deque()
        self._buffers: SimpleQueue[torch.Tensor] = SimpleQueue()
        """Buffers of the present update that no thread uses."""

    def zeros_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return zeros in the file, like `tensor`, which may be on the meta device."""
        local = local_tensor(tensor)
        if local.numel():
            start, self._used = self._used, self._used + _pages(local.nbytes)
            region = self._bytes[start : start + local.nbytes]
            zeros = region.view(local.dtype).view(local.shape)
        else:
            zeros = torch.zeros_like(local, device="cpu")  # an empty shard needs no file
        return placed(zeros, tensor)

    @torch.no_grad()
    def take_weights(self, model: nn.Module, device: torch.device) -> None:
        """Move the parameters of a sharded model into the file, and its buffers on the meta device
        to `device`. A shard that is shorter than those of other ranks stays in memory, because FSDP
        pads it in its own memory. Its gradient and optimizer state are in the file."""
        waiting = set(model.parameters())

        def move(tensor: torch.Tensor) -> torch.Tensor:
            # Buffers, and tied weights that were moved before.
            if not isinstance(tensor, nn.Parameter) or tensor not in waiting:
                return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
            waiting.remove(tensor)
            in_file = self.zeros_like(tensor)
            return in_file if tensor.is_meta else in_file.copy_(tensor)

        model._apply(move)

    def take_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Register hooks that move each gradient into the file once backward has reduced it."""
        gradients = {p: self.zeros_like(p) for p in parameters if p.requires_grad}

        @torch.no_grad()
        def move(parameter: nn.Parameter) -> None:
            fresh, kept = parameter.grad, gradients[parameter]
            # Later passes of a step add to the gradient in the file, which need not move.
            if fresh is not None and fresh is not kept:
                local_tensor(kept).copy_(local_tensor(fresh))
                parameter.grad = kept
            self._writes.append(self._writer.submit(self._flush, _bytes(kept)))
            while len(self._writes) > WRITES_AHEAD:
                self._writes.popleft().result()

        for parameter in gradients:
            parameter.register_post_accumulate_grad_hook(move)

    def read_ahead(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Register hooks that, while a block computes, read the weights that FSDP gathers next.
        `blocks` are FSDP's units in the order of forward; `model` is the root unit."""

        @torch.compiler.disable  # otherwise compiled blocks would trace this hook
        def read(number: int) -> None:
            if 0 <= number < len(blocks):
                # `_fetch` ignores parameters that are gathered: they are not in the file.
                for parameter in blocks[number].parameters():
                    self._reader.submit(self._fetch, _bytes(parameter))

        def hook(module: nn.Module, in_forward: int, in_backward: int) -> None:
            def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    output.register_hook(lambda _: read(in_backward))

            module.register_forward_pre_hook(lambda *_: read(in_forward))
            module.register_forward_hook(after)

        # While a block runs backward, FSDP already gathers the block before it, so the block before
        # that is read.
        hook(model, 0, len(blocks) - 2)
        for number, block in enumerate(blocks):
            hook(block, number + 1, number - 2)

    def portions(self, optimizer: torch.optim.Optimizer) -> Iterator[list[dict[str, Any]]]:
        """Yield the optimizer's parameter groups in portions. The caller updates each portion
        before it requests the next. The update must be elementwise, and the state of a parameter
        must consist of a step count and moments.

        A portion holds copies in memory, with gradients and state, of parameters of the file or of
        ranges of their elements. A range begins at a multiple of the page size, so vector
        instructions process the same groups of elements as in the whole parameter.
        """
        groups = optimizer.param_groups
        portions = list(_cut(groups))
        steps: dict[nn.Parameter, torch.Tensor] = {}
        # Buffers exist only during the update, because backward needs the memory.
        for _ in portions[:BUFFERS]:
            self._buffers.put(_new_buffer(copies(self._moments)))
        reads: deque[Future[torch.Tensor]] = deque()
        for number, portion in enumerate(portions):
            for following in portions[number + len(reads) : number + 2]:
                free = self._buffers.get()  # waits until the portion before the last is written
                reads.append(self._reader.submit(self._read, following, free, optimizer.state))
            buffer = reads.popleft().result()
            copied = [part.in_memory(buffer, optimizer.state, self._moments) for part in portion]
            parts = list(zip(portion, copied, strict=True))
            yield [
                {**group, "params": [made for part, made in parts if part.group is group]}
                for group in groups
            ]
            steps |= {part.parameter: optimizer.state.pop(made)["step"] for part, made in parts}
            self._writes.append(self._writer.submit(self._write, portion, buffer, optimizer.state))
        # Only after the last portion: all parts of a parameter need the same step count.
        for parameter, step in steps.items():
            optimizer.state[parameter]["step"].copy_(step)
        while self._writes:
            self._writes.popleft().result()
        while not self._buffers.empty():
            self._buffers.get()

    # --- called in threads -----------------------------------------------------------------

    def _read(
        self, portion: list["_FilePart"], buffer: torch.Tensor, state: Mapping[Any, Any]
    ) -> torch.Tensor:
        for part in portion:
            weight, gradient, *moments = part.rows(buffer)
            weight.copy_(part.of(part.parameter))
            gradient.copy_(part.of(part.parameter.grad))
            for row, name in zip(moments, self._moments, strict=True):
                self._transfer(os.preadv, row, part.of(state[part.parameter][name]))
        return buffer

    def _write(
        self, portion: list["_FilePart"], buffer: torch.Tensor, state: Mapping[Any, Any]
    ) -> None:
        try:
            for part in portion:
                weight, _, *moments = part.rows(buffer)
                for row, name in zip(moments, self._moments, strict=True):
                    self._transfer(os.pwritev, row, part.of(state[part.parameter][name]))
                place = part.of(part.parameter)
                self._flush(place.copy_(weight))
        finally:
            # Even after an error, because `portions` waits for a free buffer.
            self._buffers.put(buffer)

    def _transfer(
        self, call: Callable[[int, Sequence[memoryview], int], int], row: torch.Tensor,
        place: torch.Tensor,
    ) -> None:  # fmt: skip
        """Read or write `row`, rounded up to whole pages, at the file offset of `place`."""
        length = _pages(len(row))
        data = row.as_strided((length,), (1,)).numpy().data
        offset, done = place.data_ptr() - self._bytes.data_ptr(), 0
        while done < length:
            done += call(self._direct, [data[done:]], offset + done)

    def _fetch(self, place: torch.Tensor) -> None:
        """Make the kernel read the pages of `place` that are not in memory."""
        if self._contains(place):
            _libc.madvise(*_extent(place), mmap.MADV_WILLNEED)

    def _flush(self, place: torch.Tensor) -> None:
        """Write mapped memory to the disk, and drop it from memory."""
        if not self._contains(place):
            return
        if _libc.msync(*_extent(place), _WRITE_AND_WAIT):
            number = ctypes.get_errno()
            raise OSError(number, f"strategy.offload_directory: {os.strerror(number)}")
        # Freed at once: the kernel would evict these clean pages first anyway.
        _libc.madvise(*_extent(place), mmap.MADV_DONTNEED)

    def _contains(self, place: torch.Tensor) -> bool:
        return 0 <= place.data_ptr() - self._bytes.data_ptr() < len(self._map)


@dataclass(frozen=True)
class _FilePart:
    """Bytes `start` to `stop` of a parameter's tensors, at `position` in the rows of a buffer."""

    parameter: nn.Parameter
    group: dict[str, Any]
    start: int
    stop: int
    position: int

    def of(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Return bytes `start` to `stop` of `tensor`: the weight, the gradient or a moment."""
        if tensor is None:
            raise ValueError("a gradient was set to None during the update; set it only afterwards")
        return _bytes(tensor)[self.start : self.stop]

    def rows(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return a view of the part's bytes in a buffer, shape (copies, bytes)."""
        return buffer[:, self.position : self.position + self.stop - self.start]

    def in_memory(self, buffer: torch.Tensor, state: Any, names: Sequence[str]) -> nn.Parameter:
        """Create a parameter over the part's bytes in a buffer. `names`: names of the moments."""
        weight, gradient, *moments = self.rows(buffer).view(self.parameter.dtype)
        parameter = nn.Parameter(weight)
        parameter.grad = gradient
        step = state[self.parameter]["step"].clone()
        state[parameter] = {"step": step, **dict(zip(names, moments, strict=True))}
        return parameter


def _cut(groups: Iterable[dict[str, Any]]) -> Iterator[list[_FilePart]]:
    """Divide parameters that have gradients into portions, each of which fills a buffer."""
    portion: list[_FilePart] = []
    used = 0
    for group in groups:
        for parameter in (p for p in group["params"] if p.grad is not None):
            start, nbytes = 0, local_tensor(parameter).nbytes
            while start < nbytes:
                if used == PORTION_BYTES:
                    yield portion
                    portion, used = [], 0
                stop = min(nbytes, start + PORTION_BYTES - used)
                portion.append(_FilePart(parameter, group, start, stop, used))
                used += _pages(stop - start)
                start = stop
    if portion:
        yield portion


def _new_buffer(rows: int) -> torch.Tensor:
    """Allocate a buffer, uint8 (rows, PORTION_BYTES), page-aligned as direct I/O requires."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, rows * PORTION_BYTES, flags=private)
    return torch.frombuffer(memory, dtype=torch.uint8).view(rows, -1)


def copies(moments: Sequence[str]) -> int:
    """Return the number of float32 tensors per trained parameter: weight, gradient and moments."""
    return 2 + len(moments)


def bytes_needed(parameters: Iterable[nn.Parameter], moments: Sequence[str]) -> int:
    return sum(
        _pages(local_tensor(p).nbytes) * (copies(moments) if p.requires_grad else 1)
        for p in parameters
    )


def _open_direct(descriptor: int) -> int:
    path = f"/proc/self/fd/{descriptor}"
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDWR)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor).reshape(-1).view(torch.uint8)


def _extent(place: torch.Tensor) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    """Return address and length of a view for libc, in whole pages."""
    return ctypes.c_void_p(place.data_ptr()), ctypes.c_size_t(_pages(len(place)))


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
