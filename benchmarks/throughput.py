"""Tokens per second and peak memory: this trainer against a hand-written loop and other trainers.

All train the quickstart's architecture on the same tokens with the same AdamW and precision. In
each round they run in turn. Speeds are of ten steps with all that comes between them; the first ten
of a run warm up. A round's speed is that of its median ten steps, and ratios are taken within a
round. Where others use the machine too, the ratio of the fastest ten steps of all rounds is the one
that tells.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support import (
    QUICKSTART,
    ROOT,
    arguments,
    attempt,
    heading,
    print_table,
    run,
    spread,
    torchrun,
    workspace,
    write_json,
)

DDP = ("strategy.name=ddp", "strategy.sharding=null")
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "plain": ("1 rank, plain", 1, DDP),
    "ddp": ("2 ranks, DDP", 2, DDP),
    "full_shard": ("2 ranks, FULL_SHARD", 2, ()),
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

Figures = dict[str, Any]
"""`seconds` per step of every ten, peak_memory, and what else a peer tells."""

TOKENS = 8 * 256
"""Of a step."""


@dataclass(frozen=True)
class Round:
    """One run of this trainer and of every peer, one after the other."""

    ours: Figures
    peers: dict[str, Figures]
    """By word; those that did not fail."""


def main() -> None:
    options = arguments(__doc__ or "", rounds=3, steps=40, peers="all", cases="all")
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
    rows: list[dict[str, str]] = []
    figures: list[Figures] = []
    with workspace() as directory:
        for case in cases:
            name, ranks, overrides = CASES[case]
            recipe = [str(QUICKSTART), *settings, *overrides]
            left, rounds = list(peers), []
            for _ in range(options.rounds):
                ours, theirs = run_perdure(ranks, recipe, directory), {}
                for peer in list(left):
                    found = run_peer(peer, ranks, recipe, directory)
                    if "failed" in found:
                        left.remove(peer)
                        notes.append(f"{PEERS[peer][0]}, {name}: {found['failed']}")
                    else:
                        theirs[peer] = found
                rounds.append(Round(ours, theirs))
            for peer in left:
                row, summary = compare(name, peer, rounds)
                rows.append(row)
                figures.append(summary)
                if note := rounds[0].peers[peer].get("note"):
                    notes.append(f"{PEERS[peer][0]}, {name}: {note}")
    title = "Throughput and peak memory of rank 0; median (min-max) over rounds"
    heading(title)
    if rows:
        print_table(rows)
    print("\n" + "\n".join(notes))
    write_json(title, {"ratios": figures, "notes": notes}, options.json)


def chosen(option: str, value: str, names: list[str]) -> list[str]:
    """The words of a comma-separated option; `all` stands for all of them."""
    words = names if value == "all" else value.split(",")
    if unknown := [word for word in words if word not in names]:
        sys.exit(f"--{option}: {unknown[0]!r} is none of {', '.join(names)}")
    return words


def run_perdure(ranks: int, recipe: list[str], directory: Path) -> Figures:
    """A fresh run of this trainer."""
    shutil.rmtree(directory / "runs", ignore_errors=True)
    run(torchrun(ranks, "-m", "trainer", *recipe), directory)
    records = (directory / "runs/quickstart/metrics.jsonl").read_text().splitlines()
    # Wall-clock time between records, so that logs and all else between steps are in it. The first
    # interval holds the warm-up.
    steps = [r for r in map(json.loads, records) if "step_seconds_p50" in r]
    seconds = [
        (after["time"] - before["time"]) / (after["step"] - before["step"])
        for before, after in pairwise(steps)
    ]
    if not seconds:
        sys.exit("--steps: two intervals of 10 steps are needed, the first of which warms up")
    return {"seconds": seconds, "peak_memory": steps[-1]["peak_memory"]}


def run_peer(peer: str, ranks: int, recipe: list[str], directory: Path) -> Figures:
    """What a peer printed last: its figures, or why it `failed`."""
    command = torchrun(ranks, str(ROOT / f"benchmarks/peers/{peer}_loop.py"), *recipe)
    done = attempt(command, directory)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if failed := [line for line in told if "failed" in line]:
        return failed[0]
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip(" =-")]
        last = next(
            (line for line in lines if "Error" in line), lines[-1] if lines else "no output"
        )
        return {"failed": f"exit code {done.returncode}, {last}"}
    return told[-1]


def compare(case: str, peer: str, rounds: list[Round]) -> tuple[dict[str, str], Figures]:
    """A row of the table, and the figures behind it."""
    pairs = [(r.ours, r.peers[peer]) for r in rounds]

    speed = [median(theirs["seconds"]) / median(ours["seconds"]) for ours, theirs in pairs]
    memory = [ours["peak_memory"] / theirs["peak_memory"] for ours, theirs in pairs]
    ours_fastest = min(min(ours["seconds"]) for ours, _ in pairs)
    fastest = min(min(theirs["seconds"]) for _, theirs in pairs) / ours_fastest
    row = {
        "case": case,
        "peer": PEERS[peer][0],
        "Perdure tok/s": spread([TOKENS / median(ours["seconds"]) for ours, _ in pairs], 0),
        "peer tok/s": spread([TOKENS / median(theirs["seconds"]) for _, theirs in pairs], 0),
        "speed ratio": spread(speed, 3),
        "of the fastest": f"{fastest:.3f}",
        "Perdure MB": spread([ours["peak_memory"] / 1e6 for ours, _ in pairs], 0),
        "peer MB": spread([theirs["peak_memory"] / 1e6 for _, theirs in pairs], 0),
        "memory ratio": spread(memory, 3),
    }
    summary = {
        "case": case,
        "peer": PEERS[peer][0],
        "rounds": pairs,
        "speed_ratio": median(speed),
        "speed_ratio_of_the_fastest": fastest,
        "memory_ratio": median(memory),
    }
    return row, summary


if __name__ == "__main__":
    main()
