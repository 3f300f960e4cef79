"""trace.jsonl, which `checkpoint.trace` writes: read it, check it, draw it."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.tools import svg


@dataclass(frozen=True)
class Span:
    """Something that took time."""

    kind: str
    """write: a unit was written; begin, commit: the coordinator touched metadata."""
    node: int
    step: int
    start: float
    stop: float
    """Both in seconds of time.time()."""
    file: str = ""
    nbytes: int = 0


def read_trace(path: Path, step: int) -> list[Span]:
    """The spans of one save, in order of their starts."""
    lines = (json.loads(line) for line in path.read_text().splitlines())
    spans = [
        Span(
            line["kind"],
            line["node"],
            line["step"],
            line["start"],
            line["stop"],
            line.get("file", ""),
            line.get("bytes", 0),
        )
        for line in lines
        if line["step"] == step
    ]
    return sorted(spans, key=lambda span: span.start)


def writes(spans: Sequence[Span]) -> list[Span]:
    """Those in which bytes were written."""
    return [span for span in spans if span.kind == "write"]


def at_once(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """(moment, how many spans run from then on), in order."""
    # At the same moment one that ends makes room for one that starts.
    changes = sorted([(s.start, 1) for s in spans] + [(s.stop, -1) for s in spans])
    running, counts = 0, []
    for moment, change in changes:
        running += change
        counts.append((moment, running))
    return counts


def lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans in as few rows as possible, so that those of a row do not overlap."""
    rows: list[list[Span]] = []
    for span in spans:
        free = next((row for row in rows if row[-1].stop <= span.start), None)
        if free is None:
            rows.append(free := [])
        free.append(span)
    return rows


# --- picture -------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, TOP, ROW, GAP, CHART = 960, 150, 20, 58, 20, 8, 66
COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#edc948", "#9c755f")
Scale = Callable[[float], float]
"""Moment → horizontal place."""


def picture(spans: Sequence[Span], title: str, limit: int) -> str:
    """An SVG: metadata on top, then a row for each writer of each node, the number of writers
    below.

    Args:
        spans: of one save.
        title: above it all.
        limit: how many writers are allowed, drawn as a line.
    """
    origin = min(span.start for span in spans)
    length = max(span.stop for span in spans) - origin
    scale = (WIDTH - LEFT - RIGHT) / length

    def x(moment: float) -> float:
        return LEFT + (moment - origin) * scale

    metadata = [span for span in spans if span.kind != "write"]
    rows = [("metadata (node 0)", metadata, "#777777")]
    nodes = sorted({span.node for span in writes(spans)})
    for node in nodes:
        of_node = lanes([span for span in writes(spans) if span.node == node])
        for number, row in enumerate(of_node):
            rows.append((f"node {node}" if number == 0 else "", row, COLORS[node % len(COLORS)]))
    body, y = [], float(TOP)
    for name, row, color in rows:
        if name:
            y += GAP
            body.append(svg.label(LEFT - 10, y + ROW - 6, name, anchor="end"))
        width = WIDTH - LEFT - RIGHT
        body.append(svg.tag("rect", x=LEFT, y=y, width=width, height=ROW - 3, fill="#f3f4f6"))
        body += [_bar(span, x, y, color) for span in row]
        y += ROW
    body += _chart(at_once(writes(spans)), limit, x, y + 2 * GAP)
    bottom = y + 2 * GAP + CHART
    body += _axis(length, x, origin, bottom)
    height = round(bottom + 44)
    head = [
        svg.label(LEFT, 26, title, size=15),
        svg.label(LEFT, 44, _summary(spans), color=svg.SOFT),
    ]
    return svg.document(WIDTH, height, [*head, *body])


def _summary(spans: Sequence[Span]) -> str:
    nbytes = sum(span.nbytes for span in spans)
    files = {span.file for span in writes(spans)}
    return f"{nbytes / 1e6:,.0f} MB in {len(files)} files; a bar is a file, or some blocks of one"


def _bar(span: Span, x: Scale, y: float, color: str) -> str:
    width = max(1.5, x(span.stop) - x(span.start))
    what = span.file or span.kind
    tip = f"{what}: {span.stop - span.start:.3f} s"
    border = {"stroke": "#ffffff", "stroke_width": 0.6}
    bar = svg.bar(x(span.start), y, width, ROW - 3, tip, rx=2, fill=color, **border)
    if span.kind != "write":  # short ones, with room beside them
        ends = x(span.stop) > WIDTH - RIGHT - 60
        place = x(span.start) - 5 if ends else x(span.stop) + 5
        return bar + svg.label(place, y + ROW - 7, what, "end" if ends else "start", "#555555", 10)
    labels = (_short(what), _short(what).rpartition(" ")[2])
    label = next((label for label in labels if width > 6.2 * len(label) + 4), "")
    middle = x(span.start) + width / 2
    return bar + svg.label(middle, y + ROW - 7, label, "middle", "#ffffff", 10)


def _short(file: str) -> str:
    """ "optimizer/optimizer-00003-of-00012.safetensors" → "optimizer 3"."""
    stem, *numbers = file.rpartition("/")[2].removesuffix(".safetensors").split("-")
    return f"{stem} {int(numbers[0])}" if numbers else stem


def _chart(counts: Sequence[tuple[float, int]], limit: int, x: Scale, top: float) -> Iterator[str]:
    most = max(limit, *(count for _, count in counts)) + 0.5
    bottom = top + CHART - 14

    def y(count: float) -> float:
        return bottom - count / most * (bottom - top)

    points, before = [f"{x(counts[0][0]):.1f},{bottom:.1f}"], 0
    for moment, count in counts:
        points += [f"{x(moment):.1f},{y(before):.1f}", f"{x(moment):.1f},{y(count):.1f}"]
        before = count
    yield svg.tag("polygon", points=" ".join(points), fill="#c9d8e8", stroke="#4e79a7")
    dashes = {"stroke": "#e15759", "stroke_dasharray": "5 4"}
    yield svg.line(LEFT, y(limit), WIDTH - RIGHT, y(limit), **dashes)
    yield svg.label(
        LEFT - 10, y(limit) + 4, f"max_writers = {limit}", anchor="end", color="#c0392b"
    )
    yield svg.label(LEFT - 10, bottom + 1, "writers at once", anchor="end")


def _axis(length: float, x: Scale, origin: float, y: float) -> Iterator[str]:
    yield svg.line(LEFT, y, WIDTH - RIGHT, y, stroke=svg.LINE)
    # a round number of seconds that gives at most ten marks
    power = 10.0 ** math.floor(math.log10(length / 10))
    each = next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= length / 10 * 0.999)
    for number in range(math.floor(length / each + 1e-9) + 1):
        place = x(origin + number * each)
        yield svg.line(place, y, place, y + 4, stroke=svg.LINE)
        yield svg.label(place, y + 18, f"{number * each:g}", anchor="middle", color=svg.SOFT)
    yield svg.label(WIDTH - RIGHT, y + 34, "seconds", anchor="end", color=svg.SOFT)
