"""`perdure chaos …`: parses and calls, nothing more."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic.exits import EXIT_DONE, EXIT_FAILED
from trainer.recipe import RecipeError
from trainer.yaml_tree import listed, origin_of, read_tree

CHAOS_EXAMPLES = """\
examples:
  perdure chaos recipes/quickstart.yaml --plan plan.yaml run.steps=200
  perdure chaos recipes/quickstart.yaml --faults 20 --seed 7 run.steps=1000 checkpoint.every=20

A plan, as YAML:
  nodes: 2                                           at the start
  faults:                                            one after another
    - {what: kill_worker, at: 20}
    - {what: kill_agent, at: 20, during: init}       amid the recovery from the fault before
    - {what: join, at: 40}
    - {what: stop_node, at: 60, node: 1, seconds: 3}
  random: {faults: 20, every: 30, max_nodes: 4}      more, drawn from the seed
what:   kill_worker, kill_agent, kill_node, stop_worker, stop_node, slow_worker, partition, storage,
        nan, notice, store, join
during: step (unless said), init, load, save, rendezvous

Nodes run on this machine's CPUs; everything lies in <run.dir>-chaos.
exit codes: 0 every promise was kept; 1 one was not; 2 wrong recipe or plan
"""


def add_chaos_command(commands: Any, new: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to a parser.

    Args:
        commands: what `add_subparsers` gave.
        new: (commands, name, what it does, examples) → parser of a new command.
    """
    what = "kill, stop and add nodes of a run on this machine, and prove that nothing is lost"
    chaos = new(commands, "chaos", what, CHAOS_EXAMPLES)
    chaos.add_argument("recipe", help="YAML file")
    chaos.add_argument("overrides", nargs="*", metavar="key.sub=value", help="recipe overrides")
    chaos.add_argument("--plan", type=Path, metavar="FILE", help="YAML file; see below")
    chaos.add_argument("--faults", type=int, metavar="N", help="without a plan: so many, random")
    chaos.add_argument("--seed", type=int, default=0, help="of random faults (default 0)")
    chaos.add_argument(
        "--nproc-per-node", type=int, default=1, metavar="N", help="ranks per node (default 1)"
    )
    chaos.add_argument(
        "--tolerance", type=float, default=1e-4, help="of losses and weights (default 1e-4)"
    )
    chaos.set_defaults(run=_chaos)


def _chaos(arguments: argparse.Namespace) -> int:
    from elastic.chaos_plan import PlanError, read_plan
    from elastic.machine import network_possible

    path, partitions = arguments.plan, network_possible()
    if (path is None) == (arguments.faults is None):
        raise RecipeError("perdure chaos: give either --plan FILE or --faults N")
    if path is None:
        tree: Any = {"nodes": 2, "random": {"faults": arguments.faults}}
        plan = read_plan(tree, arguments.seed, lambda _: "--faults", partitions=partitions)
    else:
        if not path.is_file():
            raise RecipeError(f"{path}: there is no such plan")
        tree, origins, problems = read_tree(path)
        if problems:
            raise RecipeError(listed(problems, origins))
        try:
            plan = read_plan(
                tree,
                arguments.seed,
                lambda key: origin_of(key, origins, str(path)),
                partitions=partitions,
            )
        except PlanError as error:
            raise RecipeError(str(error)) from None
    from trainer.chaos import run_chaos  # not before the plan is known to be good

    verdict = run_chaos(
        arguments.recipe,
        arguments.overrides,
        plan,
        ranks=arguments.nproc_per_node,
        tolerance=arguments.tolerance,
    )
    print(verdict)
    return EXIT_FAILED if verdict.problems else EXIT_DONE
