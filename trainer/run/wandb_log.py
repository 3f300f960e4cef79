"""Reads W&B's file of a run, `run-ID.wandb`, also while it is written.

[Note: the file] It has a header of 7 bytes and blocks of 32 KiB. A record is one chunk, or several
if it crosses the end of a block. A chunk has a CRC, a length and a kind (whole, first, middle,
last), as in LevelDB's log. Records are W&B's protocol buffers; a row of history is one of them.
"""

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic.node.files import is_ours, open_to_read

_BLOCK_BYTES, _HEADER_BYTES = 32 << 10, 7
_CHUNK = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_TAIL_BLOCKS = 4
_CHANGE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_STILL_SECONDS = 2.0


@dataclass(frozen=True)
class Row:
    """A row of a run's history: W&B's step, and the time of its last record in Unix seconds."""

    step: int
    time: float


def last_row(directory: Path, run_id: str, up_to: float = math.inf) -> Row | None:
    """The newest row with a W&B step of at most `up_to` in all files of a run; None without one.

    Args:
        directory: W&B's, with a folder for each start and resume of the run.
        up_to: a W&B step.
    """
    found = []
    for path in _files(directory, run_id):
        with suppress(OSError):  # being removed, or no file of a run
            for start in (_tail(path), 0):
                rows = [row for row in read_rows(path, start)[0] if row.step <= up_to]
                if rows:
                    found.append(rows[-1])
                    break
    return max(found, key=lambda row: row.time, default=None)


def cut_torn(directory: Path, run_id: str, own: Path) -> None:
    """Remove incomplete records that a kill left at the end of a run's files: `wandb sync` would
    stop there, and skip later files.

    Args:
        directory: W&B's.
        own: the file being written. Files changed within 2 s of it may be in use, too.
    """
    if not own.exists():
        return
    now = own.stat().st_mtime  # by the filesystem's clock
    for path in _files(directory, run_id):
        with suppress(OSError), os.fdopen(os.open(path, _CHANGE), "r+b") as file:
            size, start = os.fstat(file.fileno()), _tail(path)
            whole = read_rows(path, start)[1]
            if whole == start > 0:  # the record begins in an earlier block
                whole = read_rows(path, 0)[1]
            if path != own and now - size.st_mtime > _STILL_SECONDS and whole < size.st_size:
                file.truncate(whole)


def read_rows(path: Path, offset: int) -> tuple[list[Row], int]:
    """Read the rows after an offset; returns them and the offset of the first incomplete record.

    Args:
        offset: start of a block, or a returned offset.

    Raises:
        OSError: the file is missing, no regular file, or another user's.
    """
    with os.fdopen(open_to_read(path), "rb") as file:
        if not is_ours(os.fstat(file.fileno()), path.parent):
            raise PermissionError(f"{path} belongs to another user")
        offset = offset or _HEADER_BYTES
        file.seek(offset)
        data = file.read()
    rows = []
    for record, end in _records(data, offset):
        offset = end
        row = _row(record) if record else None
        if row:
            rows.append(row)
    return rows, offset


def _files(directory: Path, run_id: str) -> Iterator[Path]:
    return directory.glob(f"*run-*-{run_id}*/run-{run_id}.wandb")


def _tail(path: Path) -> int:
    """Offset of the last blocks of a file."""
    return max(0, path.stat().st_size // _BLOCK_BYTES - _TAIL_BLOCKS) * _BLOCK_BYTES


def _records(data: bytes, start: int) -> Iterator[tuple[bytes, int]]:
    """Yield each complete record of bytes that begin at file offset `start`, with the offset of its
    end; for the rest of a damaged block an empty record."""
    at = start
    parts: list[bytes] = []
    while True:
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _CHUNK.size:  # padding at the end of a block
            at += left
            continue
        body = at - start + _CHUNK.size
        if body > len(data):
            return
        crc, length, kind = _CHUNK.unpack_from(data, at - start)
        part = data[body : body + length]
        fits = _CHUNK.size + length <= left and _WHOLE <= kind <= _LAST
        if fits and len(part) < length:  # an incomplete chunk
            return
        if not fits or zlib.crc32(part, zlib.crc32(bytes([kind]))) != crc:
            at, parts = at + left, []
            if at - start > len(data):
                return
            yield b"", at
            continue
        at += _CHUNK.size + length
        if kind in (_WHOLE, _FIRST):
            parts = [part]
        elif parts:  # skips a record whose first part is missing
            parts.append(part)
        if parts and kind in (_WHOLE, _LAST):
            yield b"".join(parts), at
            parts = []


def _row(record: bytes) -> Row | None:
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    parsed = Record()
    try:
        parsed.ParseFromString(record)
        if parsed.WhichOneof("record_type") != "history":
            return None
        for item in parsed.history.item:
            if "_timestamp" in (item.key, *item.nested_key):
                moment = float(json.loads(item.value_json))
                if math.isfinite(moment):
                    return Row(parsed.history.step.num, moment)
    except (DecodeError, ValueError, TypeError):
        return None
    return None
