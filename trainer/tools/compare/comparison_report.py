"""Formats a comparison as a table (Markdown that reads well on a console), JSON, CSV and SVG. Only
`write_report` touches files."""

import csv
import io
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from elastic import usable_cores
from trainer.recipe import Recipe, resolved
from trainer.text import markdown
from trainer.tools import svg
from trainer.tools.compare.compare import INTERRUPTED, Outcome

PLANNED = "planned"
PARTS_KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer",
    "communication_bytes": "sent per step",
    "checkpoint_bytes": "checkpoint",
}
"""Field of both `Outcome` and `Prediction` → title, of all figures but the peak."""


def table(outcomes: Sequence[Outcome]) -> str:
    """Format a Markdown table of the strategies that ran, and a line for each that did not, or
    whose pipeline idles."""
    shown = [one for one in outcomes if not one.problem]
    cells = [_cells(one) for one in shown]
    columns = [*cells[0]] if cells else []
    if cells and not any(one.predicted for one in shown):
        columns.remove(PLANNED)
    rows = [[of_one[column] for column in columns] for of_one in cells]
    lines = markdown(columns, rows, range(1, len(columns))) if rows else []
    notes = [f"- {one.name}: {one.problem}" for one in outcomes if one.problem]
    notes += [f"- {one.name}: {_bubble(one)}" for one in shown if one.bubble is not None]
    unplanned = next((one.unplanned for one in shown if one.unplanned), "")
    if unplanned:
        notes.append(f"- {PLANNED}: `perdure plan` has no figures: {unplanned}")
    if any(one.problem == INTERRUPTED for one in outcomes):
        notes.append(f"- PARTIAL: {len(shown)} of {len(outcomes)} strategies were measured")
    return "\n".join([*lines, *([""] if lines and notes else []), *notes])


def parts_table(outcomes: Sequence[Outcome]) -> str:
    """Format a Markdown table of memory, network and checkpoint bytes as measured, with the
    prediction of `perdure plan` in brackets; empty if nothing ran."""
    shown = [one for one in outcomes if not one.problem]

    def cell(one: Outcome, kind: str) -> str:
        planned = f" ({_megabytes(one.predicted.get(kind))})" if one.predicted else ""
        return f"{_megabytes(getattr(one, kind))}{planned}"

    rows = [[one.name, *(cell(one, kind) for kind in PARTS_KINDS)] for one in shown]
    columns = ["MB, measured (planned)", *PARTS_KINDS.values()]
    return "\n".join(markdown(columns, rows, range(1, len(columns)))) if rows else ""


def _cells(one: Outcome) -> dict[str, str]:
    """Map each column's title to the cell of an outcome."""
    spread = ""
    low, middle, high = (one.quantile(share) for share in (0.1, 0.5, 0.9))
    if low is not None and middle is not None and high is not None:
        spread = f"{middle * 1e3:.0f} ({low * 1e3:.0f}-{high * 1e3:.0f})"
    return {
        "strategy": one.name,
        "peak MB": _megabytes(one.peak),
        PLANNED: _megabytes(one.predicted.get("peak")),
        f"{one.unit}/s": _number(one.rate, ",.0f"),
        "step ms (p10-p90)": spread,
        "comm.": _number(one.communication, ".0%"),
        "save s": _number(one.checkpoint_stall, ".2f"),
        "last loss": _number(one.final_loss, ".4f"),
        "loss diff.": _number(one.difference, ".0e"),
    }


def _bubble(one: Outcome) -> str:
    simulated, formula = (one.predicted.get(key) for key in ("bubble", "bubble_formula"))
    planned = f" (simulated {_number(simulated, '.1%')}, by formula {_number(formula, '.1%')})"
    return f"bubble {one.bubble:.1%}{planned if one.predicted else ''}"


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.{0 if value >= 1e10 else 1}f}"


LEGEND = """\
Per rank, of the rank that holds most: `peak` of what torch allocated at once, what `perdure plan`
says of it, and of parameters (between steps), gradients (when the optimizer takes its step) and
optimizer state what lives. `comm.`: share of the time in which a collective was under way, waiting
for peers included. `bubble`: share of a pipeline's time in which its ranks wait for messages, or
are done: measured, simulated with what `perdure plan` says of its stages, and by the formula for
equal ones. `sent per step`: by this rank. `checkpoint`: its tensors, of all ranks. `save s`: what
one checkpoint cost the trainer. `loss diff.`: largest relative difference of a loss to the first
strategy's.
"""


def conditions(recipe: Recipe, ranks: int, steps: int) -> dict[str, Any]:
    """Return the date, machine, torch version, rank count and recipe of the measurement."""
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
    """Format the conditions in one line."""
    recipe = where["recipe"]
    tokens = bool(recipe["data"]["sources"])
    adapter = recipe["model"].get("adapter")
    trained = f", LoRA of rank {adapter['rank']}" if adapter else ""
    samples = "" if not tokens else f", sequences of {recipe['data']['seq_len']}"
    return (
        f"{where['ranks']} rank(s) on {where['machine']}, torch {where['torch']}, {where['date']}; "
        f"{recipe['precision']['dtype']}{trained}, "
        f"global batch {recipe['batch']['global_batch']}{samples}; "
        f"{where['timed_steps']} timed steps each"
    )


def write_report(outcomes: Sequence[Outcome], where: dict[str, Any], out: Path) -> list[Path]:
    """Write compare.md, .json, .csv and .svg into a folder, and return their paths."""
    tables = [text for text in (table(outcomes), parts_table(outcomes)) if text]
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
    """Convert an outcome to JSON values; steps become string keys."""
    return {**asdict(one), "final_loss": one.final_loss}


def comma_separated(outcomes: Sequence[Outcome]) -> str:
    """Format one CSV line per strategy, in bytes and seconds."""
    rows = []
    for one in outcomes:
        values = {
            key: value for key, value in record(one).items() if not isinstance(value, dict | list)
        }
        values |= {f"step_seconds_p{n}": one.quantile(n / 100) for n in (10, 50, 90)}
        values |= {f"predicted_{key}": value for key, value in one.predicted.items()}
        rows.append(values)
    names = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


# --- picture ---------------------------------------------------------------------------------

WIDTH, LEFT, GAP, RIGHT = 1000, 140, 80, 140
TOP, ROW, BAR = 92, 30, 18
PANEL = (WIDTH - LEFT - GAP - RIGHT) / 2
PARTS = {
    "parameters": "#4e79a7",
    "gradients": "#f28e2b",
    "optimizer_state": "#59a14f",
    "activations and the rest": "#c9ced6",
}
COMPUTE, COMMUNICATION = "#76a5c4", "#e15759"


def picture(outcomes: Sequence[Outcome], caption: str) -> str:
    """Draw an SVG with a bar of memory and one of time for each strategy that ran."""
    shown = [one for one in outcomes if not one.problem]
    height = TOP + ROW * len(shown) + 40
    # Measured and planned bytes share a scale, so that bars and marks can be compared.
    most = max([value for one in shown for value in (one.peak, _plan_of(one)) if value], default=1)
    slowest = max([one.quantile(0.9) or 0.0 for one in shown], default=1) or 1
    right = LEFT + PANEL + GAP
    body = [
        svg.label(LEFT, 24, "What each strategy costs", size=16),
        svg.label(LEFT, 42, caption, color=svg.SOFT, size=11),
        svg.label(LEFT, 66, "peak memory per rank, MB"),
        svg.label(right, 66, "time per step, ms"),
        *_key(LEFT, {name.replace("_", " "): color for name, color in PARTS.items()}),
        *_key(right, {"a collective under way": COMMUNICATION, "the rest": COMPUTE}),
    ]
    for number, one in enumerate(shown):
        y = TOP + ROW * number
        body.append(svg.label(LEFT - 10, y + 13, one.name, anchor="end"))
        body += _memory_bar(one, y, PANEL / most)
        body += _time_bar(one, right, y, PANEL / slowest)
    if any(map(_plan_of, shown)):
        note = "| as perdure plan says"
        body.append(svg.label(LEFT, height - 12, note, size=11, color=svg.SOFT))
    note = "line: 10 % to 90 % of the steps"
    body.append(svg.label(right, height - 12, note, size=11, color=svg.SOFT))
    return svg.document(WIDTH, height, body)


def _plan_of(one: Outcome) -> float | None:
    return one.predicted.get("peak")


def _memory_bar(one: Outcome, y: float, scale: float) -> list[str]:
    if one.peak is None:
        return [svg.label(LEFT, y + 13, "not measured", color=svg.SOFT, size=11)]
    sizes = [getattr(one, name, None) or 0 for name in [*PARTS][:3]]
    sizes.append(max(0, one.peak - sum(sizes)))
    parts, x = [], float(LEFT)
    for (name, color), size in zip(PARTS.items(), sizes, strict=True):
        tip = f"{name}: {size / 1e6:,.1f} MB"
        parts.append(svg.bar(x, y, size * scale, BAR, tip, fill=color))
        x += size * scale
    if planned := _plan_of(one):
        place = LEFT + planned * scale
        parts.append(svg.line(place, y - 4, place, y + BAR + 4, stroke=svg.INK, stroke_width=2))
        x = max(x, place)
    return [*parts, svg.label(x + 6, y + 13, f"{one.peak / 1e6:,.1f}")]


def _time_bar(one: Outcome, left: float, y: float, scale: float) -> list[str]:
    low, middle, high = ((one.quantile(share) or 0.0) * scale for share in (0.1, 0.5, 0.9))
    share, median = one.communication or 0.0, one.quantile(0.5) or 0.0
    rate = f"{one.rate:,.0f} {one.unit}/s" if one.rate else ""
    busy, duration = middle * share, f"{median * 1e3:,.0f} ms"
    tip = f"a collective under way: {share:.0%}"
    across = y + BAR / 2
    return [
        svg.bar(left, y, busy, BAR, tip, fill=COMMUNICATION),
        svg.bar(left + busy, y, middle - busy, BAR, f"median {duration}", fill=COMPUTE),
        svg.line(left + low, across, left + high, across, stroke=svg.INK, stroke_width=1.5),
        svg.label(left + max(middle, high) + 6, y + 13, f"{duration.removesuffix(' ms')} · {rate}"),
    ]


def _key(x: float, entries: Mapping[str, str]) -> list[str]:
    parts = []
    for name, color in entries.items():
        parts.append(svg.tag("rect", x=float(x), y=74, width=9, height=9, fill=color))
        parts.append(svg.label(x + 13, 83, name, size=10, color="#444444"))
        x += 26 + 5.0 * len(name)
    return parts
