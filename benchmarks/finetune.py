"""Fine-tuning a chat model of 135 M beside others: tokens per second and peak memory.

All train SmolLM2-135M-Instruct on the same sequences of real chats (`make finetune` brings both)
with the same AdamW in float32, all weights or LoRA of the same rank, on one rank and one core. In
each round all are started, warm up, and are stopped; then they take turns of a second each, as in
benchmarks/throughput.py. LitGPT asks for an older huggingface_hub than transformers, but does not
need it here. So both peers come by `pip install --no-deps trl==1.16.0 litgpt==0.5.13
lightning==2.6.6`, beside the packages of the project's tests.
"""

import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.support import ROOT, arguments, heading, print_table, run, write_json
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
CONVERT = """
import sys
from pathlib import Path
from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint
convert_hf_checkpoint(Path(sys.argv[1]), model_name="SmolLM2-135M-Instruct", dtype="float32")
"""
EVERY = 2
"""Steps between two looks at the clock."""
ROWS, LENGTH = 4, 256


def main() -> None:
    options = arguments(__doc__ or "", rounds=3, steps=12, peers="all", cases="sft,lora")
    cases = chosen("cases", options.cases, list(CASES))
    notes = ["None saves. With its default of two checkpoint slots Perdure holds two copies more."]
    peers = []
    for peer in chosen("peers", options.peers, list(PEERS)):
        name, package, _ = PEERS[peer]
        try:
            notes.append(f"{name}: {package} {version(package)}")
            peers.append(peer)
        except PackageNotFoundError:
            notes.append(f"{name} is left out: {package} is not installed")
    if not peers:
        sys.exit(f"nothing to compare with: {notes[-1]}")
    for needed in ("models/smollm2", "data/smalltalk"):
        if not (ROOT / needed).exists():
            sys.exit(f"{needed} is not here; `make finetune` brings it")
    rows, figures = [], []
    with TemporaryDirectory(prefix="perdure-bench-") as scratch:
        directory = Path(scratch)
        (directory / "data").symlink_to(ROOT / "data")
        (directory / "models").mkdir()
        (directory / "models/smollm2").symlink_to(ROOT / "models/smollm2")
        if "litgpt" in peers:
            convert_for_litgpt(directory)
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


def convert_for_litgpt(directory: Path) -> None:
    """Put beside models/smollm2 what LitGPT makes of it."""
    converted = directory / "models/smollm2-litgpt"
    shutil.copytree(ROOT / "models/smollm2", converted)
    run([sys.executable, "-c", CONVERT, str(converted)], directory)


if __name__ == "__main__":
    main()
