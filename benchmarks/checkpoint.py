"""What a checkpoint costs the trainer: this engine against torch's and plain files.

Two ranks hold the same FSDP2 decoder with AdamW state (fp32, gloo), or one rank holds it whole
where that is said. They take proxy training steps (forward, backward, all-reduce of 4 MB, update;
none of the saved tensors) while each engine saves.
Right after a save has returned, and staging has been waited for, all saved tensors are changed; the
last save is loaded again and compared bit for bit. Every engine runs in processes of its own, in
turn, several rounds, and gets the same tensors.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.peers.checkpoint_engines import ENGINES, SINGLE
from benchmarks.support import (
    arguments,
    environment,
    heading,
    print_table,
    spread,
    torchrun,
    write_json,
)
from benchmarks.support.checkpoint_rank import Task
from benchmarks.support.processes import MemoryWatch
from checkpointing.save.slots import available_bytes

TITLE = "Checkpoints: this engine, torch's, other libraries', plain files"
LEGEND = """\
lost       seconds of the trainer that a save costs: held up, plus what the steps (and the change of
           the saved tensors) that ran during the save took beyond what they take without one
held up    seconds in which the trainer stood still: in the call, and waiting for staging where the
           engine lets a forward and backward overlap with it
committed  seconds from the call until the checkpoint is durable on all ranks
raw        seconds in which the ranks `write` (8 MB at a time) and `fsync` the same bytes; median
           over the round
steps      time of a step during the save over that of a step without
extra      peak memory (anonymous of all processes, and shared) less that before: before there was
           an engine for its first save, before the save for later ones
Medians over saves and rounds (min-max); later saves where it does not say first."""

WORLDS = ((1, 2), (2, 1), (2, 4))
LOADERS = ("Perdure", "dcp.save", "HF writer (sharded)")
TIME_LIMIT = 1200
"""Seconds for one engine in one round."""

Result = Mapping[str, Any]


def main() -> None:
    description = (__doc__ or "").partition("\n\n")[0]
    options = arguments(description, rounds=3, saves=3, sizes="1,3", engines="", dir=".")
    if options.saves < 2:
        sys.exit("--saves: 2 are needed, as the first is told apart from the later ones")
    sizes = [float(size) for size in options.sizes.split(",")]
    names = options.engines.split(",") if options.engines else list(ENGINES)
    loaders = [name for name in LOADERS if name in names]
    _refuse_unfit(options.dir, max(sizes))
    heading(TITLE)
    print(LEGEND)
    figures = []
    with TemporaryDirectory(prefix="perdure-bench-", dir=options.dir) as scratch:
        for size in sizes:
            for ranks in (2, 1):
                here = [name for name in names if (name in SINGLE) == (ranks == 1)]
                if not here:
                    continue
                rounds = _save(here, ranks, size, options.rounds, options.saves, Path(scratch))
                summary = _summary(rounds)
                _print_saves(ranks, rounds, summary)
                loading = loaders if ranks == 2 else []
                loads = _load(loading, size, options.rounds, Path(scratch))
                _print_loads(loads)
                figures.append({"summary": summary, "loads": loads})
                write_json(TITLE, figures, options.json)


def _save(
    names: Sequence[str], ranks: int, size: float, rounds: int, times: int, scratch: Path
) -> list[dict[str, Any]]:
    """Engine → what its ranks measured, one dict a round."""
    results = []
    for number in range(rounds):
        of_round = {}
        # Another order every round, so that nobody always follows the same one.
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            with MemoryWatch() as memory:
                result = _run(ranks, "save", name, size, times, scratch)
            for save in result.get("saves", ()):
                save["extra_bytes"] = memory.extra(save["before"], save["start"], save["end"])
            of_round[name] = result
            shutil.rmtree(scratch / "engine", ignore_errors=True)
        results.append({name: of_round[name] for name in names})
    return results


def _load(names: Sequence[str], size: float, times: int, scratch: Path) -> list[dict[str, Any]]:
    results = []
    for name in names:
        for saving, loading in WORLDS:
            result = _run(saving, "write", name, size, 1, scratch)
            if not _problem(result):
                result = _run(loading, "load", name, size, times, scratch)
            results.append({"engine": name, "worlds": [saving, loading], **result})
            shutil.rmtree(scratch / "engine", ignore_errors=True)
    return results


def _run(
    ranks: int, kind: str, engine: str, size: float, times: int, scratch: Path
) -> dict[str, Any]:
    """Let the ranks do a task; its result, or {"failed": why}."""
    result = scratch / "result.json"
    result.unlink(missing_ok=True)
    task = Task(
        kind=kind,
        engine=engine,
        gigabytes=size,
        directory=str(scratch / "engine"),
        times=times,
        result=str(result),
    )
    command = torchrun(ranks, "-m", "benchmarks.support.checkpoint_rank", json.dumps(asdict(task)))
    print(f"{size:g} GB, {ranks} ranks, {kind}: {engine}", file=sys.stderr, flush=True)
    log = scratch / "log.txt"
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, env=environment(), stdout=output, stderr=output)
        try:
            process.wait(TIME_LIMIT)
        except BaseException as error:
            process.terminate()  # torchrun ends its ranks, then itself
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return {"failed": f"no end after {TIME_LIMIT} s"}
            raise
    if process.returncode or not result.exists():
        return {"failed": _cause(log.read_text(encoding="utf-8", errors="replace"))}
    return json.loads(result.read_text(encoding="utf-8"))


def _cause(log: str) -> str:
    """The first exception in the output of the ranks, else its last line."""
    exception = re.search(r"^(?:\[rank\d+\]: ?)?([A-Z_a-z.]+: \S.*)$", log, re.MULTILINE)
    return exception[1] if exception else (log.strip().splitlines() or ["no output"])[-1]


def _problem(result: Result) -> str | None:
    """What is wrong with a result, in words; None if nothing is."""
    if "not_applicable" in result:
        return f"not applicable: {result['not_applicable']}"
    if "failed" in result:
        return f"FAILED: {result['failed']}"
    wrong = result.get("wrong")
    return f"WRONG: {len(wrong)} of {result['tensors']} tensors, {wrong[0]}" if wrong else None


def _summary(rounds: Sequence[Mapping[str, Result]]) -> dict[str, Any]:
    """Engine → lists of figures over saves and rounds, of first and of later saves apart."""
    raws = [median(r["raw_seconds"] for r in of.values() if "saves" in r) for of in rounds]
    summary: dict[str, Any] = {}
    for name in rounds[0]:
        results = [of[name] for of in rounds]
        problems = {problem for problem in map(_problem, results) if problem}
        summary[name] = {"problems": sorted(problems)}
        saved = [(r, raw) for r, raw in zip(results, raws, strict=True) if "saves" in r]
        if saved:
            summary[name] |= {
                "state_bytes": saved[0][0]["state_bytes"],
                "setup": [r["setup_seconds"] for r, _ in saved],
                "first": _figures([(r["saves"][0], raw) for r, raw in saved]),
                "later": _figures([(save, raw) for r, raw in saved for save in r["saves"][1:]]),
            }
    return summary


def _figures(saves: Sequence[tuple[Result, float]]) -> dict[str, list[float]]:
    """Figures of saves, each given with the raw seconds of its round."""
    times = ("lost", "held", "committed")
    return {
        **{key: [save[key] for save, _ in saves] for key in times},
        **{f"{key} / raw": [save[key] / raw for save, raw in saves] for key in times},
        "steps": [save["step"] / save["base"] for save, _ in saves if save["steps"]],
        "GB": [save["bytes"] / 1e9 for save, _ in saves],
        "extra GB": [save["extra_bytes"] / 1e9 for save, _ in saves],
    }


def _print_saves(
    ranks: int, rounds: Sequence[Mapping[str, Result]], summary: Mapping[str, Any]
) -> None:
    results = [result for of in rounds for result in of.values() if "saves" in result]
    saves = list(chain(*(result["saves"] for result in results)))
    if saves:
        raw = spread([result["raw_seconds"] for result in results])
        base = spread([1000 * save["base"] for save in saves], 0)
        size = results[0]["state_bytes"] / 1e9
        print(f"\n{size:.2f} GB of tensors on {ranks} rank(s); raw {raw} s; ", end="")
        print(f"a step without a save {base} ms\n")
    times, rest = [], []
    for name, figures in summary.items():
        if "later" not in figures:
            continue
        first, later = figures["first"], figures["later"]
        times.append(
            {
                "engine": name,
                "lost s": spread(later["lost"]),
                "lost/raw": _median(later["lost / raw"]),
                "held up s": _median(later["held"], 3),
                "held/raw": _median(later["held / raw"], 3),
                "committed s": spread(later["committed"]),
                "committed/raw": _median(later["committed / raw"]),
                "steps": _median(later["steps"]),
                "first: lost s": spread(first["lost"]),
                "held up": _median(first["held"], 3),
                "committed": _median(first["committed"]),
            }
        )
        rest.append(
            {
                "engine": name,
                "set-up s": _median(figures["setup"]),
                "GB written": _median(later["GB"]),
                "extra GB, first": _median(first["extra GB"]),
                "extra GB, later": _median(later["extra GB"]),
                "loads the same bits": "NO" if figures["problems"] else "yes",
            }
        )
    for table in filter(None, (times, rest)):
        print_table(table)
        print()
    for name, figures in summary.items():
        for problem in figures["problems"]:
            print(f"{name}: {problem}")


def _print_loads(loads: Sequence[Result]) -> None:
    rows = []
    for load in loads:
        saving, loading = load["worlds"]
        row = {"saved by": load["engine"], "ranks": f"{saving} -> {loading}"}
        row |= {"read/needed": "", "cold s": "", "warm s": ""}
        if "cold" in load:
            row["read/needed"] = f"{load['read_bytes'] / load['needed_bytes']:.4f}"
            row |= {"cold s": spread(load["cold"]), "warm s": spread(load["warm"])}
        rows.append({**row, "result": _problem(load) or "same bits"})
    if rows:
        print("\nLoading: bytes asked of the filesystem by all ranks over those they hold\n")
        print_table(rows)


def _median(values: Sequence[float], digits: int = 2) -> str:
    return f"{median(values):.{digits}f}" if values else ""


def _refuse_unfit(directory: str, gigabytes: float) -> None:
    """Exit if the directory is in memory, or disk or memory do not suffice for that much state."""
    df = ["df", "--output=fstype", directory]
    kind = subprocess.run(df, capture_output=True, text=True, check=True).stdout.split()[-1]
    if kind in ("tmpfs", "ramfs"):
        sys.exit(f"--dir {directory} is on {kind}, in memory; name a directory on a disk")
    for what, needed, free in (
        ("disk", 5 * gigabytes, shutil.disk_usage(directory).free / 1e9),
        ("memory", 4 * gigabytes, available_bytes() / 1e9),
    ):
        if free < needed:
            sys.exit(
                f"{needed:.0f} GB of {what} are needed for --sizes {gigabytes:g}, {free:.1f} are "
                f"free (--dir {directory}); free some, or choose smaller --sizes"
            )


if __name__ == "__main__":
    main()
