"""Command lines that show what runs did: `perdure report`, `watch`, `runs` and `replay`."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.exits import EXIT_DONE, EXIT_FAILED, EXIT_WRONG_INPUT
from trainer.cli.parser import (
    Commands,
    add_command,
    at_least,
    local_path,
    run_place,
    whole_number,
    write_output,
)
from trainer.recipe import RecipeError

if TYPE_CHECKING:
    from trainer.tools.mirror import MirroredRun

WATCH_EXAMPLES = """\
examples:
  perdure watch runs/quickstart                   in this terminal
  perdure watch runs/quickstart --once            once, for a log
  perdure watch runs/quickstart --port 8080       as a page: prints the link, and the tunnel to it
  perdure watch runs/ddp runs/fsdp --port 0       two runs on one page, at any free port
  perdure watch s3://mine/runs/sft                a run in a bucket; updated every 5 s
"""


def add_report_command(commands: Commands) -> None:
    what = "show what happened in a run, and whether data was lost"
    report = add_command(commands, "report", what)
    _add_runs(report)
    what = (
        "only check that every sequence was consumed once; exit code 0: it was; 1: problems; "
        "2: recipes or data to compare with are missing"
    )
    report.add_argument("--check", action="store_true", help=what)
    what = "with --check: check the ledger alone, without recipes and data"
    report.add_argument("--without-data", action="store_true", help=what)
    what = "write an HTML page with curves"
    report.add_argument("--html", type=local_path, metavar="FILE", help=what)
    report.set_defaults(run=_report)


def add_watch_command(commands: Commands) -> None:
    what = "follow runs: in the terminal, or as a page"
    watch = add_command(commands, "watch", what, WATCH_EXAMPLES)
    _add_runs(watch)
    watch.add_argument("--port", type=whole_number, metavar="N", help="serve the page; 0: any port")
    what = "address to serve the page at (default 127.0.0.1: this machine only)"
    watch.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=what)
    watch.add_argument("--once", action="store_true", help="print the state once, and exit")
    watch.set_defaults(run=_watch)


def add_runs_command(commands: Commands) -> None:
    runs = add_command(commands, "runs", "list runs: state, step, loss, speed, failures, age")
    folder, what = Path("runs"), "folder to search (default runs)"
    runs.add_argument("folder", type=run_place, nargs="?", default=folder, metavar="DIR", help=what)
    runs.set_defaults(run=_runs)


def _add_runs(parser: argparse.ArgumentParser) -> None:
    what = "run: directory or s3://…"
    parser.add_argument("runs", type=run_place, nargs="+", metavar="RUN", help=what)


def _report(arguments: argparse.Namespace) -> int:
    from trainer.tools.mirror import local_runs

    try:
        with local_runs(arguments.runs) as runs:
            if arguments.check:
                return _check(runs, without_data=arguments.without_data)
            if arguments.html:
                from trainer.tools.seeing.server import page
                from trainer.tools.seeing.view import open_runs

                views = open_runs([run.directory for run in runs])
                write_output(arguments.html, page(views, live=False))
                for view in views:
                    view.keep()
                print(f"{arguments.html}: open it in a browser")
                return EXIT_DONE
            from trainer.tools.report.report import report

            print("\n\n".join(run.named(report(run.directory)) for run in runs))
    except OSError as error:
        raise RecipeError(str(error)) from error
    return EXIT_DONE


def _check(runs: "Sequence[MirroredRun]", *, without_data: bool) -> int:
    from elastic.record.history import read_history
    from trainer.tools.report.report import check

    worst = EXIT_DONE
    for run in runs:
        history = read_history(run.directory)
        fine, text = check(history, None if without_data else run.directory)
        print(f"{run.run}: " * (len(runs) > 1) + run.named(text))
        code = {True: EXIT_DONE, False: EXIT_FAILED, None: EXIT_WRONG_INPUT}[fine]
        worst = EXIT_FAILED if EXIT_FAILED in (worst, code) else max(worst, code)
    return worst


def _watch(arguments: argparse.Namespace) -> int:
    from trainer.tools.mirror import local_runs

    waits = not arguments.once and (arguments.port is not None or sys.stdout.isatty())
    try:
        with local_runs(arguments.runs, follow=waits) as runs:
            if waits:
                _wait_for(runs)
            directories = [run.directory for run in runs]
            if arguments.port is None:
                from trainer.tools.seeing.terminal import watch

                watch(directories, once=arguments.once)
            else:
                from trainer.tools.seeing.server import serve

                serve(directories, arguments.host, arguments.port)
    except (OSError, OverflowError) as error:
        raise RecipeError(str(error)) from error
    return EXIT_DONE


def _wait_for(runs: "Sequence[MirroredRun]") -> None:
    from elastic.record.history import has_started

    for run in runs:
        announced = False
        while not has_started(run.directory):
            if not announced:
                print(f"{run.run}: has not begun yet; waiting for it", flush=True)
            announced = True
            time.sleep(1)


def _runs(arguments: argparse.Namespace) -> int:
    from trainer.tools.mirror import local_folder
    from trainer.tools.seeing.terminal import list_runs

    folder = arguments.folder
    if not isinstance(folder, Path):
        with local_folder(folder) as copy:
            if not list_runs(copy):
                print(f"{folder}: holds no run; a run is a folder with `terms` in it")
        return EXIT_DONE
    if not folder.is_dir():
        raise RecipeError(f"{folder}: this folder does not exist; name a folder of runs")
    if not list_runs(folder):
        print(f"{folder}: holds no run; a run is a folder with a ledger.jsonl")
    return EXIT_DONE


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
