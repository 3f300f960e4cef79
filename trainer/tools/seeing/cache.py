"""Caches the columns read from a large file, so that reading continues where it stopped.

[Note: cache] The cache is in `$XDG_CACHE_HOME/perdure` of the user who reads the run. The run
directory may be read-only, or writable by others, who could forge a cache in it. A cache that is
damaged, of another version, of another user or of another file is ignored, and the file is read
from its beginning. `perdure report --check` uses no cache.
"""

import hashlib
import json
import os
import secrets
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from elastic.node.files import open_to_read

VERSION = 3
WORTH_BYTES = 4 << 20
"""Least size of a file to cache, in bytes."""
_MOST_BYTES = 4 << 30
_SAMPLE_BYTES = 1 << 16
KEPT = 32
"""Largest number of cache files; the oldest are deleted."""


def recall(source: Path) -> tuple[dict[str, Any], list[bytes]] | None:
    """Return the facts and columns that were cached for a file; None if there are none, or if the
    file no longer begins with the bytes that were read."""
    try:
        with os.fdopen(open_to_read(_place(source)), "rb") as file:
            status = os.fstat(file.fileno())
            # another user's file could claim anything about the run
            if status.st_uid != os.geteuid() or status.st_size > _MOST_BYTES:
                return None
            header = json.loads(file.readline())
            data = file.read()
        if header["version"] != VERSION or zlib.crc32(data) != header["crc"]:
            return None
        if _fingerprint(source, header["offset"]) != header["source"]:
            return None
        size = int.from_bytes(data[:8], "little")
        facts = json.loads(data[8 : 8 + size])
        columns, at = [], 8 + size
        for length in header["columns"]:
            columns.append(data[at : at + length])
            at += length
        return (facts, columns) if at == len(data) and isinstance(facts, dict) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def keep(source: Path, offset: int, facts: Mapping[str, Any], columns: Sequence[bytes]) -> None:
    """Cache facts and columns from the first `offset` bytes of a file. Ignores OSError, as a cache
    is optional."""
    with suppress(OSError, ValueError):
        text = json.dumps(facts, separators=(",", ":")).encode()
        data = b"".join([len(text).to_bytes(8, "little"), text, *columns])
        header = {
            "version": VERSION,
            "offset": offset,
            "source": _fingerprint(source, offset),
            "crc": zlib.crc32(data),
            "columns": [len(column) for column in columns],
        }
        place = _place(source)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # renamed when complete, so that no reader sees a part of it
        aside = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
        try:
            with open(aside, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(json.dumps(header).encode() + b"\n" + data)
            os.replace(aside, place)
        finally:
            aside.unlink(missing_ok=True)
        _forget_oldest(place.parent)


def _place(source: Path) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256(os.fsencode(source.resolve())).hexdigest()[:32]
    return Path(home) / "perdure" / "seeing" / f"{name}.cache"


def _fingerprint(source: Path, offset: int) -> str:
    """Return a digest of the first `offset` bytes of a file: of device, inode, `offset`, and the
    bytes at both ends. Raises ValueError if the file is shorter."""
    with os.fdopen(open_to_read(source, follow=True), "rb") as file:
        status = os.fstat(file.fileno())
        if not 0 <= offset <= status.st_size:
            raise ValueError("the file is shorter")
        first = file.read(min(_SAMPLE_BYTES, offset))
        file.seek(max(0, offset - _SAMPLE_BYTES))
        last = file.read(min(_SAMPLE_BYTES, offset))
    digest = hashlib.sha256(b"%d %d %d " % (status.st_dev, status.st_ino, offset))
    # both ends only: reading everything would cost what the cache saves
    digest.update(first + last)
    return digest.hexdigest()


def _forget_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.cache"), key=lambda path: path.stat().st_mtime)
    for path in files[:-KEPT]:
        path.unlink(missing_ok=True)
