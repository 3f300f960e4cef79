"""The events of a run: time, step, rank, cause and cost."""

import re
from collections.abc import Mapping
from typing import Any

from elastic.record.attempt import Attempt
from elastic.record.causes import ending
from elastic.record.history import History
from elastic.record.reliability import failed_at, reliability
from trainer.tools.report.report import clock, count_of


def events_of(history: History) -> list[dict[str, Any]]:
    """Return all events, oldest first. Each has `time` (Unix), `step`, `kind`, `text`, `failed`,
    `ended` (whether it ended an attempt), `cost`, `rank`, `node`, `attempt`, and `evidence` (pairs
    of texts)."""
    events: list[dict[str, Any]] = []
    recoveries = reliability(history).recoveries
    for attempt in history.attempts:
        events += _within(attempt)
        how, following = ending(history, attempt), history.next(attempt)
        if how.kind != "open":
            events.append(
                {
                    "time": how.at,
                    "step": attempt.last_step,
                    "kind": how.kind,
                    "text": how.text,
                    "failed": how.failed,
                    "ended": True,
                    "rank": how.rank,
                    "node": how.node,
                    "cost": _cost(attempt, following, recoveries) if following else "",
                    "attempt": attempt.number,
                    "evidence": [list(pair) for pair in how.evidence],
                }
            )
    return sorted(events, key=lambda event: event["time"])


def steps_lost(before: Attempt, after: Attempt) -> int:
    """Return the number of steps of attempt `before` that the next attempt, `after`, repeats."""
    return max(0, before.last_step - after.start.step)


def _within(attempt: Attempt) -> list[dict[str, Any]]:
    """Events of an attempt, other than its end."""
    events = []

    def add(after: float, step: int, kind: str, text: str, failed: bool, cost: str = "") -> None:
        events.append(
            {
                "time": attempt.loaded + after, "step": step, "kind": kind, "text": text,
                "failed": failed, "ended": False, "cost": cost, "rank": None, "node": "",
                "attempt": attempt.number, "evidence": [],
            }
        )  # fmt: skip

    for save in attempt.saves:
        if not save.get("ok"):
            error = str(save.get("error", "no reason given"))
            error = re.sub(r"^saving step \d+ failed: ", "", error)
            text = f"The checkpoint of step {save['step']} was not written: {error}"
            add(float(save.get("after", 0.0)), save["step"], "save", text, True)
    for event in attempt.events:
        step, after = event.get("step"), event.get("after")
        what = str(event.get("what") or event.get("why") or event.get("event") or "")
        if isinstance(after, int | float) and what:
            reached = step if isinstance(step, int) else attempt.start.step
            add(after, reached, str(event.get("event", "notice")), what, False)
    for rollback in attempt.rollbacks:
        done, step, to = attempt.steps.find(rollback.step), rollback.step, rollback.to
        text = f"Weights went back from step {step} to {to}, read from {rollback.source}"
        cost = f"{count_of(step - to, 'step')} of training"
        add(done.after if done else 0.0, step, "rollback", text, True, cost)
    return events


def _cost(before: Attempt, after: Attempt, recoveries: Mapping[int, float]) -> str:
    lost = steps_lost(before, after)
    words = [f"{count_of(lost, 'step')} lost" if lost else "no step lost"]
    if after.number in recoveries:
        words.append(f"back at a new step after {clock(recoveries[after.number])}")
    elif after.start.cause is not None:
        words.append(f"next start {clock(max(0.0, after.loaded - failed_at(before, after)))} later")
    elif after.began > before.finished:
        words.append(f"{clock(after.began - before.finished)} until the next start")
    return ", ".join(words)
