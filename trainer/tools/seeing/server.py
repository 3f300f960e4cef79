"""Builds the HTML page of runs, a file that loads nothing from other hosts, and serves it over
HTTP, read-only and independent of the runs. A static page contains its data; a live page queries
its server."""

import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from elastic.record.history import LedgerError
from trainer.tools.seeing.view import POINTS, SeenRun, differing_keys, named_runs

ASSETS = Path(__file__).with_name("assets")
EVERY_SECONDS = 2.0
"""Seconds between two queries of a live page."""


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


READ_SECONDS = 1.0
"""Least seconds between two reads of a run's files, however many pages query."""
LOOPBACK = ("127.0.0.1", "localhost")
IDLE_SECONDS, LONGEST_SECONDS, MOST_CONNECTIONS = 30.0, 90.0, 32
"""Seconds without a byte, and seconds in all, after which a connection is closed; most connections
at a time. Further connections are closed before they get a thread."""
CPU_SHARE, CPU_RESERVE, CPU_WAIT_SECONDS = 0.01, 10.0, 30.0
"""CPU seconds per second that replies may take in the long run, CPU seconds that they may save up,
and the longest wait for them. So a client that asks without end takes little from training on this
machine."""


class _CpuBudget:
    """CPU time of replies, as a token bucket."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left, self._at = CPU_RESERVE, time.monotonic()

    @contextmanager
    def spend(self) -> Iterator[None]:
        """Context in which a reply is made, after a wait for CPU time. One reply at a time, so that
        those that wait do not begin together."""
        with self._lock:
            now = time.monotonic()
            self._left = min(CPU_RESERVE, self._left + CPU_SHARE * (now - self._at))
            self._at = now
            if self._left < 0:
                time.sleep(min(-self._left / CPU_SHARE, CPU_WAIT_SECONDS))
            begun = time.thread_time()
            try:
                yield
            finally:
                self._left -= time.thread_time() - begun


class SeeingServer(ThreadingHTTPServer):
    """HTTP server of a page of runs and its updates. Port 0 means any free port. Raises OSError if
    the address is unavailable."""

    # Ctrl-C must not wait for open pages.
    daemon_threads = True

    def __init__(self, paths: Sequence[Path], host: str, port: int) -> None:
        self.host, self.runs = host, named_runs(paths)
        self.token = secrets.token_urlsafe(16)
        self.budget = _CpuBudget()
        self._open: dict[Any, float] = {}
        """Connection → when it was accepted, on the monotonic clock."""
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    @property
    def link(self) -> str:
        """URL to open in a browser."""
        named = socket.gethostname() if self.host in ("0.0.0.0", "::", "") else self.host
        shown = f"[{named}]" if ":" in named else named
        return f"http://{shown}:{self.server_address[1]}/?token={self.token}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, unless too many are open: the machine may be training."""
        if len(self._open) >= MOST_CONNECTIONS:
            self.shutdown_request(request)
            return
        self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that are open for LONGEST_SECONDS, even if bytes arrive in time."""
        latest = time.monotonic() - LONGEST_SECONDS
        for request, since in list(self._open.items()):
            if since < latest:
                with suppress(OSError):  # the connection's thread is closing it
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore disconnected browsers."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def read(self) -> None:
        """Read all runs, and serve meanwhile: curves first, then the shares of the ledgers that
        have been read. Raises LedgerError if a path is not the directory of a started run."""
        self.timeout = 0  # of `handle_request`
        for run in self.runs:
            run.skim()
        for run in self.runs:

            def meanwhile(share: float, run: SeenRun = run) -> None:
                run.read_share = min(share, 0.99)
                self.handle_request()
                with self.budget.spend():  # a reply is made sooner if no block is read meanwhile
                    pass

            run.ledger.read(meanwhile)
            with self.budget.spend():
                run.look()

    def keep(self) -> None:
        """Cache what has been read. One call at a time, as for `answer`."""
        for run in self.runs:
            if run.read_share == 1:
                run.keep()

    def answer(self, path: str, query: Mapping[str, list[str]]) -> tuple[str, str]:
        """Return (content type, text) for a request. One call at a time, as views change.

        Raises:
            LookupError: the page or run does not exist.
            ValueError: a parameter is no number.
            LedgerError: the ledger was deleted.
        """
        given = {name: values[0] for name, values in query.items()}
        if path == "/":
            for run in self.runs:
                _refresh(run)
            return "text/html", page(self.runs, live=True)
        if path != "/data":
            raise LookupError(path)
        place = int(given.get("run", 0))
        if not 0 <= place < len(self.runs):
            raise LookupError(f"run {place}")
        run = self.runs[place]
        _refresh(run)
        if "from" in given:
            reply: object = {"curves": run.stretch(float(given["from"]), float(given["to"]))}
        else:
            file, seen, samples = (given.get(name, "") for name in ("file", "seen", "samples"))
            reply = run.since(file, int(given.get("since", -1)), seen, samples)
        # strict, as browsers reject NaN
        return "application/json", json.dumps(reply, allow_nan=False, separators=(",", ":"))


def _refresh(run: SeenRun) -> None:
    if run.read_share == 1 and time.time() - run.now >= READ_SECONDS:
        run.look()


class _Handler(BaseHTTPRequestHandler):
    """Responds to GET requests that have the token."""

    server: SeeingServer
    timeout = IDLE_SECONDS
    server_version, sys_version = "perdure", ""

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
            query = parse_qs(url.query, max_num_fields=20)
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", "the address is not valid")
            return
        token = query.get("token", [""])[0]
        # in constant time, which does not reveal how many characters match
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "open the link that the command printed")
            return
        try:
            with self.server.budget.spend():
                kind, text = self.server.answer(url.path, query)
            self._send(HTTPStatus.OK, kind, text)
            with self.server.budget.spend():
                self.server.keep()
        except (LookupError, ValueError) as error:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", f"not found: {error}")
        except LedgerError as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", str(error))

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        # The address has the token; browsers should store nothing of it.
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", policy(live=True))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, as each request contains the token."""


def serve(paths: Sequence[Path], host: str, port: int) -> None:
    """Print the link, and serve until Ctrl-C; errors as for `SeeingServer` and its `read`."""
    os.nice(10)  # training on this machine has priority
    with SeeingServer(paths, host, port) as server:
        print(f"open {server.link}")
        if host in LOOPBACK:
            number = server.server_address[1]
            tunnel = f"ssh -N -L {number}:{host}:{number} {socket.gethostname()}"
            print(f"from another machine, first: {tunnel}")
        print("Ctrl-C ends this page; runs are not affected", flush=True)
        server.read()
        server.serve_forever()
