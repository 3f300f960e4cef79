"""Shows a run in the terminal, and a table of many runs."""

import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elastic.record.history import LedgerError
from elastic.record.ledger import LEDGER
from trainer.text import beneath, visible
from trainer.tools.report.report import date
from trainer.tools.seeing.view import SeenRun, open_runs

EVERY_SECONDS = 2.0
SHOWN_EVENTS = 5
DEPTH, MOST_RUNS = 6, 1000
"""Depth of folders that `perdure runs` searches, and most runs that it lists."""
HOLD_NO_RUNS = ("checkpoints", "recipes", "wandb")
"""Names of folders that `perdure runs` does not search."""
SPARKS = "▁▂▃▄▅▆▇█"
PARTS = {
    "steps": ("█", "blue"), "lost": ("█", "red"), "starting": ("▓", "yellow"),
    "recovery": ("▒", "dark_orange"), "down": ("░", "bright_black"),
}  # fmt: skip
STATES = {"running": "green", "finished": "green", "dead": "red", "stopped": "red"}
CURVES = {
    "loss": "loss", "validation_loss": "validation loss", "grad_norm": "grad norm", "lr": "lr",
    "tokens_per_second": "tokens/s", "step_seconds_p50": "step, s", "data_wait": "data wait",
    "peak_memory": "memory of rank 0",
}  # fmt: skip


def watch(paths: Sequence[Path], *, once: bool) -> None:
    """Show runs until all are finished or stopped, or until Ctrl-C. With `once`, or if standard
    output is no terminal, show only their current state. Raises LedgerError if a path is not the
    directory of a started run."""
    runs, console = open_runs(paths), _console()
    if once or not console.is_terminal:
        console.print(_screen(runs, console.width))
        for run in runs:
            run.keep()
        return
    # The alternate screen cuts the view to its height: lines that scroll away cannot be redrawn.
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_screen(runs, console.width), refresh=True)
            for run in runs:
                run.keep()
            if all(run.status().name in ("finished", "stopped") for run in runs):
                break
            time.sleep(EVERY_SECONDS)
            for run in runs:
                run.look()
    console.print(_screen(runs, console.width))


def list_runs(folder: Path) -> int:
    """Print a table of all runs below a folder, and return their number."""
    console = _console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for name in ("step", "loss", "ppl", "tokens/s", "failed", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    paths, unread = find_runs(folder), []
    for path in paths:
        try:
            table.add_row(*_row(path, folder))
        except (LedgerError, OSError) as error:
            unread.append(_text(str(error), "red"))
    if table.row_count:
        console.print(table)
    for line in unread:
        console.print(line)
    return len(paths)


def find_runs(folder: Path) -> list[Path]:
    """Return the folders below `folder` that have a ledger, newest first. Does not follow links,
    and skips checkpoints."""
    ledgers: list[tuple[float, Path]] = []
    todo = [(folder, 0)]
    while todo and len(ledgers) < MOST_RUNS:
        path, depth = todo.pop()
        try:
            entries = list(path.iterdir())
        except OSError:
            continue
        ledger = path / LEDGER
        if ledger.is_file():
            ledgers.append((ledger.stat().st_mtime, path))
        if depth < DEPTH:
            todo += [
                (entry, depth + 1)
                for entry in entries
                # Links may form circles.
                if entry.is_dir() and not entry.is_symlink()
                if not entry.name.startswith((".", "step-")) and entry.name not in HOLD_NO_RUNS
            ]
    return [path for _, path in sorted(ledgers, reverse=True)]


def _row(path: Path, folder: Path) -> list[Text]:
    shown = path.relative_to(folder) if path != folder else path
    (run,) = open_runs([path])
    state, values = run.status(), {what: value for what, value, _ in run.card()}
    start = run.history.attempts[-1].start
    step = f"{run.history.step:,}" + (f"/{start.steps:,}" if start.steps else "")
    rate = next((value for what, value in values.items() if what.endswith("/s")), "-")
    cells = [step, values.get("loss", "-"), values.get("perplexity", "-"), rate]
    cells += [values["failures"], _age(run.ledger.silent_seconds())]
    run.keep()
    return [
        _text(str(shown)),
        _text(state.name, STATES.get(state.name, "yellow")),
        *map(_text, cells),
    ]


def _age(seconds: float) -> str:
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{seconds:.0f} s"


# --- the screen --------------------------------------------------------------------------------


def _screen(runs: Iterable[SeenRun], width: int) -> RenderableType:
    return Group(*(part for run in runs for part in parts(run, width)))


def parts(run: SeenRun, width: int) -> list[RenderableType]:
    """Render a run, `width` columns wide."""
    state = run.status()
    head = _text(run.name, "bold")
    head.append(f"  {state.name}", STATES.get(state.name, "yellow"))
    head.append_text(_text(f"  {state.text}", "bright_black"))
    proof = run.proof()
    proved = _text(("✓ " if proof["fine"] else "✗ ") + proof["text"].partition("\n")[0])
    proved.stylize("green" if proof["fine"] else "red")
    body = [_card(run, width), _ribbon(run, width), *_events(run), *_curves(run, width)]
    return [head, *body, proved]


def _card(run: SeenRun, width: int) -> Text:
    line, used = Text(), 0
    for what, value, remark in run.card():
        extra = f" {remark}" if what == "step" and remark else ""
        size = len(what) + len(value) + len(extra) + 4
        if used and used + size > width:
            line.append("\n")
            used = 0
        line.append_text(_text(f"{what} ", "bright_black"))
        line.append_text(_text(f"{value}{extra}", "bold"))
        line.append("   ")
        used += size
    return line


def _ribbon(run: SeenRun, width: int) -> Text:
    """Draw the time of the run as a bar, in which each downtime takes one column."""
    parts = [part for attempt in run.ribbon() for part in attempt["parts"] if part[2] > part[1]]
    up = sum(end - begin for kind, begin, end in parts if kind != "down")
    room = max(10, width - 2)
    bar, pending = Text(), 0.0
    for kind, begin, end in parts:
        pending += 1.0 if kind == "down" else room * (end - begin) / up if up else 0.0
        # fractions of a column carry over to the next part
        count = int(pending)
        pending -= count
        block, color = PARTS[kind]
        bar.append(block * count, color)
    bar.truncate(room)
    key = Text("  ").join(
        Text.assemble((PARTS[kind][0], PARTS[kind][1]), f" {kind}")
        for kind in dict.fromkeys(part[0] for part in parts)
    )
    return Text("\n").join([bar, key])


def _events(run: SeenRun) -> list[Text]:
    lines = []
    for event in run.events()[-SHOWN_EVENTS:]:
        line = _text(f"{date(event['time'])}  step {event['step']:,}  ", "bright_black")
        line.append_text(_text(event["text"], "red" if event["failed"] else ""))
        if event["cost"]:
            line.append_text(_text(f"  ({event['cost']})", "bright_black"))
        lines.append(line)
    return lines


def _curves(run: SeenRun, width: int) -> list[Text]:
    room, lines = max(10, min(60, width - 44)), []
    curves = run.curves(most=100_000)
    for name in filter(curves.__contains__, CURVES):
        values = curves[name][1]
        line = _text(f"{CURVES[name]:>16} ", "bright_black")
        line.append(sparks(values, room), "cyan")
        lines.append(line.append(f" {values[-1]:,.5g}"))
    return lines


def sparks(values: Sequence[float], width: int) -> str:
    """Draw a curve of at most `width` characters, each the mean of an interval."""
    size = max(1.0, len(values) / width)
    stretches = [
        values[int(n * size) : max(int(n * size) + 1, int((n + 1) * size))]
        for n in range(min(width, len(values)))
    ]
    means = [sum(stretch) / len(stretch) for stretch in stretches]
    low, high = min(means), max(means)
    if not 0 < high - low < math.inf:
        return SPARKS[0] * len(means)
    most = len(SPARKS) - 1
    return "".join(SPARKS[round((mean - low) / (high - low) * most)] for mean in means)


def _console() -> Console:
    """Return a console that bypasses the escaping of `show_only_visible`, for colours. `_text`
    escapes control characters that come from files."""
    return Console(file=beneath(sys.stdout), highlight=False)


def _text(words: str, style: str = "") -> Text:
    """Convert words of any origin to a line of `Text` without control characters or markup."""
    return Text(visible(words, kept=""), style)
