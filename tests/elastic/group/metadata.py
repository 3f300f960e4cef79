"""The metadata services of three clouds, in their real formats, on a free port of 127.0.0.1."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Metadata:
    """What the services answer from now on."""

    address: str = ""
    interrupted: bool = False
    """The notice: 120 s ahead in AWS, 30 s in GCP and Azure."""
    rebalance: bool = False
    """AWS: may be interrupted soon."""
    events: list[dict] = field(default_factory=list)
    """Azure: events that come before that of the notice."""
    nonsense: tuple[int, bytes] | None = None
    """Status and body for every request, if any."""
    silent: threading.Event | None = None
    """Answer nothing before this is set."""
    tokens: int = 0
    """AWS: how many were given; only the last one is valid."""
    asked: Counter = field(default_factory=Counter)

    def expire_token(self) -> None:
        self.tokens += 1


class Handler(BaseHTTPRequestHandler):
    metadata: Metadata
    wbufsize = -1  # one packet per answer: a second one would wait 40 ms for the first

    def do_PUT(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        service = self.metadata
        path = self.path.partition("?")[0]
        service.asked[self.command, path] += 1
        if service.silent:
            service.silent.wait(10)
        status, body = service.nonsense or self._answer(path)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 302:
            self.send_header("Location", service.address + "/elsewhere")
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, path: str) -> tuple[int, bytes]:
        if path.startswith("/latest/"):
            return self._aws(path.removeprefix("/latest/"))
        if path == "/computeMetadata/v1/instance/preempted":
            if self.headers["Metadata-Flavor"] != "Google":
                return 403, b"Missing Metadata-Flavor:Google header."
            return 200, b"TRUE" if self.metadata.interrupted else b"FALSE"
        if path.startswith("/metadata/"):
            return self._azure(path.removeprefix("/metadata/"))
        return 404, b"not found"

    def _aws(self, path: str) -> tuple[int, bytes]:
        service = self.metadata
        if path == "api/token" and self.command == "PUT":
            if not self.headers["X-aws-ec2-metadata-token-ttl-seconds"]:
                return 400, b"missing ttl"
            service.tokens += 1
            return 200, f"AQAEA-{service.tokens}==".encode()
        if self.headers["X-aws-ec2-metadata-token"] != f"AQAEA-{service.tokens}==":
            return 401, b"Unauthorized"
        if path == "meta-data/spot/instance-action" and service.interrupted:
            return 200, json.dumps({"action": "terminate", "time": iso_time(120)}).encode()
        if path == "meta-data/events/recommendations/rebalance" and service.rebalance:
            return 200, json.dumps({"noticeTime": iso_time(-60)}).encode()
        return 404, b"Not Found"

    def _azure(self, path: str) -> tuple[int, bytes]:
        service = self.metadata
        if self.headers["Metadata"] != "true" or "api-version=" not in self.path:
            return 400, b'{"error": "Bad request"}'
        if path == "instance/compute/name":
            return 200, b"Trainers_7"
        if path == "scheduledevents":
            notice = [azure_event("Preempt", "trainers_7")] if service.interrupted else []
            events = service.events + notice
            document = {"DocumentIncarnation": 1 + len(events), "Events": events}
            return 200, json.dumps(document).encode()
        return 404, b'{"error": "Not found"}'

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def azure_event(kind: str, machine: str, status: str = "Scheduled") -> dict:
    """An event as Azure tells it; one that has started has no time."""
    return {
        "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "EventStatus": status,
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": [machine],
        "NotBefore": formatdate(time.time() + 30, usegmt=True) if status == "Scheduled" else "",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


def iso_time(seconds: float) -> str:
    """`seconds` from now, as AWS writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


@contextmanager
def metadata_service() -> Iterator[Metadata]:
    """A service that is there as long as the context."""
    metadata = Metadata()
    handler = type("MetadataHandler", (Handler,), {"metadata": metadata})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    metadata.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield metadata
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
