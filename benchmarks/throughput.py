"""Tokens per second and peak memory: this trainer against a hand-written loop and other trainers.

All train the quickstart's architecture on the same tokens with the same AdamW and precision. In
each round all are started, warm up for ten steps, and are stopped; then they take turns of a second
each, so that a machine whose speed changes is as fast or slow for one as for the other. A round's
speed is that of all steps from there to the end, with all that comes between steps, by wall-clock
time without the pauses. On GPUs, where queued work would go on in a pause, each runs to its end
before the next one starts.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch

from benchmarks.support import (
    QUICKSTART,
    arguments,
    heading,
    print_table,
    workspace,
    write_json,
)
from benchmarks.support.race import PERDURE, Round, chosen, race, row

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

TOKENS = 8 * 256
"""Tokens of a step."""

METRICS = "runs/quickstart/metrics.jsonl"


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
    rows: list[dict[str, str]] = []
    summaries: list[dict[str, Any]] = []
    with workspace() as directory:
        for case in cases:
            name, ranks, overrides = CASES[case]
            recipe = [str(QUICKSTART), *settings, *overrides]
            left, rounds = list(peers), list[Round]()
            for _ in range(options.rounds):
                files = {peer: f"{peer}_loop.py" for peer in left}
                pausing = not torch.cuda.is_available()
                found = race(files, ranks, recipe, directory, METRICS, pausing=pausing)
                for peer in left:
                    if failed := found[peer].get("failed"):
                        notes.append(f"{PEERS[peer][0]}, {name}: {failed}")
                left = [peer for peer in left if "failed" not in found[peer]]
                rounds.append(found)
            for peer in left:
                rows.append(row(name, PEERS[peer][0], TOKENS, rounds, peer))
                summaries.append(summary(name, peer, rounds))
                if note := rounds[0][peer].get("note"):
                    notes.append(f"{PEERS[peer][0]}, {name}: {note}")
    title = "Throughput and peak memory of rank 0; median (min-max) over rounds"
    heading(title)
    if rows:
        print_table(rows)
    print("\n" + "\n".join(notes))
    write_json(title, {"ratios": summaries, "notes": notes}, options.json)


def summary(case: str, peer: str, rounds: list[Round]) -> dict[str, Any]:
    """The figures behind a row of the table."""
    pairs = [(found[PERDURE], found[peer]) for found in rounds]
    return {
        "case": case,
        "peer": PEERS[peer][0],
        "rounds": pairs,
        "speed_ratio": median(other["seconds"] / mine["seconds"] for mine, other in pairs),
        "memory_ratio": median(mine["peak_memory"] / other["peak_memory"] for mine, other in pairs),
    }


if __name__ == "__main__":
    main()
