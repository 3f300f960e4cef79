"""From launch to the first optimizer step: this trainer, in parts, against a minimal loop.

Under plain torchrun, where every rank imports for itself, and under `perdure train`, where ranks
are forked from one process per node that has.
"""

import json
import shutil
import sys
import time
from statistics import median
from typing import Any

from benchmarks.support import QUICKSTART, ROOT, arguments, report, run, spread, torchrun, workspace

PERDURE = [sys.executable, "-m", "trainer.cli", "train", "--nproc-per-node", "2"]
WAYS = {"torchrun": torchrun(2, "-m", "trainer"), "perdure train": PERDURE}


def main() -> None:
    options = arguments(__doc__ or "", rounds=5)
    recipe = [str(QUICKSTART), "run.steps=1", "run.evaluate_every=0", "schedule.warmup_steps=0"]
    ours: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    peer: list[float] = []
    with workspace() as directory:
        for _ in range(options.rounds):
            for way, command in WAYS.items():
                shutil.rmtree(directory / "runs", ignore_errors=True)
                ours[way].append(_parts(run([*command, *recipe], directory)))
            launched = time.time()
            peer_file = str(ROOT / "benchmarks/peers/minimal_loop.py")
            output = run(torchrun(2, peer_file, *recipe), directory)
            first = next(line for line in output.splitlines() if '"step": 1,' in line)
            peer.append(json.loads(first)["at"] - launched)
    totals = {way: [parts["total"] for parts in ours[way]] for way in WAYS}
    ratios = {
        way: [total / loop for total, loop in zip(totals[way], peer, strict=True)] for way in WAYS
    }
    names = dict.fromkeys(name for way in WAYS for name in ours[way][0] if name != "total")
    rows = [
        {"seconds": name}
        | {way: spread([parts.get(name, 0.0) for parts in ours[way]]) for way in WAYS}
        for name in names
    ]
    rows += [
        {"seconds": "total"} | {way: spread(totals[way]) for way in WAYS},
        {"seconds": "minimal loop, total"} | {way: spread(peer) for way in WAYS},
        {"seconds": "ratio"} | {way: spread(ratios[way]) for way in WAYS},
    ]
    figures: dict[str, Any] = {**ours, "minimal_loop": peer}
    figures["ratio"] = {way: median(ratios[way]) for way in WAYS}
    title = "Launch to first optimizer step, 2 ranks, FULL_SHARD; median (min-max) over rounds"
    report(title, rows, figures, options.json)


def _parts(output: str) -> dict[str, float]:
    line = next(line for line in output.splitlines() if line.startswith("first step after"))
    total, _, parts = line.removeprefix("first step after ").partition(" s: ")
    pairs = (part.rsplit(" ", 1) for part in parts.split(", "))
    return {**{name: float(seconds) for name, seconds in pairs}, "total": float(total)}


if __name__ == "__main__":
    main()
