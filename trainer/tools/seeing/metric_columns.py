"""Follows metrics.jsonl while it grows, and stores it in columns."""

import json
import math
import os
import re
import threading
from array import array
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from elastic.node.files import open_to_read
from elastic.record.columns import FEWEST, Kind, RecordLineBlock, RecordLineShape, parsed_blocks
from elastic.record.lines import METRICS, SAMPLES, read_record
from trainer.tools.seeing import cache

MOST_KEYS = 200
"""Largest number of metrics that are shown, in the order of their appearance."""
_SAMPLES_BYTES, _LONGEST = 64 << 20, 4000
"""Most bytes of samples.jsonl that are read, and most characters of a text that are shown."""
_VALUE = re.compile(rb'(?<=": )(?:-?\d[\d.]*(?:e[+-]\d+)?|"(?P<attempt>[0-9a-f]{8})")(?=[,}])')
"""A number, or the name of an attempt, in the form in which a run writes them."""
_LATEST = 1e11
"""Unix time from which on a record is checked on its own."""


class SeenMetrics:
    """Records of a run's metrics.jsonl, in columns. Its methods return the records in the lineage
    of one attempt, see [Note: lineage] in elastic/record/history.py. A file that was replaced or
    cut is read again from its beginning."""

    def __init__(self, run: Path) -> None:
        self.path = run / METRICS
        self._begin(0)

    def _begin(self, inode: int) -> None:
        self.inode, self.offset = inode, 0
        """Inode of the file, and number of bytes read so far."""
        self._kept = 0
        self._step, self._time, self._ends = array("q"), array("d"), array("q")
        self._attempt, self._attempts = array("i"), [""]
        """Index of each record's attempt in `_attempts`; names of attempts."""
        self._by_record: list[array[Any]] = [self._step, self._time, self._ends, self._attempt]
        self._columns: dict[str, array[float]] = {}
        self._counts = np.zeros(0, dtype=bool)
        """Whether each record is in the lineage."""

    def read(self, lineage: Mapping[str, float]) -> None:
        """Read new records, and show those in a lineage (`lineage_of`). A last line without a
        newline is left for the next call."""
        try:
            descriptor = open_to_read(self.path, follow=True)
        except OSError:  # the file may come later
            return
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self.inode or status.st_size < self.offset:
                self._begin(status.st_ino)
                if status.st_size >= cache.WORTH_BYTES:
                    self._recall()
            file.seek(self.offset)
            forks = threading.active_count() == 1
            for block, (usual, columns) in parsed_blocks(file, _usual_records, forks=forks):
                self._take(block, usual, columns)
        last = np.array([lineage.get(name, math.inf) for name in self._attempts])
        self._counts = np.array(self._step) <= last[np.array(self._attempt, dtype=int)]

    def _take(
        self, block: RecordLineBlock, usual: np.ndarray, columns: Mapping[str, np.ndarray]
    ) -> None:
        """Add the records in a block of lines, in order. `usual`, `columns`: as `_usual_records`
        returns them."""
        ends = self.offset + block.bounds[1:]
        others = np.ones(len(block), bool)
        others[usual] = False
        begin = 0
        for before, other in enumerate([*np.flatnonzero(others).tolist(), len(block)]):
            if begin < other:
                part = slice(begin - before, other - before)
                self._extend({name: values[part] for name, values in columns.items()})
                self._ends.frombytes(ends[begin:other].tobytes())
            if other < len(block) and (record := read_record(block.line(other))):
                self._add(record, int(ends[other]))
            begin = other + 1
        self.offset += int(block.bounds[-1])

    def _extend(self, columns: Mapping[str, np.ndarray]) -> None:
        """Add at least one record, except for its place in the file."""
        attempts = columns.get("attempt", np.zeros(len(columns["step"]), "S8"))
        changes = np.flatnonzero(attempts[1:] != attempts[:-1]) + 1
        for begin, end in pairwise([0, *changes.tolist(), len(attempts)]):
            index = self._index(attempts[begin].decode())
            self._attempt.extend([index] * (end - begin))
        for name, values in columns.items():
            if (column := self._column(name)) is not None:
                column.frombytes(values.tobytes())
        self._step.frombytes(columns["step"].tobytes())
        self._time.frombytes(columns["time"].tobytes())

    def _add(self, record: Mapping[str, Any], end: int) -> None:
        """Add a record that ends at byte `end` of the file."""
        if record["step"] >= 1 << 63:
            return
        self._ends.append(end)
        self._attempt.append(self._index(record.get("attempt", "")))
        for name, value in record.items():
            if (column := self._column(name)) is not None:
                column.append(math.nan if value is None else float(value))
        self._step.append(record["step"])
        self._time.append(record["time"])

    def _index(self, attempt: str) -> int:
        """Index of an attempt in `_attempts`, for the next record."""
        if attempt != self._attempts[-1]:
            # A name may be listed twice, if two attempts alternate; they do so only in a partition.
            self._attempts.append(attempt)
        return len(self._attempts) - 1

    def _column(self, name: str) -> "array[float] | None":
        """Column of a metric, up to the next record; None if it is not shown."""
        if name in ("step", "time", "attempt", "event"):
            return None
        if name not in self._columns and len(self._columns) >= MOST_KEYS:
            return None
        column = self._columns.setdefault(name, array("d"))
        # a metric may begin late, and records may lack metrics
        column.extend([math.nan] * (len(self._step) - len(column)))
        return column

    @property
    def step(self) -> np.ndarray:
        """Step of each record in the lineage."""
        return np.array(self._step, dtype=float)[self._counts]

    @property
    def time(self) -> np.ndarray:
        """Unix time of each record in the lineage."""
        return np.array(self._time)[self._counts]

    def names(self) -> list[str]:
        return list(self._columns)

    def column(self, name: str) -> np.ndarray:
        """Values of a metric by record; NaN if a record has none, or a non-finite one."""
        return self._whole_column(name)[self._counts]

    def last(self, name: str) -> float | None:
        """Newest value of a metric; None if there is none."""
        values = self.column(name)
        values = values[~np.isnan(values)]
        return float(values[-1]) if len(values) else None

    def after(self, offset: int) -> int:
        """Return the index of the first record that ends beyond `offset` bytes of the file."""
        return int(np.searchsorted(np.array(self._ends)[self._counts], offset, side="right"))

    def _whole_column(self, name: str) -> np.ndarray:
        values = self._columns.get(name, array("d"))
        padded = np.full(len(self._step), math.nan)
        padded[: len(values)] = np.array(values)
        return padded

    # --- cache -------------------------------------------------------------------------------

    def keep(self) -> None:
        """Cache the records, if enough of them are not in the cache yet."""
        if self.offset - self._kept < cache.WORTH_BYTES:
            return
        self._kept = self.offset
        facts = {"offset": self.offset, "names": list(self._columns), "attempts": self._attempts}
        columns = [column.tobytes() for column in self._by_record]
        columns += [self._whole_column(name).tobytes() for name in self._columns]
        cache.keep(self.path, self.offset, facts, columns)

    def _recall(self) -> None:
        cached = cache.recall(self.path)
        if not cached:
            return
        facts, data = cached
        columns = [array("d") for _ in facts["names"]]
        for column, raw in zip([*self._by_record, *columns], data, strict=True):
            column.frombytes(raw)
        self._columns = dict(zip(facts["names"], columns, strict=True))
        self._attempts = facts["attempts"]
        self.offset = self._kept = facts["offset"]


def _usual_records(block: RecordLineBlock) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the indices of the lines that are as the typical line of the block, if this is a
    record of finite numbers, and the fields of these lines by name."""
    if len(block) >= FEWEST and (record := read_record(line := block.typical())):
        found = [*_VALUE.finditer(line)]
        # then the values found are those of the record: without escapes, no text contains `": `
        if b"\\" not in line and len(found) == len(record) == line.count(b'": '):
            names = [*record]
            spans = [one.span("attempt" if one["attempt"] else 0) for one in found]
            kinds: list[Kind] = ["hex8" if one["attempt"] else "number" for one in found]
            kinds[names.index("step")] = "whole"
            indices, values = block.columns(RecordLineShape.of(line, spans, kinds))
            columns = dict(zip(names, values, strict=True))
            fine = (columns["time"] >= 0) & (columns["time"] < _LATEST)
            return indices[fine], {name: values[fine] for name, values in columns.items()}
    return np.zeros(0, np.int64), {}


def thinned(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Reduce a curve to about `most` points, in order: the lowest and the highest of every
    interval, so that spikes stay visible. Non-finite points are dropped."""
    finite = np.isfinite(y) & np.isfinite(x)
    x, y = x[finite], y[finite]
    if len(x) <= most:
        return x, y
    size = math.ceil(2 * len(x) / most)
    whole = len(x) // size * size
    intervals = y[:whole].reshape(-1, size)
    starts = np.arange(len(intervals)) * size
    chosen = [starts + intervals.argmin(axis=1), starts + intervals.argmax(axis=1)]
    if whole < len(y):
        chosen.append(whole + np.array([y[whole:].argmin(), y[whole:].argmax()]))
    points = np.unique(np.concatenate([*chosen, [0, len(x) - 1]]))
    return x[points], y[points]


def samples_version(run: Path) -> str:
    """A text that changes with samples.jsonl; "" if there is no file."""
    try:
        status = os.stat(run / SAMPLES)
    except OSError:
        return ""
    return f"{status.st_ino}-{status.st_size}"


def read_samples(run: Path, most: int = 2000) -> list[dict[str, Any]]:
    """Return the samples of each step, from the newest lines of samples.jsonl: `step`, and pairs of
    a prompt and its newest text; [] if there is no file."""
    try:
        with os.fdopen(open_to_read(run / SAMPLES, follow=True), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _SAMPLES_BYTES))
            lines = file.read(_SAMPLES_BYTES).splitlines()[-most:]
    except OSError:
        return []
    by_step: dict[int, dict[str, str]] = {}
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            sample = json.loads(line)
            step, prompt, text = sample["step"], sample["prompt"], sample["text"]
            if isinstance(step, int) and isinstance(prompt, str) and isinstance(text, str):
                by_step.setdefault(step, {})[prompt[:_LONGEST]] = text[:_LONGEST]
    return [
        {"step": step, "pairs": [[*pair] for pair in pairs.items()]}
        for step, pairs in sorted(by_step.items())
    ]
