"""Profiles some steps of a run by torch's profiler. Each rank writes its trace, and a record of its
memory and communication, to `<run.dir>/profile/`."""

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
from trainer.recipe.strategies import ep, tp
from trainer.run.speed import Speed
from trainer.run.state import Run
from trainer.run.trace_summary import DIRECTORY, RankProfile, read_trace


@dataclass(frozen=True)
class RankRecord:
    """Memory and communication of one rank in the profiled steps. Bytes on its device, unless a
    field says otherwise."""

    rank: int
    steps: int
    parameters: int
    """Bytes between steps."""
    gathered: int
    """Whole parameters that FSDP holds at the end of a forward pass, besides `parameters`."""
    gradients: int
    """Reduced gradients at the optimizer's step."""
    optimizer_state: int
    buffers: int
    peak: int
    """Most bytes that torch had allocated at once, without the memory of checkpoints and of the
    process."""
    host: int
    """Parameters, gradients and optimizer state in host memory; 0 if the device is the CPU."""
    communication: float
    """Share of the time with at least one collective under way, waiting for peers included."""
    collectives: float
    """Calls per step."""
    sent: float
    """Bytes per step, computed from the sizes of collectives' tensors as ring algorithms send them,
    whatever the backend does; as many are received."""


class StepProfiler:
    """Profiles `tracking.profile_steps` steps after the first `tracking.profile_after`.

    A context manager; its end writes what was profiled. On all ranks.
    """

    def __init__(self, run: Run, speed: Speed) -> None:
        tracking = run.recipe.tracking
        self._run, self._speed = run, speed
        self._after = tracking.profile_after
        self._last = self._after + tracking.profile_steps
        self._done = 0
        self._profile: profile | None = None
        if not tracking.profile_steps:
            return
        self._holdings = _Holdings(run)
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
        """Whether the step under way is profiled, and slower for it."""
        return self._after <= self._done < self._last

    def after_step(self) -> None:
        """Advance the profiler. Called on all ranks after every step and the work that follows
        it."""
        if not self._profile:
            return
        self._done += 1
        if self._done == self._after:
            self._holdings.watch()
        with self._speed.aside():
            self._profile.step()
            if self._done == self._last:  # other ranks may still be writing
                dist.barrier(self._run.mesh.group)

    def _write(self, profiler: profile) -> None:
        self._holdings.leave()
        directory, rank = self._run.recipe.directory / DIRECTORY, self._run.world.rank
        trace = directory / f"rank-{rank:05}.trace.json.gz"
        try:
            own_directory(directory)
            profiler.export_chrome_trace(str(trace))
            record = self._holdings.record(rank, read_trace(trace))
            path = directory / f"rank-{rank:05}.json"
            path.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
        except Exception as error:  # a failure to write, such as a full disk, must not end the run
            logging.getLogger(__name__).warning("%s: no profile is written: %s", trace, error)


def torch_profiler(
    device: torch.device, after: int, steps: int, ready: Callable[[profile], None]
) -> profile:
    """torch's profiler over `steps` steps that follow `after` others, the last of which warms it
    up.

    Args:
        device: of this rank. On a CPU allocations are recorded too.
        after: at least 1.
        steps: at least 1.
        ready: called after the last of these steps, or if the profiler stops within them.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Kineto prints a line on stderr at every start
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(
        activities=activities,
        schedule=schedule(wait=after - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=ready,
        profile_memory=device.type == "cpu",
        record_shapes=True,  # for the sizes that collectives send
    )


def peak_bytes(device: torch.device, held: int, trace: RankProfile) -> int:
    """Most bytes allocated at once in the profiled steps, with `held` bytes between them; on a GPU
    since its peak was last reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return held + trace.allocated


class _Holdings:
    """Measures the tensors that a rank holds in its steps, from `watch` to `leave`."""

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
        """Measure what is held between steps, and begin to follow the rest."""
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
        """Remove the hooks."""
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

    def record(self, rank: int, trace: RankProfile) -> RankRecord:
        """The measurements, with figures from the trace of the same steps."""
        between: Storages = {}
        for of_kind in self._held.values():
            between |= of_kind
        if isinstance(self._model.module, DistributedDataParallel):
            # DDP's gradients are views of its buckets, which are never freed
            between |= self._gradients
        return RankRecord(
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

    def _sent(self, trace: RankProfile) -> float:
        """Bytes sent in all steps."""
        # A trace does not name the ranks of a collective. Gradients are all-reduced as vectors,
        # activations with more dimensions; without replicas both are of activations. Experts are
        # assumed to get as many rows from each rank.
        gradients, activations = trace.reduced_vectors, trace.reduced
        if self._replicas == 1:
            gradients, activations = 0, gradients + activations
        return (
            trace.exchanged
            + 2 * (1 - 1 / self._replicas) * gradients
            + tp.bytes_sent(self._strategy, activations)
            + ep.bytes_sent(self._strategy, trace.divided)
        )


def read_records(run: Path) -> list[RankRecord]:
    """The records of all ranks of a run; [] if nothing was profiled."""
    paths = sorted((run / DIRECTORY).glob("rank-?????.json"))
    return [RankRecord(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]
