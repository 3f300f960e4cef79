"""A server that answers reads of an S3 client from a directory, late, seldom, or at a limited rate.

    python -m benchmarks.support.object_server DIRECTORY LATENCY_SECONDS SHARE_503 BYTES_PER_SECOND

It prints its port. The folders in DIRECTORY are its buckets. It does as little as it can, so that
what is measured is the client. GET /stats says what was asked for. A share of the requests is
refused with 503 SlowDown. All answers share one link of BYTES_PER_SECOND; 0 does not limit it.
"""

import asyncio
import json
import random
import re
import sys
import time
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from elastic.process import die_with_parent

RANGE = re.compile(r"(?im)^range: bytes=(\d+)-(\d+)\r?$")
REFUSAL = b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>"
MISSING = b"<Error><Code>NoSuchKey</Code><Message>there is none</Message></Error>"
TIMES = "2026-01-01T00:00:00.000Z", "Thu, 01 Jan 2026 00:00:00 GMT"


class ObjectServer:
    """What is served, and how."""

    def __init__(self, directory: Path, latency: float, share: float, rate: float) -> None:
        self._directory, self._latency, self._share, self._rate = directory, latency, share, rate
        self._chance = random.Random(0)
        self._free_at = 0.0
        """Time at which the link has sent what was given to it."""
        self._stats = {"requests": 0, "refused": 0, "bytes": 0}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
                method, target, _ = head.split(" ", 2)
                writer.write(await self._answer(method, target, head))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, method: str, target: str, head: str) -> bytes:
        url = urlsplit(target)
        if url.path == "/stats":
            return _message(200, json.dumps(self._stats).encode())
        self._stats["requests"] += 1
        await asyncio.sleep(self._latency * self._chance.uniform(0.8, 1.6))
        if self._chance.random() < self._share:
            self._stats["refused"] += 1
            return _message(503, REFUSAL)
        query = parse_qs(url.query, keep_blank_values=True)
        path = self._directory / unquote(url.path).strip("/")
        if "list-type" in query:
            return _message(200, _listing(path, query["prefix"][0], query.get("delimiter")))
        if not path.is_file():
            return _message(404, MISSING)
        size = path.stat().st_size
        if method == "HEAD":
            return _message(200, b"", length=size)
        found = RANGE.search(head)
        first, last = (int(found[1]), int(found[2])) if found else (0, size - 1)
        with path.open("rb") as file:
            file.seek(first)
            body = file.read(last + 1 - first)
        self._stats["bytes"] += len(body)
        if self._rate:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + len(body) / self._rate
            await asyncio.sleep(self._free_at - now)
        return _message(206 if found else 200, body)


def _message(status: int, body: bytes, length: int | None = None) -> bytes:
    """An answer of HTTP."""
    size = len(body) if length is None else length
    head = f"HTTP/1.1 {status} -\r\nContent-Length: {size}\r\nLast-Modified: {TIMES[1]}\r\n\r\n"
    return head.encode() + body


def _listing(bucket: Path, prefix: str, delimiter: list[str] | None) -> bytes:
    """What ListObjectsV2 says of a folder."""
    entries = []
    for file in sorted((bucket / prefix).rglob("*")):
        key = file.relative_to(bucket)
        if file.is_file() and not (delimiter and "/" in str(key)[len(prefix) :]):
            entries.append(
                f"<Contents><Key>{key}</Key><Size>{file.stat().st_size}</Size>"
                f"<LastModified>{TIMES[0]}</LastModified></Contents>"
            )
    text = f"<ListBucketResult><Prefix>{prefix}</Prefix>{''.join(entries)}</ListBucketResult>"
    return text.encode()


async def main(directory: str, latency: str, share: str, rate: str) -> None:
    """Serve until this process is killed."""
    served = ObjectServer(Path(directory), float(latency), float(share), float(rate))
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0, limit=1 << 20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main(*sys.argv[1:]))
