"""What `perdure eval --follow` costs the run that it looks at, on the same cores.

The quickstart on 2 ranks saves every 20 steps, and a process beside it samples each checkpoint.
That process is stopped for 20 steps, goes on for 20 steps, and so on. The steps of a turn with it
are timed by wall clock, and compared with those of the turns before and after. So a machine whose
speed changes is as fast or slow for both. CPU time and samples of that process say that there was
somebody to be slowed by.
"""

import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.support import (
    QUICKSTART,
    arguments,
    json_lines,
    report,
    spread,
    torchrun,
    workspace,
)
from benchmarks.support.processes import cpu_seconds
from benchmarks.support.turns import PausableJob

RANKS, TURN = 2, 20
"""TURN: steps."""
SETTLING = 2
"""Steps at the start of a turn that are not timed: one was under way when the turn began."""
PROMPTS = ("The river", "In the year", "She was born in", "The city")


def main() -> None:
    options = arguments(__doc__ or "", rounds=2, turns=6)
    with workspace() as directory:
        (directory / "prompts.txt").write_text("\n".join(PROMPTS))
        rounds = [
            one_run(directory, f"run-{number}", options.turns) for number in range(options.rounds)
        ]
    followed = [seconds for one in rounds for seconds in one["seconds"][1::2]]
    alone = [
        mean((before, after))
        for one in rounds
        for before, after in zip(one["seconds"][:-1:2], one["seconds"][2::2], strict=True)
    ]
    ratios = [theirs / ours for theirs, ours in zip(followed, alone, strict=True)]
    row = {
        "turns with it": len(ratios),
        "ms per step alone": spread([1e3 * value for value in alone], 1),
        "with eval --follow": spread([1e3 * value for value in followed], 1),
        "ratio": spread(ratios, 4),
        "of all steps": f"{sum(followed) / sum(alone):.4f}",
        "its CPU s": spread([one["cpu"] for one in rounds], 1),
        "its samples": spread([one["samples"] for one in rounds], 0),
    }
    title = "Seconds per step with and without eval --follow beside; median (min-max) over turns"
    report(title, [row], {"rounds": rounds, "ratio": median(ratios)}, options.json)


def one_run(directory: Path, name: str, turns: int) -> dict[str, Any]:
    """`seconds` per step of the turns without and with the process beside, by turns; the `cpu`
    seconds that this process took in them, and the `samples` that it wrote."""
    run = directory / name
    run.mkdir()  # so that eval can follow it before it begins
    steps = [TURN * number for number in range(1, 2 * turns + 3)]  # the first turn is the warm-up
    settings = (
        *(f"run.dir={name}", f"run.steps={steps[-1]}", "run.log_every=1"),
        *("run.evaluate_every=0", f"checkpoint.every={TURN}"),
    )
    train = torchrun(RANKS, "-m", "trainer", str(QUICKSTART), *settings)
    follow = [sys.executable, "-m", "trainer.cli", "eval", name, "--follow"]
    follow += ["--prompts", "prompts.txt", "--max-new-tokens", "32", "--temperature", "0"]
    with ExitStack() as stack:
        job = stack.enter_context(PausableJob(train, directory, directory / "train"))
        beside = stack.enter_context(PausableJob(follow, directory, directory / "eval"))
        taken = []
        for number, step in enumerate(steps):
            job.run_until(partial(has_reached, run, step))
            taken.append(cpu_seconds(beside.pid))
            if job.code or beside.code is not None:
                sys.exit("".join(file.read_text() for file in sorted(directory.glob("*.err"))))
            if number % 2:
                beside.resume()
            else:
                beside.pause()
    at = {line["step"]: line["time"] for line in steps_of(run)}
    seconds = [(at[step + TURN] - at[step + SETTLING]) / (TURN - SETTLING) for step in steps[:-1]]
    samples = len(json_lines(run / "samples.jsonl"))
    return {"seconds": seconds, "cpu": taken[-1] - taken[0], "samples": samples}


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The records of steps of a run."""
    return [line for line in json_lines(run / "metrics.jsonl") if "loss" in line]


def has_reached(run: Path, step: int) -> bool:
    """Whether a run has recorded a step."""
    return any(line["step"] >= step for line in steps_of(run))


if __name__ == "__main__":
    main()
