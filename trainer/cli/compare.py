"""Command line of `perdure compare`."""

import argparse
import os
from pathlib import Path

from elastic.exits import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from trainer.cli.parser import (
    Commands,
    add_command,
    add_recipe,
    at_least,
    local_path,
    local_run,
    require_file,
)
from trainer.recipe import load_recipe

COMPARE_EXAMPLES = """\
examples:
  perdure compare recipes/quickstart.yaml
  perdure compare recipes/quickstart.yaml --strategies ddp,zero1,zero3+offload --steps 50
  perdure compare recipes/quickstart.yaml --nproc 4 precision.dtype=fp32
  perdure compare recipes/quickstart.yaml --strategies zero2,tp2+sp,pp2,cp2 batch.micro_batch=1

strategies: ddp, zero1, zero2, zero3, hybrid, no_shard; after any of them +offload, +full_ac,
            +selective_ac, +compile, +tp2, +pp2, +cp2, +ep2 (any number), +sp, +gpipe,
            +interleaved, +zero_bubble. tp2 alone means zero2+tp2; pp2, cp2 and ep2 likewise.
            Each strategy trains for a few steps in a run of its own.
results: compare.md, compare.json, compare.csv, compare.svg in <run.dir>-compare, or --out
exit codes: 0 all strategies that can run did, with equal losses; 1 a strategy failed, or losses
            differ; 2 wrong recipe or option; 130 interrupted, with the results so far written
"""


def add_compare_command(commands: Commands) -> None:
    what = "train a recipe for a few steps under every strategy, and show what each costs"
    compare = add_command(commands, "compare", what, COMPARE_EXAMPLES)
    add_recipe(compare)
    add = compare.add_argument
    add("--strategies", metavar="NAME,…", help="strategies to train (default: all that make sense)")
    add("--steps", type=at_least(2), default=20, metavar="N", help="timed steps (default 20)")
    what = "ranks (default: one per GPU; without GPUs 2)"
    add("--nproc", type=at_least(1), metavar="N", help=what)
    add("--out", type=local_path, metavar="DIR", help="default <run.dir>-compare")
    compare.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    from trainer.run.preflight import default_ranks
    from trainer.tools.compare.compare import (
        DEFAULT,
        INTERRUPTED,
        TOLERANCE,
        problems,
        run_comparison,
    )
    from trainer.tools.compare.comparison_report import conditions, parts_table, table, write_report
    from trainer.tools.torchrun import stop_on_sigterm

    require_file(arguments.recipe)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    names = arguments.strategies.split(",") if arguments.strategies else DEFAULT
    ranks = arguments.nproc or default_ranks(recipe.run.device)
    out = (arguments.out or Path(f"{local_run(recipe.run.dir)}-compare")).absolute()
    stop_on_sigterm()
    try:
        words = arguments.recipe, arguments.overrides, list(dict.fromkeys(names))
        outcomes = run_comparison(*words, ranks=ranks, steps=arguments.steps, out=out)
    except KeyboardInterrupt:
        print("interrupted before the first strategy ran")
        return EXIT_INTERRUPTED
    where = conditions(recipe, ranks, arguments.steps)
    tables = filter(None, (table(outcomes), parts_table(outcomes)))
    print("\n" + "\n\n".join(tables) + "\n")
    paths = write_report(outcomes, where, out)
    print(f"written: {', '.join(os.path.relpath(path) for path in paths)}")
    shown_problems = problems(outcomes, TOLERANCE[recipe.precision.dtype])
    for problem in shown_problems:
        print(f"problem: {problem}")
    if any(one.problem == INTERRUPTED for one in outcomes):
        return EXIT_INTERRUPTED
    return EXIT_FAILED if shown_problems else EXIT_DONE
