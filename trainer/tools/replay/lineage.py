"""What a replay computes: the lineage of a run's newest attempt, which are the attempts and steps
that led to the newest weights, see [Note: lineage] in elastic/record/history.py; and the request to
its ranks, with their answer. Imports no torch."""

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from checkpointing.errors import CheckpointError
from checkpointing.format.layout import parse_step
from checkpointing.storage.place import StoragePlace
from checkpointing.storage.steps import list_steps, read_state
from elastic.record.history import LedgerError, LedgerStepLine, RecordedAttempt, RecordHistory


class ReplaySpan(NamedTuple):
    """A range of steps that are recomputed in one go."""

    begin: int
    """Step of the loaded state; 0: the initial weights of the run."""
    end: int


@dataclass(frozen=True)
class ReplayLineage:
    """The attempts and steps that led to the newest weights of a run."""

    attempts: Sequence[tuple[RecordedAttempt, int]]
    """The attempts of the lineage, oldest first, each with its newest step in the lineage."""

    @property
    def last(self) -> int:
        return self.attempts[-1][1]

    def attempt_of(self, step: int) -> RecordedAttempt:
        """Return the attempt that computed a step. Raises LedgerError if none did."""
        for attempt, newest in self.attempts:
            if attempt.start.step < step <= newest:
                return attempt
        raise LedgerError(
            f"step {step}: no attempt in the ledger computed it; the run has steps 1 to {self.last}"
        )

    def recorded(self, step: int) -> LedgerStepLine | None:
        """Ledger line of a step; None if it is missing."""
        return next((one for one in self.attempt_of(step).steps if one.step == step), None)

    def stretch(self, step: int, end: int) -> tuple[RecordedAttempt, int]:
        """Return the attempt that computed a step, and the last step, at most `end`, with the same
        recipe."""
        first, until = self.attempt_of(step), step
        for attempt, newest in self.attempts:
            if newest < step:
                continue
            if attempt.start.recipe != first.start.recipe:
                break
            until = newest
        return first, min(until, end)

    @property
    def rollbacks(self) -> dict[int, int]:
        """Step after which weights were rolled back → step whose weights were loaded."""
        return {
            one.step: one.to
            for attempt, newest in self.attempts
            for one in attempt.rollbacks
            if one.step <= newest
        }

    @property
    def digests(self) -> dict[int, tuple[str, str]]:
        """Saved step → digests of its weights and of its moments."""
        return {
            save["step"]: (str(save["weights"]), str(save["moments"]))
            for attempt, newest in self.attempts
            for save in attempt.saves
            if save["step"] <= newest
            and save.get("ok")
            and save.get("weights")
            and save.get("moments")
        }

    def names_of(self, step: int) -> set[str]:
        """Names of the attempts that may have saved the state of a step: the attempt that computed
        it, and those that resumed from it."""
        return {
            attempt.start.attempt
            for attempt, newest in self.attempts
            if attempt.start.step <= step <= newest
        }


def newest_lineage(history: RecordHistory) -> ReplayLineage:
    """Return the lineage of the newest attempt of a run. Raises LedgerError if no step is done."""
    attempts = [
        (attempt, history.kept[attempt.number])
        for attempt in history.attempts
        if attempt.number in history.kept
    ]
    if not attempts[-1][1]:
        raise LedgerError("no step of the run is done yet")
    return ReplayLineage(attempts)


@dataclass(frozen=True)
class _ReplayStates:
    """The checkpoints of a run: those from which a replay can begin, and those it cannot use."""

    steps: Sequence[int]
    """Steps of the lineage with a checkpoint; its tensors may still be damaged."""
    damaged: Sequence[str]
    """Why checkpoints cannot be read, a line each."""
    aside: Mapping[int, str]
    """Step → attempt outside the lineage, whose checkpoint may have other rounding."""


def stored_states(directory: StoragePlace, lineage: ReplayLineage) -> _ReplayStates:
    """Find the checkpoints of a run, without reading tensors."""
    steps, damaged, aside = [], [], dict[int, str]()
    for path in list_steps(directory):
        step = parse_step(path.name)
        try:
            attempt = read_state(path).get("attempt")
        except CheckpointError as error:
            if path in list_steps(directory):  # else the run has deleted the checkpoint meanwhile
                damaged.append(str(error))
            continue
        if step is not None and (not attempt or attempt in lineage.names_of(step)):
            steps.append(step)
        elif step is not None:
            aside[step] = str(attempt)
    return _ReplayStates(steps, damaged, aside)


def beginning(lineage: ReplayLineage, stored: Collection[int], step: int) -> int:
    """Return the step of the newest state from which `step` can be recomputed; 0: the initial
    weights. `stored`: steps that have a checkpoint. A roll-back in between returns to a state that
    must have a checkpoint, or that the replay itself computes."""
    for begin in sorted((one for one in stored if one < step), reverse=True):
        backs = [to for after, to in lineage.rollbacks.items() if begin < after < step]
        if all(to >= begin or to in stored for to in backs):
            return begin
    return 0


def _span_into(lineage: ReplayLineage, stored: Collection[int], step: int) -> ReplaySpan:
    """Return the span to recompute in order to check `step`. It ends at the next step that has
    digests in the ledger or a checkpoint (`stored`), else at the last step of the lineage. The
    state at its end shows wrong moments of the optimizer, which the loss of `step` may not."""
    end = min((one for one in {*lineage.digests, *stored} if one >= step), default=lineage.last)
    return ReplaySpan(beginning(lineage, stored, step), end)


def drawn(
    lineage: ReplayLineage, stored: Collection[int], steps: Collection[int]
) -> list[ReplaySpan]:
    """Return disjoint spans that check `steps`, see `_span_into`."""
    ends: dict[int, int] = {}
    for begin, end in (_span_into(lineage, stored, step) for step in steps):
        ends[begin] = max(end, ends.get(begin, 0))
    return [ReplaySpan(*one) for one in sorted(ends.items())]


def draw(lineage: ReplayLineage, count: int, seed: int) -> list[int]:
    """Draw `count` steps of a run, or all if it has fewer, in ascending order."""
    steps = range(1, lineage.last + 1)
    return sorted(random.Random(seed).sample(steps, min(count, len(steps))))


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
