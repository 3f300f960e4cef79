"""A real S3 server process, behind a proxy that can fail. tests/conftest.py has its fixtures."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from checkpointing.storage import object_storage


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the store, unless `fault` says otherwise."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.port = port
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        """(method, path) → an HTTP status and S3's name for it, such as "503 SlowDown"; "reset" to
        close the connection; "cut" to do so in the middle of the answer; None to pass it on."""
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients come and go."""


class Handler(BaseHTTPRequestHandler):
    """One connection to the proxy."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def handle_one_request(self) -> None:
        """Any method."""
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server.lock:
            self.server.requests.append((self.command, self.path))
            fault = self.server.fault(self.command, self.path)
        if fault == "reset":
            self.close_connection = True
            return
        if fault and fault != "cut":
            status, _, code = fault.partition(" ")
            text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
            self._answer(int(status), {"Content-Type": "application/xml"}, text)
            return
        store = HTTPConnection("127.0.0.1", self.server.port)
        store.request(self.command, self.path, body, dict(self.headers.items()))
        answer = store.getresponse()
        status, headers, text = answer.status, dict(answer.getheaders()), answer.read()
        store.close()
        if status == 500 and "partNumber" in self.path:  # moto's way to say what S3 says so:
            status, text = 404, b"<Error><Code>NoSuchUpload</Code></Error>"
        self._answer(status, headers, text, cut=fault == "cut")

    def _answer(
        self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = headers.get("Content-Length", len(body)) if self.command == "HEAD" else len(body)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection |= cut


SERVER = """
import ctypes, moto.server
ctypes.CDLL(None).prctl(1, 9)  # it dies with the tests, however they end
moto.server.main(["-p", "0"])
"""


@pytest.fixture(scope="session")
def server() -> Iterator[Proxy]:
    """A store with an empty bucket, and the environment that leads to it."""
    store = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    port = next(int(found[1]) for line in store.stderr if (found := re.search(r":(\d+)\n", line)))
    threading.Thread(target=store.stderr.read, daemon=True).start()
    proxy = Proxy(port)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    import boto3  # takes half a second

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        object_storage._store.cache_clear()
        boto3.session.Session().client("s3").create_bucket(Bucket="bucket")
        yield proxy
        object_storage._store.cache_clear()
    proxy.shutdown()
    proxy.server_close()
    store.kill()
    store.wait()


@pytest.fixture
def store(server: Proxy) -> Iterator[Proxy]:
    """The store without faults."""
    server.requests.clear()
    yield server
    server.fault = lambda method, path: None
