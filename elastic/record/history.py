"""A ledger, read: the attempts of a run, and the proof that no sequence is lost or used twice.

[Note: line of a run] An attempt goes on from the state that another has reached, its parent, whose
name stands in the start line because it lives in the state. So attempts form a tree. (In ledgers
that name none, the parent is the newest attempt before that did the step loaded.) The *line* of
the newest attempt is its own steps, those of its parent up to the step loaded, and so on: these are
the steps that made the weights, and the sequences of their ranges must be 0, 1, 2, … without a gap
or a repetition. All other steps were computed in vain.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

from elastic.exits import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PAUSED, EXIT_REQUEUE
from elastic.node.files import open_to_read
from elastic.record.ledger import LEDGER, Start
from elastic.record.lines import WrongValueError, read_line

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
    skipped: str
    """What was wrong, if it left the weights alone, see [Note: verdicts] of ledger.py; else ""."""
    line: int
    """Its number in the file."""
    loss: float | None = None
    """NaN if it was not finite; None if the line has none. The same holds for `norm`."""
    norm: float | None = None
    consumed: str | None = None
    """Digest of what the ranks took for it."""


class RollbackLine(NamedTuple):
    """A `rollback` line."""

    step: int
    to: int
    """Step whose weights were loaded."""
    source: str
    after_step: int
    """The newest step recorded before it."""
    line: int


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
    rollbacks: list[RollbackLine] = field(default_factory=list)
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
        """Whether a step is on the line of the newest attempt."""
        return step.step <= self.kept.get(attempt.number, -1)

    def taken_back(self) -> list[tuple[int, int]]:
        """(step that was gone back to, step before the roll-back) of those on the line: what the
        steps between made of the weights is in none of the newest."""
        return [
            (one.to, one.step)
            for attempt in self.attempts
            for one in attempt.rollbacks
            if one.step <= self.kept.get(attempt.number, -1)
        ]

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
        with os.fdopen(open_to_read(path, follow=True), "rb") as file:
            for number, line in enumerate(file, 1):
                _take(line, number, attempts, problems)
    except OSError as error:
        raise LedgerError(f"{path}: {error.strerror}; give the directory of a run") from error
    if not attempts:
        found = f" ({problems[0]})" if problems else ""
        raise LedgerError(
            f"{path}: no attempt has begun{found}; give the directory of a run that has"
        )
    _set_times(attempts)
    problems += _problems(attempts)
    return History(attempts, problems, _kept(attempts))


def _take(line: bytes, number: int, attempts: list[Attempt], problems: list[str]) -> None:
    """One line. One that is torn is left out: if something hangs on it, the numbers tell."""
    try:
        values = read_line(line)
        kind = values.pop("kind")
        if kind == "start":
            start = _start(values)
            attempts.append(Attempt(len(attempts) + 1, start, number, phases=dict(start.phases)))
            return
        name, after = str(values.pop("attempt")), float(values["after"])
        attempt = next((one for one in reversed(attempts) if one.start.attempt == name), None)
        if attempt is None:
            problems.append(f"line {number}: a {kind} of attempt {name}, which has no start")
            return
        if kind == "step":
            first, after_last = map(int, values["sequences"])
            loss = None
            if "loss" in values:
                loss = math.nan if values["loss"] is None else float(values["loss"])
            norm = float.fromhex(values["norm"]) if "norm" in values else None
            why = str(values.get("why") or "no reason") if values.get("skipped") else ""
            attempt.steps.append(
                StepLine(
                    int(values["step"]), first, after_last, float(values["seconds"]), after,
                    why, number, loss, norm, values.get("consumed"),
                )
            )  # fmt: skip
        elif kind == "rollback":
            step, to, source = int(values["step"]), int(values["to"]), str(values["source"])
            attempt.rollbacks.append(RollbackLine(step, to, source, attempt.last_step, number))
        elif kind == "save":
            numbers = {"step": int(values["step"]), "seconds": float(values["seconds"])}
            attempt.saves.append({**values, **numbers, "line": number})
        elif kind in ("notice", "event"):
            attempt.events.append(values)
        elif kind == "phases":
            attempt.phases = {name: float(value) for name, value in values["phases"].items()}
        elif kind == "end":
            numbers = {"code": int(values["code"]), "step": int(values["step"]), "line": number}
            attempt.end = {**values, **numbers, "reason": values["reason"]}
        attempt.finished = max(attempt.finished, after)  # an offset, until times are set
    except WrongValueError as error:
        problems.append(f"line {number}: {error}")
    except (ValueError, KeyError, TypeError, AttributeError):
        return


def last_start(path: str | Path, *, trained: bool) -> Start | None:
    """The newest start line of a ledger, without reading all of it; None if there is none.

    Args:
        path: of the file, or of the run directory.
        trained: pass over attempts after the newest step line, as they did no step.
    """
    path = Path(path)
    path = path / LEDGER if path.is_dir() else path
    try:
        with (
            os.fdopen(open_to_read(path, follow=True), "rb") as file,
            mmap(file.fileno(), 0, access=ACCESS_READ) as data,
        ):
            end = data.rfind(b'{"kind":"step",') if trained else len(data)
            begin = data.rfind(b'{"kind":"start",', 0, max(end, 0))
            if begin < 0:
                return None
            data.seek(begin)
            values = read_line(data.readline())
    except (OSError, ValueError):  # there is none; it is empty; its last line is torn
        return None
    return _start(values)


def _start(values: Mapping[str, Any]) -> Start:
    """A start line as a `Start`.

    Raises:
        TypeError, ValueError: it is none.
    """
    known = {item.name for item in fields(Start)}
    start = Start(**{name: value for name, value in values.items() if name in known})
    if not all(len(pair) == 2 for pair in start.changed.values()):
        raise ValueError("changed: not pairs")
    return start


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
        earlier = attempts[: attempt.number - 1]
        yield from _link(attempt, earlier)
        yield from _gaps(attempt)
        yield from _verdicts(attempt)


def _link(attempt: Attempt, earlier: list[Attempt]) -> Iterator[str]:
    """Set the parent of `attempt`: who did the step that it loaded."""
    start = attempt.start
    where = _name(attempt)
    if start.step == 0:
        if start.sequences != 0:
            yield (
                f"{where} began with fresh weights at sequence {start.sequences}: "
                f"{_between(0, start.sequences)}"
            )
        return
    parent = _guessed_parent(attempt, earlier)
    if start.parent:
        parent = next((one for one in earlier if one.start.attempt == start.parent), None)
        if parent is None:
            yield (
                f"{where} loaded step {start.step} of attempt {start.parent}, which has no start "
                "line before it"
            )
            return
        if start.step < parent.start.step:
            yield (
                f"{where} loaded step {start.step} of attempt {parent.number}, which began after "
                f"that step, at step {parent.start.step}"
            )
            return
    if parent is None or (
        start.step > parent.last_step and not _may_be_unrecorded(parent, attempt)
    ):
        reached = max((other.last_step for other in earlier), default=0)
        yield (
            f"{where} loaded step {start.step}, which nobody did: the record ends at step "
            f"{parent.last_step if parent else reached}"
        )
        return
    attempt.parent = parent
    if start.data and parent.start.data and start.data != parent.start.data:
        yield f"{where} goes on from attempt {parent.number}, whose data has another fingerprint"
    if start.step > parent.last_step:
        attempt.unrecorded = start.step - parent.last_step
        return
    cursor = _cursor(parent, start.step)
    if cursor is not None and cursor != start.sequences:
        yield (
            f"{where} went on after step {start.step} from sequence {start.sequences}, but that "
            f"step ended before {cursor}: {_between(cursor, start.sequences)}"
        )


def _guessed_parent(attempt: Attempt, earlier: list[Attempt]) -> Attempt | None:
    """Who did the step that `attempt` loaded, where its start line does not say."""
    start = attempt.start
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
    return parent


def _cursor(attempt: Attempt, number: int) -> int | None:
    """Where a step of an attempt ended, or the one it loaded; None if it has no line."""
    if number == attempt.start.step:
        return attempt.start.sequences
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


def _verdicts(attempt: Attempt) -> Iterator[str]:
    """What step lines lack that they must have, and marks that contradict numbers or counters."""
    start, counted = attempt.start, attempt.start.skipped is not None
    for step in attempt.steps:
        where = f"step {step.step} (attempt {attempt.number}, line {step.line})"
        missing = [name for name in start.records if getattr(step, name, None) is None]
        if missing:
            yield f"{where} has no {' and no '.join(missing)}, which every step of it records"
            continue
        numbers = {"loss": step.loss, "norm": step.norm}
        bad = [name for name, value in numbers.items() if value is not None and not _finite(value)]
        if bad and not step.skipped:
            yield f"{where}: {bad[0]} is {numbers[bad[0]]}, but the step is not marked as skipped"
        elif counted and step.skipped and step.skipped not in (bad or ["weights"]):
            told = ", ".join(f"{name} is {value}" for name, value in numbers.items())
            yield f"{where} is marked as skipped for its {step.skipped}, but {told}"
    for one in attempt.rollbacks:
        where = f"the roll-back of attempt {attempt.number} (line {one.line})"
        if one.step != one.after_step or not 0 <= one.to < one.step:
            yield (
                f"{where} goes from step {one.step} to step {one.to}, but stands after step "
                f"{one.after_step}"
            )
    yield from _counters(attempt)


def _counters(attempt: Attempt) -> Iterator[str]:
    """Where the counters of a start, a save or an end are not what the lines up to there say."""
    start, parent = attempt.start, attempt.parent
    for name, what in (("skipped", "steps skipped"), ("rollbacks", "roll-backs")):
        began, before = getattr(start, name), None
        if began is None:
            continue
        if start.step == 0:
            before = 0
        elif parent and (base := getattr(parent.start, name)) is not None:
            before = base + _count(parent, name, start.step, attempt.line)
        if before is not None and not 0 <= began - before <= attempt.unrecorded:
            yield (
                f"{_name(attempt)} loaded a state with {began} {what}, but the lines before "
                f"it have {before}"
            )
        for line in filter(None, [*attempt.saves, attempt.end]):
            expected = began + _count(attempt, name, line["step"], line["line"])
            if line.get(name) != expected:
                yield (
                    f"{'the end' if line is attempt.end else 'a save'} of attempt {attempt.number} "
                    f"at step {line['step']} counts {line.get(name)} {what}, but the lines up to "
                    f"there have {expected}"
                )
    last = attempt.last_step
    reached = [("saved", save["step"]) for save in attempt.saves if save.get("ok")]
    reached += [("ended after", attempt.end["step"])] if attempt.end else []
    for what, step in [one for one in reached if one[1] > last][:1]:
        yield f"attempt {attempt.number} {what} step {step}, but its record ends at step {last}"


def _count(attempt: Attempt, name: str, step: int, line: int) -> int:
    """What a counter of an attempt was when `line` was written, for the state of `step`."""
    marked: list[StepLine] | list[RollbackLine] = attempt.rollbacks
    if name == "skipped":
        marked = [one for one in attempt.steps if one.skipped]
    return sum(one.step <= step and one.line < line for one in marked)


def _finite(value: float) -> bool:
    return abs(value) < math.inf  # False for NaN too


def _name(attempt: Attempt) -> str:
    return f"attempt {attempt.number} (line {attempt.line})"


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
