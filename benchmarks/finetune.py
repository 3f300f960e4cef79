"""Fine-tuning a chat model of 135 M beside others: tokens per second and peak memory.

All train SmolLM2-135M-Instruct on the same sequences of real chats (`make finetune` brings both)
with the same AdamW in float32, all weights or LoRA of the same rank, on one rank and one core. In
each round all are started, warm up, and are stopped; then they take turns of a second each, as in
benchmarks/throughput.py. LitGPT needs an environment of its own: run this there with `--peers
litgpt`.
"""

import shutil
import signal
import sys
from contextlib import ExitStack
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.support import (
    ROOT,
    arguments,
    heading,
    json_lines,
    print_table,
    spread,
    torchrun,
    write_json,
)
from benchmarks.support.turns import PausableJob, take_turns
from benchmarks.throughput import chosen

RECIPE = ROOT / "recipes/smollm2_sft.yaml"
PERDURE, METRICS = "perdure", "run/metrics.jsonl"
CASES = {
    "sft": ("all weights", ("model.adapter=null", "optimizer.lr=1e-5")),
    "lora": ("LoRA", ()),
}
"""By the word for `--cases`: name, overrides of the recipe."""
PEERS = {
    "trl": ("trl + PEFT", "trl", "trl_loop.py"),
    "litgpt": ("LitGPT", "litgpt", "litgpt_chats_loop.py"),
}
"""By the word for `--peers`: name, package, file in benchmarks/peers."""
TURN, EVERY = 1.0, 2
"""Seconds; steps between two looks at the clock."""
ROWS, LENGTH = 4, 256

Round = dict[str, dict[str, Any]]
"""By word of this trainer and of every peer: `seconds` per step, peak_memory, and what else it
tells."""


def main() -> None:
    options = arguments(__doc__ or "", rounds=3, steps=12, peers="trl", cases="sft,lora")
    peers = chosen("peers", options.peers, list(PEERS))
    cases = chosen("cases", options.cases, list(CASES))
    notes = ["Memory of Perdure includes the slot that its checkpoints are copied to."]
    for peer in peers:
        name, package, _ = PEERS[peer]
        try:
            notes.append(f"{name}: {package} {version(package)}")
        except PackageNotFoundError:
            sys.exit(f"{name}: {package} is not installed")
    for needed in ("models/smollm2", "data/smalltalk"):
        if not (ROOT / needed).exists():
            sys.exit(f"{needed} is not here; `make finetune` brings it")
    # Or jobs that are stopped would stay so when this is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows, figures = [], []
    with TemporaryDirectory(prefix="perdure-bench-") as scratch:
        directory = Path(scratch)
        for name in ("models", "data"):
            (directory / name).symlink_to(ROOT / name)
        for case in cases:
            found = [
                one_round(peers, CASES[case][1], options.steps, directory)
                for _ in range(options.rounds)
            ]
            for peer in peers:
                rows.append(row(CASES[case][0], peer, found))
                notes.append(f"{PEERS[peer][0]}, {CASES[case][0]}: {found[0][peer]['note']}")
            figures.append({"case": case, "rounds": found})
    title = "Fine-tuning beside others, one rank; median (min-max) over rounds"
    heading(title)
    print_table(rows)
    print("\n" + "\n".join(dict.fromkeys(notes)))
    write_json(title, figures, options.json)


def one_round(peers: list[str], overrides: tuple[str, ...], steps: int, directory: Path) -> Round:
    """A fresh run of each."""
    shutil.rmtree(directory / "run", ignore_errors=True)
    recipe = [
        *(str(RECIPE), "run.dir=run", "run.epochs=0", f"run.steps={steps}", *overrides),
        *("run.evaluate_every=0", f"run.log_every={EVERY}", "checkpoint.every=0"),
        *("checkpoint.keep_best=0", "elastic.snapshot_every=0", "schedule.name=constant"),
        *("schedule.warmup_steps=0", "schedule.min_lr_ratio=0", "data.validation_sequences=0"),
    ]
    with ExitStack() as stack:
        jobs: dict[str, PausableJob] = {}
        for word in (PERDURE, *peers):
            worker = ["-m", "trainer"]
            if word != PERDURE:
                worker = [str(ROOT / "benchmarks/peers" / PEERS[word][2])]
            job = PausableJob(torchrun(1, *worker, *recipe), directory, directory / word)
            jobs[word] = stack.enter_context(job)
            job.run_until(partial(warm, word, directory))
            job.pause()
        take_turns(list(jobs.values()), TURN)
    return {word: figures_of(word, job, directory) for word, job in jobs.items()}


def warm(word: str, directory: Path) -> bool:
    """Whether a run has reached where it is stopped for the first time."""
    return len(marks(word, directory)) > 0


def marks(word: str, directory: Path) -> list[tuple[int, float]]:
    """(step, Unix time) of what a run has told so far, after its first steps."""
    if word == PERDURE:
        told = [r for r in json_lines(directory / METRICS) if "step_seconds_p50" in r]
        return [(record["step"], record["time"]) for record in told]
    told = [line for line in json_lines(directory / f"{word}.out") if "at" in line]
    return [(line["step"], line["at"]) for line in told if line["step"] > 1]


def figures_of(word: str, job: PausableJob, directory: Path) -> dict[str, Any]:
    """What a run that has ended came to."""
    lines = json_lines(directory / f"{word}.out")
    if job.code or any("failed" in line for line in lines):
        sys.exit(f"{word} failed:\n{(directory / f'{word}.err').read_text()[-3000:]}")
    told = marks(word, directory)
    (first, began), (last, ended) = told[0], told[-1]
    seconds = (job.ran(ended) - job.ran(began)) / (last - first)
    records = json_lines(directory / METRICS) if word == PERDURE else lines
    final = next(record for record in reversed(records) if "peak_memory" in record)
    return {"peak_memory": final["peak_memory"], "note": final.get("note"), "seconds": seconds}


def row(case: str, peer: str, rounds: list[Round]) -> dict[str, str]:
    """A row of the table."""
    pairs = [(found[PERDURE], found[peer]) for found in rounds]
    memory = [median(one["peak_memory"] / 1e6 for one in side) for side in zip(*pairs, strict=True)]
    tokens = [[ROWS * LENGTH / one["seconds"] for one in side] for side in zip(*pairs, strict=True)]
    return {
        "case": case,
        "peer": PEERS[peer][0],
        "Perdure tok/s": spread(tokens[0], 0),
        "peer tok/s": spread(tokens[1], 0),
        "speed ratio": spread([ours / theirs for ours, theirs in zip(*tokens, strict=True)], 3),
        "Perdure MB": f"{memory[0]:,.0f}",
        "peer MB": f"{memory[1]:,.0f}",
        "memory ratio": f"{memory[0] / memory[1]:.3f}",
    }


if __name__ == "__main__":
    main()
