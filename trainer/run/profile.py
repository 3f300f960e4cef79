"""Profiles some steps of a run with torch's profiler. Each rank writes its trace, and a record of
its memory and communication, to `<run.dir>/profile/`."""

import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from elastic.node.files import own_directory
from trainer.parallel.mesh import mesh_shape
from trainer.plan.storages import Storages, nbytes, storages
from trainer.recipe.strategies import MODEL_PARALLEL
from trainer.run.speed import RunSpeedRecorder
from trainer.run.state import Run
from trainer.run.trace_summary import DIRECTORY, RunRankProfile, read_trace


@dataclass(frozen=True)
class RunProfileRecord:
    """Memory and communication of one rank in the profiled steps. Sizes are in bytes, on the rank's
    device unless a field says otherwise."""

    rank: int
    steps: int
    """Number of profiled steps."""
    parameters: int
    """Bytes of this rank's parameters between steps, when FSDP holds only shards."""
    gathered: int
    """Bytes of whole parameters that FSDP keeps, besides `parameters`, after a forward pass."""
    gradients: int
    """Bytes of reduced gradients when the optimizer's step begins."""
    optimizer_state: int
    buffers: int
    peak: int
    """Peak bytes that torch's allocator held. Excludes copies for checkpoints."""
    host: int
    """Bytes of parameters, gradients and optimizer state in host memory; 0 in a run on CPUs."""
    communication: float
    """Fraction of the time in which at least one collective ran or waited for other ranks."""
    collectives: float
    """Collective calls per step."""
    sent: float
    """Bytes sent per step, computed from tensor sizes as if by ring algorithms."""


class StepProfiler:
    """Context manager that profiles `tracking.profile_steps` steps after the first
    `tracking.profile_after`, and writes the files. On all ranks."""

    def __init__(self, run: Run, speed: RunSpeedRecorder) -> None:
        tracking = run.recipe.tracking
        self._run, self._speed = run, speed
        self._after = tracking.profile_after
        self._last = self._after + tracking.profile_steps
        self._done = 0
        self._profile: profile | None = None
        if not tracking.profile_steps:
            return
        self._sizes = _TensorSizes(run)
        device = run.world.device
        self._profile = torch_profiler(device, self._after, tracking.profile_steps, self._write)

    def __enter__(self) -> Self:
        if self._profile:
            self._profile.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._profile:
            self._profile.stop()

    @property
    def active(self) -> bool:
        """Whether the present step is profiled, and therefore slower."""
        return self._after <= self._done < self._last

    def after_step(self) -> None:
        """Advance the profiler, at the end of each turn of the training loop. On all ranks."""
        if not self._profile:
            return
        self._done += 1
        if self._done == self._after:
            self._sizes.watch()
        with self._speed.aside():
            self._profile.step()
            if self._done == self._last:  # no later step must wait for a rank that still writes
                dist.barrier(self._run.mesh.group)

    def _write(self, profiler: profile) -> None:
        self._sizes.leave()
        directory, rank = self._run.recipe.directory / DIRECTORY, self._run.world.rank
        trace = directory / f"rank-{rank:05}.trace.json.gz"
        try:
            own_directory(directory)
            profiler.export_chrome_trace(str(trace))
            record = self._sizes.record(rank, read_trace(trace))
            path = directory / f"rank-{rank:05}.json"
            path.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
        except Exception as error:  # a failure to write, such as a full disk, must not end the run
            logging.getLogger(__name__).warning("%s: no profile is written: %s", trace, error)


def torch_profiler(
    device: torch.device, after: int, steps: int, ready: Callable[[profile], None]
) -> profile:
    """Create torch's profiler, for `steps` steps that follow `after` steps, the last of which is a
    warm-up. On a CPU it records allocations too. `ready`: called after the last profiled step, or
    when the profiler is stopped before it."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Kineto prints a line on stderr at every start
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(
        activities=activities,
        schedule=schedule(wait=after - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=ready,
        profile_memory=device.type == "cpu",
        record_shapes=True,  # to compute the bytes that collectives send
    )


def peak_bytes(device: torch.device, held: int, trace: RunRankProfile) -> int:
    """Return the largest number of bytes allocated at once in the profiled steps: on a GPU by the
    allocator; on a CPU `held`, the bytes allocated between steps, plus allocations in `trace`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return held + trace.allocated


class _TensorSizes:
    """Measures the bytes of a rank's tensors in the steps between `watch` and `leave`."""

    def __init__(self, run: Run) -> None:
        self._model, self._optimizer, self._device = run.model, run.optimizer, run.world.device
        ranks = run.world.world_size, run.world.local_world_size
        self._replicas, _ = mesh_shape(run.recipe, *ranks)
        self._strategy = run.recipe.strategy
        self._stages = [self._model.module]
        if self._model.pipeline:
            self._stages = [*self._model.module.children()]
        self._hooks: list[Any] = []
        self._gathered: Storages = {}
        self._gradients: Storages = {}
        self._gradients_on_host = 0

    def watch(self) -> None:
        """Measure the tensors that exist between steps; set hooks that measure tensors in steps."""
        self._weights = [*self._model.parameters.values(), *self._model.optimized.values()]
        state = (v for entry in self._optimizer.state.values() for v in entry.values())
        self._state = [value for value in state if isinstance(value, torch.Tensor)]
        self._held = {
            "parameters": storages(self._weights, self._device),
            "optimizer_state": storages(self._state, self._device),
            "buffers": storages(self._model.module.buffers(), self._device),
        }
        self._hooks = [
            *(stage.register_forward_hook(self._after_forward) for stage in self._stages),
            self._optimizer.register_step_pre_hook(self._before_update),
        ]
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def leave(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _after_forward(self, *_: Any) -> None:
        held = self._held["parameters"]
        sizes = storages(self._model.module.parameters(), self._device)
        sizes = {key: size for key, size in sizes.items() if key not in held}
        self._gathered = max(self._gathered, sizes, key=nbytes)

    def _before_update(self, *_: Any) -> None:
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        sizes = storages(gradients, self._device)
        self._gradients = max(self._gradients, sizes, key=nbytes)
        self._gradients_on_host = max(self._gradients_on_host, self._on_host(gradients))

    def _on_host(self, tensors: Iterable[torch.Tensor]) -> int:
        if self._device.type == "cpu":
            return 0
        return nbytes(storages(tensors, torch.device("cpu")))

    def record(self, rank: int, trace: RunRankProfile) -> RunProfileRecord:
        between: Storages = {}
        for of_kind in self._held.values():
            between |= of_kind
        if isinstance(self._model.module, DistributedDataParallel):
            # Gradients are views of DDP's buckets, which exist between steps too.
            between |= self._gradients
        return RunProfileRecord(
            rank=rank,
            steps=len(trace.steps),
            **{kind: nbytes(held) for kind, held in self._held.items()},
            gathered=nbytes(self._gathered),
            gradients=nbytes(self._gradients),
            peak=peak_bytes(self._device, nbytes(between), trace),
            host=self._gradients_on_host + self._on_host([*self._weights, *self._state]),
            communication=trace.communication / sum(trace.steps),
            collectives=sum(trace.collectives.values()) / len(trace.steps),
            sent=self._sent(trace) / len(trace.steps),
        )

    def _sent(self, trace: RunRankProfile) -> float:
        # A trace does not say which ranks a collective joins, so it is inferred from shapes:
        # gradients are all-reduced as vectors, activations with more dimensions. Without replicas
        # all all-reduces are of activations. Experts are assumed to get equally many rows.
        gradients, activations = trace.reduced_vectors, trace.reduced
        if self._replicas == 1:
            gradients, activations = 0, gradients + activations
        of_kinds = (
            kind.bytes_sent(self._strategy, activations, trace.divided) for kind in MODEL_PARALLEL
        )
        return trace.exchanged + 2 * (1 - 1 / self._replicas) * gradients + sum(of_kinds)


def read_records(run: Path) -> list[RunProfileRecord]:
    """Return the records of all ranks of a run; [] if no step was profiled."""
    paths = sorted((run / DIRECTORY).glob("rank-?????.json"))
    return [RunProfileRecord(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]
