"""What a hook is called with: the lines of the ledger, as values. Imports no torch."""

import math
from dataclasses import dataclass
from typing import Any

from elastic.record.history import describe_failure
from elastic.record.lines import read_line


@dataclass(frozen=True)
class Start:
    """The run begins, at `step` 0. `at` is Unix time, here and below."""

    step: int
    at: float
    world_size: int
    nodes: int


@dataclass(frozen=True)
class Restart:
    """The run goes on after `step`: ranks were started again, or somebody launched it again."""

    step: int
    at: float
    world_size: int
    nodes: int
    lost: int
    """Steps that were done and are done again."""
    cause: str
    """The failure that made it necessary; empty if it was none."""


@dataclass(frozen=True)
class Step:
    """An optimizer step is done."""

    step: int
    at: float
    loss: float
    """Not finite in a step that went wrong."""
    seconds: float
    skipped: bool
    """It left the weights alone."""


@dataclass(frozen=True)
class RollBack:
    """After `step` the weights were taken back to those of an earlier step. The data goes on."""

    step: int
    at: float
    to: int
    """Step whose weights were loaded."""
    source: str
    """Where they were: "memory" or "storage"."""


@dataclass(frozen=True)
class Validation:
    """The weights after `step` were validated."""

    step: int
    at: float
    values: dict[str, float]
    """By the names of docs/metrics.md."""


@dataclass(frozen=True)
class Save:
    """A checkpoint of `step` has ended."""

    step: int
    at: float
    seconds: float
    error: str
    """Why there is none; empty if it is there."""


@dataclass(frozen=True)
class End:
    """The ranks end after `step`, by themselves: a rank that is killed leaves none."""

    step: int
    at: float
    code: int
    """Exit code of the ranks."""
    reason: str


Event = Start | Restart | Step | RollBack | Validation | Save | End


class Reader:
    """Makes events of the lines of a ledger, which it is given in their order."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        """Attempt → Unix time of its start."""
        self._reached = 0

    def event(self, line: bytes) -> Event | None:
        """That of a line; None for one that is torn, or tells of nothing here."""
        try:
            values = read_line(line)
            return self._event(values.pop("kind"), values)
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
            found = {name: _number(value) for name, value in values["values"].items()}
            return Validation(values["step"], at, found)
        if kind == "save":
            return Save(values["step"], at, values["seconds"], values.get("error", ""))
        if kind == "end":
            return End(values["step"], at, values["code"], values["reason"])
        return None

    def _start(self, values: dict[str, Any]) -> Start | Restart:
        first = not self._began
        self._began[values["attempt"]] = values["at"]
        ranks = values["step"], values["at"], values["world_size"], values["nodes"]
        if first:
            return Start(*ranks)
        cause = values["cause"]
        lost = max(0, self._reached - values["step"])
        return Restart(*ranks, lost, describe_failure(cause) if cause else "")


def _number(value: float | str | None) -> float:
    return math.nan if value is None else float(value)
