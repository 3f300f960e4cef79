"""Step time and peak memory of the offload tiers on one model, and under a memory limit that its
optimizer state exceeds (cgroup v1 and root; left out elsewhere). The loss curves must be equal.

One rank. Memory is anonymous and shared memory of all processes of the run, without the page cache,
which the kernel gives to whoever needs it.
"""

import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support import QUICKSTART, arguments, json_lines, report, run, spread, workspace
from benchmarks.support.control_groups import NoLimitError, memory_limit
from benchmarks.support.processes import MemoryWatch

MODEL = (
    "model.architecture.hidden_size=512",
    "model.architecture.intermediate_size=1536",
    "model.architecture.num_hidden_layers=18",
    "model.architecture.head_dim=128",
)
PARAMETERS = 58_700_000
SETTINGS = (
    *("run.evaluate_every=0", "run.log_every=1", "schedule.warmup_steps=0"),
    *("batch.global_batch=1", "batch.micro_batch=1", "data.seq_len=64", "optimizer.lr=3e-4"),
    *("checkpoint.every=0", "elastic.snapshot_every=0"),
)
NVME = ("strategy.offload=nvme", "strategy.offload_directory=offload")
LIMIT_MIB = 512
TIERS: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("none", (), 0),
    ("cpu", ("strategy.offload=cpu",), 0),
    ("nvme", NVME, 0),
    (f"nvme, {LIMIT_MIB} MiB limit", NVME, LIMIT_MIB << 20),
)
"""Name, overrides, memory limit in bytes (0: none)."""


def main() -> None:
    options = arguments(__doc__ or "", rounds=3, steps=6)
    settings = (*MODEL, *SETTINGS, f"run.steps={options.steps}")
    seconds: dict[str, list[float]] = {}
    memory: dict[str, list[int]] = {}
    curves: dict[str, list[float]] = {}
    with workspace() as directory, MemoryWatch() as watch:
        for _ in range(options.rounds):
            for name, overrides, limit in TIERS:
                worker = [sys.executable, "-m", "trainer"]  # torchrun would fill half the limit
                command = [*worker, str(QUICKSTART), *settings, *overrides]
                try:
                    records, peak = _measure(command, directory, limit, watch)
                except NoLimitError as reason:
                    print(f"left out: {name}: {reason}")
                    continue
                # The first step also warms up.
                steps = [r["step_seconds_p50"] for r in records if "step_seconds_p50" in r]
                seconds.setdefault(name, []).append(median(steps))
                memory.setdefault(name, []).append(peak)
                curves[name] = [r["loss"] for r in records if "loss" in r]
    for name, curve in curves.items():
        if curve != curves["none"]:
            raise SystemExit(f"the losses of {name} differ: {curve} against {curves['none']}")
    rows = [
        {
            "offload": name,
            "seconds per step": spread(seconds[name]),
            "peak memory, MB": spread([peak / 1e6 for peak in memory[name]], 0),
            "loss of the last step": curves[name][-1],
        }
        for name in seconds
    ]
    figures: dict[str, Any] = {"seconds": seconds, "memory": memory, "losses": curves}
    title = f"Offload: {PARAMETERS / 1e6:.0f} M parameters, 1 rank; median (min-max) over rounds"
    report(title, rows, figures, options.json)


def _measure(
    command: Sequence[str], directory: Path, limit: int, watch: MemoryWatch
) -> tuple[list[dict[str, Any]], int]:
    """Train once; returns the records of metrics.jsonl, and the peak memory in bytes."""
    shutil.rmtree(directory / "runs", ignore_errors=True)
    time.sleep(1)  # the memory of the run before is gone
    with ExitStack() as stack:
        if limit:
            command = stack.enter_context(memory_limit(limit)).command(command)
        start = time.monotonic()
        run(command, directory)
    peak = watch.extra(start, start, time.monotonic())
    return json_lines(directory / "runs/quickstart/metrics.jsonl"), peak


if __name__ == "__main__":
    main()
