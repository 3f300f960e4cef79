"""The lines of a ledger that one start of training processes wrote."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elastic.record.ledger import StartLine
from elastic.record.steps import StepLines


class RollbackLine(NamedTuple):
    """A line that records a roll-back."""

    step: int
    """Step after which the run rolled back."""
    to: int
    """Step whose weights were loaded."""
    source: str
    after_step: int
    """Newest step recorded before the roll-back."""
    line: int


@dataclass
class Attempt:
    """An attempt: one start of training processes, with the lines that it wrote to the ledger. Its
    Unix times are never before those of earlier attempts: intervals between attempts on one machine
    that was not restarted are measured by its monotonic clock, others by the wall clock, where an
    earlier time is raised."""

    number: int
    """Number of the attempt in the ledger, from 1."""
    start: StartLine
    line: int
    steps: StepLines = field(default_factory=StepLines)
    saves: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    validations: dict[int, Mapping[str, float | None]] = field(default_factory=dict)
    """Step → name → mean over the validation set after the step; None: the mean was not finite."""
    rollbacks: list[RollbackLine] = field(default_factory=list)
    end: dict[str, Any] | None = None
    phases: dict[str, float] = field(default_factory=dict)
    began: float = 0.0
    """Time of the launch."""
    loaded: float = 0.0
    """Time of the start line."""
    finished: float = 0.0
    """Time of the last line."""
    written: float = 0.0
    """Seconds from the start line to the last line."""
    parent: "Attempt | None" = None
    """Attempt whose state was loaded; None: fresh weights, or no attempt computed the loaded
    step."""
    unrecorded: int = 0
    """Steps of the parent without a step line, proved only by the start line of this attempt."""

    @property
    def last_step(self) -> int:
        return self.steps.highest if self.steps else self.start.step

    def settle(self) -> None:
        """Compute `written` and `RollbackLine.after_step`, once all step lines have been read."""
        number, line = self.steps.column("step"), self.steps.column("line")
        self.written = max(self.written, float(self.steps.column("after").max(initial=0.0)))
        self.rollbacks = [
            one._replace(after_step=int(number[line < one.line].max(initial=self.start.step)))
            for one in self.rollbacks
        ]
