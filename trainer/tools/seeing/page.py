"""The page of runs: one HTML file that asks no other host for anything. As a file it has its data
inside; live, it asks the server that it came from."""

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from trainer.tools.seeing.view import POINTS, RunView, differing_keys, look_at

ASSETS = Path(__file__).with_name("assets")
EVERY_SECONDS = 2.0
"""Between two questions of a live page."""


def report_html(paths: Sequence[Path]) -> str:
    """The page of some runs, as they are now.

    Raises:
        LedgerError: one is not the directory of a run that has begun.
    """
    runs = look_at(paths)
    return page(title(runs), {"live": False, **first_data(runs)})


def first_data(runs: Sequence[RunView]) -> dict[str, Any]:
    """What the page begins with: all of each run, and the keys in which their recipes differ."""
    told = [run.all(max(500, POINTS // len(runs))) for run in runs]
    return {"runs": told, "differing": differing_keys([one.pop("keys") for one in told])}


def title(runs: Sequence[RunView]) -> str:
    """What the page is called."""
    return ", ".join(run.name for run in runs)


def page(name: str, data: Mapping[str, Any]) -> str:
    """The HTML. `data` is what page.js reads: see `first_data`, or where to ask for it."""
    parts = {
        "policy": escape(policy(live=bool(data["live"]))),
        "title": escape(name),
        "style": _style(),
        "data": embedded(data),
        "script": _script(),
    }
    # In one pass: what is put in is not looked at again.
    return re.sub(r"\{(\w+)\}", lambda place: parts[place[1]], _text("page.html"))


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that ends no script element and begins no comment: in it `<` is written `\\u003c`."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def policy(*, live: bool) -> str:
    """The Content-Security-Policy: only this page's own script and style run, and only its own
    server is asked."""
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
    licence = f"/* uPlot:\n{_text('uPlot.LICENSE')}\n*/\n"  # which goes where it goes
    return licence + _text("uPlot.iife.min.js") + "\n" + _text("page.js")


@cache
def _text(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
