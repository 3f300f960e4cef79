"""Reports what happened in a run, as text, from its directory. Imports no torch."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from elastic.node.files import open_to_read
from elastic.record.causes import ending
from elastic.record.history import RecordHistory, in_lineage, lineage_of, read_history, read_starts
from elastic.record.lines import read_record
from elastic.record.reliability import Goodput, Reliability, goodput, reliability
from trainer.recipe.yaml_tree import RecipeError, read_tree
from trainer.text import table

ORIGINS = {"none": "fresh weights", "init": "model.init_from"}
"""Source of the initial state in a start line → words."""
SHOWN_ATTEMPTS = 40


def report(run: Path) -> str:
    """Summarise a run as text. Raises LedgerError if `run` is not the directory of a started
    run."""
    history = read_history(run)
    sizes = [str(size) for size, _ in groupby(one.start.world_size for one in history.attempts)]
    if len(sizes) >= 9:
        sizes[4:-4] = ["…"]
    steps, planned = count_of(history.step, "step"), history.attempts[-1].start.steps
    if planned and planned > history.step:
        steps = f"{history.step:,} of {count_of(planned, 'step')}"
    head = (
        f"{run}: {steps}, {count_of(history.sequences, 'sequence')}, "
        f"{count_of(len(history.attempts), 'attempt')}, world size {' → '.join(sizes)}"
    )
    trust, metrics = reliability(history), read_metrics(run)
    lines = [_failures_line(trust), _throughput_line(history, metrics, unit_of(run))]
    lines += [*_validation_lines(metrics), _saves_line(history)]
    parts = [head, _goodput_text(goodput(history)), "\n".join(lines)]
    return "\n\n".join([*parts, _attempts_table(history, trust), check(history)[1]])


def check(history: RecordHistory, run: Path | None = None) -> tuple[bool | None, str]:
    """Check that the record of a run is complete and that every sequence was consumed exactly once.
    With the directory `run`, also compare consumption with recipes and data, which imports torch.

    Returns:
        (verdict, proof or problems as text). The verdict is None if there is no problem, but some
        comparisons were impossible.
    """
    problems, missing, proved = list(history.problems), [], []
    has_recipe = any(attempt.start.recipe for attempt in history.attempts)
    has_digest = any(step.consumed for attempt in history.attempts for step in attempt.steps)
    if run and (has_recipe or has_digest):
        from trainer.tools.report.consumption import check_consumption

        findings = check_consumption(run, history)
        problems += findings.problems
        missing, proved = findings.left_out, findings.proved
    left_out = [f"not compared: {what}" for what in missing]
    if problems:
        return False, "\n".join([*(f"problem: {problem}" for problem in problems), *left_out])
    lines = [history.summary(), *proved, *left_out, *_changes_lines(history)]
    if history.unrecorded:
        lines.append(
            f"not recorded: {count_of(history.unrecorded, 'step')}, whose line was lost when a "
            "process died; the next start line proves that their sequences were consumed"
        )
    return None if missing else True, "\n".join(lines)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Read the records of metrics.jsonl in the newest attempt's lineage, without a torn last line;
    [] if there is no file."""
    starts = read_starts(run)
    lineage = lineage_of(starts, next(reversed(starts), ""))
    try:
        descriptor = open_to_read(run / "metrics.jsonl", follow=True)
    except OSError:
        return []
    with os.fdopen(descriptor, "rb") as file:
        return [
            record for record in map(read_record, file) if record and in_lineage(record, lineage)
        ]


def unit_of(run: Path) -> str:
    """Return the unit of `tokens` in a run's records: tokens for prepared data, else samples."""
    try:
        data = read_tree(run / "recipe.yaml", kept=True)[0].get("data")
    except RecipeError:  # the report also works if the recipe is missing
        data = None
    on_samples = isinstance(data, dict) and (data.get("graph") or data.get("factory"))
    return "samples" if on_samples else "tokens"


# --- parts -----------------------------------------------------------------------------------


def _goodput_text(account: Goodput) -> str:
    up = account.wall - account.idle
    head = f"goodput {account.share_of_uptime:.1%} of {clock(up)}"
    if account.idle > 0.001 * account.wall:
        head += f" up; {account.share:.1%} of {clock(account.wall)} since the first launch"
    phases = sorted(account.starting.items(), key=lambda item: -item[1])
    starting = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases if seconds >= 0.05)
    rows = [
        ("steps whose result survived", account.kept, ""),
        ("steps lost to failures", account.redone, ""),
        ("steps skipped or rolled back", account.skipped, ""),
        ("start and recovery", sum(account.starting.values()), starting),
        ("paused for saves", account.stalled, ""),
        ("between steps", account.between, "evaluation, records, the last save"),
    ]
    cells = [
        [name, clock(seconds), f"{seconds / up:.1%}", remark]
        for name, seconds, remark in rows
        if seconds > 0 and up > 0
    ]
    return "\n".join([head, *table(cells, right={1, 2}, indent="  ")])


def _failures_line(trust: Reliability) -> str:
    line = f"failures: {trust.failures}"
    if trust.mtbf is not None:
        line += f", one every {clock(trust.mtbf)} (MTBF)"
    if trust.mttr is not None:
        line += f", back at a new step after {clock(trust.mttr)} on average (MTTR)"
    return line


def _throughput_line(
    history: RecordHistory, metrics: Sequence[Mapping[str, Any]], unit: str
) -> str:
    sequences = seconds = 0.0
    for attempt in history.attempts:
        for step in attempt.steps[1:]:  # the first step also warms up
            sequences += step.after_last - step.first
            seconds += step.seconds
    line = f"throughput: {sequences / seconds:,.1f} sequences/s" if seconds else "throughput: -"
    rates = sorted(r["tokens_per_second"] for r in metrics if r.get("tokens_per_second"))
    return line + (f", {rates[len(rates) // 2]:,.0f} {unit}/s (median)" if rates else "")


def _validation_lines(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    losses = [
        (record["validation_loss"], record["step"])
        for record in metrics
        if record.get("validation_loss") is not None
    ]
    if not losses:
        return []
    loss, step = min(losses)
    passes = f"{len(losses)} pass{'' if len(losses) == 1 else 'es'}"
    return [f"validation: {passes}, the lowest loss {loss:.4f} after step {step}"]


def _changes_lines(history: RecordHistory) -> list[str]:
    """Lines about changed recipe keys between surviving attempts, and about roll-backs."""
    lines = []
    for attempt in history.attempts:
        if attempt.start.changed and attempt.number in history.kept:
            changes = attempt.start.changed.items()
            parts = [f"{key} {json.dumps(old)} → {json.dumps(new)}" for key, (old, new) in changes]
            lines.append(f"changed after step {attempt.start.step}: {', '.join(parts)}")
    for to, last in history.taken_back():
        lines.append(f"rolled back after step {last} to the weights of step {to}")
    return lines


def _saves_line(history: RecordHistory) -> str:
    saves = [save for attempt in history.attempts for save in attempt.saves]
    good = [save for save in saves if save.get("ok")]
    line = f"saves: {len(good)}"
    if good:
        mean = sum(save["seconds"] for save in good) / len(good)
        line += f", {mean:.2f} s on average, the newest of step {good[-1]['step']}"
    if failed := [save for save in saves if not save.get("ok")]:
        reason = failed[-1].get("error", "no reason given")
        line += f"; {len(failed)} failed, the last time: {reason}"
    return line


def _attempts_table(history: RecordHistory, trust: Reliability) -> str:
    head = ["attempt", "began", "nodes", "ranks", "steps", "state", "back after", "end"]
    attempts, left_out = history.attempts, len(history.attempts) - SHOWN_ATTEMPTS
    rows = []
    for attempt in attempts[-SHOWN_ATTEMPTS:]:
        start, back = attempt.start, trust.recoveries.get(attempt.number)
        steps = f"{start.step + 1} to {attempt.last_step}" if attempt.steps else "none"
        source = ORIGINS.get(start.source) or f"step {start.step} from {start.source}"
        row = [str(attempt.number), date(attempt.began), str(start.nodes), str(start.world_size)]
        row += [steps, source, clock(back) if back else "", ending(history, attempt).text]
        rows.append(row)
    lines = table([head, *rows], right={0, 2, 3, 4, 6})
    if left_out > 0:
        lines.insert(1, f"… {count_of(left_out, 'earlier attempt')}")
    return "\n".join(lines)


# --- words -----------------------------------------------------------------------------------


def clock(seconds: float) -> str:
    """Format a duration in milliseconds, seconds, minutes or hours, by its size."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


def date(moment: float) -> str:
    """Format a Unix time; "" outside the calendar's range."""
    try:
        return datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return ""


def count_of(number: int, what: str) -> str:
    """Format a count with its noun."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
