"""Train with every optimizer class of ten packages, kill it, resume it, and resume it in another
world; a table of what was trained and what was refused, and why.

Every run is the trainer's own: a recipe with `optimizer.factory`, ranks that are forked from one
process, real saves and loads. A rank dies by SIGKILL in the forward pass of its last step. DDP is
tried for each class, FSDP where it is not refused.

    python -m benchmarks.optimizers [PACKAGE or PACKAGE:CLASS …]

Results that stand in the table already are kept, but those of packages and classes that are named.
"""

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import trainer.optim.own
import trainer.run.worker  # both for what is forked
from benchmarks.support import end_children_at_sigterm
from benchmarks.support.optimizers import SAVED, STEPS, classes, losses, recipe_of
from elastic import EXIT_WRONG_INPUT
from trainer.recipe import load_recipe
from trainer.run.preflight import check_launch

RESULTS = Path(__file__).parent / "results"
SECONDS = 120
"""A run that takes longer is ended."""
ALIKE = 2e-4
"""Largest relative difference of losses, at another world size or layout: of rounding."""
LAYOUTS = {"ddp": ["strategy.name=ddp"], "fsdp": ["strategy.name=fsdp"]}


def main() -> int:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the table")
    arguments = parser.parse_args()
    words, out = arguments.words, arguments.out.absolute()
    end_children_at_sigterm()
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    known, names = measured_before(out), classes()
    load_recipe_once()
    for name in names:
        asked = name in words or name.partition(":")[0] in words
        chosen = asked if words else name not in known
        if chosen:
            with tempfile.TemporaryDirectory() as folder:
                found = measured(name, Path(folder))
            known[name] = {layout: _short(said) for layout, said in found.items()}
            print(f"{name}: {json.dumps(known[name])}", flush=True)
            known = keep(out, name, known[name])
    path = out / "optimizers.md"
    path.write_text(table({name: known[name] for name in names if name in known}))
    print(f"{path} is written")
    return 0


def measured_before(out: Path) -> dict[str, Any]:
    """Results that stand in the table."""
    path = out / "optimizers.json"
    return json.loads(path.read_text()) if path.exists() else {}


def keep(out: Path, name: str, found: dict[str, str]) -> dict[str, Any]:
    """All results, with a new one; another process may add its own."""
    folder = os.open(out, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    known = {**measured_before(out), name: found}
    data = json.dumps(known, indent=1, sort_keys=True) + "\n"
    (out / "optimizers.json").write_text(data)
    os.close(folder)
    return known


def load_recipe_once() -> None:
    """So that no fork has to learn what a recipe may hold."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "recipe.yaml")
        path.write_text("{}\n")
        load_recipe(path, [*recipe_of("torch.optim:SGD"), "run.dir=run"])


def measured(name: str, folder: Path) -> dict[str, str]:
    """What became of an optimizer: by layout, `trained` or a reason."""
    os.chdir(folder)
    (folder / "recipe.yaml").write_text("{}\n")
    found: dict[str, str] = {}
    for layout, overrides in LAYOUTS.items():
        given = [*recipe_of(name), *overrides]
        if refused := in_a_fork(
            lambda given=given: refusal([*given, "run.dir=run"]), folder / f"check-{layout}"
        ):
            found[layout] = f"refused: {refused}"
            continue
        found[layout] = trained(folder, layout, given)
        if os.environ.get("SHOW_LOGS"):
            for log in sorted(folder.glob("*.log")):
                print(log.name, log.read_text())
    if found["ddp"] == found["fsdp"] == "trained":
        there = [losses(folder / layout) for layout in LAYOUTS]
        if (worst := differing(there[0], there[1], range(1, STEPS))) > ALIKE:
            found["fsdp"] = f"WRONG: losses differ from those of DDP by {worst:.1e}"
    return found


def refusal(overrides: list[str]) -> str:
    """Why a recipe cannot start; empty if it can."""
    try:
        check_launch(load_recipe("recipe.yaml", overrides), 2, 2)
    except Exception as error:
        return f"{error}".partition("\n")[0]
    return ""


def trained(folder: Path, layout: str, overrides: list[str]) -> str:
    """Whether a run is killed, resumed, and resumed on one rank."""
    run, moved = folder / layout, folder / f"{layout}-moved"
    given = [*overrides, f"run.dir={run}"]
    codes = launch(2, given, folder / f"{layout}.log", DIE_IN=str(run))
    if EXIT_WRONG_INPUT in codes:
        told = last_line(folder / f"{layout}.log").removeprefix("error: ")
        return f"refused: {told} (told by the ranks, before the first step)"
    if -signal.SIGKILL not in codes or STEPS - 1 not in losses(run):
        return f"FAILED: {last_line(folder / f'{layout}.log')}"
    before = losses(run)  # a run that goes on drops the steps that it makes again
    step = run / f"checkpoints/step-{SAVED:08}"
    if not step.exists():
        return "FAILED: no checkpoint"
    shutil.copytree(step, moved / "checkpoints" / step.name)
    if any(launch(2, given, folder / f"{layout}-again.log")):
        return f"FAILED to resume: {last_line(folder / f'{layout}-again.log')}"
    found, again = losses(run), range(SAVED + 1, STEPS)
    if f"resuming after step {SAVED}" not in (folder / f"{layout}-again.log").read_text():
        return "FAILED: not resumed from the checkpoint"
    if odd := [number for number in again if found[number] != before[number]]:
        return f"WRONG: the loss of step {odd[0]} differs after the kill"
    if any(launch(1, [*overrides, f"run.dir={moved}"], folder / f"{layout}-moved.log")):
        return f"FAILED on one rank: {last_line(folder / f'{layout}-moved.log')}"
    if (worst := differing(found, losses(moved), again)) > ALIKE:
        return f"WRONG: losses on one rank differ by {worst:.1e}"
    return "trained"


def differing(one: dict[int, float], other: dict[int, float], steps: range) -> float:
    """Largest relative difference of losses."""
    pairs = [(one[number], other[number]) for number in steps]
    return max(0.0 if a == b else abs(a - b) / max(abs(a), abs(b)) for a, b in pairs)


def launch(ranks: int, overrides: list[str], log: Path, **environment: str) -> list[int]:
    """Run ranks as torchrun would, forked from this process; their exit codes. If one dies, so do
    the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        there = {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **environment}
        children.append(forked(lambda: worker(overrides), log, there))
    codes: dict[int, int] = {}
    until = time.monotonic() + SECONDS
    while len(codes) < ranks:
        if time.monotonic() > until and len(codes) < ranks:
            with log.open("a") as file:
                file.write(f"error: not done within {SECONDS} s\n")
        for pid in children:
            if pid not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(ended[1])
        if any(codes.values()) or time.monotonic() > until:
            for pid in children:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in children]


def worker(overrides: list[str]) -> None:
    trainer.run.worker.main(["recipe.yaml", *overrides])


def forked(work: Any, log: Path, environment: dict[str, Any]) -> int:
    """Process that does `work`, with its output in a file."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    os.environ |= {key: str(value) for key, value in environment.items()}
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        work()
    finally:
        os._exit(1)


def in_a_fork(work: Any, told: Path) -> str:
    """What `work` returns in a process of its own; what ended that, if it did not."""
    pid = forked(lambda: told.write_text(work()), told.with_suffix(".log"), {})
    until = time.monotonic() + SECONDS
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.005)
    return told.read_text() if told.exists() else "the check did not end"


def last_line(log: Path) -> str:
    """The last error that ranks have printed, else their last line."""
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line]
        return (errors or lines or ["nothing was said"])[-1].strip()[:300]
    return "nothing was said"


def table(known: dict[str, dict[str, str]]) -> str:
    """Markdown."""
    kinds = [(row["ddp"] == "trained", row["fsdp"] == "trained") for row in known.values()]
    lines = [
        "# Optimizers",
        "",
        f"`python -m benchmarks.optimizers` made this table. Of {len(known)} classes "
        f"{sum(ddp for ddp, _ in kinds)} train under DDP on two ranks and "
        f"{sum(fsdp for _, fsdp in kinds)} under FSDP on two ranks. Each of these was killed by "
        f"SIGKILL in step {STEPS}, resumed from step {SAVED} with the same bits of every loss, and "
        "resumed on one rank with the same losses up to rounding. Under FSDP losses are those of "
        "DDP up to rounding. The others are refused before the start, with the reason given.",
        "",
        "| class | DDP x2 | FSDP x2 |",
        "|---|---|---|",
    ]
    for name, row in known.items():
        cells = [
            row[layout]
            .removeprefix("refused: ")
            .removeprefix("optimizer.factory: ")
            .replace("|", "\\|")
            for layout in LAYOUTS
        ]
        shown = [cells[0], "as DDP" if cells[1] == cells[0] != "trained" else cells[1]]
        lines.append(f"| `{name}` | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _short(said: str) -> str:
    """Without folders of the machine."""
    home = f"{Path(__file__).parents[1]}{os.sep}"
    words = (word.rpartition("site-packages/")[2].removeprefix(home) for word in said.split())
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
