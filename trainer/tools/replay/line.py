"""The line of a run (see elastic/record/history.py): who did each step, what the ledger says of it,
and from which state it can be computed again. Imports no torch."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from checkpointing.errors import CheckpointError
from checkpointing.format.layout import parse_step
from checkpointing.storage.place import Place
from checkpointing.storage.steps import list_steps, read_state
from elastic.record.history import Attempt, History, LedgerError, StepLine


class StepSpan(NamedTuple):
    """Steps that are computed one after the other."""

    begin: int
    """Step of the state that is loaded; 0: the weights that the run began with."""
    end: int
    """The last one that is computed."""


@dataclass(frozen=True)
class Lineage:
    """The steps that made the newest weights of a run."""

    attempts: Sequence[tuple[Attempt, int]]
    """Who did them, oldest first; each with the newest of its steps that is one of them."""

    @property
    def last(self) -> int:
        """The newest step."""
        return self.attempts[-1][1]

    def attempt_of(self, step: int) -> Attempt:
        """Who did a step.

        Raises:
            LedgerError: the ledger does not say.
        """
        for attempt, newest in self.attempts:
            if attempt.start.step < step <= newest:
                return attempt
        raise LedgerError(
            f"step {step}: the ledger does not say who did it; the run has steps 1 to {self.last}"
        )

    def recorded(self, step: int) -> StepLine | None:
        """What the ledger says of a step; None where it has no line."""
        return next((one for one in self.attempt_of(step).steps if one.step == step), None)

    def stretch(self, step: int, end: int) -> tuple[Attempt, int]:
        """Who did a step, and up to which step, `end` at most, the run had the same recipe."""
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
        """Step after which weights were taken back → step whose weights were loaded."""
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
        """Attempts that may have saved the state of a step: who did it, and who began from it."""
        return {
            attempt.start.attempt
            for attempt, newest in self.attempts
            if attempt.start.step <= step <= newest
        }


def line_of(history: History) -> Lineage:
    """The line of the newest attempt of a run.

    Raises:
        LedgerError: no step is done.
    """
    found = [
        (attempt, history.kept[attempt.number])
        for attempt in history.attempts
        if attempt.number in history.kept
    ]
    if not found[-1][1]:
        raise LedgerError("no step of the run is done yet")
    return Lineage(found)


@dataclass(frozen=True)
class States:
    """What is stored of a run."""

    steps: Sequence[int]
    """Checkpoints of steps on its line, as far as their small files tell."""
    damaged: Sequence[str] = field(default_factory=list)
    """Why others are none, a line each."""


def stored_states(directory: Place, line: Lineage) -> States:
    """Look at the checkpoints of a run, without their tensors. One that another attempt than those
    on the line has computed is left out: its rounding may be another."""
    steps, damaged = [], []
    for path in list_steps(directory):
        step = parse_step(path.name)
        try:
            attempt = read_state(path).get("attempt")
        except CheckpointError as error:
            if path in list_steps(directory):  # else the run has deleted it meanwhile
                damaged.append(str(error))
            continue
        if step is not None and (not attempt or attempt in line.names_of(step)):
            steps.append(step)
    return States(steps, damaged)


def beginning(line: Lineage, stored: Collection[int], step: int) -> int:
    """The newest state before a step from which it can be computed; 0: that of the beginning.

    A roll-back on the way loads a state that must be stored, or be passed on the way itself.
    """
    for begin in sorted((one for one in stored if one < step), reverse=True):
        backs = [to for after, to in line.rollbacks.items() if begin < after < step]
        if all(to >= begin or to in stored for to in backs):
            return begin
    return 0


def span_into(line: Lineage, stored: Collection[int], step: int) -> StepSpan:
    """The steps to compute so that the weights after a step are compared with a save, too: what is
    wrong with moments shows in no step that is computed from them at once."""
    end = min((saved for saved in line.digests if saved >= step), default=line.last)
    return StepSpan(beginning(line, stored, step), end)


def drawn(line: Lineage, stored: Collection[int], steps: Collection[int]) -> list[StepSpan]:
    """The spans of some steps, none of them twice."""
    ends: dict[int, int] = {}
    for begin, end in (span_into(line, stored, step) for step in steps):
        ends[begin] = max(end, ends.get(begin, 0))
    return [StepSpan(*one) for one in sorted(ends.items())]


def draw(line: Lineage, count: int, seed: int) -> list[int]:
    """So many steps of a run, all of them if it has fewer, in order."""
    steps = range(1, line.last + 1)
    return sorted(random.Random(seed).sample(steps, min(count, len(steps))))
