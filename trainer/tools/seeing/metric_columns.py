"""Follows metrics.jsonl while it grows, and stores it in columns."""

import json
import math
import os
from array import array
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from elastic.node.files import open_to_read
from elastic.record.lines import read_record
from trainer.run.trackers import METRICS, SAMPLES
from trainer.tools.seeing import cache

MOST_KEYS = 200
"""Largest number of metrics that are shown, in the order of their appearance."""
_SAMPLES_BYTES, _LONGEST = 64 << 20, 4000
"""Most bytes of samples.jsonl that are read, and most characters of a text that are shown."""


class MetricRecords:
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
            for text in file:
                if not text.endswith(b"\n"):
                    break
                self.offset += len(text)
                if record := read_record(text):
                    self._add(record)
        if self.offset - self._kept >= cache.WORTH_BYTES:
            self._keep()
        last = np.array([lineage.get(name, math.inf) for name in self._attempts])
        self._counts = np.array(self._step) <= last[np.array(self._attempt, dtype=int)]

    def _add(self, record: Mapping[str, Any]) -> None:
        count = len(self._step)
        try:
            self._step.append(record["step"])
        except OverflowError:  # the step is not a 64-bit integer
            return
        self._time.append(record["time"])
        self._ends.append(self.offset)
        attempt = record.get("attempt", "")
        if attempt != self._attempts[-1]:
            # A name may be listed twice, if two attempts alternate; they do so only in a partition.
            self._attempts.append(attempt)
        self._attempt.append(len(self._attempts) - 1)
        for name, value in record.items():
            if name in ("step", "time", "attempt", "event"):
                continue
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MOST_KEYS:
                    continue
                column = self._columns[name] = array("d")
            if len(column) < count:
                # a metric may begin late, and records may lack metrics
                column.extend([math.nan] * (count - len(column)))
            column.append(math.nan if value is None else float(value))

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

    def _keep(self) -> None:
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
