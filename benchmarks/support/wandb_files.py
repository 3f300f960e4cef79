"""What stands in the W&B files of a run: read by nothing of W&B's but its message format, and with
the CRC of every record."""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

from trainer.tools.report.report import read_metrics

BLOCK, HEADER = 32 << 10, 7
WHOLE, FIRST, LAST = 1, 2, 4


def wandb_rows(run: Path) -> list[list[dict[str, Any]]]:
    """Rows of history in each file of a run, in the order in which the files were begun.

    Raises:
        ValueError: a record is damaged, other than one that a kill has torn at the end of a file.
    """
    return [_rows(path) for path in sorted((run / "wandb").glob("*run-*/*.wandb"))]


def not_in_wandb(run: Path) -> list[dict[str, Any]]:
    """Records in the newest attempt's lineage that are in no row.

    Raises:
        ValueError: W&B's steps do not grow from row to row, over all files.
    """
    rows = [row for file in wandb_rows(run) for row in file]
    steps = [row["_step"] for row in rows]
    if steps != sorted(set(steps)):
        raise ValueError(f"W&B's steps do not grow: {steps}")
    by_step: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row)
    return [
        record
        for record in read_metrics(run)
        if not any(_holds(row, record) for row in by_step.get(record["step"], []))
    ]


def _holds(row: dict[str, Any], record: dict[str, Any]) -> bool:
    """Whether a row has all values of a record."""
    about = ("time", "attempt", "event")
    values = {key: value for key, value in record.items() if key not in about}
    return all(value is None or row.get(key) == value for key, value in values.items())


def _rows(path: Path) -> list[dict[str, Any]]:
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, rows = path.read_bytes(), HEADER, b"", []
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        crc, length, kind = struct.unpack_from("<IHB", data, at)
        part, at = data[at + HEADER : at + HEADER + length], at + HEADER + length
        if at > len(data):
            break
        if zlib.crc32(part, zlib.crc32(bytes([kind]))) != crc:
            raise ValueError(f"{path}: the CRC of the chunk before byte {at} is wrong")
        whole = part if kind in (WHOLE, FIRST) else whole + part
        if kind in (WHOLE, LAST):
            items = Record.FromString(whole).history.item
            row = {".".join(item.nested_key): json.loads(item.value_json) for item in items}
            rows += [row] if row else []
    return rows
