"""From launch to the first optimizer step: this trainer, in parts, against a minimal loop."""

import json
import re
import shutil
import time
from statistics import median
from typing import Any

from benchmarks.support import QUICKSTART, ROOT, arguments, report, run, spread, torchrun, workspace


def main() -> None:
    options = arguments(__doc__ or "", rounds=5)
    settings = ("run.steps=1", "run.evaluate_every=0", "schedule.warmup_steps=0")
    ours: list[dict[str, float]] = []
    peer: list[float] = []
    with workspace() as directory:
        for _ in range(options.rounds):
            recipe = [str(QUICKSTART), *settings]
            shutil.rmtree(directory / "runs", ignore_errors=True)
            output = run(torchrun(2, "-m", "trainer", *recipe), directory)
            ours.append(_parts(output))
            launched = time.time()
            peer_file = str(ROOT / "benchmarks/peers/minimal_loop.py")
            output = run(torchrun(2, peer_file, *recipe), directory)
            first = next(line for line in output.splitlines() if "first_step_at" in line)
            peer.append(json.loads(first)["first_step_at"] - launched)
    rows = [{"part": part, "seconds": spread([parts[part] for parts in ours])} for part in ours[0]]
    ratio = [parts["total"] / seconds for parts, seconds in zip(ours, peer, strict=True)]
    rows.append({"part": "minimal loop, total", "seconds": spread(peer)})
    rows.append({"part": "ratio of totals", "seconds": spread(ratio)})
    figures: dict[str, Any] = {"perdure": ours, "minimal_loop": peer, "ratio": median(ratio)}
    title = "Launch to first optimizer step, 2 ranks, FULL_SHARD; median (min-max) over rounds"
    report(title, rows, figures, options.json)


def _parts(output: str) -> dict[str, float]:
    line = next(line for line in output.splitlines() if line.startswith("first step after"))
    total, parts = re.fullmatch(r"first step after ([\d.]+) s: (.*)", line).groups()
    pairs = (part.rsplit(" ", 1) for part in parts.split(", "))
    return {**{name: float(seconds) for name, seconds in pairs}, "total": float(total)}


if __name__ == "__main__":
    main()
