"""How fast the run is: means over each log interval, and ranks that are slower than the others."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from elastic.node.exchange import received
from trainer.plan.gpus import named_gpu, peak_tflops
from trainer.recipe import Recipe
from trainer.run.metrics import step_line
from trainer.run.state import Run
from trainer.run.step import StepResult
from trainer.run.straggler import RankPace, compare_ranks
from trainer.text import terminal_columns


class Speed:
    """The log intervals of a run. On all ranks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._window, self._stages = Window(), run.mesh.stages
        self._paces = [RankPace() for _ in self._stages]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done in it is no training, and no part of the averages."""
        began = time.perf_counter()
        yield
        self._window.leave_out(time.perf_counter() - began)

    def step(self, result: StepResult, *, odd: bool) -> None:
        """A step is done; at the end of a log interval, record it.

        Args:
            result: of the step.
            odd: it took longer than others for a reason, and would spoil the averages.
        """
        run = self._run
        if odd:
            self._window.leave_out(result.seconds)
        else:
            tokens = run.plan.global_batch * run.recipe.data.seq_len
            self._window.add(result.seconds, result.data_wait, result.compute, tokens)
            if run.model.pipeline:
                self._window.pipeline.append(run.model.pipeline.seconds)
        if not run.due(run.recipe.run.log_every):
            return
        seconds, sequences, *pipeline = self._by_rank()
        self._name_stragglers(seconds, sequences)
        values = step_record(run, result, self._window)
        if self._window.pipeline:
            values["bubble"] = bubble(*pipeline)
        step, steps = run.progress.step, run.recipe.run.steps
        columns = terminal_columns(sys.stdout)
        run.log.record(step, values, step_line(step, steps, values, run.task.unit, columns))
        self._window = Window()

    def _name_stragglers(self, seconds: Sequence[float], sequences: Sequence[float]) -> None:
        for stage, ranks in enumerate(self._stages):  # which take their own times
            self._paces[stage], sentences = compare_ranks(
                self._paces[stage],
                [seconds[rank] for rank in ranks],
                [sequences[rank] for rank in ranks],
                ranks if len(self._stages) > 1 else None,
            )
            for sentence in sentences:
                self._run.log.event(self._run.progress.step, "straggler", sentence)

    def _by_rank(self) -> list[list[float]]:
        """By rank, in this interval: seconds of a forward pass, sequences of one; of a pipeline,
        its seconds, and those that a rank waited for messages."""
        mesh, plan, window = self._run.mesh, self._run.plan, self._window
        world, rank = self._run.world, self._run.world.rank
        mine = plan.micro_batches(mesh.dp_rank, self._run.progress.sequences)
        told = [
            sum(window.computes) / max(1, len(window.computes)),
            sum(len(micro.positions) for micro in mine) / plan.passes,
        ]
        if self._run.model.pipeline:
            told += [sum(ran for ran, _ in window.pipeline), sum(w for _, w in window.pipeline)]
        ranks = torch.zeros((len(told), world.world_size), dtype=torch.float64, device=world.device)
        ranks[:, rank] = torch.tensor(told, dtype=torch.float64)
        dist.all_reduce(ranks, group=mesh.group)
        by_rank: list[list[float]] = received(ranks)
        return by_rank


def bubble(ran: Sequence[float], waited: Sequence[float]) -> float:
    """Share of a pipeline's time in which its ranks wait for messages, or are done.

    Args:
        ran: by rank, seconds from the first action of a step to the last. All begin together, as
            a step ends with a sum over them; the pipeline's time is that of the last to be done.
        waited: by rank, what of them it waited for messages.
    """
    busy = sum(ran) - sum(waited)
    return 1 - busy / (len(ran) * max(ran))


class Window:
    """Step times of one log interval, which begins now."""

    def __init__(self) -> None:
        self._began, self._left_out = time.perf_counter(), 0.0
        self.seconds: list[float] = []
        self.waits: list[float] = []
        self.computes: list[float] = []
        self.pipeline: list[tuple[float, float]] = []
        """`Pipeline.seconds` of each step."""
        self.tokens = 0

    def add(self, seconds: float, data_wait: float, compute: float, tokens: int) -> None:
        """One step: its duration, the part of it spent waiting for data, one forward pass of this
        rank, its target tokens."""
        self.seconds.append(seconds)
        self.waits.append(data_wait)
        self.computes.append(compute)
        self.tokens += tokens

    def leave_out(self, seconds: float) -> None:
        """Time of the interval that is not training: warming up, validation."""
        self._left_out += seconds

    @property
    def elapsed(self) -> float:
        """Time that the steps took so far, with all that came between them: logs, checkpoints."""
        return time.perf_counter() - self._began - self._left_out

    def summary(
        self, world_size: int, flops_per_token: float | None, peak: float | None
    ) -> dict[str, float]:
        """Speed over the interval; nothing when it holds no step."""
        if not self.seconds:
            return {}
        elapsed = self.elapsed
        middle, slow, slowest = np.percentile(self.seconds, (50, 90, 100)).tolist()
        rate = self.tokens / elapsed
        record = {
            "tokens_per_second": rate,
            "tokens_per_second_per_rank": rate / world_size,
            "step_seconds_p50": middle,
            "step_seconds_p90": slow,
            "step_seconds_max": slowest,
            "data_wait": sum(self.waits) / elapsed,
        }
        if flops_per_token and peak:
            record["mfu"] = rate * flops_per_token / (peak * world_size)
        return record


def step_record(run: Run, result: StepResult, window: Window) -> dict[str, float]:
    """What metrics.jsonl and the trackers get of a log interval."""
    recipe, progress, device = run.recipe, run.progress, run.world.device
    peak = peak_flops(recipe, device)
    values = {
        **result.means,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "tokens": progress.tokens,
        "skipped_steps": progress.skipped,
        "peak_memory": peak_memory(device),
        **window.summary(run.world.world_size, run.task.flops_per_token, peak),
    }
    if recipe.precision.dtype == "fp16":
        values["loss_scale"] = progress.loss_scale.value
    if window.seconds:
        mean_seconds = window.elapsed / len(window.seconds)
        values["eta_seconds"] = mean_seconds * (recipe.run.steps - progress.step)
    return values


def peak_flops(recipe: Recipe, device: torch.device) -> float | None:
    """Peak FLOP/s of one device, or None where it is not known."""
    if recipe.tracking.peak_tflops:
        return recipe.tracking.peak_tflops * 1e12
    if device.type != "cuda":
        return None
    gpu = named_gpu(torch.cuda.get_device_name(device))
    return peak_tflops(gpu, recipe.precision.dtype) * 1e12 if gpu else None


def peak_memory(device: torch.device) -> int:
    """Largest memory this process has held: GPU memory reserved, or resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
