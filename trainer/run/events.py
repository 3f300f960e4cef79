"""Events of a run for `tracking.hooks`, read from lines of its ledger; and what they sum up to:
attempts, failures, lost steps and goodput. Imports no torch."""

import math
import os
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.node.files import open_to_read
from elastic.record.history import describe_failure
from elastic.record.ledger import LEDGER
from elastic.record.lines import read_line


@dataclass(frozen=True)
class Event:
    """Something that happened to a run."""

    step: int
    at: float


@dataclass(frozen=True)
class Start(Event):
    """The run begins at `step` 0. In all events `at` is Unix time."""

    world_size: int
    nodes: int


@dataclass(frozen=True)
class Restart(Event):
    """The run continues after `step`: its ranks were restarted, or the job was launched again."""

    world_size: int
    nodes: int
    lost: int
    """Steps after `step` that had been done and are repeated."""
    cause: str
    """The failure that led to the restart; "" if nothing failed."""


@dataclass(frozen=True)
class Step(Event):
    """The ranks completed an optimizer step."""

    loss: float
    """Mean loss over the global batch; NaN or infinite if training diverged."""
    seconds: float
    skipped: bool
    """Whether the weights were left unchanged, because the loss or a gradient was not finite."""


@dataclass(frozen=True)
class RollBack(Event):
    """After `step` the weights of an earlier step were loaded. The data continues after `step`."""

    to: int
    """Step whose weights were loaded."""
    source: str
    """"memory" or "storage"."""


@dataclass(frozen=True)
class Validation(Event):
    """The weights after `step` were validated."""

    values: dict[str, float]
    """Results, by the names in docs/metrics.md."""


@dataclass(frozen=True)
class Save(Event):
    """The save of `step` ended."""

    seconds: float
    error: str
    """Why the save failed; "" if the checkpoint is complete."""


@dataclass(frozen=True)
class End(Event):
    """The ranks ended after `step`, at the end of training or with an error. Killed ranks leave no
    such event."""

    code: int
    """Exit code of the ranks."""
    reason: str


class RunEventReader:
    """Converts the lines of a ledger, in their order, to events."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        """Attempt → Unix time of its start."""
        self._reached = 0

    def read(self, path: Path, offset: int) -> Iterator[tuple[int, Event | None]]:
        """Yield (offset of its end, result of `event`) of each complete line after an offset."""
        with os.fdopen(open_to_read(path), "rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    break
                offset += len(line)
                yield offset, self.event(line)

    def event(self, line: bytes) -> Event | None:
        """Return the event of a line; None if hooks do not get it, or the line is incomplete."""
        try:
            values = read_line(line)
            return self._event(values.pop("kind"), values)
        # Incomplete lines and lines of another version must not end the hook's process.
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def _event(self, kind: str, values: dict[str, Any]) -> Event | None:
        if kind == "start":
            return self._start(values)
        at = self._began[values["attempt"]] + values["after"]
        if kind == "step":
            self._reached = values["step"]
            loss, skipped = _number(values.get("loss")), bool(values.get("skipped"))
            return Step(values["step"], at, loss, values["seconds"], skipped)
        if kind == "rollback":
            return RollBack(values["step"], at, values["to"], values["source"])
        if kind == "validation":
            numbers = {name: _number(value) for name, value in values["values"].items()}
            return Validation(values["step"], at, numbers)
        if kind == "save":
            return Save(values["step"], at, values["seconds"], values.get("error", ""))
        if kind == "end":
            return End(values["step"], at, values["code"], values["reason"])
        return None

    def _start(self, values: dict[str, Any]) -> Start | Restart:
        first = not self._began
        # All other lines have their time relative to the start of their attempt.
        self._began[values["attempt"]] = values["at"]
        ranks = values["step"], values["at"], values["world_size"], values["nodes"]
        if first:
            return Start(*ranks)
        cause = values["cause"]
        lost = max(0, self._reached - values["step"])
        return Restart(*ranks, lost, describe_failure(cause) if cause else "")


def _number(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


class RunEventSummary:
    """Summarises the ledger of a run while it grows."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._offset, self._reader = run_dir / LEDGER, 0, RunEventReader()
        self._ahead = deque[Event]()
        """Events that were read, but are later than the time of the last call of `at`."""
        self._began = self._kept = 0.0
        self._seconds = array("d")
        """Seconds of each step (index 0 is step 1); 0 if the present weights do not contain it."""
        self._counts = dict.fromkeys(("attempt", "world_size", "failures", "steps_lost"), 0)

    def at(self, moment: float) -> dict[str, float]:
        """Return attempts, ranks, failures, lost steps and goodput up to a Unix time; {} before the
        run begins. The time must not decrease from call to call."""
        with suppress(OSError):
            for end, event in self._reader.read(self._path, self._offset):
                self._offset = end
                if event:
                    self._ahead.append(event)
        while self._ahead and self._ahead[0].at <= moment:
            self._add(self._ahead.popleft())
        if not self._began:
            return {}
        wall = max(moment - self._began, 0.0)
        return {**self._counts, "goodput": min(1.0, self._kept / wall) if wall else 0.0}

    def _add(self, event: Event) -> None:
        if isinstance(event, Start | Restart):
            self._began = self._began or event.at
            self._counts["attempt"] += 1
            self._counts["world_size"] = event.world_size
        if isinstance(event, Restart):
            self._counts["failures"] += bool(event.cause)
            self._counts["steps_lost"] += event.lost
            self._drop(event.step)
        elif isinstance(event, RollBack):
            self._drop(event.to)
        elif isinstance(event, Step) and not event.skipped:
            self._seconds.extend([0.0] * (event.step - len(self._seconds)))
            self._kept += event.seconds - self._seconds[event.step - 1]
            self._seconds[event.step - 1] = event.seconds

    def _drop(self, last: int) -> None:
        """Subtract the time of steps after `last`, which the present weights do not contain."""
        for index in range(last, len(self._seconds)):
            self._kept -= self._seconds[index]
            self._seconds[index] = 0.0
