"""What one start of training processes wrote to the ledger."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elastic.record.ledger import StartLine
from elastic.record.steps import Steps


class RollbackLine(NamedTuple):
    step: int
    to: int
    """Step whose weights were loaded."""
    source: str
    after_step: int
    """Newest step recorded before the roll-back."""
    line: int


@dataclass
class Attempt:
    """Lines that one start of training processes wrote.

    Times are Unix times on one time line for the whole run. Between attempts in the same boot of
    one machine the monotonic clock counts, else the wall clock, and time never goes back.
    """

    number: int
    start: StartLine
    line: int
    steps: Steps = field(default_factory=Steps)
    saves: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    validations: dict[int, Mapping[str, float | None]] = field(default_factory=dict)
    """Step → means over the validation set after it, None where they were not finite."""
    rollbacks: list[RollbackLine] = field(default_factory=list)
    end: dict[str, Any] | None = None
    phases: dict[str, float] = field(default_factory=dict)
    began: float = 0.0
    """Time of its launch."""
    loaded: float = 0.0
    """Time of its start line."""
    finished: float = 0.0
    """Time of its last line."""
    written: float = 0.0
    """Seconds from its start line to its last line."""
    parent: "Attempt | None" = None
    """Attempt whose state it continues; None for fresh weights, and where none did the loaded
    step."""
    unrecorded: int = 0
    """Steps of the parent that only this attempt's start line proves."""

    @property
    def last_step(self) -> int:
        return self.steps.highest if self.steps else self.start.step

    def settle(self) -> None:
        """Work out what follows from step lines that came in after the lines around them."""
        number, line = self.steps.column("step"), self.steps.column("line")
        self.written = max(self.written, float(self.steps.column("after").max(initial=0.0)))
        self.rollbacks = [
            one._replace(
                after_step=int(number[line < one.line].max(initial=self.start.step)),
            )
            for one in self.rollbacks
        ]
