"""Fine-tuning a chat model of 135 M beside others: tokens per second and peak memory.

All train SmolLM2-135M-Instruct on the same sequences of real chats (`make finetune` brings both)
with the same AdamW in float32, all weights or LoRA of the same rank, on one rank and one core. In
each round all are started, warm up, and are stopped; then they take turns of a second each, as in
benchmarks/throughput.py. LitGPT needs an environment of its own: run this there with `--peers
litgpt`.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.support import ROOT, arguments, heading, print_table, write_json
from benchmarks.support.race import Round, chosen, race, row

RECIPE = ROOT / "recipes/smollm2_sft.yaml"
METRICS = "run/metrics.jsonl"
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
EVERY = 2
"""Steps between two looks at the clock."""
ROWS, LENGTH = 4, 256


def main() -> None:
    options = arguments(__doc__ or "", rounds=3, steps=12, peers="trl", cases="sft,lora")
    peers = chosen("peers", options.peers, list(PEERS))
    cases = chosen("cases", options.cases, list(CASES))
    notes = [
        "Neither saves. With its default of two checkpoint slots Perdure holds two copies more."
    ]
    for peer in peers:
        name, package, _ = PEERS[peer]
        try:
            notes.append(f"{name}: {package} {version(package)}")
        except PackageNotFoundError:
            sys.exit(f"{name}: {package} is not installed")
    for needed in ("models/smollm2", "data/smalltalk"):
        if not (ROOT / needed).exists():
            sys.exit(f"{needed} is not here; `make finetune` brings it")
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
                rows.append(row(CASES[case][0], PEERS[peer][0], ROWS * LENGTH, found, peer))
                notes.append(f"{PEERS[peer][0]}, {CASES[case][0]}: {found[0][peer]['note']}")
            figures.append({"case": case, "rounds": found})
    title = "Fine-tuning beside others, one rank; median (min-max) over rounds"
    heading(title)
    print_table(rows)
    print("\n" + "\n".join(dict.fromkeys(notes)))
    write_json(title, figures, options.json)


def one_round(peers: list[str], overrides: tuple[str, ...], steps: int, directory: Path) -> Round:
    """A fresh run of each."""
    recipe = [
        *(str(RECIPE), "run.dir=run", "run.epochs=0", f"run.steps={steps}", *overrides),
        *("run.evaluate_every=0", f"run.log_every={EVERY}", "checkpoint.every=0"),
        "checkpoint.slots=0",
        *("checkpoint.keep_best=0", "elastic.snapshot_every=0", "schedule.name=constant"),
        *("schedule.warmup_steps=0", "schedule.min_lr_ratio=0"),
    ]
    found = race({peer: PEERS[peer][2] for peer in peers}, 1, recipe, directory, METRICS)
    for peer in peers:
        if failed := found[peer].get("failed"):
            sys.exit(f"{peer}: {failed}")
    return found


if __name__ == "__main__":
    main()
