"""Command line of `perdure doctor`."""

import argparse

from elastic.exits import EXIT_DONE, EXIT_FAILED
from trainer.cli.parser import Commands, add_command
from trainer.recipe import load_recipe

EXAMPLES = """\
examples:
  perdure doctor
  perdure doctor recipes/quickstart.yaml

exit codes: 0 training can start here; 1 it cannot; 2 wrong recipe
`perdure train RECIPE --dry-run` checks the recipe itself, and its data.
"""


def add_doctor_command(commands: Commands) -> None:
    what = "check this machine: what it has, and which features lack something"
    doctor = add_command(commands, "doctor", what, EXAMPLES)
    what = "recipe whose run directory and extras are checked, too"
    doctor.add_argument("recipe", nargs="?", help=what)
    doctor.add_argument("overrides", nargs="*", metavar="key.sub=value", help="recipe overrides")
    doctor.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    recipe = load_recipe(arguments.recipe, arguments.overrides) if arguments.recipe else None
    from trainer.tools.doctor import examine, report

    findings = list(examine(recipe))
    print(report(findings))
    return EXIT_FAILED if any(one.state == "WRONG" for one in findings) else EXIT_DONE
