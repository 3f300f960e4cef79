"""What kills cost trackers.

A run of a tiny model with W&B offline, TensorBoard and a record per step, in which something
is killed again and again (SIGKILL) in the midst of logging: a node with all its processes, the rank
alone, the tracker alone, wandb-core alone. Afterwards each record of metrics.jsonl is looked for in
W&B's files (benchmarks/support/wandb_files.py).
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.support import arguments, environment, json_lines, report, run
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
KINDS = ("node", "rank", "wandb-core", "node", "tracker")
PATIENCE = 240.0


def main() -> None:
    options = arguments(__doc__ or "", kills=20, seed=0)
    with TemporaryDirectory(prefix="perdure-bench-") as scratch:
        folder = Path(scratch)
        (folder / "recipe.yaml").write_text(RECIPE)
        (folder / "text.txt").write_text("".join(f"Apple {n} of {n % 7}.\n" for n in range(9000)))
        perdure = [sys.executable, "-m", "trainer.cli"]
        prepare = ["data", "prepare", "text.txt", "--out", "data", "--tokenizer", "bytes"]
        run([*perdure, *prepare], folder)
        kill(folder, options.kills, random.Random(options.seed), options.json)


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
