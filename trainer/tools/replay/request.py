"""The request to the ranks of a replay, and their answer. Imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from trainer.tools.replay.lineage import ReplaySpan

REQUEST = "PERDURE_REPLAY"
"""Environment variable with a rank's `ReplayRequest`."""
OUTCOME = "outcome.json"
"""Name of the `ReplayOutcome` file that the ranks leave in the scratch folder."""


@dataclass(frozen=True)
class ReplayRequest:
    """The work of the ranks of a replay. Paths are absolute."""

    run: str
    scratch: str
    device: str
    timeout: float
    """Seconds that a rank waits for another."""
    spans: Sequence[ReplaySpan]
    """Spans to recompute, in order."""
    stored: Sequence[int] = ()
    """Steps of the run's lineage with a checkpoint."""
    data: Sequence[str] = ()
    """Locations of the data sets, in the order of the recipe; empty: those of the recipe."""
    examined: int = 0
    """Step to examine: its loss, norm and digest of gradients are printed. It is the last step of
    the only span. 0: an audit, which compares all steps of the spans, and the weights at saves."""
    why: bool = False
    """Whether to explain the step `examined`, see why.py."""
    secret: str = ""
    """Hexadecimal secret with which the ranks authenticate each other; "" for a single rank."""

    @classmethod
    def from_json(cls, text: str) -> "ReplayRequest":
        values = json.loads(text)
        return cls(**{**values, "spans": [ReplaySpan(*one) for one in values["spans"]]})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class ReplayOutcome:
    """The result of a replay."""

    problems: list[str] = field(default_factory=list)
    """Contradictions between recomputation and ledger."""
    missing: list[str] = field(default_factory=list)
    """Comparisons that were impossible, with the reason."""
    errors: list[str] = field(default_factory=list)
    """Reasons why nothing was recomputed."""

    def problem(self, what: str) -> None:
        self.problems += [what] if what not in self.problems else []

    def miss(self, what: str) -> None:
        self.missing += [what] if what not in self.missing else []
