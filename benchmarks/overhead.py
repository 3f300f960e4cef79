"""What elasticity costs a run that nothing happens to: seconds per step, with it and without.

The quickstart on 2 ranks, in turn, several rounds: under plain torchrun; under `perdure train`,
which adds the rendezvous, the node's agent, its watchdog and health checks; and with snapshots in
shared memory on top. Wall-clock time from the first record after warm-up to the last, so all that
lies between steps is in it. Where others use the machine too, only the fastest rounds tell, and
the CPU time that all processes besides the ranks took in that time (agents, zygote, checkpoint
writer), as a share of the machine's cores. The ledger and the word of each step cannot be switched
off: that they are cheap shows in benchmarks/throughput.py, against a loop that has neither.
"""

import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support import (
    QUICKSTART,
    arguments,
    json_lines,
    report,
    run,
    spread,
    torchrun,
    workspace,
)
from benchmarks.support.processes import CpuWatch
from elastic import usable_cores

RANKS = 2
WARM_UP = 20
PERDURE = [sys.executable, "-m", "trainer.cli", "train", "--nproc-per-node", str(RANKS)]
PLAIN = "torchrun, no snapshots"
CASES = {
    PLAIN: (torchrun(RANKS, "-m", "trainer"), 0),
    "perdure train, no snapshots": (PERDURE, 0),
    "perdure train, a snapshot every 10 steps": (PERDURE, 10),
    "perdure train, a snapshot every step": (PERDURE, 1),
}


def main() -> None:
    options = arguments(__doc__ or "", rounds=5, steps=120)
    settings = (
        f"run.steps={options.steps + 1}",  # the last step saves, and is not measured
        f"run.log_every={WARM_UP}",
        "run.evaluate_every=0",
        "checkpoint.every=0",
        "checkpoint.slots=2",
    )
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    beside: dict[str, list[float]] = {case: [] for case in CASES}
    with workspace() as directory:
        for _ in range(options.rounds):
            for case, (command, every) in CASES.items():
                shutil.rmtree(directory / "runs", ignore_errors=True)
                recipe = [str(QUICKSTART), *settings, f"elastic.snapshot_every={every}"]
                with CpuWatch() as watch:
                    run([*command, *recipe], directory)
                first, last = _ends(directory / "runs/quickstart/metrics.jsonl")
                seconds[case].append(
                    (last["time"] - first["time"]) / (last["step"] - first["step"])
                )
                used = watch.used(first["time"], last["time"])
                beside[case].append(100 * sum(used[RANKS:]) / usable_cores())
    ratios = {
        case: [ours / plain for ours, plain in zip(those, seconds[PLAIN], strict=True)]
        for case, those in seconds.items()
    }
    rows = [
        {
            "case": case,
            "ms per step": spread([1e3 * value for value in those], 1),
            "ratio": spread(ratios[case], 3),
            "of the fastest rounds": f"{min(those) / min(seconds[PLAIN]):.3f}",
            "CPU % besides the ranks": spread(beside[case]),
        }
        for case, those in seconds.items()
    ]
    title = "Seconds per step of an undisturbed run, 2 ranks; median (min-max) over rounds"
    figures = {
        case: {"rounds": those, "ratio": median(ratios[case]), "cpu_percent": beside[case]}
        for case, those in seconds.items()
    }
    report(title, rows, figures, options.json)


def _ends(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first and the last regular record of a run."""
    regular = [r for r in json_lines(path) if "step_seconds_p50" in r and r["step"] % WARM_UP == 0]
    return regular[0], regular[-1]


if __name__ == "__main__":
    main()
