"""Finds contradictions to the claim that every sequence was consumed exactly once; see history.py
[Note: lineage]."""

import math
from collections.abc import Iterator, Sequence

from elastic.record.attempt import LedgerRollbackLine, LedgerStepLine, RecordedAttempt

UNRECORDED_STEPS = 3
"""Largest number of steps that a killed process may have completed without writing their lines."""
UNRECORDED_SECONDS = 60.0
"""Longest time, in seconds, whose lines a crash of the machine may lose: Linux flushes pages
after 30 s."""


def problems_of(attempts: list[RecordedAttempt]) -> Iterator[str]:
    """Set the parent of every attempt, and yield the contradictions in the ledger."""
    for attempt in attempts:
        earlier = attempts[: attempt.number - 1]
        attempt.parent, attempt.unrecorded = None, 0
        yield from _link(attempt, earlier)
        yield from _gaps(attempt)
        yield from _verdicts(attempt)


def _link(attempt: RecordedAttempt, earlier: list[RecordedAttempt]) -> Iterator[str]:
    """Set `attempt.parent` to the earlier attempt that computed the step which `attempt` loaded. It
    stays None for fresh weights, or if no attempt computed it. Yield contradictions."""
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
            f"{where} loaded step {start.step}, which no attempt computed: the record ends at step "
            f"{parent.last_step if parent else reached}"
        )
        return
    attempt.parent = parent
    if start.data and parent.start.data and start.data != parent.start.data:
        yield f"{where} continues from attempt {parent.number}, whose data has another fingerprint"
    begun, before = (
        [list(stage) for stage in one.start.stages if stage[0] < start.sequences]
        for one in (attempt, parent)
    )
    if begun != before:
        yield (
            f"{where} continues from attempt {parent.number} at sequence {start.sequences}, but "
            "the stages of their data up to that sequence differ"
        )
    if start.step > parent.last_step:
        attempt.unrecorded = start.step - parent.last_step
        return
    cursor = _cursor(parent, start.step)
    if cursor is not None and cursor != start.sequences:
        yield (
            f"{where} continued after step {start.step} from sequence {start.sequences}, but that "
            f"step ended before {cursor}: {_between(cursor, start.sequences)}"
        )


def _guessed_parent(
    attempt: RecordedAttempt, earlier: list[RecordedAttempt]
) -> RecordedAttempt | None:
    """Returns the attempt that probably computed the step which `attempt` loaded, for ledgers of
    older versions, whose start lines name no parent."""
    start = attempt.start
    parent = earlier[-1] if earlier else None
    while parent and start.step <= parent.start.step:
        parent = parent.parent
    if not (parent and start.step <= parent.last_step):
        # Either the parent's last lines are lost, or a step of an older attempt was loaded.
        torn = parent is not None and _may_be_unrecorded(parent, attempt)
        if not torn or start.source != "memory":
            others = (other for other in reversed(earlier) if _cursor(other, start.step))
            parent = next(others, parent if torn else None)
    return parent


def _cursor(attempt: RecordedAttempt, number: int) -> int | None:
    """Returns the number of sequences consumed up to the end of step `number`, if recorded."""
    if number == attempt.start.step:
        return attempt.start.sequences
    step = attempt.steps.find(number)
    return step.after_last if step else None


def _may_be_unrecorded(parent: RecordedAttempt, attempt: RecordedAttempt) -> bool:
    """Whether `parent` may have computed the steps between its last step line and the loaded step,
    although their lines were lost: they are few, and the number of sequences is right."""
    missing = attempt.start.step - parent.last_step
    cursor = parent.steps[-1].after_last if parent.steps else parent.start.sequences
    if attempt.start.sequences - cursor != missing * parent.start.global_batch:
        return False
    allowed: float = UNRECORDED_STEPS
    if parent.steps and parent.start.boot != attempt.start.boot:
        seconds = parent.steps.column("seconds").mean()
        allowed = max(allowed, UNRECORDED_SECONDS / seconds if seconds else math.inf)
    return missing <= allowed


def _gaps(attempt: RecordedAttempt) -> Iterator[str]:
    number, cursor = attempt.start.step, attempt.start.sequences
    if attempt.steps.consecutive(number, cursor, attempt.start.global_batch):
        return
    for step in attempt.steps:
        where = f"step {step.step} (attempt {attempt.number}, line {step.line})"
        if step.step <= number:
            yield f"{where} is recorded after step {number}: it was computed twice"
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


def _verdicts(attempt: RecordedAttempt) -> Iterator[str]:
    start, counted = attempt.start, attempt.start.skipped is not None
    plain = attempt.steps.finite() and not any(map(attempt.steps.lack, start.records))
    for step in () if plain else attempt.steps:
        where = f"step {step.step} (attempt {attempt.number}, line {step.line})"
        missing = [name for name in start.records if getattr(step, name, None) is None]
        if missing:
            yield f"{where} has no {' and no '.join(missing)}, which its start line promises"
            continue
        numbers = {"loss": step.loss, "norm": step.norm}
        known = {name: value for name, value in numbers.items() if value is not None}
        bad = [name for name, value in known.items() if not math.isfinite(value)]
        if bad and not step.skipped:
            yield f"{where}: {bad[0]} is {numbers[bad[0]]}, but the step is not marked as skipped"
        elif counted and step.skipped and step.skipped not in (bad or ["weights"]):
            values = ", ".join(f"{name} is {value}" for name, value in numbers.items())
            yield f"{where} is marked as skipped for its {step.skipped}, but {values}"
    for item in attempt.rollbacks:
        where = f"the roll-back of attempt {attempt.number} (line {item.line})"
        if item.step != item.after_step or not 0 <= item.to < item.step:
            yield (
                f"{where} goes from step {item.step} to step {item.to}, but is recorded after step "
                f"{item.after_step}"
            )
    yield from _counters(attempt)


def _counters(attempt: RecordedAttempt) -> Iterator[str]:
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


def _count(attempt: RecordedAttempt, name: str, step: int, line: int) -> int:
    """Returns the number of skipped steps (`name` is "skipped") or roll-backs up to `step`, counted
    in the lines before line number `line`."""
    skipped = name == "skipped"
    marked: Sequence[LedgerStepLine | LedgerRollbackLine] = (
        attempt.steps.skipped() if skipped else attempt.rollbacks
    )
    return sum(item.step <= step and item.line < line for item in marked)


def _name(attempt: RecordedAttempt) -> str:
    return f"attempt {attempt.number} (line {attempt.line})"


def _between(expected: int, actual: int) -> str:
    low, high = sorted((expected, actual))
    fate = "never consumed" if actual > expected else "consumed twice"
    return f"sequences {low} to {high - 1} are {fate}"
