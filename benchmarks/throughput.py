"""Tokens per second and peak memory: this trainer against a minimal hand-written loop.

Both train the quickstart's decoder on the same tokens with the same AdamW, in turn, several rounds;
each figure is a median over steps after warm-up, the ratio a median over rounds.
"""

import json
import shutil
from statistics import median
from typing import Any

from benchmarks.support import QUICKSTART, ROOT, arguments, report, run, spread, torchrun, workspace

CASES = (
    ("1 rank, plain", 1, ("strategy.name=ddp", "strategy.sharding=null")),
    ("2 ranks, DDP", 2, ("strategy.name=ddp", "strategy.sharding=null")),
    ("2 ranks, FULL_SHARD", 2, ()),
)


def main() -> None:
    options = arguments(__doc__ or "", rounds=3, steps=40)
    settings = (
        f"run.steps={options.steps}",
        "run.log_every=10",
        "run.evaluate_every=0",
        "checkpoint.every=0",
        "schedule.warmup_steps=5",
    )
    rows: list[dict[str, str]] = []
    figures: list[dict[str, Any]] = []
    with workspace() as directory:
        for name, ranks, overrides in CASES:
            rounds = []
            for _ in range(options.rounds):
                recipe = [str(QUICKSTART), *settings, *overrides]
                shutil.rmtree(directory / "runs", ignore_errors=True)
                run(torchrun(ranks, "-m", "trainer", *recipe), directory)
                records = (directory / "runs/quickstart/metrics.jsonl").read_text().splitlines()
                # The first interval holds the warm-up; speed is that of the median step after it.
                steps = [r for r in map(json.loads, records) if "step_seconds_p50" in r]
                after = steps[1:]
                tokens = 8 * 256
                ours = {
                    "tokens_per_second": tokens / median(r["step_seconds_p50"] for r in after),
                    "peak_memory": after[-1]["peak_memory"],
                }
                peer_file = str(ROOT / "benchmarks/peers/minimal_loop.py")
                output = run(torchrun(ranks, peer_file, *recipe), directory)
                rounds.append((ours, json.loads(output.splitlines()[-1])))
            speed = [ours["tokens_per_second"] / peer["tokens_per_second"] for ours, peer in rounds]
            memory = [ours["peak_memory"] / peer["peak_memory"] for ours, peer in rounds]
            rows.append(
                {
                    "case": name,
                    "Perdure tok/s": spread([ours["tokens_per_second"] for ours, _ in rounds], 0),
                    "minimal loop tok/s": spread([p["tokens_per_second"] for _, p in rounds], 0),
                    "speed ratio": spread(speed, 3),
                    "Perdure MB": spread([ours["peak_memory"] / 1e6 for ours, _ in rounds], 0),
                    "minimal loop MB": spread([p["peak_memory"] / 1e6 for _, p in rounds], 0),
                    "memory ratio": spread(memory, 3),
                }
            )
            figures.append({"case": name, "rounds": rounds, "speed_ratio": median(speed)})
            figures[-1]["memory_ratio"] = median(memory)
    title = "Throughput and peak memory of rank 0; median (min-max) over rounds"
    report(title, rows, figures, options.json)


if __name__ == "__main__":
    main()
