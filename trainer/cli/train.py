"""Command line of `perdure train` and `perdure store`."""

import argparse
import os
import resource
import signal
import sys
import time

from elastic.exits import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    EXIT_WRONG_INPUT,
    handled_signals,
    leave_at_once,
)
from elastic.group.job_secret import SECRET_FILE
from elastic.group.membership import MembershipLimits
from elastic.node.zygote import start_early
from elastic.process import usable_cores
from trainer.cli.parser import Commands, add_command, add_recipe, require_file
from trainer.recipe import RecipeError, dump_recipe, load_recipe

TRAIN_EXAMPLES = """\
examples:
  perdure train recipes/quickstart.yaml
  perdure train recipes/quickstart.yaml run.steps=50 optimizer.lr=3e-4
  perdure train recipes/qwen3_0_6b.yaml --dry-run
  perdure train recipes/llama3_8b.yaml --nnodes 2 --rdzv-endpoint node0:29400

Starting the same recipe again resumes from the newest checkpoint in run.dir.
exit codes: 0 done; 2 wrong recipe or input; 75 left with state saved (requeue); 93 stopped for
good (do not requeue); 130 Ctrl-C (once: state saved); 1 anything else
"""


FEWEST_FILES = 256
"""Open files that the launcher of a node must be allowed: 70 were open at once with two ranks."""


def add_train_command(commands: Commands) -> None:
    train = add_command(commands, "train", "train a recipe, or resume its run", TRAIN_EXAMPLES)
    add_recipe(train)
    add = train.add_argument
    what = "check the recipe and its inputs, print it with all defaults, and stop"
    add("--dry-run", action="store_true", help=what)
    add("--nnodes", default="1", metavar="N or MIN:MAX", help="nodes (default 1)")
    what = "ranks on this node (default: one per GPU; without GPUs 2)"
    add("--nproc-per-node", type=int, metavar="N", help=what)
    what = "where nodes meet; the same on all nodes, needed if there are several"
    add("--rdzv-endpoint", metavar="HOST:PORT", help=what)
    restarts = MembershipLimits.restarts
    what = f"failures within one hour after which ranks are started again (default {restarts})"
    add("--max-restarts", type=int, default=restarts, metavar="N", help=what)
    add("--local-addr", metavar="ADDRESS", help="address at which other nodes reach this one")
    what = "secret that all nodes share (default: one in run.dir; see docs/elastic.md)"
    add("--secret", metavar="FILE", help=what)
    add("--rdzv-conf", metavar="K=V,…", help="further settings, listed in elastic/rendezvous.py")
    add("--rdzv-id", default="perdure", help="name of the job (default perdure)")
    train.set_defaults(run=_train)


def add_store_command(commands: Commands) -> None:
    what = "host the rendezvous store of jobs, outside of their nodes"
    store = add_command(commands, "store", what)
    store.add_argument("--port", type=int, default=29400, help="default 29400; 0: any free port")
    store.set_defaults(run=_store)


def _train(arguments: argparse.Namespace) -> int:
    for number in handled_signals():  # until the node's agent installs its own handlers
        signal.signal(number, leave_at_once)
    os.environ["PERDURE_LAUNCHED_AT"] = str(time.time())
    os.environ.setdefault("PERDURE_PRELOAD", "trainer.run.worker")
    # Perdure reports a lost store or peer in one line; torch would add a page of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if arguments.secret:
        os.environ[SECRET_FILE] = arguments.secret
    if not arguments.dry_run:
        require_file(arguments.recipe)
        _raise_file_limit()
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    if arguments.dry_run:
        print(dump_recipe(recipe), end="", flush=True)
    if not (arguments.rdzv_endpoint or arguments.nnodes == "1"):
        raise RecipeError("--nnodes: several nodes need --rdzv-endpoint HOST:PORT")
    # Printed first, as importing torch takes seconds, and longer on a busy machine.
    if arguments.dry_run:
        print("# loading PyTorch", file=sys.stderr, flush=True)
    else:
        what = f"{arguments.recipe}: {recipe.run.length}, in {recipe.run.dir}"
        print(f"{what}; loading PyTorch", flush=True)
    from trainer.parallel.mesh import least_nodes
    from trainer.run.preflight import check_launch, default_ranks

    if not arguments.dry_run:
        import trainer.run.worker  # noqa: F401  # shared with forked ranks

        start_early()  # it forks the zygote, and must come before CUDA is initialised
    ranks = arguments.nproc_per_node or default_ranks(recipe.run.device)
    least, _, most = arguments.nnodes.partition(":")
    nodes = min(least_nodes(recipe, int(least), ranks), int(most or least))
    notes = check_launch(recipe, nodes * ranks, ranks, int(most or least) * ranks)
    if arguments.dry_run:
        for note in notes:
            print(f"# note: {note}", file=sys.stderr)
        print(f"# checked for {nodes * ranks} rank(s): this recipe can start", file=sys.stderr)
        return 0
    return _launch(arguments, ranks)


def _raise_file_limit() -> None:
    """Let this process and its ranks open as many files as the system allows. Raises RecipeError
    if these are too few: the run would wait without a message."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < FEWEST_FILES:  # -1: unlimited
        raise RecipeError(
            f"this process may open {most} files, and a run needs {FEWEST_FILES} or more; raise "
            "the limit: ulimit -Hn 65536, or nofile in /etc/security/limits.conf"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _launch(arguments: argparse.Namespace, ranks: int) -> int:
    """Run torch's elastic agent, as torchrun does, and return the exit code of the run."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    # torchrun would give each rank a single thread.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    endpoint = arguments.rdzv_endpoint or "127.0.0.1:0"  # a free port, for this node alone
    torchrun = ["--rdzv-backend", "perdure", "--rdzv-endpoint", endpoint]
    torchrun += ["--rdzv-id", arguments.rdzv_id, "--nnodes", arguments.nnodes]
    # torchrun's workers are stand-ins for ranks (elastic/node/standin.py): their restarts are no
    # failures. --max-restarts of `perdure train` limits the failures of ranks.
    torchrun += ["--nproc-per-node", str(ranks), "--max-restarts", "1000000"]
    # Ranks print to the standard output of this process, so torchrun's log folder would stay empty.
    torchrun += ["--log-dir", os.devnull]
    options = [f"restarts={arguments.max_restarts}", *filter(None, [arguments.rdzv_conf])]
    torchrun += ["--rdzv-conf", ",".join(options)]
    if arguments.local_addr:
        torchrun += ["--local-addr", arguments.local_addr]
    worker = ["-m", "trainer", arguments.recipe, *arguments.overrides]
    sys.argv = ["torchrun", *torchrun, *worker]  # the agent reads the command of its ranks here
    config, command, command_arguments = config_from_args(parse_args(sys.argv[1:]))
    try:
        elastic_launch(config, command)(*command_arguments)
    except ChildFailedError as failed:
        codes = {failure.exitcode for failure in failed.failures.values()}
        known = {EXIT_WRONG_INPUT, EXIT_DO_NOT_REQUEUE, EXIT_REQUEUE, EXIT_INTERRUPTED} & codes
        # A rank that names a cause outweighs peers that failed because of it.
        return min(known, default=EXIT_FAILED)
    except RendezvousError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except SignalException as stopped:  # SIGQUIT
        print(f"ended by {signal.Signals(stopped.sigval).name}; the same command resumes")
        return EXIT_REQUEUE
    return EXIT_DONE


def _store(arguments: argparse.Namespace) -> int:
    from elastic.group.store import serve

    serve(arguments.port)
    return EXIT_DONE
