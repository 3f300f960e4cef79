"""The console command `perdure`: parses the command line, calls the command's function, and turns
errors into exit codes."""

import argparse
import os
import sys
from collections.abc import Sequence

from elastic.exits import EXIT_INTERRUPTED, EXIT_WRONG_INPUT
from elastic.process import tolerate_lost_output
from trainer.cli.chaos import add_chaos_command
from trainer.cli.ckpt import add_ckpt_command
from trainer.cli.compare import add_compare_command
from trainer.cli.data import add_data_command
from trainer.cli.doctor import add_doctor_command
from trainer.cli.generate import add_eval_command, add_generate_command
from trainer.cli.launch import add_launch_command
from trainer.cli.parser import CommandParser, CommandVersionAction
from trainer.cli.plan import add_plan_command
from trainer.cli.profile import add_profile_command
from trainer.cli.recipe import add_import_command, add_init_command, add_recipe_command
from trainer.cli.runs import (
    add_replay_command,
    add_report_command,
    add_runs_command,
    add_watch_command,
)
from trainer.cli.train import add_store_command, add_train_command
from trainer.recipe.errors import error_text, known_errors
from trainer.text import show_only_visible


def main() -> None:
    # Child processes shall not search the working directory for modules first.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    # Training outlives its terminal. Other commands exist for their output, so they end with it.
    if sys.argv[1:2] in (["train"], ["store"]):
        tolerate_lost_output()
    show_only_visible()
    arguments = parse(sys.argv[1:])
    try:
        code = arguments.run(arguments)
    except known_errors() as error:
        print(error_text(error), file=sys.stderr)
        code = EXIT_WRONG_INPUT
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader is gone; Python's flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; `run` of the result is the function that runs the command. Exits with
    code 2 if the line is wrong."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(words)
    # argparse consumes positional arguments in one go, but overrides may also follow options.
    if any(word.startswith("-") for word in rest) or (rest and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="perdure", description="Train models that last.")
    what = "show versions of Perdure, Python and torch"
    parser.add_argument("--version", action=CommandVersionAction, help=what)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        *(add_train_command, add_store_command, add_data_command, add_ckpt_command),
        *(add_compare_command, add_chaos_command, add_plan_command, add_import_command),
        *(add_profile_command, add_generate_command, add_eval_command, add_report_command),
        *(add_watch_command, add_runs_command, add_replay_command, add_recipe_command),
        *(add_init_command, add_doctor_command, add_launch_command),
    ):
        add(commands)
    return parser
