"""What `perdure eval --follow` costs the run that it looks at, on the same cores.

The quickstart on 2 ranks, with a checkpoint every few steps, in turn alone and with a process
beside it that samples each checkpoint as it is committed. Wall-clock time from the first record
after warm-up to the last. Where others use the machine too, only the fastest rounds tell. Samples
that are written before the run ends say that there was somebody to be slowed by.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.support import (
    QUICKSTART,
    arguments,
    environment,
    json_lines,
    report,
    spread,
    torchrun,
    workspace,
)

RANKS, WARM_UP, EVERY = 2, 20, 20
PROMPTS = ("The river", "In the year", "She was born in", "The city")
CASES = "alone", "with eval --follow"


def main() -> None:
    options = arguments(__doc__ or "", rounds=5, steps=200)
    settings = (
        f"run.steps={options.steps + 1}",  # the last step saves, and is not measured
        f"run.log_every={WARM_UP}",
        "run.evaluate_every=0",
        f"checkpoint.every={EVERY}",
    )
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    written = []
    with workspace() as directory:
        (directory / "prompts.txt").write_text("\n".join(PROMPTS))
        for _ in range(options.rounds):
            for case in CASES:
                shutil.rmtree(directory / "runs", ignore_errors=True)
                found, lines = one_run(directory, settings, case != CASES[0])
                seconds[case].append(found)
                written += [lines] if case != CASES[0] else []
    alone, followed = (seconds[case] for case in CASES)
    ratios = [theirs / ours for ours, theirs in zip(alone, followed, strict=True)]
    rows = [
        {
            "case": case,
            "ms per step": spread([1e3 * value for value in those], 2),
            "fastest, ms": f"{1e3 * min(those):.2f}",
            "ratio": spread(ratios, 4) if case != CASES[0] else "1",
            "of the fastest rounds": f"{min(those) / min(alone):.4f}",
            "samples meanwhile": spread(written, 0) if case != CASES[0] else "",
        }
        for case, those in seconds.items()
    ]
    title = "Seconds per step with and without eval --follow beside; median (min-max) over rounds"
    report(title, rows, {**seconds, "ratio": median(ratios), "samples": written}, options.json)


def one_run(directory: Path, settings: tuple[str, ...], followed: bool) -> tuple[float, int]:
    """(seconds per step after warm-up, samples that were written before the run ended)."""
    run = directory / "runs/quickstart"
    command = torchrun(RANKS, "-m", "trainer", str(QUICKSTART), *settings)
    follow = [sys.executable, "-m", "trainer.cli", "eval", str(run), "--follow"]
    follow += ["--prompts", "prompts.txt", "--max-new-tokens", "32", "--temperature", "0"]
    with (directory / "log.txt").open("wb") as log:
        job = subprocess.Popen(command, cwd=directory, env=environment(), stdout=log, stderr=log)
        while followed and not run.is_dir():
            time.sleep(0.1)
        beside = None
        if followed:
            beside = subprocess.Popen(
                follow, cwd=directory, env=environment(), stdout=log, stderr=log
            )
        code = job.wait()
        meanwhile = len(json_lines(run / "samples.jsonl"))
        if code or (beside and beside.wait()):
            sys.exit((directory / "log.txt").read_text(errors="replace"))
    regular = [
        record
        for record in json_lines(run / "metrics.jsonl")
        if "step_seconds_p50" in record and record["step"] % WARM_UP == 0
    ]
    first, last = regular[0], regular[-1]
    return (last["time"] - first["time"]) / (last["step"] - first["step"]), meanwhile


if __name__ == "__main__":
    main()
