"""What each rank holds and how long it communicates, over the last steps of a run → one record per
rank in `<run.dir>/ranks/`, with the profiler's trace beside it.

Bytes are those of storages: views of one storage count once, and a storage counts whole, whatever
part of it a tensor shows. On a GPU memory is the GPU's, and `host` tells what lies in host memory.
"""

import gzip
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

from elastic import World
from trainer.parallel import ParallelModel
from trainer.recipe import Recipe

RANKS = "ranks"
"""Folder of the records in the run directory."""
Storages = dict[int, int]
"""Address of a storage → its bytes."""
Event = dict[str, Any]
"""Of a trace in Chrome's format; times in microseconds."""
STEP = "perdure:step"
"""Name of the events that stand for steps."""


@dataclass(frozen=True)
class RankRecord:
    """Of one rank, over `steps` steps. Bytes, unless it says otherwise."""

    rank: int
    steps: int
    parameters: int
    """Held between steps, the slices of ZeRO-1 included."""
    gathered: int
    """Whole parameters that FSDP holds at the end of a forward pass, besides `parameters`."""
    gradients: int
    """When the optimizer takes its step: the reduced ones."""
    optimizer_state: int
    buffers: int
    peak: int
    """Most that was allocated at once; the memory of checkpoints and of the process itself, which
    torch does not allocate, is not in it."""
    host: int
    """Parameters, gradients and optimizer state in host memory; 0 when that is what is measured."""
    communication: float
    """Share of the time in which at least one collective was under way, waiting for peers
    included."""
    collectives: float
    """Started per step."""


class RankMeter:
    """Measures the last `tracking.measure_steps` steps of a run under torch's profiler.

    `with meter.step(number):` goes around every step; around those before it does nothing.
    """

    def __init__(
        self, recipe: Recipe, model: ParallelModel, optimizer: torch.optim.Optimizer, world: World
    ) -> None:
        self._first = recipe.run.steps - recipe.tracking.measure_steps + 1
        self._last = recipe.run.steps
        self._directory = Path(recipe.run.dir) / RANKS
        self._model, self._optimizer, self._world = model, optimizer, world
        self._running: _Running | None = None

    def covers(self, step: int) -> bool:
        """Whether a step is measured, and slower for it."""
        return step >= self._first

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Measure what happens inside, if it is due. On all ranks."""
        if not self.covers(number):
            yield
            return
        if self._running is None:
            self._running = _Running(self._model, self._optimizer, self._world.device)
        self._running.steps += 1
        with self._running.trace.step():
            yield
        if number == self._last:
            self._directory.mkdir(exist_ok=True)
            path = self._directory / f"rank-{self._world.rank:05}.json"
            record = self._running.finish(self._world.rank, path.with_suffix(".trace.json.gz"))
            self._running = None
            path.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")


class _Running:
    """A measurement under way."""

    def __init__(
        self, model: ParallelModel, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        self.steps = 0
        self.trace = Trace(device)
        self._model, self._device = model, device
        weights = [*model.parameters.values(), *model.optimized.values()]
        state = [value for of_one in optimizer.state.values() for value in of_one.values()]
        self._tensors: dict[str, list[Any]] = {
            "parameters": weights,
            "optimizer_state": state,
            "buffers": list(model.module.buffers()),
        }
        self._held = {kind: storages(some, device) for kind, some in self._tensors.items()}
        self._gathered: Storages = {}
        self._gradients: Storages = {}
        self._gradients_on_host = 0
        self._hooks = [
            model.module.register_forward_hook(self._after_forward),
            optimizer.register_step_pre_hook(self._before_update),
        ]

    def _after_forward(self, *_: Any) -> None:
        held = self._held["parameters"]
        found = storages(self._model.module.parameters(), self._device)
        found = {key: size for key, size in found.items() if key not in held}
        self._gathered = max(self._gathered, found, key=_total)

    def _before_update(self, *_: Any) -> None:
        weights = self._tensors["parameters"]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        found = storages(gradients, self._device)
        self._gradients = max(self._gradients, found, key=_total)
        self._gradients_on_host = max(self._gradients_on_host, self._on_host(gradients))

    def _on_host(self, tensors: Iterable[torch.Tensor]) -> int:
        if self._device.type == "cpu":
            return 0
        return _total(storages(tensors, torch.device("cpu")))

    def finish(self, rank: int, trace: Path) -> RankRecord:
        """End the measurement, and leave the profiler's trace in a file."""
        self.trace.stop(trace)
        for hook in self._hooks:
            hook.remove()
        bytes_of = {kind: _total(held) for kind, held in self._held.items()}
        return RankRecord(
            rank=rank,
            steps=self.steps,
            gathered=_total(self._gathered),
            gradients=_total(self._gradients),
            peak=self.trace.peak(self._held_between_steps()),
            host=self._gradients_on_host + sum(map(self._on_host, self._tensors.values())),
            communication=self.trace.communication,
            collectives=self.trace.collectives / self.steps,
            **bytes_of,
        )

    def _held_between_steps(self) -> int:
        held: Storages = {}
        for of_kind in self._held.values():
            held |= of_kind
        if isinstance(self._model.module, DistributedDataParallel):
            held |= self._gradients  # views of its buckets, which it never frees
        return _total(held)


class Trace:
    """torch's profiler over a few steps of this rank, from the moment it is made to `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.reset_peak_memory_stats(device)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of every start on stderr
        self._profile = profile(activities=activities, profile_memory=device.type == "cpu")
        self._profile.start()
        self._highest = 0
        self.communication = 0.0
        """Share of the time of steps in which a collective was under way."""
        self.collectives = 0

    @staticmethod
    def step() -> AbstractContextManager[Any]:
        """Goes around each step."""
        return record_function(STEP)

    def stop(self, path: Path) -> None:
        """Stop, leave the trace in a file (json.gz), and work out the figures."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profile.stop()
        self._profile.export_chrome_trace(str(path))
        with gzip.open(path) as file:
            events: list[Event] = json.load(file)["traceEvents"]
        steps = [
            (event["ts"], event["ts"] + event["dur"])
            for event in events
            if event["name"] == STEP and event.get("cat") == "user_annotation"
        ]
        spans = _collectives(events, self._device)
        inside = [(max(a, b), min(c, d)) for a, c in spans for b, d in steps if a < d and b < c]
        self.communication = covered(inside) / covered(steps)
        self.collectives = len(spans)
        if self._device.type == "cpu":
            self._highest = min(_highest_level(events, *step) for step in steps)

    def peak(self, held: int) -> int:
        """Most bytes allocated at once, when `held` were between steps."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return held + self._highest


def _highest_level(events: Iterable[Event], begin: float, end: float) -> int:
    """Most bytes of host memory held at once of those allocated from `begin` to `end`.

    The profiler does not hear what gloo's threads free, when they are the last to hold it. An
    address that is given out again was freed; what is not may be counted too long, so the least of
    several steps is nearest the truth.
    """
    changes = sorted(
        (event["ts"], event["args"]["Bytes"], event["args"]["Addr"])
        for event in events
        if event["name"] == "[memory]" and event["args"]["Device Type"] == 0
        if begin <= event["ts"] <= end
    )
    live: dict[int, int] = {}
    level = highest = 0
    for _, change, address in changes:
        level -= live.pop(address, 0)
        if change > 0:
            live[address] = change
            level += change
        highest = max(highest, level)
    return highest


def storages(tensors: Iterable[torch.Tensor], device: torch.device) -> Storages:
    """The storages of tensors, or of this rank's shards of them, on a kind of device."""
    found: Storages = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.device.type == device.type:
                storage = local.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)  # empty ones
    return found


def _total(found: Storages) -> int:
    return sum(found.values())


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans (begin, end)."""
    total = reached = 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _collectives(events: Iterable[Event], device: torch.device) -> list[tuple[float, float]]:
    """(begin, end): gloo's from being asked for to being done, NCCL's kernels."""
    if device.type == "cuda":
        found = [e for e in events if e.get("cat") == "kernel" and "nccl" in e["name"].lower()]
    else:
        found = [e for e in events if e["name"].startswith("gloo:") and "dur" in e]
    return [(e["ts"], e["ts"] + e["dur"]) for e in found]


def read_records(run: Path) -> list[RankRecord]:
    """The records of all ranks of a run; empty when nothing was measured."""
    paths = sorted((run / RANKS).glob("rank-?????.json"))
    return [RankRecord(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]
