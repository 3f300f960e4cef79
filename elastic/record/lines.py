"""Files of JSON lines: appended to by a process that a full disk must not end, and parsed with
checks, because their contents are not trusted."""

import json
import logging
import math
import os
import re
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from elastic.node.files import open_to_append, open_to_read

logger = logging.getLogger(__name__)

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
"""File names in the run directory: records (`read_record`), and samples of the model's output."""
BATCH = 256


class RecordFile:
    """Appends to a file of lines, created if missing. Each line is passed to the operating system
    at once, so it survives the death of this process. Lines that cannot be written, as the disk is
    full or missing, wait in memory, in order. `waiting`: lines of an earlier process, to be written
    unless the file has them. `trusted`: other users (uids) who may own the file; a file of any
    other user is renamed."""

    def __init__(
        self, path: Path, waiting: Iterable[str] = (), trusted: Container[int] = ()
    ) -> None:
        self._path, self._trusted = path, trusted
        self._file: int | None = None
        self._lines = deque(line.encode() for line in waiting)
        self._from_before = bool(self._lines)
        self._written_bytes = 0
        """Bytes of the first waiting line that are written already."""
        self._failing = False

    @property
    def waiting(self) -> list[str]:
        return [line.decode() for line in self._lines if line]

    def add(self, line: str) -> None:
        """Append a line, passed without its newline. Raises no OSError."""
        self._lines.append(line.encode())
        self.flush()

    def flush(self) -> None:
        """Write waiting lines, as many as the file accepts. Raises no OSError."""
        try:
            while self._lines:
                if self._file is None:
                    self._file = self._open()
                first, *others = (line + b"\n" for line in islice(self._lines, BATCH))
                first = first[self._written_bytes :]
                self._written_bytes += os.writev(self._file, [first, *others])
                while self._lines and self._written_bytes > len(self._lines[0]):
                    self._written_bytes -= len(self._lines.popleft()) + 1
            self._failing = False
        except OSError as error:
            if not self._failing:  # logged only once, as the disk stays full for many lines
                why = "its lines are kept in memory until it can be written"
                logger.warning("%s: %s; %s", self._path, error.strerror, why)
            self._failing = True

    def close(self) -> None:
        """Close the file. Lines still waiting are lost when this process ends."""
        if self._lines:
            self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        file = open_to_append(self._path, self._trusted)
        try:
            if self._from_before:
                with open(f"/proc/self/fd/{file}", "rb") as existing:
                    # lines contain a time and an attempt, so equal lines are the same line
                    missing = dict.fromkeys(self._lines)
                    for line in existing:
                        missing.pop(line.removesuffix(b"\n"), None)
                self._lines, self._from_before = deque(missing), False
            size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                self._lines.appendleft(b"")  # a process was killed while it wrote the last line
        except OSError:
            os.close(file)
            raise
        return file


def last_lines(path: Path) -> list[bytes]:
    """Return the lines in the last 64 KiB of a file, the first perhaps torn; [] if it cannot be
    read."""
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
            return file.read().splitlines()
    except OSError:
        return []


_MAX_NESTING = 16
_MAX_WHOLE = 2**63
_YEAR_9999 = 250_000_000_000
_HEXADECIMAL = re.compile(r"-?0x[01](\.[0-9a-f]{1,13})?p[+-]\d{1,4}|inf|nan")
_DIGEST = re.compile(r"[0-9a-f]{9,128}")


class RecordValueError(ValueError):
    """A complete line with a value that no run would write."""


def read_line(line: bytes | str) -> dict[str, Any]:
    """Parse a line of a ledger, and check the fields that readers compute with. Raises
    RecordValueError if a field has a value that no run would write, and any other ValueError if the
    line is torn or no line of a ledger."""
    values = _object(line)
    kind = values.get("kind")
    if not isinstance(kind, str):
        raise ValueError("the line has no kind")
    for name, fits in _FIELDS.get(kind, {}).items():
        if name in values and not fits(values[name]):
            raise RecordValueError(f"a {kind} line with a wrong {name}")
    return values


def read_record(line: bytes | str) -> dict[str, Any] | None:
    """Parse a record of metrics.jsonl: `step`, `time`, `attempt` and `event` (texts) and metrics
    (numbers; null: not finite). Other fields are left out. Returns None if the line is torn or no
    record."""
    try:
        values = _object(line)
    except ValueError:
        return None
    if not (_whole(values.get("step")) and _seconds(values.get("time"))):
        return None
    return {
        name: value
        for name, value in values.items()
        if (_text(value) if name in ("attempt", "event") else value is None or _number(value))
    }


def _object(line: bytes | str) -> dict[str, Any]:
    try:
        values = json.loads(line, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    level: list[Any] = [values]
    # not recursive, as a recursion could exceed the stack
    for _ in range(_MAX_NESTING):
        inner = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
        ]
        if any(isinstance(item, int) and abs(item) > _MAX_WHOLE for item in inner):
            raise ValueError("a whole number that no run writes")
        if any(isinstance(item, float) and not math.isfinite(item) for item in inner):
            raise ValueError("an infinite number")  # Python reads 1e999 as infinity
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return values
    raise ValueError("nested too deep")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid JSON")


def _number(value: Any) -> bool:
    # bool is a subclass of int
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _seconds(value: Any) -> bool:
    return _number(value) and 0 <= value <= _YEAR_9999


def _span(value: Any) -> bool:  # a difference of two times, which may be negative
    return _number(value) and abs(value) <= _YEAR_9999


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _or_null(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _cause(value: Any) -> bool:
    return isinstance(value, dict) and (value.get("at") is None or _seconds(value["at"]))


def _integer(value: Any) -> bool:  # perhaps negative: the proof reports negative counts
    return isinstance(value, int) and not isinstance(value, bool)


def _range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_integer, value))


_LATER: Mapping[str, Callable[[Any], bool]] = {"attempt": _text, "after": _seconds, "step": _whole}
_COUNTERS: Mapping[str, Callable[[Any], bool]] = {"skipped": _integer, "rollbacks": _integer}
_FIELDS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "start": {
        **dict.fromkeys(("step", "global_batch", "world_size", "nodes"), _whole),
        **dict.fromkeys(("round", "generation", "pid"), _whole),
        **dict.fromkeys(("data", "source", "boot", "attempt", "model"), _text),
        **dict.fromkeys(("at", "monotonic"), _seconds),
        "sequences": _integer,
        "cause": _or_null(_cause),
        "phases": _of(_span),
        "parent": _or_null(_text),
        **dict.fromkeys(("skipped", "rollbacks"), _or_null(_integer)),
        "steps": _or_null(_whole),
        "records": lambda value: isinstance(value, list) and all(map(_text, value)),
        "recipe": lambda value: _text(value) and bool(re.fullmatch(r"\w*", value)),
        "directory": _text,
        "computed_by": _of(_text),
        "changed": _of(lambda value: isinstance(value, list) and len(value) == 2),
    },
    "phases": {**_LATER, "phases": _of(_span)},
    "step": {
        **_LATER,
        "sequences": _range,
        "seconds": _seconds,
        "loss": _or_null(_number),
        "norm": lambda value: _text(value) and bool(_HEXADECIMAL.fullmatch(value)),
        "skipped": _flag,
        "consumed": lambda value: _text(value) and bool(_DIGEST.fullmatch(value)),
    },
    "validation": {**_LATER, "values": _of(_or_null(_number))},
    "save": {
        **_LATER,
        "ok": _flag,
        "seconds": _seconds,
        "stall": _or_null(_seconds),
        **dict.fromkeys(("error", "weights", "moments"), _or_null(_text)),
        **_COUNTERS,
    },
    "rollback": {**_LATER, "to": _whole, "source": _text},
    "notice": _LATER,
    "event": _LATER,
    "end": {**_LATER, "code": _number, "reason": _text, **_COUNTERS},
}
