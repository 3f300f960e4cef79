"""Builds the HTML page of runs: a file that loads nothing from other hosts. A static page contains
its data; a live page queries its server."""

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from trainer.tools.seeing.view import POINTS, SeenRun, differing_keys, open_runs

ASSETS = Path(__file__).with_name("assets")
EVERY_SECONDS = 2.0
"""Seconds between two queries of a live page."""


def report_html(paths: Sequence[Path]) -> str:
    """Static page of the current state of runs. Raises LedgerError if a path is not the directory
    of a started run."""
    return page(open_runs(paths), live=False)


def page(runs: Sequence[SeenRun], *, live: bool) -> str:
    """Return the HTML of a page with everything about each run, and the keys in which their recipes
    differ."""
    shown = [run.all(max(500, POINTS // len(runs))) for run in runs]
    differing = differing_keys([data.pop("keys") for data in shown])
    data = {"live": live, "every": EVERY_SECONDS, "runs": shown, "differing": differing}
    parts = {
        "policy": escape(policy(live=live)),
        "title": escape(", ".join(run.name for run in runs)),
        "style": _style(),
        "data": embedded(data),
        "script": _script(),
    }
    # in one pass, so that inserted data is not searched for placeholders
    return re.sub(r"\{(\w+)\}", lambda place: parts[place[1]], _text("page.html"))


def embedded(data: Mapping[str, Any]) -> str:
    """Format JSON for a script element. `<` becomes `\u003c`, so that data cannot end the element
    or open a comment."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def policy(*, live: bool) -> str:
    """Content-Security-Policy of the page: only its own script and style may run, and only its own
    server may be queried."""
    parts = {
        "default-src": "'none'",
        "script-src": _hash(_script()),
        "style-src": _hash(_style()),
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _style() -> str:
    return _text("uPlot.min.css") + _text("page.css")


def _script() -> str:
    # the licence must accompany every copy
    licence = f"/* uPlot:\n{_text('uPlot.LICENSE')}\n*/\n"
    return licence + _text("uPlot.iife.min.js") + "\n" + _text("page.js")


@cache
def _text(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
