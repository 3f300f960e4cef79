"""Formats a comparison as Markdown, JSON, CSV and SVG."""

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
from trainer.tools.compare.compare import INTERRUPTED, ComparedOutcome

PLANNED = "planned"
PARTS_KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer",
    "communication_bytes": "sent per step",
    "checkpoint_bytes": "checkpoint",
}
"""Field that both `ComparedOutcome` and `Prediction` have, except the peak → column title."""


def table(outcomes: Sequence[ComparedOutcome]) -> str:
    """Format a Markdown table of the strategies that ran, and below it a list of those that did not
    run, and of the bubbles of pipelines."""
    shown = [outcome for outcome in outcomes if not outcome.problem]
    cells = [_cells(outcome) for outcome in shown]
    columns = [*cells[0]] if cells else []
    if cells and not any(outcome.predicted for outcome in shown):
        columns.remove(PLANNED)
    rows = [[row[column] for column in columns] for row in cells]
    lines = markdown(columns, rows, range(1, len(columns))) if rows else []
    notes = [f"- {outcome.name}: {outcome.problem}" for outcome in outcomes if outcome.problem]
    notes += [
        f"- {outcome.name}: {_bubble(outcome)}" for outcome in shown if outcome.bubble is not None
    ]
    unplanned = next((outcome.unplanned for outcome in shown if outcome.unplanned), "")
    if unplanned:
        notes.append(f"- {PLANNED}: `perdure plan` has no figures: {unplanned}")
    if any(outcome.problem == INTERRUPTED for outcome in outcomes):
        notes.append(f"- PARTIAL: {len(shown)} of {len(outcomes)} strategies were measured")
    return "\n".join([*lines, *([""] if lines and notes else []), *notes])


def parts_table(outcomes: Sequence[ComparedOutcome]) -> str:
    """Format a Markdown table of measured bytes of memory, network and checkpoint, with the
    prediction of `perdure plan` in brackets; "" if nothing ran."""
    shown = [outcome for outcome in outcomes if not outcome.problem]

    def cell(outcome: ComparedOutcome, kind: str) -> str:
        planned = f" ({_megabytes(outcome.predicted.get(kind))})" if outcome.predicted else ""
        return f"{_megabytes(getattr(outcome, kind))}{planned}"

    rows = [[outcome.name, *(cell(outcome, kind) for kind in PARTS_KINDS)] for outcome in shown]
    columns = ["MB, measured (planned)", *PARTS_KINDS.values()]
    return "\n".join(markdown(columns, rows, range(1, len(columns)))) if rows else ""


def _cells(outcome: ComparedOutcome) -> dict[str, str]:
    spread = ""
    low, middle, high = (outcome.quantile(share) for share in (0.1, 0.5, 0.9))
    if low is not None and middle is not None and high is not None:
        spread = f"{middle * 1e3:.0f} ({low * 1e3:.0f}-{high * 1e3:.0f})"
    return {
        "strategy": outcome.name,
        "peak MB": _megabytes(outcome.peak),
        PLANNED: _megabytes(outcome.predicted.get("peak")),
        f"{outcome.unit}/s": _number(outcome.rate, ",.0f"),
        "step ms (p10-p90)": spread,
        "comm.": _number(outcome.communication, ".0%"),
        "save s": _number(outcome.checkpoint_stall, ".2f"),
        "last loss": _number(outcome.final_loss, ".4f"),
        "loss diff.": _number(outcome.difference, ".0e"),
    }


def _bubble(outcome: ComparedOutcome) -> str:
    simulated, formula = (outcome.predicted.get(key) for key in ("bubble", "bubble_formula"))
    planned = f" (simulated {_number(simulated, '.1%')}, by formula {_number(formula, '.1%')})"
    return f"bubble {outcome.bubble:.1%}{planned if outcome.predicted else ''}"


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.{0 if value >= 1e10 else 1}f}"


LEGEND = """\
Memory is that of the rank with most: `peak` of torch's allocations, `planned` peak by `perdure
plan`, and parameters (between steps), gradients (at the optimizer step) and optimizer state.
`comm.`: share of the time in which a collective was under way, including waiting for peers.
`bubble`: share of a pipeline's time in which its ranks wait for messages, or are done: measured,
simulated from the stages of `perdure plan`, and by the formula for equal stages. `sent per step`:
by one rank. `checkpoint`: tensors of all ranks. `save s`: seconds of training that one checkpoint
cost. `loss diff.`: largest relative difference of a loss from the first
strategy's.
"""


def conditions(recipe: Recipe, ranks: int, steps: int) -> dict[str, Any]:
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


def _describe(where: dict[str, Any]) -> str:
    """Format the conditions in one line."""
    recipe = where["recipe"]
    adapter = recipe["model"].get("adapter")
    trained = f", LoRA of rank {adapter['rank']}" if adapter else ""
    data = recipe["data"]
    samples = f", sequences of {data['seq_len']}" if data["sources"] else ""
    return (
        f"{where['ranks']} rank(s) on {where['machine']}, torch {where['torch']}, {where['date']}; "
        f"{recipe['precision']['dtype']}{trained}, "
        f"global batch {recipe['batch']['global_batch']}{samples}; "
        f"{where['timed_steps']} timed steps each"
    )


def write_report(
    outcomes: Sequence[ComparedOutcome], where: dict[str, Any], out: Path
) -> list[Path]:
    """Write compare.md, .json, .csv and .svg into a folder, and return their paths."""
    tables = [text for text in (table(outcomes), parts_table(outcomes)) if text]
    strategies = [_record(outcome) for outcome in outcomes]
    texts = {
        "md": "\n\n".join([_describe(where), *tables, LEGEND]),
        "json": json.dumps({**where, "strategies": strategies}, indent=2),
        "csv": _comma_separated(outcomes),
        "svg": _picture(outcomes, _describe(where)),
    }
    paths = [out / f"compare.{kind}" for kind in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def _record(outcome: ComparedOutcome) -> dict[str, Any]:
    return {**asdict(outcome), "final_loss": outcome.final_loss}


def _comma_separated(outcomes: Sequence[ComparedOutcome]) -> str:
    rows = []
    for outcome in outcomes:
        record = _record(outcome)
        values = {key: one for key, one in record.items() if not isinstance(one, dict | list)}
        values |= {f"step_seconds_p{n}": outcome.quantile(n / 100) for n in (10, 50, 90)}
        values |= {f"predicted_{key}": value for key, value in outcome.predicted.items()}
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


def _picture(outcomes: Sequence[ComparedOutcome], caption: str) -> str:
    """Draw an SVG with a bar of memory and a bar of time for each strategy that ran."""
    shown = [outcome for outcome in outcomes if not outcome.problem]
    height = TOP + ROW * len(shown) + 40
    # measured and planned bytes share a scale, so that bars and marks are comparable
    sizes = [size for one in shown for size in (one.peak, one.predicted.get("peak")) if size]
    most = max(sizes, default=1)
    slowest = max([outcome.quantile(0.9) or 0.0 for outcome in shown], default=1) or 1
    right = LEFT + PANEL + GAP
    body = [
        svg.label(LEFT, 24, "What each strategy costs", size=16),
        svg.label(LEFT, 42, caption, color=svg.SOFT, size=11),
        svg.label(LEFT, 66, "peak memory per rank, MB"),
        svg.label(right, 66, "time per step, ms"),
        *_key(LEFT, {name.replace("_", " "): color for name, color in PARTS.items()}),
        *_key(right, {"a collective under way": COMMUNICATION, "the rest": COMPUTE}),
    ]
    for number, outcome in enumerate(shown):
        y = TOP + ROW * number
        body.append(svg.label(LEFT - 10, y + 13, outcome.name, anchor="end"))
        body += _memory_bar(outcome, y, PANEL / most)
        body += _time_bar(outcome, right, y, PANEL / slowest)
    if any(outcome.predicted.get("peak") for outcome in shown):
        note = "| planned by perdure plan"
        body.append(svg.label(LEFT, height - 12, note, size=11, color=svg.SOFT))
    note = "line: 10 % to 90 % of the steps"
    body.append(svg.label(right, height - 12, note, size=11, color=svg.SOFT))
    return svg.document(WIDTH, height, body)


def _memory_bar(outcome: ComparedOutcome, y: float, scale: float) -> list[str]:
    if outcome.peak is None:
        return [svg.label(LEFT, y + 13, "not measured", color=svg.SOFT, size=11)]
    sizes = [getattr(outcome, name, None) or 0 for name in [*PARTS][:3]]
    sizes.append(max(0, outcome.peak - sum(sizes)))
    parts, x = [], float(LEFT)
    for (name, color), size in zip(PARTS.items(), sizes, strict=True):
        tip = f"{name}: {size / 1e6:,.1f} MB"
        parts.append(svg.bar(x, y, size * scale, BAR, tip, fill=color))
        x += size * scale
    if planned := outcome.predicted.get("peak"):
        place = LEFT + planned * scale
        parts.append(svg.line(place, y - 4, place, y + BAR + 4, stroke=svg.INK, stroke_width=2))
        x = max(x, place)
    return [*parts, svg.label(x + 6, y + 13, f"{outcome.peak / 1e6:,.1f}")]


def _time_bar(outcome: ComparedOutcome, left: float, y: float, scale: float) -> list[str]:
    low, middle, high = ((outcome.quantile(share) or 0.0) * scale for share in (0.1, 0.5, 0.9))
    share, median = outcome.communication or 0.0, outcome.quantile(0.5) or 0.0
    rate = f"{outcome.rate:,.0f} {outcome.unit}/s" if outcome.rate else ""
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
