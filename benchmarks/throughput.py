"""Tokens per second and peak memory: this trainer against a hand-written loop and other trainers.

All train the quickstart's architecture on the same tokens with the same AdamW and precision. In
each round all are started, warm up for ten steps, and are stopped; then they take turns of a second
each, so that a machine whose speed changes is as fast or slow for one as for the other. A round's
speed is that of all steps from there to the end, with all that comes between steps, by wall-clock
time without the pauses. On GPUs, where queued work would go on in a pause, each runs to its end
before the next one starts.
"""

import shutil
import signal
import sys
from contextlib import ExitStack
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.support import (
    QUICKSTART,
    ROOT,
    arguments,
    heading,
    json_lines,
    print_table,
    spread,
    torchrun,
    workspace,
    write_json,
)
from benchmarks.support.turns import PausableJob, take_turns

DDP = ("strategy.name=ddp",)
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "plain": ("1 rank, plain", 1, DDP),
    "ddp": ("2 ranks, DDP", 2, DDP),
    "zero1": ("2 ranks, OPTIMIZER_STATE", 2, ("strategy.sharding=OPTIMIZER_STATE",)),
    "zero2": ("2 ranks, SHARD_GRAD_OP", 2, ("strategy.sharding=SHARD_GRAD_OP",)),
    "full_shard": ("2 ranks, FULL_SHARD", 2, ()),
    "accumulate": (
        "2 ranks, SHARD_GRAD_OP, 4 passes",
        2,
        ("strategy.sharding=SHARD_GRAD_OP", "batch.micro_batch=1"),
    ),
    "tp": ("2 ranks, TP", 2, ("strategy.tp=2",)),
}
"""By the word for `--cases`: name, ranks, overrides of the recipe."""

PEERS = {
    "minimal": ("minimal loop", "torch"),
    "accelerate": ("Accelerate", "accelerate"),
    "fabric": ("Lightning Fabric", "lightning-fabric"),
    "litgpt": ("LitGPT", "litgpt"),
    "torchtitan": ("torchtitan", "torchtitan"),
    "deepspeed": ("DeepSpeed", "deepspeed"),
}
"""By the word for `--peers`, which is also that of benchmarks/peers/WORD_loop.py: name, package."""

TURN = 1.0
"""Seconds."""

TOKENS = 8 * 256
"""Tokens of a step."""

PERDURE = "perdure"

METRICS = "runs/quickstart/metrics.jsonl"

Round = dict[str, dict[str, Any]]
"""By word of this trainer and of every peer that did not fail: `seconds` per step, peak_memory,
and what else it tells."""


def main() -> None:
    usual = "plain,ddp,full_shard"
    options = arguments(__doc__ or "", rounds=3, steps=40, peers="all", cases=usual)
    cases = chosen("cases", options.cases, list(CASES))
    notes = [
        "Memory of Perdure includes the slot that its checkpoints are copied to.",
        "Attention is causal over whole sequences: not every peer has a mask between documents.",
    ]
    peers = []
    for peer in chosen("peers", options.peers, list(PEERS)):
        name, package = PEERS[peer]
        try:
            notes.append(f"{name}: {package} {version(package)}")
            peers.append(peer)
        except PackageNotFoundError:
            notes.append(f"{name} is left out: {package} is not installed")
    if not peers:
        sys.exit(f"nothing to compare with: {notes[-1]}")
    settings = (
        f"run.steps={options.steps}",
        "run.log_every=10",
        "run.evaluate_every=0",
        "data.document_mask=false",
        "checkpoint.every=0",
        "schedule.warmup_steps=5",
    )
    # Or jobs that are stopped would stay so when this is told to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows: list[dict[str, str]] = []
    summaries: list[dict[str, Any]] = []
    with workspace() as directory:
        for case in cases:
            name, ranks, overrides = CASES[case]
            recipe = [str(QUICKSTART), *settings, *overrides]
            left, rounds = list(peers), list[Round]()
            for _ in range(options.rounds):
                found = one_round([PERDURE, *left], ranks, recipe, directory)
                for peer in left:
                    if failed := found[peer].get("failed"):
                        notes.append(f"{PEERS[peer][0]}, {name}: {failed}")
                left = [peer for peer in left if "failed" not in found[peer]]
                rounds.append(found)
            for peer in left:
                row, summary = compare(name, peer, rounds)
                rows.append(row)
                summaries.append(summary)
                if note := rounds[0][peer].get("note"):
                    notes.append(f"{PEERS[peer][0]}, {name}: {note}")
    title = "Throughput and peak memory of rank 0; median (min-max) over rounds"
    heading(title)
    if rows:
        print_table(rows)
    print("\n" + "\n".join(notes))
    write_json(title, {"ratios": summaries, "notes": notes}, options.json)


def chosen(option: str, value: str, names: list[str]) -> list[str]:
    """The words of a comma-separated option; `all` stands for all of them."""
    words = names if value == "all" else value.split(",")
    if unknown := [word for word in words if word not in names]:
        sys.exit(f"--{option}: {unknown[0]!r} is none of {', '.join(names)}")
    return words


def one_round(words: list[str], ranks: int, recipe: list[str], directory: Path) -> Round:
    """A fresh run of each, `words` being PERDURE and words of PEERS."""
    shutil.rmtree(directory / "runs", ignore_errors=True)
    with ExitStack() as stack:
        jobs: dict[str, PausableJob] = {}
        for word in words:
            worker = [str(ROOT / f"benchmarks/peers/{word}_loop.py")]
            if word == PERDURE:
                worker = ["-m", "trainer"]
            job = PausableJob(torchrun(ranks, *worker, *recipe), directory, directory / word)
            jobs[word] = stack.enter_context(job)
            job.run_until(partial(warm, word, directory))
            job.pause()
        take_turns(list(jobs.values()), TURN)
    return {word: figures(word, job, directory) for word, job in jobs.items()}


def warm(word: str, directory: Path) -> bool:
    """Whether a run has reached where it is stopped for the first time."""
    return not torch.cuda.is_available() and len(marks(word, directory)) > 0


def marks(word: str, directory: Path) -> list[tuple[int, float]]:
    """(step, Unix time) of what a run has told so far, after every ten steps."""
    if word == PERDURE:
        told = [r for r in json_lines(directory / METRICS) if "step_seconds_p50" in r]
        return [(record["step"], record["time"]) for record in told]
    told = [line for line in json_lines(directory / f"{word}.out") if "at" in line]
    return [(line["step"], line["at"]) for line in told if line["step"] > 1]


def figures(word: str, job: PausableJob, directory: Path) -> dict[str, Any]:
    """What a run that has ended came to, or why it `failed`. That of this trainer must not."""
    lines = json_lines(directory / f"{word}.out")
    if failed := [line for line in lines if "failed" in line]:
        return failed[0]
    if job.code:
        errors = (directory / f"{word}.err").read_text()
        if word == PERDURE:
            sys.exit(f"this trainer failed:\n{errors}")
        error = next((line for line in errors.splitlines() if "Error" in line), "no error shown")
        return {"failed": f"exit code {job.code}, {error}"}
    told = marks(word, directory)
    if len(told) < 2:
        sys.exit("--steps: 20 are needed, the first ten of which warm up")
    (first, began), (last, ended) = told[0], told[-1]
    seconds = (job.ran(ended) - job.ran(began)) / (last - first)
    records = json_lines(directory / METRICS) if word == PERDURE else lines
    final = next(record for record in reversed(records) if "peak_memory" in record)
    return {**final, "seconds": seconds}


def compare(case: str, peer: str, rounds: list[Round]) -> tuple[dict[str, str], dict[str, Any]]:
    """A row of the table, and the figures behind it."""
    pairs = [(found[PERDURE], found[peer]) for found in rounds]

    ours = [mine["seconds"] for mine, _ in pairs]
    theirs = [other["seconds"] for _, other in pairs]
    speed = [other / mine for mine, other in zip(ours, theirs, strict=True)]
    memory = [mine["peak_memory"] / other["peak_memory"] for mine, other in pairs]
    row = {
        "case": case,
        "peer": PEERS[peer][0],
        "Perdure tok/s": spread([TOKENS / seconds for seconds in ours], 0),
        "peer tok/s": spread([TOKENS / seconds for seconds in theirs], 0),
        "speed ratio": spread(speed, 3),
        "Perdure MB": spread([mine["peak_memory"] / 1e6 for mine, _ in pairs], 0),
        "peer MB": spread([other["peak_memory"] / 1e6 for _, other in pairs], 0),
        "memory ratio": spread(memory, 3),
    }
    summary = {
        "case": case,
        "peer": PEERS[peer][0],
        "rounds": pairs,
        "speed_ratio": median(speed),
        "memory_ratio": median(memory),
    }
    return row, summary


if __name__ == "__main__":
    main()
