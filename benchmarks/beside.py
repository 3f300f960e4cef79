"""What a process beside a run costs it on the same cores: the live page, the terminal's view,
`perdure eval --follow`, and sinks of a tracker that hang, crash or print without end.

The quickstart on 2 ranks, with 4 sequences a step, saves every 20 steps. What is beside it works
for 20 steps, rests for 20 steps, and so on. The steps of a turn with it are timed by wall clock,
and compared with those of the turns before and after. So a machine whose speed changes is as fast
or slow for both. CPU time is compared as well, which other work on the machine hardly changes: that
of the ranks for a step, and what the process took of the machine's cores.

The sinks rest while a file exists. All other processes are stopped.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from benchmarks.support import (
    QUICKSTART,
    arguments,
    environment,
    json_lines,
    python_path,
    report,
    spread,
    torchrun,
    workspace,
)
from benchmarks.support.processes import CpuCount
from benchmarks.support.turns import PausableJob
from elastic.process import descendants

RANKS, TURN = 2, 20
"""TURN: steps."""
SETTLING = 2
"""Steps at the start of a turn that are not timed: one was under way when the turn began."""
PROMPTS = ("The river", "In the year", "She was born in", "The city")
PERDURE = (sys.executable, "-m", "trainer.cli")
FOLLOW = ("--follow", "--prompts", "prompts.txt", "--max-new-tokens", "32", "--temperature", "0")
SINKS = """\
import os, time
from pathlib import Path

RESTS = Path("rests")

class Sink:
    def __init__(self, record):
        self.record = record
    def close(self):
        pass

def _while_at_work(act):
    return Sink(lambda step, values: None if RESTS.exists() else act())

def _hang():
    while not RESTS.exists():
        time.sleep(0.1)

def hangs(run_dir):
    return _while_at_work(_hang)

def crashes(run_dir):
    return _while_at_work(os.abort)

def floods(run_dir):
    return _while_at_work(lambda: print("x" * (1 << 20)))
"""


class Beside(NamedTuple):
    """Processes beside a run, while they are there."""

    resume: Callable[[], None]
    pause: Callable[[], None]
    cpu: Callable[[], float]
    """CPU seconds that they took up to now."""


def main() -> None:
    options = arguments(__doc__ or "", rounds=1, turns=20, cases="all")
    names = [*CASES] if options.cases == "all" else options.cases.split(",")
    rows, figures = [], {}
    with workspace() as directory:
        (directory / "prompts.txt").write_text("\n".join(PROMPTS))
        (directory / "bad_sinks.py").write_text(SINKS)
        for name in names:
            rounds = [
                one_run(directory, f"{name}-{number}", name, options.turns)
                for number in range(options.rounds)
            ]
            row = of_rounds(rounds)
            rows.append({"beside": TITLES[name], **row})
            figures[name] = rounds
            print(rows[-1], flush=True)
    title = "Seconds per step with and without a process beside; median (min-max) over turns"
    report(title, rows, figures, options.json)


def of_rounds(rounds: list[dict[str, Any]]) -> dict[str, str]:
    """Columns of the table."""
    beside = [seconds for one in rounds for seconds in one["seconds"][1::2]]
    alone = [
        mean((before, after))
        for one in rounds
        for before, after in zip(one["seconds"][:-1:2], one["seconds"][2::2], strict=True)
    ]
    # All turns have equally many steps, and one more is without than with the process.
    with_it, without = (
        sum(sum(one["train_cpu"][first::2]) / len(one["train_cpu"][first::2]) for one in rounds)
        for first in (1, 0)
    )
    ratios = [theirs / ours for theirs, ours in zip(beside, alone, strict=True)]
    error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    return {
        "turns": str(len(ratios)),
        "ms alone": spread([1e3 * value for value in alone], 1),
        "ms with it": spread([1e3 * value for value in beside], 1),
        "ratio": spread(ratios, 4),
        "mean ± its error": f"{mean(ratios):.4f} ± {error:.4f}",
        "ranks' CPU": f"{with_it / without:.4f}",
        "its share of cores": f"{mean(one['share'] for one in rounds):.2%}",
    }


def one_run(directory: Path, name: str, case: str, turns: int) -> dict[str, Any]:
    """`seconds` per step of the turns without and with the processes beside, by turns; `train_cpu`:
    CPU seconds of the ranks in each turn; `share`: what the processes took of the machine's CPU
    time in the turns with them."""
    folder = directory / name
    folder.mkdir()  # so that eval can follow it before it begins
    (directory / "rests").touch()
    steps = [TURN * number for number in range(1, 2 * turns + 3)]  # the first turn is the warm-up
    sink = {"hangs", "crashes", "floods"} & {case}
    settings = (
        *(f"run.dir={name}", f"run.steps={steps[-1]}", "run.log_every=1"),
        *("run.evaluate_every=0", f"checkpoint.every={TURN}", "batch.global_batch=4"),
        *(f"tracking.sinks=[bad_sinks:{one}]" for one in sink),
    )
    train = torchrun(RANKS, "-m", "trainer", str(QUICKSTART), *settings)
    more = {"PYTHONPATH": python_path(directory, environment()["PYTHONPATH"])}
    with ExitStack() as stack:
        job = stack.enter_context(PausableJob(train, directory, directory / "train", more))
        job.run_until(partial(has_reached, folder, 1))
        beside = stack.enter_context(CASES[case](directory, name, job))
        beside.pause()
        train_cpu = CpuCount(partial(processes_of, job, trackers=False))

        def count_until(step: int) -> bool:
            train_cpu()
            beside.cpu()
            return has_reached(folder, step)

        taken = []
        for number, step in enumerate(steps):
            job.run_until(partial(count_until, step))
            taken.append((time.monotonic(), train_cpu(), beside.cpu()))
            if job.code:
                sys.exit("".join(file.read_text() for file in sorted(directory.glob("*.err"))))
            (beside.resume if number % 2 else beside.pause)()
    at = {line["step"]: line["time"] for line in steps_of(folder)}
    seconds = [(at[step + TURN] - at[step + SETTLING]) / (TURN - SETTLING) for step in steps[:-1]]
    turns_taken = [
        tuple(new - old for new, old in zip(*pair, strict=True)) for pair in pairwise(taken)
    ]
    wall, used = (sum(turn[which] for turn in turns_taken[1::2]) for which in (0, 2))
    return {
        "seconds": seconds,
        "train_cpu": [turn[1] for turn in turns_taken],
        "share": used / wall / len(os.sched_getaffinity(0)),
    }


def processes_of(job: PausableJob, *, trackers: bool) -> Iterator[int]:
    """The processes of a run's trackers, or all its other processes."""
    for pid in descendants(job.pid):
        with suppress(OSError):  # it has just ended
            if (b"trackers" in Path(f"/proc/{pid}/cmdline").read_bytes()) == trackers:
                yield pid


@contextmanager
def _command(words: list[str], directory: Path, name: str, job: PausableJob) -> Iterator[Beside]:
    """A command of ours that gets the run's directory. It is stopped while it rests."""
    command = [*PERDURE, words[0], name, *words[1:]]
    with PausableJob(command, directory, directory / "beside") as beside:
        yield Beside(beside.resume, beside.pause, CpuCount(lambda: [beside.pid]))


@contextmanager
def _page(wait: float, directory: Path, name: str, job: PausableJob) -> Iterator[Beside]:
    """The live page's server, and a client that queries it as a browser does every `wait` s."""
    command = [*PERDURE, "watch", name, "--port", "0"]
    with PausableJob(command, directory, directory / "page") as server:
        file = directory / "page.out"
        job.run_until(lambda: "open http" in file.read_text())
        link = next(word for word in file.read_text().split() if word.startswith("http"))
        client = [sys.executable, "-m", "benchmarks.support.page_client", link, str(wait)]
        with PausableJob(client, directory, directory / "client") as browser:
            yield Beside(
                lambda: _each(server.resume, browser.resume),
                lambda: _each(browser.pause, server.pause),
                CpuCount(lambda: [server.pid]),
            )


def _each(*actions: Callable[[], None]) -> None:
    for action in actions:
        action()


@contextmanager
def _sink(directory: Path, _: str, job: PausableJob) -> Iterator[Beside]:
    """A sink that is in the tracker's process. It rests while a file is there."""
    rests = directory / "rests"

    yield Beside(rests.unlink, rests.touch, CpuCount(partial(processes_of, job, trackers=True)))


CASES: dict[str, Callable[[Path, str, PausableJob], AbstractContextManager[Beside]]] = {
    "eval": partial(_command, ["eval", *FOLLOW]),
    "page": partial(_page, 2.0),
    "page_flooded": partial(_page, 0.0),
    "hangs": _sink,
    "crashes": _sink,
    "floods": _sink,
}
"""Name → what is beside a run, which gets the working directory, the name of the run's folder in
it, and the job."""
TITLES = {
    "eval": "perdure eval --follow",
    "page": "live page, a browser",
    "page_flooded": "live page, a client that asks without end",
    "hangs": "a sink that hangs",
    "crashes": "a sink that crashes",
    "floods": "a sink that prints 1 MiB a record",
}


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The records of steps of a run."""
    return [line for line in json_lines(run / "metrics.jsonl") if "loss" in line]


def has_reached(run: Path, step: int) -> bool:
    """Whether a run has recorded a step."""
    return any(line["step"] >= step for line in steps_of(run))


if __name__ == "__main__":
    main()
