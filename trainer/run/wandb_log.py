"""Reads the file in which W&B stores a run, `run-ID.wandb`, even while it is written.

[Note: the file] The file has a header of 7 bytes and blocks of 32 KiB, as LevelDB's log. A record
is one chunk, or several if it crosses the end of a block. A chunk has a CRC, a length and a kind
(whole, first, middle, last). Records are W&B's protocol buffers; one kind is a row of history.
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
class _WandbHistoryRow:
    """A row of a run's history: W&B's step, and the time of its last record in Unix seconds."""

    step: int
    time: float


def last_row(directory: Path, run_id: str, up_to: float = math.inf) -> _WandbHistoryRow | None:
    """Return the newest row with a W&B step of at most `up_to` in all files of a run; None if there
    is none. `directory`: where W&B has a folder for each start and resume of the run."""
    found = []
    for path in _files(directory, run_id):
        with suppress(OSError):  # the file is being removed, or cannot be read
            for start in (_tail(path), 0):
                rows = [row for row in read_rows(path, start)[0] if row.step <= up_to]
                if rows:
                    found.append(rows[-1])
                    break
    return max(found, key=lambda row: row.time, default=None)


def cut_torn(directory: Path, run_id: str, own: Path) -> None:
    """Cut off incomplete records that a kill left at the end of a run's files: `wandb sync` would
    stop there, and skip later files. `own`, the file being written, is not cut, and neither are
    files that changed less than 2 s before it. `directory`: see `last_row`."""
    if not own.exists():
        return
    now = own.stat().st_mtime  # the filesystem's clock, which also set the other files' times
    for path in _files(directory, run_id):
        with suppress(OSError), os.fdopen(os.open(path, _CHANGE), "r+b") as file:
            size, start = os.fstat(file.fileno()), _tail(path)
            whole = read_rows(path, start)[1]
            if whole == start > 0:  # the incomplete record begins in an earlier block
                whole = read_rows(path, 0)[1]
            if path != own and now - size.st_mtime > _STILL_SECONDS and whole < size.st_size:
                file.truncate(whole)


def read_rows(path: Path, offset: int) -> tuple[list[_WandbHistoryRow], int]:
    """Read the rows after an offset; returns them and the offset of the first incomplete record.
    `offset`: the start of a block, or a result of this function. Raises OSError if the file is
    missing, not a regular file, or belongs to another user."""
    with os.fdopen(open_to_read(path), "rb") as file:
        if not is_ours(os.fstat(file.fileno()), path.parent):
            raise PermissionError(f"{path} belongs to another user")
        offset = offset or _HEADER_BYTES
        file.seek(offset)
        data = file.read()
    rows = []
    for record, end in _records(data, offset):
        offset = end
        if record and (row := _row(record)):
            rows.append(row)
    return rows, offset


def _files(directory: Path, run_id: str) -> Iterator[Path]:
    return directory.glob(f"*run-*-{run_id}*/run-{run_id}.wandb")


def _tail(path: Path) -> int:
    """Return the offset of the last _TAIL_BLOCKS blocks of a file."""
    return max(0, path.stat().st_size // _BLOCK_BYTES - _TAIL_BLOCKS) * _BLOCK_BYTES


def _records(data: bytes, start: int) -> Iterator[tuple[bytes, int]]:
    """Yield (record, file offset of its end) for each complete record in `data`, which begins at
    file offset `start`. What follows a damaged record in its block is yielded as an empty
    record."""
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
        if fits and len(part) < length:  # the chunk is still being written
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
        elif parts:  # a record whose first part is missing is skipped
            parts.append(part)
        if parts and kind in (_WHOLE, _LAST):
            yield b"".join(parts), at
            parts = []


def _row(record: bytes) -> _WandbHistoryRow | None:
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
                    return _WandbHistoryRow(parsed.history.step.num, moment)
    except (DecodeError, ValueError, TypeError):
        return None
    return None
