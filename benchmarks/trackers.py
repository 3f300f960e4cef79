"""Trackers: what kills cost them, and what they cost training.

First a run of a tiny model with W&B offline, TensorBoard and a record per step, in which something
is killed again and again (SIGKILL) in the midst of logging: a node with all its processes, the rank
alone, the tracker alone, wandb-core alone. Afterwards each record of metrics.jsonl is looked for in
W&B's files (benchmarks/support/wandb_files.py).

Then the time per step without a tracker, with W&B, and with sinks that hang, that crash and that
flood the output, in turn, several rounds.
"""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.support import arguments, environment, json_lines, python_path, report, run, spread
from benchmarks.support.wandb_files import not_in_wandb, wandb_rows
from elastic.process import children
from lab.local_nodes import LocalNode, LocalNodes

RECIPE = """\
run: {dir: run, log_every: 1, device: cpu}
model:
  architecture:
    {model_type: llama, vocab_size: 257, hidden_size: 48, intermediate_size: 96,
     num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 12}
data: {sources: [{path: data}], seq_len: 32}
batch: {global_batch: 8}
optimizer: {lr: 1e-3}
precision: {dtype: fp32}
checkpoint: {every: 25, slots: 0}
"""
SINKS = """\
import os, time

class Sink:
    def __init__(self, record):
        self.record = record
    def close(self):
        pass

def hangs(run_dir):
    return Sink(lambda step, values: time.sleep(1e6))

def crashes(run_dir):
    return Sink(lambda step, values: os.abort())

def floods(run_dir):
    return Sink(lambda step, values: print("x" * (1 << 20)))
"""
CASES = {
    "no tracker": "",
    "W&B, offline": "tracking.wandb=offline",
    "a sink that hangs": "tracking.sinks=[bad_sinks:hangs]",
    "a sink that crashes": "tracking.sinks=[bad_sinks:crashes]",
    "a sink that prints 1 MiB a record": "tracking.sinks=[bad_sinks:floods]",
}
KINDS = ("node", "rank", "wandb-core", "node", "tracker")
PATIENCE = 240.0


def main() -> None:
    options = arguments(__doc__ or "", kills=20, rounds=3, steps=150, seed=0)
    with TemporaryDirectory(prefix="perdure-bench-") as scratch:
        folder = Path(scratch)
        (folder / "recipe.yaml").write_text(RECIPE)
        (folder / "bad_sinks.py").write_text(SINKS)
        (folder / "text.txt").write_text("".join(f"Apple {n} of {n % 7}.\n" for n in range(9000)))
        perdure = [sys.executable, "-m", "trainer.cli"]
        prepare = ["data", "prepare", "text.txt", "--out", "data", "--tokenizer", "bytes"]
        run([*perdure, *prepare], folder)
        if options.kills:
            kill(folder, options.kills, random.Random(options.seed), options.json)
        if options.rounds:
            slow_down(folder, options.rounds, options.steps, options.json)


def kill(folder: Path, kills: int, chance: random.Random, json_file: Path | None) -> None:
    """Kill something `kills` times, in turn, and count the records that W&B lacks."""
    directory, did = folder / "run", dict.fromkeys(KINDS, 0)
    worker = ["-m", "trainer", "recipe.yaml", "tracking.wandb=offline", "tracking.tensorboard=true"]
    with LocalNodes(
        [*worker, "run.steps=100000"], folder=folder, nnodes="1", logs=folder,
        environment=environment(),
    ) as nodes:  # fmt: skip
        node = nodes.add()
        for number in range(kills):
            kind = KINDS[number % len(KINDS)]
            begun = len(wandb_rows(directory))
            # W&B must be at it, or the kill would say nothing.
            _until(partial(_logs, directory, _reached(directory) + chance.randint(3, 12)), node)
            time.sleep(chance.random())
            if kind == "node":
                node.kill()
                node = nodes.add()
            else:
                os.kill(_victim(node, kind), signal.SIGKILL)
            did[kind] += 1
            if kind in ("node", "wandb-core"):
                _until(partial(_begun_again, directory, begun), node)
            print(f"kill {number + 1}, {kind}: {len(not_in_wandb(directory))} behind", flush=True)
        node.kill()
        nodes.worker = [*worker, f"run.steps={_reached(directory) + 10}"]
        node = nodes.add()
        _until(lambda: node.process.poll() is not None, node)
    files = wandb_rows(directory)
    records, lost = json_lines(directory / "metrics.jsonl"), not_in_wandb(directory)
    for record in lost:
        print("lost:", record)
    rows = [
        {
            "kills": ", ".join(f"{count} x {kind}" for kind, count in did.items()),
            "records": len(records),
            "lost in W&B": len(lost),
            "files": len(files),
            "rows": sum(map(len, files)),
            "rows of steps done again": sum(map(len, files)) - len({r["step"] for r in records}),
        }
    ]
    report("Records of a run in W&B's offline files after kills", rows, rows, json_file)


def slow_down(folder: Path, rounds: int, steps: int, json_file: Path | None) -> None:
    """Measure the seconds per step beside each tracker."""
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    launch = [sys.executable, "-m", "trainer.cli", "train", "recipe.yaml", "--nproc-per-node", "1"]
    settings = [f"run.steps={steps}", "checkpoint.every=0"]
    for _ in range(rounds):
        for case, tracker in CASES.items():
            shutil.rmtree(folder / "run", ignore_errors=True)
            more = {"PYTHONPATH": python_path(folder, environment()["PYTHONPATH"])}
            run([*launch, *settings, *filter(None, [tracker])], folder, more)
            regular = [r for r in json_lines(folder / "run/metrics.jsonl") if "loss" in r]
            first, last = regular[steps // 3], regular[-1]  # trackers take seconds to start
            seconds[case].append((last["time"] - first["time"]) / (last["step"] - first["step"]))
    none = seconds["no tracker"]
    ratios = {c: [a / b for a, b in zip(those, none, strict=True)] for c, those in seconds.items()}
    rows = [
        {
            "case": case,
            "ms per step": spread([1e3 * value for value in those], 1),
            "ratio": spread(ratios[case], 3),
        }
        for case, those in seconds.items()
    ]
    figures = {
        case: {"rounds": those, "ratio": median(ratios[case])} for case, those in seconds.items()
    }
    report("Seconds per step, 1 rank; median (min-max) over rounds", rows, figures, json_file)


def _victim(node: LocalNode, kind: str) -> int:
    """Process id of what is to be killed."""
    if kind == "rank":
        return node.trainers()[0]
    trackers = node.running("trainer.run.trackers")
    tracker = next(
        pid for pid in trackers if b"\0wandb\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return tracker if kind == "tracker" else children(tracker)[0]


def _reached(directory: Path) -> int:
    return max((record["step"] for record in json_lines(directory / "metrics.jsonl")), default=0)


def _logs(directory: Path, step: int) -> bool:
    """Whether the run has come to `step`, and W&B's newest file has a row."""
    files = wandb_rows(directory)
    return _reached(directory) >= step and bool(files and files[-1])


def _begun_again(directory: Path, files: int) -> bool:
    return len(wandb_rows(directory)) > files


def _until(true: Callable[[], bool], node: LocalNode) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing happened for {PATIENCE:.0f} s:\n{node.text()[-3000:]}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
