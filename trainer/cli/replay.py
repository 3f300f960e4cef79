"""Command line of `perdure replay`."""

import argparse

from trainer.cli.parser import Commands, add_command, at_least, local_path, run_place, whole_number

REPLAY_EXAMPLES = """\
examples:
  perdure replay runs/quickstart --step 120
  perdure replay runs/quickstart --step 120 --why
  perdure replay runs/quickstart --audit 5
  perdure replay runs/quickstart --audit 5 --seed 7 --nproc 4 --data /mnt/wikipedia

A step is computed from the nearest checkpoint before it, or from the beginning. The run directory
is not changed, and the run may be training meanwhile.
exit codes: 0 the result equals the ledger; 1 it does not, or the files of the run contradict each
            other; 2 it cannot be compared (another kind of code, torch or machine; recipe or data
            missing), or wrong input
"""


def add_replay_command(commands: Commands) -> None:
    what = "recompute past steps of a run: check its ledger, and explain a step"
    command = add_command(commands, "replay", what, REPLAY_EXAMPLES)
    command.add_argument("of_run", type=run_place, metavar="RUN", help="run: directory or s3://…")
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=at_least(1), metavar="N", help="recompute step N")
    what = "draw K steps at random, and recompute from each to the next save"
    which.add_argument("--audit", type=at_least(1), metavar="K", help=what)
    add = command.add_argument
    what = "with --step: explain the step: its documents by loss, gradient and share, and more"
    add("--why", action="store_true", help=what)
    what = "with --audit: seed of the draw (default: random)"
    add("--seed", type=whole_number, metavar="N", help=what)
    what = (
        "ranks on this machine (default: in exact mode as few as hold the model, but for an audit "
        "another number than the run had; otherwise as many as the run had)"
    )
    add("--nproc", type=at_least(1), metavar="K", help=what)
    what = "where a data set is now; give it once per data set, in the recipe's order"
    add("--data", type=local_path, action="append", default=[], metavar="DIR", help=what)
    command.set_defaults(run=_replay, refuse=command.error)


def _replay(arguments: argparse.Namespace) -> int:
    from trainer.tools.mirror import local_runs
    from trainer.tools.replay.replay import audit, replay
    from trainer.tools.torchrun import stop_on_sigterm

    if arguments.why and not arguments.step:
        arguments.refuse("--why: works only with --step")
    if arguments.seed is not None and not arguments.audit:
        arguments.refuse("--seed: works only with --audit")
    stop_on_sigterm()
    where = arguments.nproc, [str(path.absolute()) for path in arguments.data]
    with local_runs([arguments.of_run]) as (run,):
        if arguments.step:
            return replay(run.directory, arguments.step, *where, why=arguments.why)
        return audit(run.directory, arguments.audit, arguments.seed, *where)
