"""One record per log interval → console and metrics.jsonl, where trackers.py finds it; one line per
step → the ledger.

Only rank 0 holds a `Metrics`. Units: seconds, bytes, tokens; `tokens_per_second` counts target
tokens over all ranks.
"""

import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from checkpointing import SaveOutcome
from elastic import LEDGER, Ledger, Start
from elastic.companion import accompany
from trainer.recipe import Recipe
from trainer.trackers import METRICS

logger = logging.getLogger(__name__)

# Dense tensor-core TFLOP/s from NVIDIA's data sheets, without sparsity: bf16/fp16 and tf32-less
# fp32. A name that is not here leaves MFU out: a wrong peak would be worse than none. Of the names
# that are words of a device's name, the first counts.
PEAK_TFLOPS = {
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "V100-PCIE": 112.0,
    "V100": 125.0,
    "T4": 65.0,
}
# Before compute capability 8.0 tensor cores know no bf16: as fast as fp32 without them.
BF16_TFLOPS = {"V100-PCIE": 14.0, "V100": 15.7, "T4": 8.1}


class Startup:
    """Where the time from launch to the first optimizer step goes, in named parts."""

    def __init__(self) -> None:
        launched = float(os.environ.get("PERDURE_LAUNCHED_AT", "0"))
        born = _process_start()
        self.parts: dict[str, float] = {}
        if launched:
            self.parts["launcher"] = born - launched
        self._last = born

    def mark(self, part: str) -> None:
        """The time since the last mark went to `part`."""
        now = time.time()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.parts.items())
        return f"first step after {sum(self.parts.values()):.1f} s: {parts}"


def _process_start() -> float:
    """When this process was started, in seconds since the epoch (Linux; elsewhere: now)."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age
    except (OSError, AttributeError):
        return time.time()


def peak_flops(recipe: Recipe, device: torch.device) -> float | None:
    """Peak FLOP/s of one device, or None where it is not known."""
    if recipe.tracking.peak_tflops:
        return recipe.tracking.peak_tflops * 1e12
    if device.type != "cuda" or recipe.precision.dtype == "fp32":
        return None
    tflops = named_tflops(torch.cuda.get_device_name(device), recipe.precision.dtype)
    return tflops and tflops * 1e12


def named_tflops(name: str, dtype: str) -> float | None:
    """Peak of a GPU by its name, at bf16 or fp16; None where it is not known, or is a slice of a
    GPU (MIG), whose share of it the name does not tell."""
    known = PEAK_TFLOPS | BF16_TFLOPS if dtype == "bf16" else PEAK_TFLOPS
    whole = not re.search(r"\bMIG\b", name)
    return next((known[n] for n in known if whole and re.search(rf"\b{n}\b", name)), None)


def peak_memory(device: torch.device) -> int:
    """Largest memory this process has held: GPU memory reserved, or resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


class Window:
    """Step times of one log interval, which begins now."""

    def __init__(self) -> None:
        self._began, self._left_out = time.perf_counter(), 0.0
        self.seconds: list[float] = []
        self.waits: list[float] = []
        self.computes: list[float] = []
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
        elapsed, ordered = self.elapsed, sorted(self.seconds)
        rate = self.tokens / elapsed
        record = {
            "tokens_per_second": rate,
            "tokens_per_second_per_rank": rate / world_size,
            "step_seconds_p50": _percentile(ordered, 0.5),
            "step_seconds_p90": _percentile(ordered, 0.9),
            "step_seconds_max": ordered[-1],
            "data_wait": sum(self.waits) / elapsed,
        }
        if flops_per_token and peak:
            record["mfu"] = rate * flops_per_token / (peak * world_size)
        return record


def _percentile(ordered: list[float], share: float) -> float:
    """By linear interpolation between the two nearest values."""
    below, rest = divmod(share * (len(ordered) - 1), 1)
    low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
    return low + rest * (high - low)


class Metrics:
    """Sinks of rank 0; use as a context manager."""

    def __init__(self, recipe: Recipe, start: Start) -> None:
        """Open all sinks.

        Args:
            recipe: of the run.
            start: what this attempt begins with. Records of later steps are dropped, because the
                steps they describe are computed again; the ledger keeps them.
        """
        run_dir, resumed_step = Path(recipe.run.dir), start.step
        self.ledger = Ledger(run_dir / LEDGER, start)
        self._path = run_dir / METRICS
        self._latest = 0.0
        """Time of the last record. Trackers tell what is new by it, also after a restart on a
        machine whose clock is behind."""
        try:
            self._latest = keep_records(self._path, resumed_step)
        except OSError as error:  # a full disk must not keep a run from going on
            print(f"warning: {self._path} keeps records of steps that are done again: {error}")
        self._file = self._path.open("a", encoding="utf-8")
        self._bar = tqdm(
            total=recipe.run.steps,
            initial=resumed_step,
            unit="step",
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            leave=False,
        )
        wanted = {
            "tensorboard": recipe.tracking.tensorboard,
            "wandb": recipe.tracking.wandb != "off",
        }
        self._end_trackers = [
            accompany(["trainer.trackers", kind, str(run_dir.absolute())])
            for kind in wanted
            if wanted[kind]
        ]

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: Any) -> None:
        self.ledger.__exit__(*error)
        self._bar.close()
        try:
            self._file.close()
        except OSError as failure:
            print(f"warning: the last records are lost: {failure}", flush=True)
        for end in self._end_trackers:
            end()

    def say(self, text: str) -> None:
        """One line on the console, above the progress bar."""
        self._bar.clear()
        print(text, flush=True)
        self._bar.refresh()

    def done(
        self,
        step: int,
        first: int,
        after_last: int,
        seconds: float,
        skipped: bool,
        consumed: str | None,
    ) -> None:
        """A step over the sequences from `first` to before `after_last` is done: move the progress
        bar, and tell the ledger."""
        self._bar.update(step - self._bar.n)
        self.ledger.step(step, first, after_last, seconds, skipped=skipped, consumed=consumed)

    def record(
        self,
        step: int,
        values: Mapping[str, float],
        line: str | None = None,
        event: str | None = None,
    ) -> None:
        """Send `values` of `step` everywhere, and `line` to the console; metrics.jsonl also gets
        `event`, something that went wrong."""
        # JSON has no NaN: what is not finite is null there.
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        self._latest = max(time.time(), math.nextafter(self._latest, math.inf))
        try:
            record: dict[str, Any] = {"step": step, "time": self._latest, **finite}
            record |= {"event": event} if event else {}
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:  # a full disk must not cost the run; what is buffered comes later
            self.say(f"warning: the record of step {step} is not written yet: {error}")
        if line:
            self.say(line)


def say(metrics: Metrics | None, text: str) -> None:
    """One line on the console of rank 0."""
    if metrics:
        metrics.say(text)


def warn(metrics: Metrics | None, step: int, what: str) -> None:
    """Tell of something that went wrong in a step, on the console and in the ledger."""
    if metrics and what:
        metrics.say(f"warning: {what}")
        metrics.ledger.event("bad numbers", step=step, what=what)


def step_line(step: int, steps: int, values: Mapping[str, float], unit: str = "tokens") -> str:
    """The console line of a training record; speed is in `unit`."""
    parts = [
        f"step {step:>{len(str(steps))}}/{steps}",
        f"loss {values['loss']:.4f}",
        f"grad norm {values['grad_norm']:.3f}",
        f"lr {values['lr']:.2e}",
    ]
    if "tokens_per_second" in values:
        parts += [
            f"{values['tokens_per_second']:,.0f} {unit}/s",
            f"{values['step_seconds_p50'] * 1e3:.0f} ms/step",
            f"data wait {values['data_wait']:.1%}",
        ]
    if "mfu" in values:
        parts.append(f"MFU {values['mfu']:.1%}")
    parts.append(f"memory {values['peak_memory'] / 1e9:.2f} GB")
    if "eta_seconds" in values:
        parts.append(f"ETA {_clock(values['eta_seconds'])}")
    return " | ".join(parts)


def save_record(outcome: SaveOutcome) -> tuple[dict[str, float], str, str | None]:
    """What a checkpoint that ended leaves: values, a console line, an event if it failed."""
    values = {"checkpoint_step": outcome.step, "checkpoint_seconds": outcome.seconds}
    if outcome.error:
        values["checkpoint_failed"] = 1
        return values, f"warning: {outcome.error}", outcome.error
    values |= {"checkpoint_bytes": outcome.nbytes, "checkpoint_writers": outcome.writers}
    line = f"saved {outcome.path}: {outcome.nbytes / 1e6:,.1f} MB in {outcome.seconds:.2f} s"
    return values, line, None


def validation_line(values: Mapping[str, float]) -> str:
    """The console line of a validation record."""
    if "validation_loss" not in values:
        return ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
    return (
        f"validation loss {values['validation_loss']:.4f}, "
        f"perplexity {values['validation_perplexity']:.2f}"
    )


def keep_records(path: Path, last_step: int) -> float:
    """Drop the records after `last_step`, and a last line that a killed process left unfinished;
    returns the time of the last record, dropped or not."""
    if not path.exists():
        return 0.0
    kept, latest = [], 0.0
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue
        latest = max(latest, record["time"])
        if record["step"] <= last_step:
            kept.append(line + "\n")
    temporary = path.with_suffix(".jsonl.tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
    return latest


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
