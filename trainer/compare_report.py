"""A comparison → table (Markdown that reads well on a console), JSON, CSV and a picture (SVG). Pure
but for `write_report`."""

import csv
import io
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import torch

from elastic import usable_cores
from trainer.compare import INTERRUPTED, Outcome
from trainer.recipe import Recipe, resolved

PLANNED = "planned"
PLANNED_KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer",
    "communication_bytes": "sent per step",
    "checkpoint_bytes": "checkpoint",
}
"""Field of `Outcome` and of `Prediction` → title: what is measured and planned besides the peak."""


def table(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table of what ran, and a line for each strategy that did not."""
    shown = [one for one in outcomes if not one.problem]
    cells = [_cells(one) for one in shown]
    columns = [*cells[0]] if cells else []
    if cells and not any(one.predicted for one in shown):
        columns.remove(PLANNED)
    rows = [[of_one[column] for column in columns] for of_one in cells]
    lines = _markdown(columns, rows) if rows else []
    notes = [f"- {one.name}: {one.problem}" for one in outcomes if one.problem]
    unplanned = next((one.unplanned for one in shown if one.unplanned), "")
    if unplanned:
        notes.append(f"- {PLANNED}: `perdure plan` has no figures: {unplanned}")
    if any(one.problem == INTERRUPTED for one in outcomes):
        notes.append(f"- PARTIAL: {len(shown)} of {len(outcomes)} strategies were measured")
    return "\n".join([*lines, *([""] if lines and notes else []), *notes])


def plan_table(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table of what was measured, and in brackets what `perdure plan` says; empty if it
    says nothing."""
    shown = [one for one in outcomes if one.predicted]
    rows = [
        [
            one.name,
            *(
                f"{_megabytes(getattr(one, kind))} ({_megabytes(one.predicted.get(kind))})"
                for kind in PLANNED_KINDS
            ),
        ]
        for one in shown
    ]
    columns = ["MB, measured (planned)", *PLANNED_KINDS.values()]
    return "\n".join(_markdown(columns, rows)) if rows else ""


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * (width - 1)}{':' if number else '-'}" for number, width in enumerate(widths)]
    return [line(columns), f"| {' | '.join(rule)} |", *map(line, rows)]


def _cells(one: Outcome) -> dict[str, str]:
    """By column."""
    spread = ""
    low, middle, high = (one.quantile(share) for share in (0.1, 0.5, 0.9))
    if low is not None and middle is not None and high is not None:
        spread = f"{middle * 1e3:.0f} ({low * 1e3:.0f}-{high * 1e3:.0f})"
    return {
        "strategy": one.name,
        "peak MB": _megabytes(one.peak),
        PLANNED: _megabytes(one.predicted.get("peak")),
        "params": _megabytes(one.parameters),
        "grads": _megabytes(one.gradients),
        "optimizer": _megabytes(one.optimizer_state),
        f"{one.unit}/s": _number(one.rate, ",.0f"),
        "step ms (p10-p90)": spread,
        "comm.": _number(one.communication, ".0%"),
        "save s": _number(one.checkpoint_stall, ".2f"),
        "save MB": _megabytes(one.checkpoint_bytes),
        "last loss": _number(one.final_loss, ".4f"),
        "loss diff.": _number(one.difference, ".0e"),
    }


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.1f}"


LEGEND = """\
Per rank, of the rank that holds most: `peak` of what torch allocated at once, what `perdure plan`
says of it, and of parameters (between steps), gradients (when the optimizer takes its step) and
optimizer state what lives. `comm.`: share of the time in which a collective was under way, waiting
for peers included. `save s`: what one checkpoint cost the trainer. `loss diff.`: largest relative
difference of a loss to the first strategy's.
"""


def conditions(recipe: Recipe, ranks: int, steps: int) -> dict[str, Any]:
    """Where, when and with what it was measured."""
    device = recipe.run.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"{usable_cores()} CPU cores"
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "machine": f"{name}, {platform.machine()}",
        "torch": torch.__version__,
        "ranks": ranks,
        "timed_steps": steps,
        "recipe": resolved(recipe),
    }


def describe(where: dict[str, Any]) -> str:
    """Conditions in a line."""
    recipe = where["recipe"]
    samples = "" if recipe["data"]["graph"] else f", sequences of {recipe['data']['seq_len']}"
    return (
        f"{where['ranks']} rank(s) on {where['machine']}, torch {where['torch']}, {where['date']}; "
        f"{recipe['precision']['dtype']}, global batch {recipe['batch']['global_batch']}{samples}; "
        f"{where['timed_steps']} timed steps each"
    )


def write_report(outcomes: Sequence[Outcome], where: dict[str, Any], out: Path) -> list[Path]:
    """Write compare.md, .json, .csv and .svg into a folder; returns their paths."""
    tables = [text for text in (table(outcomes), plan_table(outcomes)) if text]
    texts = {
        "md": "\n\n".join([describe(where), *tables, LEGEND]),
        "json": json.dumps({**where, "strategies": [record(one) for one in outcomes]}, indent=2),
        "csv": comma_separated(outcomes),
        "svg": picture(outcomes, describe(where)),
    }
    paths = [out / f"compare.{kind}" for kind in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def record(one: Outcome) -> dict[str, Any]:
    """An outcome as JSON values; steps are strings there."""
    return {**asdict(one), "final_loss": one.final_loss}


def comma_separated(outcomes: Sequence[Outcome]) -> str:
    """One line per strategy, in bytes and seconds."""
    rows = []
    for one in outcomes:
        values = {key: value for key, value in record(one).items() if not _nested(value)}
        values |= {f"step_seconds_p{n}": one.quantile(n / 100) for n in (10, 50, 90)}
        values |= {f"predicted_{key}": value for key, value in one.predicted.items()}
        rows.append(values)
    names = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _nested(value: object) -> bool:
    return isinstance(value, (dict, list))


# --- picture ---------------------------------------------------------------------------------

WIDTH, LEFT, GAP, RIGHT = 1000, 140, 80, 140
TOP, ROW, BAR = 92, 30, 18
PANEL = (WIDTH - LEFT - GAP - RIGHT) / 2
PARTS = (
    ("parameters", "#4e79a7"),
    ("gradients", "#f28e2b"),
    ("optimizer_state", "#59a14f"),
    ("activations and the rest", "#c9ced6"),
)
COMPUTE, COMMUNICATION = "#76a5c4", "#e15759"
FONT = 'font-family="Helvetica, Arial, sans-serif"'


def picture(outcomes: Sequence[Outcome], caption: str) -> str:
    """An SVG: for each strategy that ran a bar of memory and one of time."""
    shown = [one for one in outcomes if not one.problem]
    height = TOP + ROW * len(shown) + 40
    most = max([value for one in shown for value in (one.peak, _planned(one)) if value], default=1)
    slowest = max([one.quantile(0.9) or 0.0 for one in shown], default=1) or 1
    right = LEFT + PANEL + GAP
    body = [
        _text(LEFT, 24, "What each strategy costs", size=16),
        _text(LEFT, 42, caption, color="#666666", size=11),
        _text(LEFT, 66, "peak memory per rank, MB", size=12),
        _text(right, 66, "time per step, ms", size=12),
        *_key(LEFT, [(name.replace("_", " "), color) for name, color in PARTS]),
        *_key(right, [("a collective under way", COMMUNICATION), ("the rest", COMPUTE)]),
    ]
    for number, one in enumerate(shown):
        y = TOP + ROW * number
        body.append(_text(LEFT - 10, y + 13, one.name, anchor="end"))
        body += _memory_bar(one, y, PANEL / most)
        body += _time_bar(one, right, y, PANEL / slowest)
    if any(map(_planned, shown)):
        body.append(_text(LEFT, height - 12, "| as perdure plan says", size=11, color="#666666"))
    note = "line: 10 % to 90 % of the steps"
    body.append(_text(right, height - 12, note, size=11, color="#666666"))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" {FONT} font-size="12">'
    )
    ground = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, ground, *body, "</svg>\n"])


def _planned(one: Outcome) -> float | None:
    return one.predicted.get("peak")


def _memory_bar(one: Outcome, y: float, scale: float) -> list[str]:
    if one.peak is None:
        return [_text(LEFT, y + 13, "not measured", color="#666666", size=11)]
    sizes = [getattr(one, name, None) or 0 for name, _ in PARTS[:3]]
    sizes.append(max(0, one.peak - sum(sizes)))
    parts, x = [], float(LEFT)
    for (name, color), size in zip(PARTS, sizes, strict=True):
        parts.append(_bar(x, y, size * scale, color, f"{name}: {size / 1e6:,.1f} MB"))
        x += size * scale
    planned = _planned(one)
    if planned:
        place = LEFT + planned * scale
        parts.append(
            f'<path d="M{place:.1f} {y - 4}V{y + BAR + 4}" stroke="#222222" stroke-width="2"/>'
        )
    end = max(x, LEFT + (planned or 0) * scale)
    return [*parts, _text(end + 6, y + 13, f"{one.peak / 1e6:,.1f}")]


def _time_bar(one: Outcome, left: float, y: float, scale: float) -> list[str]:
    low, middle, high = (one.quantile(share) or 0.0 for share in (0.1, 0.5, 0.9))
    share = one.communication or 0.0
    busy = middle * share * scale
    rate = f"{one.rate:,.0f} {one.unit}/s" if one.rate else ""
    middle_y = y + BAR / 2
    line = f"M{left + low * scale:.1f} {middle_y}H{left + high * scale:.1f}"
    return [
        _bar(left, y, busy, COMMUNICATION, f"a collective under way: {share:.0%}"),
        _bar(left + busy, y, middle * scale - busy, COMPUTE, f"median {middle * 1e3:,.0f} ms"),
        f'<path d="{line}" stroke="#222222" stroke-width="1.5"/>',
        _text(left + max(middle, high) * scale + 6, y + 13, f"{middle * 1e3:,.0f} · {rate}"),
    ]


def _key(x: float, entries: Sequence[tuple[str, str]]) -> list[str]:
    parts = []
    for name, color in entries:
        parts.append(f'<rect x="{x:.1f}" y="74" width="9" height="9" fill="{color}"/>')
        parts.append(_text(x + 13, 83, name, size=10, color="#444444"))
        x += 26 + 5.0 * len(name)
    return parts


def _bar(x: float, y: float, width: float, color: str, tip: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(0.0, width):.1f}" height="{BAR}" fill="{color}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def _text(
    x: float, y: float, text: str, anchor: str = "start", color: str = "#222222", size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" '
        f'font-size="{size}">{escape(text)}</text>'
    )
