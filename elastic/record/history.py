"""A ledger as the history of a run, and the proof that no sequence is lost or used twice.

[Note: line of a run] An attempt continues from a state that another attempt, its parent, has
reached. The state holds the parent's name, and the start line repeats it. So attempts form a tree.
(In ledgers without these names, the parent is the newest earlier attempt that did the loaded step.)
The *line* of the newest attempt is its own steps, those of its parent up to the loaded step, and so
on: the steps that made the weights. The sequences of their ranges must be 0, 1, 2, … without a gap
or repetition. All other steps were computed in vain.
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
from elastic.record.ledger import LEDGER, StartLine
from elastic.record.lines import WrongValueError, read_line

UNRECORDED_STEPS = 3
"""Steps that a killed process may have done without writing their lines."""
UNRECORDED_SECONDS = 60.0
"""Seconds of written lines that a crash of the machine may lose: Linux flushes pages after 30 s."""
PLANNED = (EXIT_DONE, EXIT_REQUEUE, EXIT_PAUSED, EXIT_INTERRUPTED)


class LedgerError(Exception):
    """There is no ledger to read."""


class StepLine(NamedTuple):
    step: int
    first: int
    after_last: int
    seconds: float
    after: float
    """Seconds from the start line to the end of the step."""
    skipped: str
    """Why the step left the weights alone, see ledger.py [Note: verdicts]; "" if it did not."""
    line: int
    loss: float | None = None
    """NaN: not finite; None: the line has none. The same holds for `norm`."""
    norm: float | None = None
    consumed: str | None = None
    """Digest of the sequences that the ranks consumed."""


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
    steps: list[StepLine] = field(default_factory=list)
    saves: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    rollbacks: list[RollbackLine] = field(default_factory=list)
    end: dict[str, Any] | None = None
    phases: dict[str, float] = field(default_factory=dict)
    began: float = 0.0
    """Time of its launch."""
    loaded: float = 0.0
    """Time of its start line."""
    finished: float = 0.0
    """Time of its last line."""
    parent: "Attempt | None" = None
    """Attempt whose state it continues; None for fresh weights, and where none did the loaded
    step."""
    unrecorded: int = 0
    """Steps of the parent that only this attempt's start line proves."""

    @property
    def last_step(self) -> int:
        return max((step.step for step in self.steps), default=self.start.step)


@dataclass(frozen=True)
class History:
    """All attempts of a ledger, and what contradicts the proof."""

    attempts: list[Attempt]
    problems: list[str]
    """Contradictions to the claim that every sequence was consumed exactly once."""
    kept: dict[int, int]
    """Number of an attempt on the newest attempt's line → its last step on that line."""

    @property
    def step(self) -> int:
        return self.attempts[-1].last_step

    @property
    def sequences(self) -> int:
        newest = self.attempts[-1]
        return newest.steps[-1].after_last if newest.steps else newest.start.sequences

    @property
    def unrecorded(self) -> int:
        """Steps on the line without a line of their own; later starts prove their sequences."""
        return sum(a.unrecorded for a in self.attempts if a.number in self.kept)

    def survives(self, attempt: Attempt, step: StepLine) -> bool:
        """Whether a step is on the line of the newest attempt."""
        return step.step <= self.kept.get(attempt.number, -1)

    def taken_back(self) -> list[tuple[int, int]]:
        """(step loaded, step before the roll-back) of the roll-backs on the line. The newest
        weights hold nothing of the steps between."""
        return [
            (item.to, item.step)
            for attempt in self.attempts
            for item in attempt.rollbacks
            if item.step <= self.kept.get(attempt.number, -1)
        ]

    def failed(self, attempt: Attempt) -> str | None:
        """Why an attempt failed; None if it did not."""
        following = self.next(attempt)
        if following and following.start.cause is not None:
            return describe_failure(following.start.cause)
        if attempt.end:
            return None if attempt.end["code"] in PLANNED else str(attempt.end["reason"])
        return "died without a word" if following else None

    def next(self, attempt: Attempt) -> Attempt | None:
        return self.attempts[attempt.number] if attempt.number < len(self.attempts) else None

    def summary(self) -> str:
        """One line for a ledger without problems."""
        return (
            f"every sequence exactly once: {self.sequences} sequences in {self.step} steps over "
            f"{len(self.attempts)} attempts"
        )


def describe_failure(cause: Mapping[str, Any]) -> str:
    """The rank or node that failed, and why, as far as known."""
    rank, node = cause.get("rank"), cause.get("node")
    culprit = f"rank {rank}" if rank is not None else f"node {node}" if node else ""
    return ": ".join(filter(None, [culprit, str(cause.get("why", "failed"))]))


def read_history(path: str | Path) -> History:
    """Read a ledger.

    Args:
        path: of the file, or of the run directory.

    Raises:
        LedgerError: there is no ledger, or no attempt in it has begun.
    """
    path = Path(path)
    path = path / LEDGER if path.is_dir() else path
    attempts: list[Attempt] = []
    problems: list[str] = []
    try:
        with os.fdopen(open_to_read(path, follow=True), "rb") as file:
            for number, line in enumerate(file, 1):
                _add_line(line, number, attempts, problems)
    except OSError as error:
        raise LedgerError(f"{path}: {error.strerror}; give the directory of a run") from error
    if not attempts:
        problem = f" ({problems[0]})" if problems else ""
        raise LedgerError(
            f"{path}: no attempt has begun{problem}; give the directory of a run that has"
        )
    _set_times(attempts)
    problems += _problems(attempts)
    return History(attempts, problems, _kept(attempts))


def _add_line(line: bytes, number: int, attempts: list[Attempt], problems: list[str]) -> None:
    """Add one line to its attempt. A torn line is left out; counters show if it matters."""
    try:
        values = read_line(line)
        kind = values.pop("kind")
        if kind == "start":
            start = _start(values)
            attempts.append(Attempt(len(attempts) + 1, start, number, phases=dict(start.phases)))
            return
        name, after = str(values.pop("attempt")), float(values["after"])
        attempt = next((item for item in reversed(attempts) if item.start.attempt == name), None)
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
        # seconds since the start line, until `_set_times`
        attempt.finished = max(attempt.finished, after)
    except WrongValueError as error:
        problems.append(f"line {number}: {error}")
    except (ValueError, KeyError, TypeError, AttributeError):
        return


def last_start(path: str | Path, *, trained: bool) -> StartLine | None:
    """The newest start line of a ledger, read from the file's end; None if there is none.

    Args:
        path: of the file, or of the run directory.
        trained: skip attempts after the newest step line, which did no step.
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
    except (OSError, ValueError):  # missing, empty, or with a torn last line
        return None
    return _start(values)


def _start(values: Mapping[str, Any]) -> StartLine:
    """Parse the values of a start line.

    Raises:
        TypeError, ValueError: it is none.
    """
    known = {item.name for item in fields(StartLine)}
    start = StartLine(**{name: value for name, value in values.items() if name in known})
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
            # A process that was cut off may have gone on beside the next attempt.
            before.finished = min(before.finished, attempt.loaded)
        attempt.began = attempt.loaded - sum(start.phases.values())
        if before:
            attempt.loaded = max(attempt.loaded, before.finished)
            attempt.began = max(attempt.began, before.finished)
        attempt.finished = attempt.loaded + attempt.finished
        before = attempt


# --- the proof -------------------------------------------------------------------------------


def _problems(attempts: list[Attempt]) -> Iterator[str]:
    """Link every attempt to its parent, and yield what contradicts the proof."""
    for attempt in attempts:
        earlier = attempts[: attempt.number - 1]
        yield from _link(attempt, earlier)
        yield from _gaps(attempt)
        yield from _verdicts(attempt)


def _link(attempt: Attempt, earlier: list[Attempt]) -> Iterator[str]:
    """Set the parent of `attempt`, which did the step it loaded; yield contradictions."""
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
        parent = next((item for item in earlier if item.start.attempt == start.parent), None)
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
    """The attempt that did the step loaded by `attempt`, whose start line names none."""
    start = attempt.start
    parent = earlier[-1] if earlier else None
    while parent and start.step <= parent.start.step:
        parent = parent.parent
    if not (parent and start.step <= parent.last_step):
        # The loaded step is beyond the record of the attempt before: its last lines may be lost, or
        # the checkpoint of an earlier attempt has turned up.
        torn = parent is not None and _may_be_unrecorded(parent, attempt)
        if not torn or start.source != "memory":
            others = (other for other in reversed(earlier) if _cursor(other, start.step))
            parent = next(others, parent if torn else None)
    return parent


def _cursor(attempt: Attempt, number: int) -> int | None:
    """Sequences consumed by an attempt up to the end of a step; None if it has no line for it."""
    if number == attempt.start.step:
        return attempt.start.sequences
    return next((step.after_last for step in attempt.steps if step.step == number), None)


def _may_be_unrecorded(parent: Attempt, attempt: Attempt) -> bool:
    """Whether the steps that `attempt` loaded beyond the record of `parent` were lost with its last
    lines: they are few, and the cursor is where they would have left it."""
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
    """Yield steps of an attempt that do not follow from the line before."""
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
    """Yield step lines without required fields, and marks that contradict numbers or counters."""
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
            values = ", ".join(f"{name} is {value}" for name, value in numbers.items())
            yield f"{where} is marked as skipped for its {step.skipped}, but {values}"
    for item in attempt.rollbacks:
        where = f"the roll-back of attempt {attempt.number} (line {item.line})"
        if item.step != item.after_step or not 0 <= item.to < item.step:
            yield (
                f"{where} goes from step {item.step} to step {item.to}, but stands after step "
                f"{item.after_step}"
            )
    yield from _counters(attempt)


def _counters(attempt: Attempt) -> Iterator[str]:
    """Yield counters of a start, save or end line that differ from the lines before it."""
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
    for what, step in [item for item in reached if item[1] > last][:1]:
        yield f"attempt {attempt.number} {what} step {step}, but its record ends at step {last}"


def _count(attempt: Attempt, name: str, step: int, line: int) -> int:
    """Value of a counter for the state of `step`, by the lines before number `line`."""
    marked: list[StepLine] | list[RollbackLine] = attempt.rollbacks
    if name == "skipped":
        marked = [item for item in attempt.steps if item.skipped]
    return sum(item.step <= step and item.line < line for item in marked)


def _finite(value: float) -> bool:
    return abs(value) < math.inf  # False for NaN too


def _name(attempt: Attempt) -> str:
    return f"attempt {attempt.number} (line {attempt.line})"


def _between(expected: int, actual: int) -> str:
    low, high = sorted((expected, actual))
    fate = "never consumed" if actual > expected else "consumed twice"
    return f"sequences {low} to {high - 1} are {fate}"


def _kept(attempts: list[Attempt]) -> dict[int, int]:
    """The line of the newest attempt; see `History.kept`."""
    kept: dict[int, int] = {}
    attempt: Attempt | None = attempts[-1]
    newest = attempts[-1].last_step
    while attempt:
        kept[attempt.number] = newest
        newest, attempt = attempt.start.step, attempt.parent
    return kept
