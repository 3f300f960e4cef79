"""A ledger, read: the attempts of a run, and the proof that no sequence is lost or used twice.

[Note: line of a run] An attempt goes on from the state that another has reached, mostly the one
before it, so attempts form a tree. The *line* of the newest attempt is its own steps, those of the
attempt that it goes on from up to the step loaded, and so on: these are the steps that made the
weights, and the sequences of their ranges must be 0, 1, 2, … without a gap or a repetition. All
other steps were computed in vain.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from elastic.exits import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PAUSED, EXIT_REQUEUE
from elastic.record.ledger import LEDGER, Start

UNRECORDED_STEPS = 3
"""A process that is killed may have done a step and not have written its line."""
UNRECORDED_SECONDS = 60.0
"""So much of what was written a machine that crashes may lose: Linux flushes pages after 30 s."""
PLANNED = (EXIT_DONE, EXIT_REQUEUE, EXIT_PAUSED, EXIT_INTERRUPTED)


class LedgerError(Exception):
    """There is no ledger to read."""


class StepLine(NamedTuple):
    """A `step` line."""

    step: int
    first: int
    after_last: int
    seconds: float
    after: float
    """When it was done: seconds since the start line."""
    skipped: bool
    line: int
    """Its number in the file."""
    consumed: str | None = None
    """Digest of what the ranks took for it."""


@dataclass
class Attempt:
    """What one start of training processes wrote.

    Times named here are Unix times on one time line for the whole run: between attempts on one boot
    of one machine the monotonic clock counts, else the wall clock, and time never goes back.
    """

    number: int
    """From 1."""
    start: Start
    line: int
    """Number of the start line in the ledger."""
    steps: list[StepLine] = field(default_factory=list)
    saves: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    """Notices too."""
    end: dict[str, Any] | None = None
    phases: dict[str, float] = field(default_factory=dict)
    began: float = 0.0
    """Its launch."""
    loaded: float = 0.0
    """Its start line."""
    finished: float = 0.0
    """Its last line."""
    parent: "Attempt | None" = None
    """The attempt whose state it goes on from; None for fresh weights, and where nobody did it."""
    unrecorded: int = 0
    """Steps of the parent that only this start tells of."""

    @property
    def last_step(self) -> int:
        """Highest step reached, as far as recorded."""
        return max((step.step for step in self.steps), default=self.start.step)


@dataclass(frozen=True)
class History:
    """A ledger, read."""

    attempts: list[Attempt]
    problems: list[str]
    """What contradicts that every sequence was consumed exactly once; empty: nothing."""
    kept: dict[int, int]
    """Number of an attempt on the line of the newest → its newest step that is on that line."""

    @property
    def step(self) -> int:
        """Steps done."""
        return self.attempts[-1].last_step

    @property
    def sequences(self) -> int:
        """Sequences consumed."""
        newest = self.attempts[-1]
        return newest.steps[-1].after_last if newest.steps else newest.start.sequences

    @property
    def unrecorded(self) -> int:
        """Steps that left no line of their own; the starts that follow prove their sequences."""
        return sum(a.unrecorded for a in self.attempts if a.number in self.kept)

    def survives(self, attempt: Attempt, step: StepLine) -> bool:
        """Whether the result of a step is in the newest weights."""
        return step.step <= self.kept.get(attempt.number, -1)

    def failed(self, attempt: Attempt) -> str | None:
        """Why an attempt ended, if by a failure."""
        following = self.next(attempt)
        if following and following.start.cause is not None:
            return describe_failure(following.start.cause)
        if attempt.end:
            return None if attempt.end["code"] in PLANNED else str(attempt.end["reason"])
        return "died without a word" if following else None

    def next(self, attempt: Attempt) -> Attempt | None:
        """The attempt after this one in time."""
        return self.attempts[attempt.number] if attempt.number < len(self.attempts) else None

    def summary(self) -> str:
        """One line for a ledger without problems."""
        return (
            f"every sequence exactly once: {self.sequences} sequences in {self.step} steps over "
            f"{len(self.attempts)} attempts"
        )


def describe_failure(cause: Mapping[str, Any]) -> str:
    """Who and why, as far as it is known."""
    rank, node = cause.get("rank"), cause.get("node")
    who = f"rank {rank}" if rank is not None else f"node {node}" if node else ""
    return ": ".join(filter(None, [who, str(cause.get("why", "failed"))]))


def read_history(path: str | Path) -> History:
    """Read a ledger.

    Args:
        path: of the file, or of the run directory.

    Raises:
        LedgerError: there is none, or no attempt in it has begun.
    """
    path = Path(path)
    path = path / LEDGER if path.is_dir() else path
    attempts: list[Attempt] = []
    problems: list[str] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                _take(line, number, attempts, problems)
    except OSError as error:
        raise LedgerError(f"{path}: {error.strerror}; give the directory of a run") from error
    if not attempts:
        raise LedgerError(f"{path}: no attempt has begun; give the directory of a run that has")
    _set_times(attempts)
    problems += _problems(attempts)
    return History(attempts, problems, _kept(attempts))


def _take(line: bytes, number: int, attempts: list[Attempt], problems: list[str]) -> None:
    """One line. One that is torn is left out: if something hangs on it, the numbers tell."""
    try:
        values = json.loads(line)
        kind = values.pop("kind")
        if kind == "start":
            known = {item.name for item in fields(Start)}
            start = Start(**{name: value for name, value in values.items() if name in known})
            attempts.append(Attempt(len(attempts) + 1, start, number, phases=dict(start.phases)))
            return
        name, after = str(values.pop("attempt")), float(values["after"])
        attempt = next((one for one in reversed(attempts) if one.start.attempt == name), None)
        if attempt is None:
            problems.append(f"line {number}: a {kind} of attempt {name}, which has no start")
            return
        if kind == "step":
            first, after_last = map(int, values["sequences"])
            seconds, skipped = float(values["seconds"]), bool(values.get("skipped"))
            done, consumed = int(values["step"]), values.get("consumed")
            attempt.steps.append(
                StepLine(done, first, after_last, seconds, after, skipped, number, consumed)
            )
        elif kind == "save":
            attempt.saves.append({**values, "seconds": float(values["seconds"])})
        elif kind in ("notice", "event"):
            attempt.events.append(values)
        elif kind == "phases":
            attempt.phases = {name: float(value) for name, value in values["phases"].items()}
        elif kind == "end":
            attempt.end = {**values, "code": int(values["code"]), "reason": values["reason"]}
        attempt.finished = max(attempt.finished, after)  # an offset, until times are set
    except (ValueError, KeyError, TypeError, AttributeError):
        return


def _set_times(attempts: list[Attempt]) -> None:
    before: Attempt | None = None
    for attempt in attempts:
        start = attempt.start
        attempt.loaded = start.at
        if before and start.boot and start.boot == before.start.boot:
            attempt.loaded = before.loaded + start.monotonic - before.start.monotonic
            # Who was cut off may have gone on for a while beside the next attempt.
            before.finished = min(before.finished, attempt.loaded)
        attempt.began = attempt.loaded - sum(start.phases.values())
        if before:
            attempt.loaded = max(attempt.loaded, before.finished)
            attempt.began = max(attempt.began, before.finished)
        attempt.finished = attempt.loaded + attempt.finished
        before = attempt


# --- the proof -------------------------------------------------------------------------------


def _problems(attempts: list[Attempt]) -> Iterator[str]:
    """Link every attempt to its parent, and name all that does not fit together."""
    for attempt in attempts:
        yield from _link(attempt, attempts[: attempt.number - 1])
        yield from _gaps(attempt)


def _link(attempt: Attempt, earlier: list[Attempt]) -> Iterator[str]:
    """Set the parent of `attempt`: who did the step that it loaded."""
    start = attempt.start
    where = f"attempt {attempt.number} (line {attempt.line})"
    if start.step == 0:
        if start.sequences != 0:
            yield (
                f"{where} began with fresh weights at sequence {start.sequences}: "
                f"{_between(0, start.sequences)}"
            )
        return
    parent = earlier[-1] if earlier else None
    while parent and start.step <= parent.start.step:
        parent = parent.parent
    if not (parent and start.step <= parent.last_step):
        # Beyond the record of the attempt before: its last lines may be lost. Or the state comes
        # from an attempt that was thought to be lost, whose checkpoint has turned up.
        torn = parent is not None and _may_be_unrecorded(parent, attempt)
        if not torn or start.source != "memory":
            others = (other for other in reversed(earlier) if _cursor(other, start.step))
            parent = next(others, parent if torn else None)
    if parent is None:
        reached = max((other.last_step for other in earlier), default=0)
        yield (
            f"{where} loaded step {start.step}, which nobody did: the record ends at step {reached}"
        )
        return
    attempt.parent = parent
    if start.step > parent.last_step:
        attempt.unrecorded = start.step - parent.last_step
        return
    cursor = _cursor(parent, start.step)
    if cursor is not None and cursor != start.sequences:
        yield (
            f"{where} went on after step {start.step} from sequence {start.sequences}, but that "
            f"step ended before {cursor}: {_between(cursor, start.sequences)}"
        )


def _cursor(attempt: Attempt, number: int) -> int | None:
    """Where a step of an attempt ended; None if it has no line."""
    return next((step.after_last for step in attempt.steps if step.step == number), None)


def _may_be_unrecorded(parent: Attempt, attempt: Attempt) -> bool:
    """Whether the steps that `attempt` loaded beyond what `parent` recorded were lost with the last
    lines: few enough, and the cursor is where they would have left it."""
    missing = attempt.start.step - parent.last_step
    cursor = parent.steps[-1].after_last if parent.steps else parent.start.sequences
    if attempt.start.sequences - cursor != missing * parent.start.global_batch:
        return False
    allowed: float = UNRECORDED_STEPS
    if parent.steps and parent.start.boot != attempt.start.boot:
        seconds = sum(step.seconds for step in parent.steps) / len(parent.steps)
        allowed = max(allowed, UNRECORDED_SECONDS / seconds if seconds else math.inf)
    return missing <= allowed


def _gaps(attempt: Attempt) -> Iterator[str]:
    """What does not follow from the line before, inside an attempt."""
    number, cursor = attempt.start.step, attempt.start.sequences
    for step in attempt.steps:
        where = f"step {step.step} (attempt {attempt.number}, line {step.line})"
        if step.step <= number:
            yield f"{where} is recorded after step {number}: it was done twice"
        elif step.step > number + 1:
            missing = f"{number + 1} to {step.step - 1}" if step.step > number + 2 else number + 1
            yield f"{where} follows step {number}: no record of {missing}"
        elif step.first != cursor:
            fate = _between(cursor, step.first)
            yield f"{where} begins at sequence {step.first}, not {cursor}: {fate}"
        if step.after_last - step.first != attempt.start.global_batch:
            yield (
                f"{where} consumed {step.after_last - step.first} sequences, but the global batch "
                f"is {attempt.start.global_batch}"
            )
        number, cursor = step.step, step.after_last


def _between(expected: int, found: int) -> str:
    low, high = sorted((expected, found))
    fate = "never consumed" if found > expected else "consumed twice"
    return f"sequences {low} to {high - 1} are {fate}"


def _kept(attempts: list[Attempt]) -> dict[int, int]:
    """The line of the newest attempt."""
    kept: dict[int, int] = {}
    attempt: Attempt | None = attempts[-1]
    newest = attempts[-1].last_step
    while attempt:
        kept[attempt.number] = newest
        newest, attempt = attempt.start.step, attempt.parent
    return kept
