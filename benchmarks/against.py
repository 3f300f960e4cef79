"""This tree against another commit of it, in turns on one machine: what a change costs a run.

Of each it takes a checkout, puts it in front of PYTHONPATH, and has `perdure train` run the
quickstart in fp32 on the same prepared data: on one rank, on two under DDP and under FULL_SHARD.
A run saves twice. Under FULL_SHARD one of the ranks is killed after that, once. The loss of an
output head is timed alone, forward and backward: in chunks with a vocabulary of 151,936.

Then it compares bits, without document masks, whose attention is computed in more than one way:
losses, gradient norms and checkpoints of both, and of this tree from a checkpoint of the other's.
With `--rounds 0` that is all.
"""

import configparser
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support import (
    ROOT,
    arguments,
    heading,
    json_lines,
    print_table,
    python_path,
    report,
    run,
    spread,
    workspace,
)
from benchmarks.support.processes import cpu_seconds
from elastic.process import descendants

STEPS, EVERY, WARM, LATE = 40, 15, 8, 32
CASES = {
    "one rank": ("--nproc-per-node=1",),
    "DDP": ("--nproc-per-node=2", "strategy.name=ddp"),
    "FULL_SHARD": ("--nproc-per-node=2",),
}
EXACT = {"exact": ("--nproc-per-node=2", "run.determinism=exact")}
LOSS = "loss alone"
RECIPE = (
    *("precision.dtype=fp32", f"run.steps={STEPS}", "run.log_every=1", "run.evaluate_every=0"),
    *(f"checkpoint.every={EVERY}", "elastic.snapshot_every=1", "schedule.warmup_steps=5"),
)


SHORT = (
    *("precision.dtype=fp32", "run.steps=10", "run.log_every=1", "run.evaluate_every=0"),
    *("checkpoint.every=5", "schedule.warmup_steps=2", "data.document_mask=false"),
)

TIME_LOSS = """
import json
import time
import torch
from trainer.models.loss import head_cross_entropy

found = {}
sizes = (151936, 32, "float32"), (151936, 32, "bfloat16"), (4096, 256, "float32")
for vocabulary, width, dtype in sizes:
    times = []
    for _ in range(4):
        hidden, weight = torch.randn(1024, width), torch.randn(vocabulary, width) / 50
        hidden, weight = (x.to(getattr(torch, dtype)).requires_grad_() for x in (hidden, weight))
        labels = torch.randint(vocabulary, (1024,))
        began = time.process_time()
        head_cross_entropy(hidden, weight, labels).backward()
        times.append(time.process_time() - began)
    found[f"{vocabulary:,} x {width}, {dtype}"] = sorted(times[1:])[1]
print(json.dumps(found))
"""
"""Processor seconds by vocabulary, width and format; 1,024 tokens."""


def main() -> None:
    every = ",".join((*CASES, *EXACT, LOSS))
    options = arguments(__doc__ or "", commit="HEAD~1", rounds=3, cases=every)
    cases = options.cases.split(",")
    runs = {case: choice for case, choice in CASES.items() if case in cases}
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    with workspace() as directory:
        trees = {options.commit: directory / "before", "this": directory / "after"}
        try:
            for name, tree in trees.items():
                commit = "HEAD" if name == "this" else name
                run(["git", "worktree", "add", "--detach", str(tree), commit], ROOT)
                install(tree)
            for number in range(options.rounds):
                order = list(trees.items())
                for name, tree in order if number % 2 else order[::-1]:
                    if LOSS in cases:
                        figures = time_loss(directory, tree)
                        found.setdefault(LOSS, {}).setdefault(name, []).append(figures)
                    for case, choice in runs.items():
                        figures = measure(directory, tree, choice, kill=case == "FULL_SHARD")
                        found.setdefault(case, {}).setdefault(name, []).append(figures)
            bits = [
                {"run": case, **same_bits(directory, trees, choice)}
                for case, choice in (CASES | EXACT).items()
                if case in cases
            ]
        finally:
            for tree in trees.values():
                run(["git", "worktree", "remove", "--force", str(tree)], ROOT)
    rows = []
    for case, by_tree in found.items():
        before, after = by_tree[options.commit], by_tree["this"]
        for what in before[0]:
            old, new = ([one[what] for one in runs] for runs in (before, after))
            rows.append(
                {
                    "run": case,
                    "what": what,
                    "before": spread(old, 3),
                    "after": spread(new, 3),
                    "after / before": f"{median(new) / median(old):.3f}",
                }
            )
    if rows:
        report(f"This tree against {options.commit}; median (min-max)", rows, found, options.json)
    if bits:
        heading(f"Bitwise as {options.commit}, ten steps without document masks")
        print_table(bits)


def install(tree: Path) -> None:
    """What an installation of this tree would tell torchrun: its entry points."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    folder = tree / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    entries = configparser.ConfigParser()
    entries.read_dict(project["entry-points"])
    with (folder / "entry_points.txt").open("w") as file:
        entries.write(file)


def time_loss(directory: Path, tree: Path) -> dict[str, float]:
    """Processor seconds of a tree's own code."""
    found: dict[str, float] = json.loads(
        run([sys.executable, "-P", "-c", TIME_LOSS], directory, {"PYTHONPATH": python_path(tree)})
    )
    return found


def measure(
    directory: Path, tree: Path, choice: tuple[str, ...], *, kill: bool
) -> dict[str, float]:
    """Train once; figures in seconds."""
    shutil.rmtree(directory / "runs", ignore_errors=True)
    metrics = directory / "runs/quickstart/metrics.jsonl"
    command = [sys.executable, "-P", "-m", "trainer.cli", "train"]
    log = directory / "log"
    environment = {**os.environ, "PYTHONPATH": python_path(tree), "OMP_NUM_THREADS": "1"}
    recovery = None
    began = time.time()
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, str(tree / "recipes/quickstart.yaml"), *choice, *RECIPE],
            cwd=directory, env=environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            while process.poll() is None:
                done = steps(metrics)
                if kill and recovery is None and max(done, default=0) >= LATE:
                    killed_at, reached = time.monotonic(), max(done)
                    os.kill(busiest_rank(process.pid), signal.SIGKILL)
                    while max(steps(metrics), default=0) <= reached and process.poll() is None:
                        time.sleep(0.005)
                    recovery = time.monotonic() - killed_at
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
    done = steps(metrics)
    if process.returncode or max(done, default=0) != STEPS:
        sys.exit(f"{tree.name}: {log.read_text()}")
    text = log.read_text()
    first = float(text.partition("first step after ")[2].split()[0])
    name = "checkpoint_seconds"
    saves = [record[name] for record in json_lines(metrics) if name in record]
    name = "step_seconds_p50"
    steady = [one[name] for step, one in done.items() if name in one and WARM < step < LATE]
    figures = {"a step": median(steady), "first step": first, "whole run": time.time() - began}
    if saves:
        figures["a save"] = median(saves)
    return figures | ({"a killed rank": recovery} if recovery else {})


def same_bits(
    directory: Path, trees: Mapping[str, Path], choice: tuple[str, ...]
) -> dict[str, str]:
    """Whether both trees train alike, and the new one goes on alike from the other's step 5."""
    old, new = trees.values()

    def train(tree: Path, name: str) -> tuple[list[Any], dict[str, bytes]]:
        command = [sys.executable, "-P", "-m", "trainer.cli", "train"]
        command += [str(tree / "recipes/quickstart.yaml"), *choice, *SHORT, f"run.dir={name}"]
        run(command, directory, {"PYTHONPATH": python_path(tree), "OMP_NUM_THREADS": "1"})
        told = steps(directory / name / "metrics.jsonl")
        last = directory / name / "checkpoints/step-00000010"
        files = {str(f.relative_to(last)): f.read_bytes() for f in last.rglob("*.safetensors")}
        return [(told[n]["loss"], told[n]["grad_norm"]) for n in range(1, 11)], files

    for name in ("old", "new", "on"):
        shutil.rmtree(directory / name, ignore_errors=True)
    theirs, ours = train(old, "old"), train(new, "new")
    shutil.copytree(directory / "old", directory / "on", symlinks=True)
    shutil.rmtree(directory / "on/checkpoints/step-00000010")
    on = train(new, "on")
    words = {True: "the same", False: "differ"}
    return {
        "losses, norms": words[theirs[0] == ours[0]],
        "checkpoints": words[theirs[1] == ours[1]],
        "from the other's checkpoint": words[theirs == on],
    }


def steps(metrics: Path) -> Mapping[int, dict[str, Any]]:
    return {record["step"]: record for record in json_lines(metrics) if "loss" in record}


def busiest_rank(launcher: int) -> int:
    """The forked rank with most CPU time, among all processes below the launcher."""
    return max(descendants(launcher), key=cpu_seconds)


if __name__ == "__main__":
    main()
