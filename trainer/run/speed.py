"""Speed of a run: means over each log interval, and ranks slower than the median.

[Note: slow ranks] A slow rank does not fail, but makes all others wait. Only times without such
waits show it: those of forward passes, because a backward pass ends when the gradients of all ranks
are summed. FSDP waits for other ranks in forward passes too, so with FSDP a slow rank shows only in
its time between waits. Ranks with unequal shares of the batch must not look slow. A pass has a
fixed cost and a cost per sequence, so small shares take less time, but more per sequence. A rank
counts as slow only if it is slow both per pass and per sequence.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

import numpy as np
import torch
import torch.distributed as dist

from elastic.node.exchange import received
from trainer.plan.costs import named_gpu, peak_tflops
from trainer.recipe import Recipe
from trainer.run.metrics import step_line
from trainer.run.state import Run
from trainer.run.step import StepResult
from trainer.text import terminal_columns


class RunSpeedRecorder:
    """Measures the speed of a run per log interval, and records it. On all ranks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._window, self._stages = _SpeedWindow(), run.mesh.stages
        self._paces = [RunStragglerState() for _ in self._stages]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context whose time is excluded from the averages of the log interval."""
        began = time.perf_counter()
        yield
        self._window.left_out += time.perf_counter() - began

    def step(self, result: StepResult, *, odd: bool) -> None:
        """Add a step; at the end of a log interval, record the interval. `odd`: whether the step
        took longer for a known reason; then averages exclude it."""
        run = self._run
        if balance := run.balance:
            compute = result.gradients.compute
            if change := balance.after_step(run.progress.sequences, compute, odd=odd):
                run.log.shares(run.progress.step, balance.begin, balance.shares, change)
        if odd:
            self._window.left_out += result.seconds
        else:
            self._window.results.append(result)
            if run.model.pipeline:
                self._window.pipeline.append(run.model.pipeline.seconds)
        if not run.due(run.recipe.run.log_every):
            return
        seconds, sequences, *pipeline = self._by_rank()
        # With shares by speed nobody waits for slow ranks, and a change of shares names them.
        if not run.balance:
            self._name_stragglers(seconds, sequences)
        values = step_record(run, result, self._window)
        if self._window.pipeline:
            values["bubble"] = bubble(*pipeline)
        step, steps = run.progress.step, run.recipe.run.steps
        columns = terminal_columns(sys.stdout)
        run.log.record(step, values, step_line(step, steps, values, run.task.unit, columns))
        self._window = _SpeedWindow()

    def _name_stragglers(self, seconds: Sequence[float], sequences: Sequence[float]) -> None:
        for stage, ranks in enumerate(self._stages):  # pipeline stages differ in work
            self._paces[stage], sentences = compare_ranks(
                self._paces[stage],
                [seconds[rank] for rank in ranks],
                [sequences[rank] for rank in ranks],
                ranks if len(self._stages) > 1 else None,
            )
            for sentence in sentences:
                self._run.log.event(self._run.progress.step, "straggler", sentence)

    def _by_rank(self) -> list[list[float]]:
        """Return lists by rank for this interval: mean seconds of a forward pass; mean sequences of
        a micro-batch; with a pipeline also its seconds, and seconds of waiting for messages."""
        mesh, window = self._run.mesh, self._window
        world, rank = self._run.world, self._run.world.rank
        mine = self._run.micro_batches
        values = [
            sum(one.gradients.compute for one in window.results) / max(1, len(window.results)),
            sum(len(micro.positions) for micro in mine) / len(mine),
        ]
        if self._run.model.pipeline:
            values += [sum(ran for ran, _ in window.pipeline), sum(w for _, w in window.pipeline)]
        shape = len(values), world.world_size
        ranks = torch.zeros(shape, dtype=torch.float64, device=world.device)
        # Each rank fills its own column, so the sum holds all columns.
        ranks[:, rank] = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(ranks, group=mesh.group)
        by_rank: list[list[float]] = received(ranks)
        return by_rank


def bubble(ran: Sequence[float], waited: Sequence[float]) -> float:
    """Return the fraction of a pipeline's time in which its ranks are idle: waiting for messages,
    or finished before other ranks.

    Args:
        ran: by rank, seconds from its first action in a step to its last.
        waited: by rank, seconds within `ran` that it waited for messages.
    """
    # Ranks begin together, since each step ends with an all-reduce: the pipeline takes max(ran).
    busy = sum(ran) - sum(waited)
    return 1 - busy / (len(ran) * max(ran))


class _SpeedWindow:
    """Collects the step times of one log interval, which begins when the object is created."""

    def __init__(self) -> None:
        self._began, self.left_out = time.perf_counter(), 0.0
        """`left_out`: seconds without training, such as validation, which do not count."""
        self.results: list[StepResult] = []
        self.pipeline: list[tuple[float, float]] = []
        """`PipelineParallel.seconds` of each step: (seconds of running, seconds of waiting)."""

    @property
    def elapsed(self) -> float:
        """Seconds since the interval began, without `left_out`."""
        return time.perf_counter() - self._began - self.left_out


def step_record(run: Run, result: StepResult, window: _SpeedWindow) -> dict[str, float]:
    """Return the record of a log interval for metrics.jsonl, by the names in docs/metrics.md."""
    recipe, progress, device = run.recipe, run.progress, run.world.device
    elapsed, seconds = window.elapsed, [one.seconds for one in window.results]
    values = {
        **result.gradients.means,
        "loss": result.gradients.loss,
        "grad_norm": result.gradients.norm,
        "lr": result.lr,
        "tokens": progress.tokens,
        "skipped_steps": progress.skipped,
        "peak_memory": peak_memory(device),
    }
    if seconds:
        middle, slow, slowest = np.percentile(seconds, (50, 90, 100)).tolist()
        rate = len(seconds) * run.plan.global_batch * recipe.data.seq_len / elapsed
        values |= {
            "tokens_per_second": rate,
            "tokens_per_second_per_rank": rate / run.world.world_size,
            "step_seconds_p50": middle,
            "step_seconds_p90": slow,
            "step_seconds_max": slowest,
            "data_wait": sum(one.data_wait for one in window.results) / elapsed,
        }
        flops, peak = run.task.flops_per_token, peak_flops(recipe, device)
        if flops and peak:
            values["mfu"] = rate * flops / (peak * run.world.world_size)
    if run.balance:
        shares = run.balance.shares
        values |= {"smallest_share": min(shares), "largest_share": max(shares)}
    if recipe.precision.dtype == "fp16":
        values["loss_scale"] = progress.loss_scale.value
    if seconds:
        values["eta_seconds"] = elapsed / len(seconds) * (recipe.run.steps - progress.step)
    return values


def peak_flops(recipe: Recipe, device: torch.device) -> float | None:
    """Return the peak FLOP/s of one device; None if it is not known."""
    if recipe.tracking.peak_tflops:
        return recipe.tracking.peak_tflops * 1e12
    if device.type != "cuda":
        return None
    gpu = named_gpu(torch.cuda.get_device_name(device))
    return peak_tflops(gpu, recipe.precision.dtype) * 1e12 if gpu else None


def peak_memory(device: torch.device) -> int:
    """Return this process's peak memory in bytes: reserved on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):  # in KiB
            return int(line.split()[1]) * 1024
    return 0


SLOWER = 1.3
"""A slow rank takes more than this many times the median."""
ODD = 3.5
"""Modified z-score above which a value is an outlier (Iglewicz and Hoaglin, 1993)."""
WINDOWS = 3
"""Log intervals in a row after which a rank is called slow, or no longer called slow."""
WEIGHT = 0.5
"""Weight of the newest log interval in the moving average."""


@dataclass(frozen=True)
class RunStragglerState:
    """State of the comparison of ranks after a log interval; the defaults are the initial state."""

    smoothed: tuple[float, ...] = ()
    """By rank, moving average of the seconds of a pass."""
    contrary: tuple[int, ...] = ()
    """By rank, number of log intervals in a row whose result disagrees with `named`."""
    named: frozenset[int] = frozenset()
    """Ranks that are called slow."""


def compare_ranks(
    pace: RunStragglerState,
    seconds: Sequence[float],
    sequences: Sequence[float] | None = None,
    ranks: Sequence[int] | None = None,
) -> tuple[RunStragglerState, list[str]]:
    """Compare the ranks in one more log interval. A rank is called slow if it takes more than
    SLOWER times the median and is an outlier, in the interval and in the moving average, for
    WINDOWS intervals in a row. If the number of ranks changes, the comparison begins anew. Returns
    the new state, and a sentence for each rank that became slow or is no longer slow.

    Args:
        seconds: by rank, mean seconds of a pass in this interval, without waits for other ranks.
        sequences: by rank, mean number of sequences in a pass; None: all equal.
        ranks: global ranks of the values, such as the ranks of a pipeline stage; None: 0, 1, ….
    """
    if len(pace.smoothed) != len(seconds):
        pace = RunStragglerState(tuple(seconds), (0,) * len(seconds))
    smoothed = tuple(
        WEIGHT * new + (1 - WEIGHT) * old for old, new in zip(pace.smoothed, seconds, strict=True)
    )
    sizes = sequences or [1.0] * len(seconds)

    def per_sequence(values: Sequence[float]) -> list[float]:
        return [value / size for value, size in zip(values, sizes, strict=True)]

    slow = outliers(seconds) & outliers(smoothed)
    slow &= outliers(per_sequence(seconds)) & outliers(per_sequence(smoothed))
    contrary = tuple(
        count + 1 if (rank in slow) != (rank in pace.named) else 0
        for rank, count in enumerate(pace.contrary)
    )
    changed = {rank for rank, count in enumerate(contrary) if count >= WINDOWS}
    median = median_low(smoothed) if smoothed else 0.0
    sentences = []
    for rank in sorted(changed):
        whose = "its stage" if ranks else "all ranks"
        times = f"{smoothed[rank]:.3g} s, median of {whose} {median:.3g} s"
        name = ranks[rank] if ranks else rank
        if rank in pace.named:
            sentences.append(f"rank {name} is no longer slow ({times})")
        else:
            sentences.append(
                f"rank {name} is slow, and all others wait for it: {smoothed[rank] / median:.1f} "
                f"times the median for {WINDOWS} log intervals in a row ({times}); look for "
                "other processes, heat, or lowered clocks on its machine"
            )
    contrary = tuple(0 if rank in changed else count for rank, count in enumerate(contrary))
    return RunStragglerState(smoothed, contrary, pace.named ^ changed), sentences


def outliers(seconds: Sequence[float]) -> set[int]:
    """Return the ranks above SLOWER times the median whose modified z-score is above ODD."""
    if not seconds:
        return set()
    # The low median: of two ranks, the slower is compared with the faster.
    median = median_low(seconds)
    spread = median_low([abs(value - median) for value in seconds])
    # 0.6745 makes the median absolute deviation comparable to a standard deviation.
    return {
        rank
        for rank, value in enumerate(seconds)
        if value > SLOWER * median > 0 and 0.6745 * (value - median) > ODD * spread
    }
