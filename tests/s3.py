"""A real S3 server process, behind a proxy that can fail. tests/conftest.py has its fixtures."""

import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from checkpointing.storage import object_storage


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the store, unless `fault` says otherwise."""

    daemon_threads = True

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), Handler)
        self.port = port
        self.delay: Callable[[], float] = lambda: 0.0
        """→ seconds before a request is passed on."""
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        """(method, path) → an HTTP status and S3's name for it, such as "503 SlowDown"; "reset" to
        close the connection; "cut" to do so in the middle of the answer; None to pass it on."""
        self.rewritten: Callable[[str, bytes], bytes] = lambda path, body: body
        """(path, body) → body of the request that is passed on."""
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients come and go."""


class Handler(BaseHTTPRequestHandler):
    """One connection to the proxy."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body waits for no acknowledgement of its headers
    server: Proxy

    def handle_one_request(self) -> None:
        """Any method."""
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if len(body) < length:  # the client died: S3 stores nothing then
            self.close_connection = True
            return
        with self.server.lock:
            self.server.requests.append((self.command, self.path))
            fault = self.server.fault(self.command, self.path)
        time.sleep(self.server.delay())
        if fault == "reset":
            self.close_connection = True
            return
        if fault and fault != "cut":
            status, _, code = fault.partition(" ")
            text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
            self._answer(int(status), {"Content-Type": "application/xml"}, text)
            return
        store = HTTPConnection("127.0.0.1", self.server.port)
        body = self.server.rewritten(self.path, body)
        sent = dict(self.headers.items())
        if "Content-Length" in sent:
            sent["Content-Length"] = str(len(body))
        store.request(self.command, self.path, body, sent)
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
        length = str(len(body))
        if self.command == "HEAD":
            length = {name.lower(): value for name, value in headers.items()}.get(
                "content-length", length
            )
        self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection |= cut


SERVER = """
import ctypes, moto.server
ctypes.CDLL(None).prctl(1, 9)  # it dies with the tests, however they end
moto.server.main(["-p", "0"])
"""


def start_store() -> tuple[subprocess.Popen[str], int]:
    """A server without a bucket, which ends with this process; and its port."""
    store = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert store.stderr
    port = next(int(found[1]) for line in store.stderr if (found := re.search(r":(\d+)\n", line)))
    threading.Thread(target=store.stderr.read, daemon=True).start()
    return store, port


def access(host: str, port: int) -> dict[str, str]:
    """The environment that leads to a store."""
    return {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@pytest.fixture(scope="session")
def server() -> Iterator[Proxy]:
    """A store with an empty bucket, and the environment that leads to it."""
    store, port = start_store()
    proxy = Proxy(port)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    import boto3  # takes half a second

    with pytest.MonkeyPatch.context() as patch:
        for name, value in access("127.0.0.1", proxy.server_port).items():
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


def troubled(host: str, seed: int) -> None:
    """Serve a bucket as a bad day of a cloud has it, until this process is killed: of all requests
    5 % get a 503, 4 % lose their connection before or after they are done, and 2 % are slow."""
    draw = random.Random(seed)

    def fault(method: str, path: str) -> str | None:
        luck = draw.random()
        shares = {"503 SlowDown": 0.05, "reset": 0.07, "cut": 0.09}
        return next((name for name, most in shares.items() if luck < most), None)

    def delay() -> float:
        return 0.5 if draw.random() < 0.02 else draw.uniform(0.0, 0.03)

    _, port = start_store()
    proxy = Proxy(port, host)
    os.environ |= access(host, proxy.server_port)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    import boto3

    boto3.session.Session().client("s3").create_bucket(Bucket="bucket")
    proxy.fault, proxy.delay = fault, delay
    print(f"port {proxy.server_port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    troubled(sys.argv[1], int(sys.argv[2]))
