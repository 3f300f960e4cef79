"""Reads a ledger as the history of a run, and proves that no sequence is lost or used twice.

[Note: lineage] An attempt continues from a state that another attempt, its parent, has reached. The
start line names the parent. (In older ledgers, the parent is the newest earlier attempt that
computed the loaded step.) The *lineage* of an attempt consists of its own steps, its parent's steps
up to the loaded step, and so on: the steps that led to its weights. Their ranges of sequences must
be 0, 1, 2, … without a gap or repetition. Other steps do not affect the weights."""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np

from elastic.exits import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PAUSED, EXIT_REQUEUE
from elastic.node.files import open_to_read
from elastic.record.attempt import LedgerRollbackLine, LedgerStepLine, RecordedAttempt
from elastic.record.columns import FEWEST, Kind, RecordLineBlock, RecordLineShape, parsed_blocks
from elastic.record.ledger import LEDGER, StartLine
from elastic.record.lines import RecordValueError, read_line
from elastic.record.proof import problems_of

PLANNED = (EXIT_DONE, EXIT_REQUEUE, EXIT_PAUSED, EXIT_INTERRUPTED)


class LedgerError(Exception):
    """The ledger is missing, or no attempt in it has begun."""


@dataclass(frozen=True)
class RecordHistory:
    """All attempts of a ledger, and the contradictions in it."""

    attempts: list[RecordedAttempt]
    problems: list[str]
    """Contradictions to the claim that every sequence was consumed exactly once."""
    kept: dict[int, int]
    """Number of an attempt in the newest attempt's lineage → its last step in that lineage."""

    @property
    def step(self) -> int:
        return self.attempts[-1].last_step

    @property
    def sequences(self) -> int:
        newest = self.attempts[-1]
        return newest.steps[-1].after_last if newest.steps else newest.start.sequences

    @property
    def unrecorded(self) -> int:
        """Number of steps in the newest attempt's lineage ([Note: lineage]) without a step line.
        The start line of the next attempt proves which sequences they consumed."""
        return sum(a.unrecorded for a in self.attempts if a.number in self.kept)

    @property
    def lineage(self) -> dict[str, float]:
        """Lineage of the newest attempt ([Note: lineage]), as `lineage_of` returns it."""
        starts = {attempt.start.attempt: attempt.start for attempt in self.attempts}
        return lineage_of(starts, self.attempts[-1].start.attempt)

    def survives(self, attempt: RecordedAttempt, step: LedgerStepLine) -> bool:
        return step.step <= self.kept.get(attempt.number, -1)

    def taken_back(self) -> list[tuple[int, int]]:
        """Returns (loaded step, last step before the roll-back) of each roll-back in the newest
        attempt's lineage."""
        return [
            (item.to, item.step)
            for attempt in self.attempts
            for item in attempt.rollbacks
            if item.step <= self.kept.get(attempt.number, -1)
        ]

    def failed(self, attempt: RecordedAttempt) -> str | None:
        following = self.next(attempt)
        if following and following.start.cause is not None:
            return describe_failure(following.start.cause)
        if attempt.end:
            return None if attempt.end["code"] in PLANNED else str(attempt.end["reason"])
        return "ended without a recorded cause" if following else None

    def next(self, attempt: RecordedAttempt) -> RecordedAttempt | None:
        return self.attempts[attempt.number] if attempt.number < len(self.attempts) else None

    def summary(self) -> str:
        """Returns one line that describes a ledger without problems."""
        return (
            f"every sequence exactly once: {self.sequences} sequences in {self.step} steps over "
            f"{len(self.attempts)} attempts"
        )


def describe_failure(cause: Mapping[str, Any]) -> str:
    """Returns the rank or node that failed, and why, as far as known."""
    rank, node = cause.get("rank"), cause.get("node")
    culprit = f"rank {rank}" if rank is not None else f"node {node}" if node else ""
    return ": ".join(filter(None, [culprit, str(cause.get("why", "failed"))]))


def read_history(path: str | Path) -> RecordHistory:
    """Read a ledger. `path`: path of the ledger or of the run directory.

    Raises:
        LedgerError: there is no ledger, or no attempt in it has begun.
    """
    return LedgerReader(path).read(whole=True)


class LedgerReader:
    """Follows a ledger that grows. A file that was replaced or cut is read from its beginning."""

    def __init__(self, path: str | Path) -> None:
        self.path = _file_of(path)
        self.begin(0)

    def begin(self, inode: int) -> None:
        """Forget all lines, and begin to read the file with this inode."""
        self.inode, self.offset, self.number = inode, 0, 0
        """Inode of the file, and the numbers of its bytes and lines that have been read."""
        self.others: list[tuple[int, bytes]] = []
        """(line number, line) of all lines that are not step lines."""
        self.attempts: list[RecordedAttempt] = []
        self._torn: list[str] = []
        """Problems of single lines, such as torn lines."""

    def read(
        self,
        *,
        whole: bool = False,
        forks: bool = False,
        meanwhile: Callable[[float], None] = lambda share: None,
    ) -> RecordHistory:
        """Returns the history so far. Reads only lines that are new since the last call. `whole`:
        also read a last line without a newline, after which no call may follow. `forks`: as for
        `parsed_blocks`. `meanwhile`: called after each block of lines, with the share of the file
        that has been read. Raises LedgerError as `read_history` does."""
        try:
            with os.fdopen(open_to_read(self.path, follow=True), "rb") as file:
                status = os.fstat(file.fileno())
                # Another file has this name now, or the file is shorter than what has been read.
                if (status.st_ino, 0) != (self.inode, max(0, self.offset - status.st_size)):
                    self.begin(status.st_ino)
                file.seek(self.offset)
                for block, (usual, columns) in parsed_blocks(file, _usual_steps, forks=forks):
                    self._take_all(block, usual, columns)
                    self.offset += int(block.bounds[-1])
                    meanwhile(self.offset / status.st_size)
                file.seek(self.offset)
                if whole and (text := file.readline()):
                    self.take(text, self.number + 1)
        except OSError as error:
            raise LedgerError(
                f"{self.path}: {error.strerror}; give the directory of a run"
            ) from error
        if not self.attempts:
            found = f" ({self._torn[0]})" if self._torn else ""
            raise LedgerError(
                f"{self.path}: no attempt has begun{found}; give the directory of a run that has "
                "begun to train"
            )
        _set_times(self.attempts)
        problems = [*self._torn, *problems_of(self.attempts)]
        return RecordHistory(list(self.attempts), problems, _kept(self.attempts))

    def take(self, line: bytes, number: int) -> None:
        """Add a line to its attempt. Torn lines are skipped, as the proof notices missing steps."""
        if not _take_step(line, number, self.attempts) and (
            _take(line, number, self.attempts, self._torn) != "step"
        ):
            self.others.append((number, line))

    def _take_all(
        self, block: RecordLineBlock, usual: np.ndarray, columns: dict[str, np.ndarray]
    ) -> None:
        """Add all lines of a block, in order. `usual`, `columns`: as `_usual_steps` returns
        them."""
        columns["line"] = usual + self.number + 1
        others = np.ones(len(block), bool)
        others[usual] = False
        begin = 0
        for before, other in enumerate([*np.flatnonzero(others).tolist(), len(block)]):
            steps = {
                name: values[begin - before : other - before] for name, values in columns.items()
            }
            if begin < other and not _take_steps(steps, self.attempts):
                for index in range(begin, other):
                    self.take(block.line(index), self.number + index + 1)
            if other < len(block):
                self.take(block.line(other), self.number + other + 1)
            begin = other + 1
        self.number += len(block)


_STEP = re.compile(
    rb'\{"kind":"step","step":(?P<step>\d{1,15}),'
    rb'"sequences":\[(?P<first>\d{1,15}),(?P<after_last>\d{1,15})\],'
    rb'"seconds":(?P<seconds>\d{1,9}(?:\.\d{1,9})?)'
    rb'(?:,"loss":(?P<loss>-?\d{1,15}(?:\.\d{1,20})?(?:e-?\d{1,2})?))?'
    rb'(?:,"norm":"0x1\.(?P<norm>[0-9a-f]{1,13}p[+-]\d{1,3})")?'
    rb'(?:,"consumed":"(?P<consumed>[0-9a-f]{9,128})")?'
    rb',"after":(?P<after>\d{1,9}(?:\.\d{1,9})?),"attempt":"(?P<attempt>[0-9a-f]{1,32})"\}\n'
)
"""The usual form of a step line, which nearly every line of a ledger has."""
_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("step", "first", "after_last"), "whole"),
    **dict.fromkeys(("seconds", "loss", "after"), "number"),
    "norm": "fraction", "consumed": "hex16", "attempt": "hex8",
}  # fmt: skip
_LONGEST = 1e9
"""Seconds from which on a step line is checked on its own."""


def _usual_steps(block: RecordLineBlock) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the indices of the lines that are as the typical line of the block, if this is a step
    line of the usual form, and the fields of these lines by name."""
    if len(block) >= FEWEST and (found := _STEP.fullmatch(line := block.typical())):
        names = [name for name, text in found.groupdict().items() if text]
        shape = RecordLineShape.of(
            line, [found.span(name) for name in names], [_KINDS[n] for n in names]
        )
        indices, values = block.columns(shape)
        columns = dict(zip(names, values, strict=True))
        fine = np.ones(len(indices), bool)
        for name in ("seconds", "after"):
            fine &= (columns[name] >= 0) & (columns[name] < _LONGEST)
        return indices[fine], {name: values[fine] for name, values in columns.items()}
    return np.zeros(0, np.int64), {}


def _take_steps(columns: Mapping[str, np.ndarray], attempts: list[RecordedAttempt]) -> bool:
    """Add step lines to the newest attempt; returns whether all are of that attempt, else none is
    added."""
    name = attempts[-1].start.attempt if attempts else ""
    if len(name) != 8 or (columns["attempt"] != name.encode(errors="replace")).any():
        return False
    attempts[-1].steps.extend(columns)
    attempts[-1].written = max(attempts[-1].written, float(columns["after"].max()))
    return True


def _take_step(line: bytes, number: int, attempts: list[RecordedAttempt]) -> bool:
    """Add a line of the usual form to the newest attempt; returns whether it was added."""
    found = _STEP.fullmatch(line)
    if not found or not attempts:
        return False
    step, first, after_last, seconds, loss, norm, consumed, after, name = found.groups()
    attempt = attempts[-1]
    # A line that names another attempt was written late, by a rank 0 that was cut off from the
    # other ranks; `_take` handles it.
    if attempt.start.attempt != name.decode():
        return False
    lasted = float(after)
    attempt.steps.append(
        LedgerStepLine(
            int(step), int(first), int(after_last), float(seconds), lasted, "", number,
            None if loss is None else float(loss),
            None if norm is None else float.fromhex(f"0x1.{norm.decode()}"),
            None if consumed is None else consumed.decode(),
        )
    )  # fmt: skip
    attempt.written = max(attempt.written, lasted)
    return True


def _take(line: bytes, number: int, attempts: list[RecordedAttempt], problems: list[str]) -> str:
    """Add a line that `_take_step` has not added to its attempt; returns the line's kind, or "" if
    it is skipped."""
    try:
        values = read_line(line)
        kind = values.pop("kind")
        if kind == "start":
            start = _start(values)
            attempts.append(
                RecordedAttempt(len(attempts) + 1, start, number, phases=dict(start.phases))
            )
            return str(kind)
        name, after = str(values.pop("attempt")), float(values["after"])
        attempt = next((one for one in reversed(attempts) if one.start.attempt == name), None)
        if attempt is None:
            problems.append(f"line {number}: a {kind} of attempt {name}, which has no start")
            return ""
        if kind == "step":
            first, after_last = map(int, values["sequences"])
            loss = None
            if "loss" in values:
                loss = math.nan if values["loss"] is None else float(values["loss"])
            norm = float.fromhex(values["norm"]) if "norm" in values else None
            why = str(values.get("why") or "no reason") if values.get("skipped") else ""
            # Without its mark, a skipped step with finite numbers would not be noticed.
            if "why" in values and not why:
                problems.append(
                    f"line {number}: step {values['step']} has a reason for being skipped "
                    f"({values['why']}), but is not marked as skipped"
                )
            attempt.steps.append(
                LedgerStepLine(
                    int(values["step"]), first, after_last, float(values["seconds"]), after,
                    why, number, loss, norm, values.get("consumed"),
                )
            )  # fmt: skip
        elif kind == "rollback":
            step, to, source = int(values["step"]), int(values["to"]), str(values["source"])
            attempt.rollbacks.append(
                LedgerRollbackLine(step, to, source, attempt.last_step, number)
            )
        elif kind == "save":
            numbers = {"step": int(values["step"]), "seconds": float(values["seconds"])}
            attempt.saves.append({**values, **numbers, "line": number})
        elif kind == "validation":
            attempt.validations[int(values["step"])] = values["values"]
        elif kind in ("notice", "event"):
            attempt.events.append(values)
        elif kind == "phases":
            attempt.phases = {name: float(value) for name, value in values["phases"].items()}
        elif kind == "end":
            numbers = {"code": int(values["code"]), "step": int(values["step"]), "line": number}
            attempt.end = {**values, **numbers, "reason": values["reason"]}
        attempt.written = max(attempt.written, after)
        return str(kind)
    except RecordValueError as error:
        problems.append(f"line {number}: {error}")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        pass
    return ""


def has_started(path: str | Path) -> bool:
    """Whether a ledger, or the ledger in a run directory, has a start line."""
    return any(True for _ in _starts(path))  # reads no further than the first


def read_starts(path: str | Path) -> dict[str, StartLine]:
    """Return the start lines of a ledger, or of the ledger in a run directory, in their order, by
    the name of the attempt; {} if the ledger cannot be read."""
    return {start.attempt: start for start in _starts(path)}


def _starts(path: str | Path) -> Iterator[StartLine]:
    with suppress(OSError, ValueError), _mapped(path) as data:  # the file may be missing or empty
        # Start lines are searched for, as most lines of a long ledger are step lines.
        begin = data.find(b'{"kind":"start",')
        while begin >= 0:
            data.seek(begin)
            with suppress(ValueError, TypeError, AttributeError):  # torn, or no start line
                yield _start(read_line(data.readline()))
            begin = data.find(b'\n{"kind":"start",', begin) + 1 or -1


def lineage_of(starts: Mapping[str, StartLine], attempt: str) -> dict[str, float]:
    """Return the lineage of an attempt, see [Note: lineage]: each attempt of `starts` → the last
    step whose records count; `math.inf` for `attempt` itself, -1 for none.

    An attempt outside the lineage may have validated or saved the weights that it loaded. Its
    records of that step count if these weights are in the lineage. `starts`: attempt → its start
    line, in the order of the ledger."""
    lineage, last = dict[str, float](), math.inf
    # A forged ledger may have an attempt that is its own ancestor.
    while attempt in starts and attempt not in lineage:
        lineage[attempt] = last
        last, attempt = min(last, starts[attempt].step), starts[attempt].parent or ""
    for name, start in starts.items():  # parents come first
        loaded = lineage.get(start.parent, -1.0) if start.parent else math.inf
        lineage.setdefault(name, min(loaded, start.step))
    return lineage


def in_lineage(record: Mapping[str, Any], lineage: Mapping[str, float]) -> bool:
    """Whether a record of metrics.jsonl counts in the lineage that `lineage_of` has returned. True
    for a record that names no attempt, or an attempt that the ledger lacks."""
    return bool(record["step"] <= lineage.get(record.get("attempt", ""), math.inf))


def last_start(path: str | Path, *, trained: bool) -> StartLine | None:
    """Returns the newest start line of a ledger, or of the ledger in a run directory; None if there
    is none. `trained`: skip attempts that completed no step."""
    values: dict[str, Any] | None = None
    # The ledger may be missing or empty, or its last line torn.
    with suppress(OSError, ValueError), _mapped(path) as data:
        # Searched from the end, as the ledger of a long run is large.
        end = data.rfind(b'{"kind":"step",') if trained else len(data)
        begin = data.rfind(b'{"kind":"start",', 0, max(end, 0))
        if begin >= 0:
            data.seek(begin)
            values = read_line(data.readline())
    return None if values is None else _start(values)


def _file_of(path: str | Path) -> Path:
    return Path(path) / LEDGER if Path(path).is_dir() else Path(path)


@contextmanager
def _mapped(path: str | Path) -> Iterator[mmap]:
    with (
        os.fdopen(open_to_read(_file_of(path), follow=True), "rb") as file,
        mmap(file.fileno(), 0, access=ACCESS_READ) as data,
    ):
        yield data


def _start(values: Mapping[str, Any]) -> StartLine:
    """Parse a start line. Raises TypeError or ValueError if the values are of no start line."""
    known = {item.name for item in fields(StartLine)}
    start = StartLine(**{name: value for name, value in values.items() if name in known})
    if not all(len(pair) == 2 for pair in start.changed.values()):
        raise ValueError("changed: not pairs")
    if not all(len(stage) == 2 and type(stage[0]) is int for stage in start.stages):
        raise ValueError("stages: not pairs of a sequence and a fingerprint")
    return start


def _set_times(attempts: list[RecordedAttempt]) -> None:
    before: RecordedAttempt | None = None
    for attempt in attempts:
        start = attempt.start
        attempt.loaded = start.at
        if before and start.boot and start.boot == before.start.boot:
            attempt.loaded = before.loaded + start.monotonic - before.start.monotonic
            # A process that was cut off may have continued beside the next attempt.
            before.finished = min(before.finished, attempt.loaded)
        attempt.began = attempt.loaded - sum(start.phases.values())
        if before:
            attempt.loaded = max(attempt.loaded, before.finished)
            attempt.began = max(attempt.began, before.finished)
        attempt.finished = attempt.loaded + attempt.written
        before = attempt


def _kept(attempts: list[RecordedAttempt]) -> dict[int, int]:
    kept: dict[int, int] = {}
    attempt: RecordedAttempt | None = attempts[-1]
    newest = attempts[-1].last_step
    while attempt:
        kept[attempt.number] = newest
        # The parent contributes only the steps up to the loaded one.
        newest, attempt = attempt.start.step, attempt.parent
    return kept
