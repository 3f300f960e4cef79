"""A run directory → one HTML page with its curves, which needs nothing but itself."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from elastic.record.history import History, read_history
from elastic.record.reliability import goodput, goodput_curve, idle_spans, reliability
from trainer.tools.report.report import check, clock, read_metrics, report, unit_of
from trainer.tools.svg import line, tag, text, ticks

Point = tuple[float, float]

MAX_POINTS = 600
WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 36

STYLE = """
:root { --page:#fff; --ink:#1b1f24; --soft:#656d76; --line:#d8dee4; --a:#2a6fdb; --b:#c2570c;
  --bad:#c62828; }
@media (prefers-color-scheme: dark) { :root { --page:#14171c; --ink:#e6e9ed; --soft:#9aa4af;
  --line:#343b44; --a:#6ea8ff; --b:#f0a05a; --bad:#ff7b72; } }
body { background:var(--page); color:var(--ink); font:15px/1.45 system-ui,sans-serif;
  max-width:1200px; margin:2rem auto; padding:0 1rem; }
h1 { font-size:1.35rem; margin:0 0 1rem; overflow-wrap:anywhere; }
h2 { font-size:.95rem; margin:0 0 .2rem; }
.figures { display:flex; flex-wrap:wrap; gap:.6rem 2.4rem; margin-bottom:1.2rem; }
.figures b { display:block; font-size:1.5rem; font-weight:600; }
.figures span, .key { color:var(--soft); font-size:.85rem; }
.charts { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));
  gap:1.4rem; }
svg { width:100%; height:auto; display:block; }
svg text { fill:var(--soft); font-size:11px; }
.grid { stroke:var(--line); } .restart { stroke:var(--soft); stroke-dasharray:2 4; }
.failure { stroke:var(--bad); stroke-dasharray:2 4; }
polyline { fill:none; stroke-width:1.8; stroke-linejoin:round; }
.a { stroke:var(--a); } .b { stroke:var(--b); } .bad { stroke:var(--bad); }
circle.a { fill:var(--a); } circle.b { fill:var(--b); } circle.bad { fill:var(--bad); }
circle.hit { opacity:0; } circle.hit:hover { opacity:1; }
i { display:inline-block; width:.9em; height:.22em; vertical-align:.25em; margin:0 .3em 0 .8em; }
i.a { background:var(--a); } i.b { background:var(--b); } i.bad { background:var(--bad); }
pre { overflow-x:auto; font-size:.82rem; line-height:1.4; border-top:1px solid var(--line);
  padding-top:1rem; }
.wrong { color:var(--bad); }
"""


@dataclass(frozen=True)
class Series:
    """Points of one kind."""

    name: str
    points: Sequence[Point]
    color: str = "a"
    dots: bool = False
    """Single events instead of a curve."""


@dataclass(frozen=True)
class Axis:
    """What x is. It begins at 0, so that charts with the same axis can be compared by eye."""

    name: str
    end: float
    marks: Sequence[tuple[float, str, str]] = ()
    """(x, class, meaning) of vertical lines."""


def report_html(run: Path) -> str:
    """The page of a run.

    Raises:
        LedgerError: `run` is not the directory of a run that has begun.
    """
    history, metrics = read_history(run), read_metrics(run)
    fine, proof = check(history)
    body = [
        f"<h1>{escape(str(run.resolve().name))}</h1>",
        _figures(history),
        f'<p class="{"proof" if fine else "wrong"}">{escape(proof).replace(chr(10), "<br>")}</p>',
        '<div class="charts">',
        *_charts(history, metrics, unit_of(run)),
        "</div>",
        '<p class="key">Dashed: starts; red where a failure led to one. Times count while the run '
        "was up.</p>",
        f"<pre>{escape(report(run))}</pre>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.resolve().name)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _figures(history: History) -> str:
    account, trust = goodput(history), reliability(history)
    figures = [
        (f"{account.share_of_uptime:.1%}", "goodput while up"),
        (clock(account.wall - account.idle), "up"),
        (f"{history.step:,}", "steps"),
        (f"{history.sequences:,}", "sequences"),
        (str(trust.failures), "failures"),
        (clock(trust.mttr) if trust.mttr else "none", "mean time to a new step"),
    ]
    cells = "".join(f"<div><b>{value}</b><span>{name}</span></div>" for value, name in figures)
    return f'<div class="figures">{cells}</div>'


def _charts(history: History, metrics: Sequence[Mapping[str, Any]], counted: str) -> list[str]:
    uptime = _uptime(history)
    last = uptime(history.attempts[-1].finished)
    unit, name = next(
        (
            (size, name)
            for size, name in ((86400, "d"), (3600, "h"), (60, "min"))
            if last > 2 * size
        ),
        (1, "s"),
    )

    def when(time: float) -> float:
        return uptime(time) / unit

    def records(key: str, scale: float = 1.0) -> list[Point]:
        return sorted((when(r["time"]), r[key] * scale) for r in metrics if r.get(key) is not None)

    def by_step(key: str) -> list[Point]:
        return sorted({r["step"]: r[key] for r in metrics if r.get(key) is not None}.items())

    starts = [
        (
            when(attempt.began),
            "failure" if attempt.start.cause is not None else "restart",
            f"attempt {attempt.number}: after step {attempt.start.step} on "
            f"{attempt.start.world_size} ranks",
        )
        for attempt in history.attempts[1:]
    ]
    saves = [
        (when(attempt.loaded + save["after"]), save["seconds"], save.get("ok"))
        for attempt in history.attempts
        for save in attempt.saves
    ]
    sizes = [
        (when(time), float(attempt.start.world_size))
        for attempt in history.attempts
        for time in (attempt.began, attempt.finished)
    ]
    time, steps = Axis(f"time up ({name})", last / unit, starts), Axis("step", history.step)
    curve = [(when(at), 100 * share) for at, share in goodput_curve(history)]
    return [
        chart(
            "Loss",
            steps,
            Series("training", by_step("loss")),
            Series("validation", by_step("validation_loss"), "b"),
        ),
        chart(f"Throughput ({counted}/s)", time, Series("", records("tokens_per_second")), floor=0),
        chart(
            "Peak memory of rank 0 (GB)", time, Series("", records("peak_memory", 1e-9)), floor=0
        ),
        chart(
            "Checkpoints (seconds from call to commit)",
            time,
            Series("written", [(x, y) for x, y, ok in saves if ok], "a", dots=True),
            Series("failed", [(x, y) for x, y, ok in saves if not ok], "bad", dots=True),
            floor=0,
        ),
        chart("World size (ranks)", time, Series("", sizes), floor=0),
        chart("Goodput until then (%)", time, Series("", curve), floor=0),
    ]


def _uptime(history: History) -> Callable[[float], float]:
    """Unix time → seconds that the run was up until then."""
    began, spans = history.attempts[0].began, idle_spans(history)

    def uptime(time: float) -> float:
        idle = sum(min(time, end) - begin for begin, end in spans if time > begin)
        return max(0.0, time - began - idle)

    return uptime


# --- drawing ---------------------------------------------------------------------------------


def chart(name: str, axis: Axis, *series: Series, floor: float | None = None) -> str:
    """A line chart as inline SVG; a remark instead where there is nothing to draw.

    Args:
        name: above it, with the unit of y.
        axis: of x.
        series: those without points are left out.
        floor: value that y begins at; the smallest one unless set.
    """
    series = tuple(one for one in series if one.points)
    if not series:
        return f'<section><h2>{escape(name)}</h2><p class="key">nothing recorded</p></section>'
    points = [point for one in series for point in one.points]
    values = [y for _, y in points] + ([] if floor is None else [floor])
    y_ticks = ticks(min(values), max(values))
    # The clock that stamps records is not the ledger's.
    x_end = max(axis.end, *(x for x, _ in points)) or 1.0
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def px(x: float) -> float:
        return LEFT + x / x_end * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for y in y_ticks:
        parts.append(line(LEFT, py(y), right, py(y), class_="grid"))
        parts.append(text(LEFT - 6, py(y) + 4, f"{y:,.6g}", "end"))
    parts += [
        text(px(x), HEIGHT - 19, f"{x:,.6g}", "middle") for x in ticks(0, x_end) if x <= x_end
    ]
    parts.append(text(right, HEIGHT - 4, axis.name, "end"))
    for x, kind, meaning in axis.marks:
        title = tag("title", escape(meaning))
        parts.append(tag("path", title, class_=kind, d=f"M{px(x):.1f} {TOP}V{bottom}"))
    for one in series:
        shown = thin(one.points)
        if not one.dots:
            path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in shown)
            parts.append(tag("polyline", class_=one.color, points=path))
        kind = one.color if one.dots else f"{one.color} hit"
        for x, y in shown:
            title = tag("title", escape(f"{axis.name} {x:,.5g}: {y:,.5g}"))
            parts.append(tag("circle", title, class_=kind, cx=px(x), cy=py(y), r="3.5"))
    key = ""
    if any(one.name for one in series):
        key = "".join(f'<i class="{one.color}"></i>{escape(one.name)}' for one in series)
    drawn = tag("svg", "".join(parts), viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=name)
    return f'<section><h2>{escape(name)}<span class="key">{key}</span></h2>{drawn}</section>'


def thin(points: Sequence[Point]) -> Iterable[Point]:
    """At most about `MAX_POINTS`, in order: of every stretch the lowest and the highest, so that a
    spike stays visible."""
    size = math.ceil(2 * len(points) / MAX_POINTS)
    if size <= 2:
        return points
    kept = []
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        extremes = {
            min(stretch, key=lambda n: points[n][1]),
            max(stretch, key=lambda n: points[n][1]),
        }
        kept += [points[number] for number in sorted(extremes)]
    return kept
