"""The checkpoint engines that `benchmarks.checkpoint` compares, behind one face.

Each saves the named tensors of a ShardedState under a directory of its own, in the fastest of the
ways that it documents, and gets the same tensors; an engine that does not make its files durable
itself is followed by an fsync of them. Construction raises ImportError, AttributeError or TypeError
where the installed torch has no such engine.
"""

import mmap
import multiprocessing
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.support.sharded_state import ShardedState
from checkpointing import Checkpointer, CheckpointOptions, TensorCheckpointer
from checkpointing.adapters import dcp as ours


@dataclass
class Running:
    """A save on its way, as one rank sees it."""

    wait_staged: Callable[[], None]
    """Returns when the tensors may be changed."""

    committed_at: Callable[[], float | None]
    """time.monotonic() at which the checkpoint was there; None while it is being written. Raises
    what went wrong."""


class Engine(ABC):
    """Made, and every method called, on all ranks."""

    asynchronous = False
    """Whether training goes on while a save runs."""
    name = "save-{}"
    """What the files of a save are called."""

    def __init__(self, state: ShardedState, directory: Path) -> None:
        self._state, self._directory = state, directory

    def _path(self, number: int) -> Path:
        """Where a save lies."""
        return self._directory / self.name.format(number)

    def _file(self, number: int) -> Path:
        """What this rank writes, where each has a file of its own."""
        return self._path(number) / f"rank-{dist.get_rank()}"

    def prepare(self) -> None:
        """What can be done before the first save."""
        return  # most have nothing to do

    @abstractmethod
    def save(self, number: int) -> Running:
        """Save the state as number `number`; the directory is empty, or does not exist."""

    @abstractmethod
    def load(self, number: int) -> int:
        """Load save `number` into the state, in place; returns the bytes that this rank took from
        memory-mapped files, which the kernel does not count as read."""

    def close(self) -> None:
        """End processes, let go of memory."""
        return


class _Done(Running):
    """A synchronous save that has just ended."""

    def __init__(self) -> None:
        ended = time.monotonic()
        super().__init__(lambda: None, lambda: ended)


class Perdure(Engine):
    """This engine."""

    asynchronous = True

    def __init__(self, state: ShardedState, directory: Path, slots: int = 1) -> None:
        super().__init__(state, directory)
        self._tensors: dict[str, Any] = {"model": state.model, "optimizer": state.optimizer}
        options = CheckpointOptions(keep=0, slots=slots)
        group: Any = dist.new_group(backend="gloo")
        self._checkpointer = TensorCheckpointer(directory, options, group)

    def prepare(self) -> None:
        self._checkpointer.prepare(**self._tensors)

    def save(self, number: int) -> Running:
        asked = time.monotonic()
        state = {"step": number}
        if not self._checkpointer.save(number, **self._tensors, state=state, files={}):
            raise RuntimeError(f"save {number} was skipped: {self._checkpointer.outcomes()}")
        return _begun(self._checkpointer, asked)

    def load(self, number: int) -> int:
        state = self._checkpointer.load(**self._tensors)
        if state != {"step": number}:
            raise RuntimeError(f"loaded {state}, not step {number}")
        return 0

    def close(self) -> None:
        self._checkpointer.close()


def _begun(checkpointer: TensorCheckpointer | Checkpointer, asked: float) -> Running:
    """A save that was asked for at `asked`, by time.monotonic()."""
    ended: list[float] = []

    def committed_at() -> float | None:
        for outcome in checkpointer.outcomes():
            if outcome.error is not None:
                raise RuntimeError(outcome.error)
            ended.append(asked + outcome.seconds)  # it may be a step ago
        return ended[0] if ended else None

    return Running(checkpointer.wait_staged, committed_at)


class Dcp(Engine):
    """torch.distributed.checkpoint.save."""

    def __init__(self, state: ShardedState, directory: Path) -> None:
        super().__init__(state, directory)
        # Of its own: collectives in a background thread deadlock with those of training.
        self._group: Any = dist.new_group(backend="gloo")

    def save(self, number: int) -> Running:
        dcp.save(self._state.flat(), checkpoint_id=self._path(number), process_group=self._group)
        return _Done()

    def load(self, number: int) -> int:
        dcp.load(self._state.flat(), checkpoint_id=self._path(number), process_group=self._group)
        return 0


class DcpAsync(Dcp):
    """torch.distributed.checkpoint.async_save, in a thread or a process."""

    asynchronous = True

    def __init__(
        self, state: ShardedState, directory: Path, *, process: bool = False, reuse: bool = False
    ) -> None:
        super().__init__(state, directory)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self._how: dict[str, Any] = {
            "process_group": self._group,
            "async_checkpointer_type": AsyncCheckpointerType.PROCESS
            if process
            else AsyncCheckpointerType.THREAD,
        }
        if reuse:
            # Kept by the caller: its buffers are copied into again, in a thread of its own.
            options = StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=process,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
            self._how["async_stager"] = DefaultStager(options)

    def save(self, number: int) -> Running:
        response = dcp.async_save(self._state.flat(), checkpoint_id=self._path(number), **self._how)
        if isinstance(response, Future):
            return Running(lambda: None, _when_done(response))
        wait_staged = response.staging_completion.result
        return Running(wait_staged, _when_done(response.upload_completion))

    def close(self) -> None:
        if "async_stager" in self._how:
            self._how["async_stager"].close()
        for child in multiprocessing.active_children():
            child.terminate()
            child.join()


def _when_done(future: Future[Any]) -> Callable[[], float | None]:
    ended: list[float] = []
    future.add_done_callback(lambda _: ended.append(time.monotonic()))

    def committed_at() -> float | None:
        if not ended:
            return None
        future.result()
        return ended[0]

    return committed_at


class DcpAdapter(Dcp):
    """`dcp.save` and `dcp.load` of checkpointing.adapters.dcp."""

    name = "step-{:08}"

    def save(self, number: int) -> Running:
        ours.save(self._state.flat(), checkpoint_id=self._path(number), process_group=self._group)
        return _Done()

    def load(self, number: int) -> int:
        state = self._state.flat()
        ours.load(state, checkpoint_id=self._path(number), process_group=self._group)
        return 0


class DcpAdapterAnyName(DcpAdapter):
    """With names that are no steps, as in plain DCP code."""

    name = Dcp.name


class LightningFabric(Engine):
    """fabric.save of a module and an optimizer, by Fabric's own strategy for FSDP2, or by that of
    checkpointing.adapters.fabric."""

    name = "step-{:08}"

    def __init__(self, state: ShardedState, directory: Path, *, adapter: bool = False) -> None:
        from lightning_fabric import Fabric
        from lightning_fabric.strategies import ModelParallelStrategy

        from checkpointing.adapters.fabric import CheckpointedModelParallel

        super().__init__(state, directory)
        ranks = dist.get_world_size()
        layout: dict[str, Any] = {"data_parallel_size": ranks, "tensor_parallel_size": 1}
        strategy = (
            CheckpointedModelParallel(_sharded_already, checkpoint={"keep": 0}, **layout)
            if adapter
            else ModelParallelStrategy(_sharded_already, **layout)
        )
        self.asynchronous = adapter
        self._fabric = Fabric(accelerator="cpu", strategy=strategy, devices=ranks)
        self._fabric.launch()
        self._strategy: Any = strategy
        self._objects = {"model": state.module, "optimizer": state.adamw}

    def save(self, number: int) -> Running:
        asked = time.monotonic()
        self._fabric.save(self._path(number), self._objects)
        if not self.asynchronous:
            return _Done()
        return _begun(self._strategy.checkpointer(str(self._directory)), asked)

    def load(self, number: int) -> int:
        self._fabric.load(self._path(number), dict(self._objects))
        return 0

    def close(self) -> None:
        if self.asynchronous:
            self._strategy.close_checkpoints()


def _sharded_already(module: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    return module


class HFTrainer(Engine):
    """What transformers' Trainer saves, by itself, and its files are fsynced; or by the callback of
    checkpointing.adapters.hugging_face. In one process."""

    name = "checkpoint-{}"

    def __init__(self, state: ShardedState, directory: Path, *, adapter: bool = False) -> None:
        from transformers import Trainer, TrainingArguments

        from checkpointing.adapters.hugging_face import CheckpointCallback

        super().__init__(state, directory)
        self.asynchronous = adapter
        constant = torch.optim.lr_scheduler.LambdaLR(state.adamw, lambda _: 1.0)
        arguments = TrainingArguments(
            output_dir=str(directory), report_to=[], use_cpu=True, max_steps=1000
        )
        self._trainer: Any = Trainer(state.module, arguments, optimizers=(state.adamw, constant))
        self._parts = {"model": state.module, "optimizer": state.adamw, "lr_scheduler": constant}
        self._callback = CheckpointCallback(directory, every=1, keep=0)
        self._begun = False

    def _begin(self, step: int) -> None:
        """What the callback does before the Trainer trains from a step on."""
        self._trainer.state.global_step = step
        self._call("on_train_begin")
        self._begun = True

    def _call(self, event: str) -> None:
        trainer = self._trainer
        getattr(self._callback, event)(trainer.args, trainer.state, trainer.control, **self._parts)

    def prepare(self) -> None:
        if self.asynchronous:
            self._begin(0)

    def save(self, number: int) -> Running:
        asked = time.monotonic()
        self._trainer.state.global_step = number
        if self.asynchronous:
            self._call("on_step_end")
            return _begun(self._callback.checkpointer, asked)
        self._trainer._save_checkpoint(self._state.module, None)
        for file in sorted(self._path(number).iterdir()):
            sync(file)
        sync(self._path(number))
        return _Done()

    def load(self, number: int) -> int:
        if self.asynchronous:
            self._begin(number)
        else:
            self._trainer._load_from_checkpoint(str(self._path(number)))
            self._trainer._load_optimizer_and_scheduler(str(self._path(number)))
        return 0

    def close(self) -> None:
        if self._begun:
            self._call("on_train_end")


class HuggingFace(Dcp):
    """torch's HuggingFaceStorageWriter and its reader; its files are fsynced afterwards."""

    def __init__(self, state: ShardedState, directory: Path, *, consolidate: bool = False) -> None:
        super().__init__(state, directory)
        from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

        self._reader, self._writer = HuggingFaceStorageReader, HuggingFaceStorageWriter
        self._consolidate = consolidate

    def save(self, number: int) -> Running:
        path = self._path(number)
        writer = self._writer(
            str(path), save_distributed=True, enable_consolidation=self._consolidate
        )
        dcp.save(self._state.flat(), storage_writer=writer, process_group=self._group)
        if dist.get_rank() == 0:
            for file in sorted(path.rglob("*")):
                sync(file)
            sync(path)
        dist.barrier(self._group)
        return _Done()

    def load(self, number: int) -> int:
        class Counting(dcp.DefaultLoadPlanner):
            """Counts the slices that the reader copies out of mapped files."""

            mapped = 0

            def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
                self.mapped += tensor.nbytes
                super().commit_tensor(read_item, tensor)

        planner = Counting()
        dcp.load(
            self._state.flat(),
            storage_reader=self._reader(str(self._path(number))),
            planner=planner,
            process_group=self._group,
        )
        return planner.mapped


class PerRank(Engine):
    """What each rank holds in a file of its own, by `torch.save` or `safetensors`, and fsync."""

    def __init__(self, state: ShardedState, directory: Path, *, safetensors: bool) -> None:
        super().__init__(state, directory)
        self._safetensors = safetensors

    def save(self, number: int) -> Running:
        file = self._file(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        if self._safetensors:
            from safetensors.torch import save_file

            save_file(self._state.local(), file)
        else:
            torch.save(self._state.local(), file)
        sync(file)
        dist.barrier()
        if dist.get_rank() == 0:
            sync(file.parent)
        return _Done()

    def load(self, number: int) -> int:
        file = self._file(number)
        if self._safetensors:
            from safetensors.torch import load_file

            self._state.load_local(load_file(file))
        else:
            self._state.load_local(torch.load(file))
        return 0


class Floor(Engine):
    """The least that an asynchronous save costs: each rank copies what it holds into memory that is
    there, and writes it past the page cache as it comes. No checksums, no files that others read,
    nobody who admits writers, nothing that outlives the process."""

    asynchronous = True

    def __init__(self, state: ShardedState, directory: Path) -> None:
        super().__init__(state, directory)
        size = sum(tensor.nbytes for tensor in state.local().values())
        self._size = -(-size // FLOOR_BLOCK) * FLOOR_BLOCK
        self._memory = torch.frombuffer(mmap.mmap(-1, self._size), dtype=torch.uint8)

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(a tensor's bytes, their place in memory)."""
        place = 0
        for tensor in self._state.local().values():
            data = tensor.contiguous().view(-1).view(torch.uint8)
            yield data, self._memory[place : place + len(data)]
            place += len(data)

    def prepare(self) -> None:
        self._memory.zero_()

    def save(self, number: int) -> Running:
        staged, filled = threading.Event(), threading.Semaphore(0)
        done: Future[float] = Future()

        def copy() -> None:
            reached = told = 0
            for data, place in self._parts():
                place.copy_(data)
                reached += len(data)
                while told + FLOOR_BLOCK <= reached:
                    filled.release()
                    told += FLOOR_BLOCK
            staged.set()
            filled.release()  # the last block is seldom full

        def write() -> None:
            file = self._file(number)
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
            data = self._memory.numpy().data
            for start in range(0, self._size, FLOOR_BLOCK):
                filled.acquire()
                os.pwrite(descriptor, data[start : start + FLOOR_BLOCK], start)
            os.fsync(descriptor)
            os.close(descriptor)
            done.set_result(time.monotonic())

        for work in (copy, write):
            threading.Thread(target=work).start()
        return Running(lambda: cast(None, staged.wait()), _when_done(done))

    def load(self, number: int) -> int:
        with self._file(number).open("rb") as file:
            file.readinto(self._memory.numpy().data)
        for data, place in self._parts():
            data.copy_(place)
        return 0


FLOOR_BLOCK = 16 << 20


def sync(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


ENGINES: dict[str, Callable[[ShardedState, Path], Engine]] = {
    "Perdure": Perdure,
    "Floor: copy and write": Floor,
    "Perdure (2 slots)": partial(Perdure, slots=2),
    "dcp.save": Dcp,
    "dcp.async_save": DcpAsync,
    "dcp.async_save (reused stager)": partial(DcpAsync, reuse=True),
    "dcp.async_save (process)": partial(DcpAsync, process=True, reuse=True),
    "HF writer (sharded)": HuggingFace,
    "HF writer (consolidated)": partial(HuggingFace, consolidate=True),
    "safetensors.save_file": partial(PerRank, safetensors=True),
    "torch.save": partial(PerRank, safetensors=False),
    "dcp.save by our adapter": DcpAdapter,
    "dcp.save by our adapter (any name)": DcpAdapterAnyName,
    "fabric.save": LightningFabric,
    "fabric.save by our adapter": partial(LightningFabric, adapter=True),
    "HF Trainer": HFTrainer,
    "HF Trainer by our adapter": partial(HFTrainer, adapter=True),
}
"""By the name under which it is shown. The process has the shared-memory stager, reused, with which
it is fastest."""

SINGLE = ("HF Trainer", "HF Trainer by our adapter")
"""Those that are measured in one process, which holds all."""
