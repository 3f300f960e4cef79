"""Command line of `perdure chaos`."""

import argparse
from typing import Any

from elastic.exits import EXIT_DONE, EXIT_FAILED
from trainer.cli.parser import Commands, add_command, add_recipe, local_path, require_file
from trainer.recipe import RecipeError
from trainer.recipe.yaml_tree import Origins, listed, read_tree

CHAOS_EXAMPLES = """\
examples:
  perdure chaos recipes/quickstart.yaml --plan plan.yaml run.steps=200
  perdure chaos recipes/quickstart.yaml --faults 20 --seed 7 run.steps=1000 checkpoint.every=20
  perdure chaos recipes/quickstart.yaml --pairs 20 --within 10 run.steps=1000

A plan, as YAML:
  nodes: 2                                           at the start
  faults:                                            one after another
    - {what: kill_worker, at: 20}
    - {what: kill_agent, at: 20, during: init}       amid the recovery from the previous fault
    - {what: join, at: 40}
    - {what: stop_node, at: 60, node: 1, seconds: 3}
  random: {faults: 20, every: 30, max_nodes: 4}      more, drawn from the seed
what:   kill_worker, kill_stand_in, kill_zygote, kill_writer, kill_agent, kill_node, stop_worker,
        stop_node, slow_worker, partition, storage, nan, notice, store, join
during: step (default), init, load, save, rendezvous

Nodes run on this machine's CPUs; all files are in <run.dir>-chaos.
exit codes: 0 passed; 1 failed; 2 wrong recipe or plan
"""


def add_chaos_command(commands: Commands) -> None:
    what = "kill, stop and add nodes of a run on this machine, and check that nothing is lost"
    chaos = add_command(commands, "chaos", what, CHAOS_EXAMPLES)
    add_recipe(chaos)
    add = chaos.add_argument
    add("--plan", type=local_path, metavar="FILE", help="YAML file; see below")
    add("--faults", type=int, metavar="N", help="draw N faults at random")
    add("--pairs", type=int, metavar="N", help="draw N pairs of faults, at most 50 ms apart")
    what = "nodes at the start of --pairs (default 3)"
    add("--nodes", type=int, default=3, metavar="N", help=what)
    add("--within", type=float, metavar="SECONDS", help="fail if no new step is done for so long")
    add("--seed", type=int, default=0, help="seed of random faults (default 0)")
    add("--nproc-per-node", type=int, default=1, metavar="N", help="ranks per node (default 1)")
    what = "largest relative difference of losses and weights (default 1e-4)"
    add("--tolerance", type=float, default=1e-4, help=what)
    chaos.set_defaults(run=_chaos)


def _chaos(arguments: argparse.Namespace) -> int:
    from lab.chaos.plan import random_pairs, read_plan
    from lab.container import network_possible

    require_file(arguments.recipe)
    path, partitions = arguments.plan, network_possible()
    if [path, arguments.faults, arguments.pairs].count(None) != 2:
        raise RecipeError("perdure chaos: give one of --plan FILE, --faults N and --pairs N")
    if arguments.nodes < 2:
        raise RecipeError("--nodes: pairs of faults need at least 2 nodes")
    tree: Any = {"nodes": 2, "random": {"faults": arguments.faults}}
    origins: Origins = {}
    if path is not None:
        if not path.is_file():
            raise RecipeError(f"{path}: this plan file does not exist")
        tree, origins, problems = read_tree(path)
        if problems:
            raise RecipeError(listed(problems, origins))
    if arguments.pairs is not None:
        plan = random_pairs(arguments.seed, arguments.pairs, arguments.nodes)
    else:
        file = str(path or "--faults")
        plan = read_plan(tree, arguments.seed, origins, file, partitions=partitions)
    from lab.chaos.run import run_chaos  # loads torch, so only for a valid plan

    verdict = run_chaos(
        arguments.recipe,
        arguments.overrides,
        plan,
        ranks=arguments.nproc_per_node,
        tolerance=arguments.tolerance,
        within=arguments.within,
    )
    print(verdict)
    return EXIT_FAILED if verdict.problems else EXIT_DONE
