"""This trainer beside others: all start, warm up and are stopped; then they take turns, so that a
machine whose speed changes is as fast or slow for one as for the other."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.support import ROOT, json_lines, spread, torchrun
from benchmarks.support.turns import PausableJob, take_turns

PERDURE = "perdure"
TURN = 1.0
"""Seconds."""

Round = dict[str, dict[str, Any]]
"""By word of this trainer and of every peer: `seconds` per step, peak_memory, and what else it
tells; or why it `failed`."""


def chosen(option: str, value: str, names: Sequence[str]) -> list[str]:
    """The words of a comma-separated option; `all` stands for all of them."""
    words = list(names) if value == "all" else value.split(",")
    if unknown := [word for word in words if word not in names]:
        sys.exit(f"--{option}: {unknown[0]!r} is none of {', '.join(names)}")
    return words


def race(
    peers: Mapping[str, str],
    ranks: int,
    recipe: Sequence[str],
    directory: Path,
    metrics: str,
    *,
    pausing: bool = True,
) -> Round:
    """A fresh run of this trainer, which must not fail, and of each peer.

    Args:
        peers: word of each → its file in benchmarks/peers.
        ranks: of each.
        recipe: file and overrides.
        directory: where they run.
        metrics: file below it in which this trainer tells its steps.
        pausing: whether they take turns; else each runs to its end before the next one starts.
    """
    shutil.rmtree((directory / metrics).parent, ignore_errors=True)
    workers = {word: [str(ROOT / "benchmarks/peers" / file)] for word, file in peers.items()}
    told = {word: directory / f"{word}.out" for word in peers} | {PERDURE: directory / metrics}
    with ExitStack() as stack:
        jobs: dict[str, PausableJob] = {}
        for word, worker in ({PERDURE: ["-m", "trainer"]} | workers).items():
            job = PausableJob(torchrun(ranks, *worker, *recipe), directory, directory / word)
            jobs[word] = stack.enter_context(job)
            job.run_until(partial(_is_warm, told[word], pausing))
            job.pause()
        take_turns(list(jobs.values()), TURN)
    return {word: _figures(word, job, directory, told[word]) for word, job in jobs.items()}


def row(case: str, peer: str, tokens: int, rounds: Sequence[Round], word: str) -> dict[str, str]:
    """A row of the table: this trainer beside the peer of that word. `tokens`: of a step."""
    pairs = [(found[PERDURE], found[word]) for found in rounds]
    cells = {"case": case, "peer": peer}
    for place, name in enumerate(("Perdure", "peer")):
        cells[f"{name} tok/s"] = spread([tokens / pair[place]["seconds"] for pair in pairs], 0)
    cells["speed ratio"] = spread([other["seconds"] / ours["seconds"] for ours, other in pairs], 3)
    memory = [[one["peak_memory"] / 1e6 for one in side] for side in zip(*pairs, strict=True)]
    ratios = [ours / other for ours, other in zip(*memory, strict=True)]
    mine, theirs = (spread(side, 0) for side in memory)
    return {**cells, "Perdure MB": mine, "peer MB": theirs, "memory ratio": spread(ratios, 3)}


def _is_warm(told: Path, pausing: bool) -> bool:
    """Whether a run has reached where it is stopped for the first time."""
    return pausing and len(_marks(told)) > 0


def _marks(told: Path) -> list[tuple[int, float]]:
    """(step, Unix time) of what a run has told so far, after its first steps."""
    records = json_lines(told)
    ours = [(one["step"], one["time"]) for one in records if "step_seconds_p50" in one]
    return ours + [(one["step"], one["at"]) for one in records if "at" in one and one["step"] > 1]


def _figures(word: str, job: PausableJob, directory: Path, told: Path) -> dict[str, Any]:
    """What a run that has ended came to, or why it `failed`."""
    records = json_lines(told)
    if failed := [one for one in records if "failed" in one]:
        return failed[0]
    if job.code:
        errors = (directory / f"{word}.err").read_text()
        if word == PERDURE:
            sys.exit(f"this trainer failed:\n{errors}")
        error = next((line for line in errors.splitlines() if "Error" in line), "no error shown")
        return {"failed": f"exit code {job.code}, {error}"}
    marks = _marks(told)
    if len(marks) < 2:
        sys.exit("--steps: more are needed, as the first ones warm up")
    (first, began), (last, ended) = marks[0], marks[-1]
    seconds = (job.ran(ended) - job.ran(began)) / (last - first)
    final = next(record for record in reversed(records) if "peak_memory" in record)
    return {**final, "seconds": seconds}
