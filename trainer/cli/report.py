"""`perdure report`: parses and calls, nothing more."""

import argparse
import sys

from elastic.exits import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT
from trainer.cli.parser import Commands, add_command, local_path, write_output


def add_report_command(commands: Commands) -> None:
    """Add the command to a parser."""
    report = add_command(commands, "report", "what happened in a run, and whether nothing is lost")
    report.add_argument("run_directory", type=local_path, metavar="RUN", help="run directory")
    report.add_argument(
        "--check",
        action="store_true",
        help="only whether every sequence was consumed once: 0; 1: there are problems; 2: recipes "
        "or data are not there to compare with",
    )
    report.add_argument(
        "--without-data",
        action="store_true",
        help="with --check: the ledger alone, without recipes and data",
    )
    report.add_argument(
        "--html", type=local_path, metavar="FILE", help="write a page with its curves"
    )
    report.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    from elastic.record.history import LedgerError, read_history
    from trainer.tools.report.report import check, report

    directory = arguments.run_directory
    try:
        if arguments.check:
            history = read_history(directory)
            fine, text = check(history, None if arguments.without_data else directory)
            print(text)
            return {True: EXIT_DONE, False: EXIT_FAILED, None: EXIT_WRONG_INPUT}[fine]
        if arguments.html:
            from trainer.tools.report.html import report_html

            write_output(arguments.html, report_html(directory))
            print(f"{arguments.html}: open it in a browser")
            return EXIT_DONE
        print(report(directory))
    except (LedgerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_WRONG_INPUT
    return EXIT_DONE
