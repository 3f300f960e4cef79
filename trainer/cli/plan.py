"""Command line of `perdure plan`."""

import argparse
import dataclasses
import json
import math
import shlex
from contextlib import suppress
from pathlib import Path

from elastic.exits import EXIT_DONE, EXIT_FAILED
from trainer.cli.parser import Commands, add_command, add_recipe, local_path, write_output
from trainer.recipe import Recipe, RecipeError, counted, load_recipe, shipped_recipes

PLAN_EXAMPLES = """\
examples:
  perdure plan recipes/llama3_8b.yaml --gpus 8xH100
  perdure plan recipes/llama3_70b.yaml --gpus 8x80GB --nodes 16 --net 8x400Gb/s --storage 10GB/s
  perdure plan recipes/qwen3_0_6b.yaml --gpus 4xT4 precision.dtype=fp16 --json plan.json
  perdure plan llama3_405b --gpus 1024xH100 --price 2.5

Needs neither GPU nor data. Memory is predicted from the code that trains; seconds are a roofline.
exit codes: 0 a strategy fits; 1 no strategy fits; 2 wrong recipe or machine
"""
LIMITS = ("net", "storage", "memory", "disk", "tflops")
"""Options that are arguments of `describe_machine`."""


def add_plan_command(commands: Commands) -> None:
    what = "predict which strategies fit given GPUs, and their cost, before renting the GPUs"
    plan = add_command(commands, "plan", what, PLAN_EXAMPLES)
    add_recipe(plan)
    add = plan.add_argument
    add("--gpus", required=True, help="GPUs of one node: 8xH100, 1xRTX4090, 8x80GB")
    add("--nodes", type=int, default=1, metavar="N", help="nodes (default 1)")
    add("--net", metavar="RATE", help="network rate of one node: 400Gb/s")
    add("--storage", metavar="RATE", help="write rate for checkpoints: 2GB/s")
    add("--host-memory", dest="memory", metavar="SIZE", help="host memory of one node: 2TB")
    add("--disk", metavar="SIZE", help="local disk of one node: 8TB")
    add("--tflops", type=float, metavar="X", help="dense peak TFLOP/s of one GPU")
    add("--price", type=float, metavar="X", help="price of one GPU for an hour, in any currency")
    add("--all", action="store_true", help="show a line for each micro-batch")
    add("--json", type=local_path, metavar="FILE", help="write all figures")
    plan.set_defaults(run=_plan)


def _in_steps(recipe: Recipe) -> Recipe:
    """Convert the recipe's epochs to steps, if its data exists."""
    from trainer.data.shards import DataError
    from trainer.tasks.task import open_streams

    if not recipe.run.epochs or not recipe.data.sources:
        return recipe
    with suppress(RecipeError, DataError):
        run = counted(recipe, open_streams(recipe)[0].sequences).run
        return dataclasses.replace(recipe, run=dataclasses.replace(run, epochs=0.0))
    return recipe


def _plan(arguments: argparse.Namespace) -> int:
    own = arguments.recipe
    shipped = None if Path(own).exists() else shipped_recipes().get(own)
    recipe = load_recipe(shipped or own, arguments.overrides)
    from trainer.plan.costs import describe_machine
    from trainer.plan.search import make_plan
    from trainer.tasks.task import check_plannable
    from trainer.tools.plan_text import plan_json, plan_text

    # Checked first, so that a recipe that cannot be planned is reported before wrong options.
    check_plannable(recipe)
    recipe = _in_steps(recipe)
    limits = {name: getattr(arguments, name) for name in LIMITS}
    machine = describe_machine(arguments.gpus, arguments.nodes, recipe.precision.dtype, **limits)
    if arguments.price is not None and not 0 < arguments.price < math.inf:
        raise RecipeError(f"--price: must be above 0, but it is {arguments.price}")
    plan = make_plan(recipe, machine, "cpu" if recipe.run.device == "cpu" else "cuda")
    first = f"perdure recipe copy {own} {own}.yaml && " if shipped else ""
    file = f"{own}.yaml" if shipped else own
    command = first + shlex.join(["perdure", "train", file, *arguments.overrides])
    print(plan_text(plan, command, everything=arguments.all, price=arguments.price))
    if arguments.json:
        try:
            figures = plan_json(plan, arguments.price)
            write_output(arguments.json, json.dumps(figures, indent=2) + "\n")
        except OSError as error:
            raise RecipeError(f"--json: cannot write {arguments.json}: {error.strerror}") from error
    return EXIT_DONE if plan.best else EXIT_FAILED
