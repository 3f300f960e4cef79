"""Command line of `perdure profile`: a short run of a recipe under torch's profiler, and a summary
page."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from elastic.exits import EXIT_DONE
from trainer.cli.parser import (
    Commands,
    add_command,
    add_recipe,
    at_least,
    local_path,
    local_run,
    require_file,
    write_output,
)
from trainer.recipe import Recipe, RecipeError, load_recipe

PROFILE_EXAMPLES = """\
examples:
  perdure profile recipes/quickstart.yaml
  perdure profile recipes/qwen3_0_6b.yaml --steps 10 --nproc 8 strategy.compile=false

Traces open in https://ui.perfetto.dev and chrome://tracing. One of the traced steps saves a
checkpoint, which is deleted at the end.
To trace an ordinary run, also on several nodes: tracking.profile_steps=5 with any `perdure train`.
"""
WARM_UP = 4
"""Steps before the first traced step, in which memory is allocated and blocks are compiled."""


def add_profile_command(commands: Commands) -> None:
    what = "trace some steps of a recipe, and show where their time goes"
    command = add_command(commands, "profile", what, PROFILE_EXAMPLES)
    add_recipe(command)
    add = command.add_argument
    add("--steps", type=at_least(2), default=6, metavar="N", help="steps to trace (default 6)")
    add("--nproc", type=int, metavar="N", help="ranks (default: as for train)")
    what = "folder of traces and page (default <run.dir>-profile)"
    add("--out", type=local_path, metavar="DIR", help=what)
    command.set_defaults(run=_profile)


def short_run(recipe: Recipe, out: Path, steps: int) -> list[str]:
    """Return overrides for a run that ends right after the traced steps."""
    return [
        f"run.dir={out}",
        f"run.steps={WARM_UP + steps + 1}",
        "run.epochs=0",
        "run.evaluate_every=0",
        "run.stop_after=0",
        "run.samples=[]",
        "schedule={name: constant}",
        "checkpoint.directory=null",
        f"checkpoint.every={WARM_UP + 1 + steps // 2}",
        "elastic.snapshot_every=0",
        "tracking={wandb: off}",
        f"tracking.peak_tflops={recipe.tracking.peak_tflops or 'null'}",
        f"tracking.profile_steps={steps}",
        f"tracking.profile_after={WARM_UP}",
    ]


def _profile(arguments: argparse.Namespace) -> int:
    from trainer.run.trace_summary import DIRECTORY, read_trace, summary

    require_file(arguments.recipe)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    out = arguments.out or Path(f"{local_run(recipe.run.dir)}-profile")
    if out.exists():
        raise RecipeError(f"{out}: already exists; delete it, or choose another --out")
    overrides = [*arguments.overrides, *short_run(recipe, out, arguments.steps)]
    command = [sys.executable, "-m", "trainer.cli", "train", arguments.recipe, *overrides]
    if arguments.nproc:
        command += ["--nproc-per-node", str(arguments.nproc)]
    done = subprocess.run(command, check=False)
    if done.returncode != EXIT_DONE:
        return done.returncode
    shutil.rmtree(out / "checkpoints")
    traces = sorted((out / DIRECTORY).glob("rank-*.trace.json.gz"))
    if not traces:
        raise RecipeError(f"{out / DIRECTORY}: no trace was written; see the warnings above")
    every = None if recipe.checkpoint.every == "auto" else recipe.checkpoint.every
    profiles = [read_trace(path) for path in traces]
    page = summary(profiles, f"Profile of {arguments.recipe}", every)
    write_output(out / "profile.md", page)
    print(f"\n{page}\n{out / 'profile.md'}: this page; {out / DIRECTORY}: one trace per rank")
    return EXIT_DONE
