"""What the ranks of a replay are asked for, and what they answer. Imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from trainer.tools.replay.line import StepSpan

REQUEST = "PERDURE_REPLAY"
"""Environment variable of a rank: its `Request`."""
OUTCOME = "outcome.json"
"""What the ranks leave in the scratch folder: an `ReplayOutcome`."""


@dataclass(frozen=True)
class Request:
    """What a replay is asked for."""

    run: str
    """Directory of the run, absolute."""
    scratch: str
    """Folder of this replay."""
    device: str
    """cpu or cuda."""
    timeout: float
    """Seconds that a rank waits for another."""
    spans: Sequence[StepSpan]
    """To be computed, in order."""
    stored: Sequence[int] = ()
    """Steps of the run's line of which there are checkpoints."""
    data: Sequence[str] = ()
    """Where the data sets lie now, in the order of the recipe; empty: where the recipe says."""
    look_at: int = 0
    """Step, the last of the only span, whose gradients are told; it changes no weights. 0: an
    audit, in which all steps of the spans are compared, and weights at each save."""
    why: bool = False
    """Explain that step."""
    secret: str = ""
    """By which ranks know each other, hexadecimal; "" for a single one."""

    @classmethod
    def from_json(cls, text: str) -> "Request":
        """From what `to_json` gave."""
        values = json.loads(text)
        return cls(**{**values, "spans": [StepSpan(*one) for one in values["spans"]]})

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))


@dataclass
class ReplayOutcome:
    """How it went."""

    problems: list[str] = field(default_factory=list)
    """Contradictions between what was computed and what the run says."""
    missing: list[str] = field(default_factory=list)
    """What could not be compared, and why."""
    errors: list[str] = field(default_factory=list)
    """Why nothing was computed."""

    def problem(self, what: str) -> None:
        """Add a contradiction, once."""
        self.problems += [what] if what not in self.problems else []

    def miss(self, what: str) -> None:
        """Add what could not be compared, once."""
        self.missing += [what] if what not in self.missing else []
