"""`perdure replay`: parses and calls, nothing more."""

import argparse

from trainer.cli.parser import Commands, add_command, at_least, local_path, run_place, whole_number

REPLAY_EXAMPLES = """\
examples:
  perdure replay runs/quickstart --step 120
  perdure replay runs/quickstart --step 120 --why
  perdure replay runs/quickstart --audit 5
  perdure replay runs/quickstart --audit 5 --seed 7 --nproc 4 --data /mnt/wikipedia

A step is computed from the nearest checkpoint before it, else from the beginning. Nothing in the
run directory changes, and the run may go on meanwhile.
exit codes: 0 it is what the ledger says; 1 it is not, or the files of the run contradict each
            other; 2 it cannot be compared (code, torch or machine of another kind; recipe or data
            away), or wrong input
"""


def add_replay_command(commands: Commands) -> None:
    """Add `perdure replay`."""
    what = "compute past steps of a run again: whether its ledger holds, and why a step went so"
    command = add_command(commands, "replay", what, REPLAY_EXAMPLES)
    command.add_argument("of_run", type=run_place, metavar="RUN", help="run: directory or s3://…")
    which = command.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=at_least(1), metavar="N", help="compute step N")
    which.add_argument(
        "--audit",
        type=at_least(1),
        metavar="K",
        help="draw K steps, and compute each up to the save after it",
    )
    command.add_argument(
        "--why",
        action="store_true",
        help="with --step: its documents by loss, gradient and share, and what else explains it",
    )
    command.add_argument(
        "--seed", type=whole_number, metavar="N", help="with --audit: of the draw (default: chance)"
    )
    command.add_argument(
        "--nproc",
        type=at_least(1),
        metavar="K",
        help="ranks of this machine (default: in exact mode as few as hold the model, for an audit "
        "another number than the run had; else as many as the run had)",
    )
    command.add_argument(
        "--data",
        type=local_path,
        action="append",
        default=[],
        metavar="DIR",
        help="where a data set lies now; once for each, in the order of the recipe",
    )
    command.set_defaults(run=_replay, refuse=command.error)


def _replay(arguments: argparse.Namespace) -> int:
    from trainer.tools.mirror import local_runs
    from trainer.tools.replay.replay import Options, audit, replay

    if arguments.why and not arguments.step:
        arguments.refuse("--why: give the step, with --step")
    if arguments.seed is not None and not arguments.audit:
        arguments.refuse("--seed: only with --audit")
    options = Options(arguments.nproc, arguments.data)
    with local_runs([arguments.of_run]) as (run,):
        if arguments.step:
            return replay(run.directory, arguments.step, options, why=arguments.why)
        return audit(run.directory, arguments.audit, arguments.seed, options)
