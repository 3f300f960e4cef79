"""Summarises a run for page and terminal, from its ledger, records and recipe; with its events:
time, step, rank, cause and cost."""

import math
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from elastic.exits import EXIT_DO_NOT_REQUEUE, EXIT_DONE, EXIT_INTERRUPTED
from elastic.node.files import open_to_read
from elastic.record.attempt import RecordedAttempt
from elastic.record.causes import ending
from elastic.record.history import RecordHistory, lineage_of, read_starts
from elastic.record.reliability import (
    failed_at,
    goodput,
    idle_spans,
    reliability,
    startup,
    time_in_steps,
)
from trainer.recipe.strategies import MODEL_PARALLEL
from trainer.recipe.yaml_tree import RecipeError, flat, read_tree
from trainer.tools.report.report import clock, count_of, unit_of
from trainer.tools.seeing.ledger_view import SeenLedger
from trainer.tools.seeing.metric_columns import (
    SeenMetrics,
    read_samples,
    samples_version,
    thinned,
)

POINTS, FIRST_POINTS = 4000, 1000
"""Largest number of points of a curve, and before the ledger has been read: fewer are drawn sooner,
and those with the whole page follow soon."""
SHOWN_EVENTS, SHOWN_ATTEMPTS = 300, 400
"""Largest numbers of events and of attempts that are shown, newest first."""
LATE_STEPS, LATE_SECONDS, STARTING_SECONDS = 10, 30.0, 600.0
"""A run counts as dead if it writes nothing for the time of LATE_STEPS steps and at least
LATE_SECONDS; while it starts, for STARTING_SECONDS."""
_RECENT = 100
_LOG_BYTES = 64 << 10


@dataclass(frozen=True)
class _RunStatus:
    """Whether a run is active, and why."""

    name: str
    """"running", "starting", "waiting", "finished", "stopped", "paused" or "dead"."""
    text: str


class SeenRun:
    """A run that is read repeatedly."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, _name(path.resolve())
        self.ledger, self.records = SeenLedger(path), SeenMetrics(path)
        self.history: RecordHistory
        self.now, self.samples_version = 0.0, ""
        self.read_share = 1.0
        """Share of the ledger that has been read. Below 1, only the records are shown."""

    def skim(self) -> None:
        """Read the records alone, with which the curves can be shown until `look` has read the
        ledger, the larger file."""
        starts = read_starts(self.path)
        self.records.read(lineage_of(starts, next(reversed(starts), "")))
        self.read_share = 0.0

    def look(self) -> None:
        """Read new data. Raises LedgerError if the run has not started, or the path is no run."""
        self.history = self.ledger.read()
        self.read_share = 1.0
        self.records.read(self.history.lineage)
        # Read before the samples: a page that misses some then requests them again.
        self.samples_version = samples_version(self.path)
        self.now = time.time()

    def keep(self) -> None:
        """Cache what `look` has read, so that the run opens faster the next time. This takes as
        long as a page, so it comes after the page."""
        self.ledger.keep()
        self.records.keep()

    @cached_property
    def unit(self) -> str:
        """What the run counts. Parsing the recipe costs more than all else of an update."""
        return unit_of(self.path)

    # --- parts of the page --------------------------------------------------------------------

    def status(self) -> _RunStatus:
        """Return whether the run is active, judged from its last writes."""
        newest = self.history.attempts[-1]
        silent = self.ledger.silent_seconds()
        if newest.end:
            code, how = newest.end["code"], ending(self.history, newest)
            if code == EXIT_DONE:
                return _RunStatus("finished", how.text)
            if code == EXIT_DO_NOT_REQUEUE:
                return _RunStatus("stopped", how.text)
            if code == EXIT_INTERRUPTED:
                return _RunStatus("paused", "stopped by Ctrl-C; the same command resumes")
            # when a node joins or leaves, the ranks start again by themselves
            if how.kind in ("join", "leave") and silent < STARTING_SECONDS:
                return _RunStatus("waiting", f"waits for its nodes, for {clock(silent)}")
            paused = how.kind in ("join", "leave", "asked")
            return _RunStatus("paused" if paused else "dead", how.text)
        if not newest.steps:
            if silent < STARTING_SECONDS:
                return _RunStatus("starting", f"does its first step, for {clock(silent)}")
            return _RunStatus("dead", f"has started no step for {clock(silent)}")
        # the median, as steps during a save are slower
        usual = LATE_STEPS * float(np.median(newest.steps.column("seconds")[-_RECENT:]))
        if silent < max(usual, LATE_SECONDS):
            return _RunStatus("running", f"last step {clock(silent)} ago")
        return _RunStatus("dead", f"no step for {clock(silent)}: it was killed, hangs, or waits")

    def card(self) -> list[list[str]]:
        """Return (name, value, remark) of the key figures, most important first."""
        history, records = self.history, self.records
        account, trust = goodput(history), reliability(history)
        start = history.attempts[-1].start
        rows = [["loss", _number(records.last("loss")), ""]]
        validation = records.column("validation_loss")
        validation = validation[np.isfinite(validation)]
        if len(validation):
            change = ""
            if len(validation) > 1:
                change = f"{validation[-1] - validation[-2]:+.4f} since the previous one"
            rows.append(["validation loss", f"{validation[-1]:.4f}", change])
            perplexity = records.last("validation_perplexity")
            rows.append(["perplexity", _number(perplexity), f"lowest loss {validation.min():.4f}"])
        rows.append(["step", f"{history.step:,}", f"of {start.steps:,}" if start.steps else ""])
        if (left := self._seconds_left()) is not None:
            rows.append(["left", clock(left), "at the speed of the last steps"])
        unit = self.unit
        if tokens := records.last("tokens"):
            rows.append([unit, _count(tokens), ""])
        if rate := records.last("tokens_per_second"):
            rows.append([f"{unit}/s", _count(rate), ""])
        if (mfu := records.last("mfu")) is not None:
            rows.append(["MFU", f"{mfu:.1%}", "of the peak of its GPUs"])
        rows.append(["ranks", str(start.world_size), count_of(start.nodes, "node")])
        lost = sum(steps_lost(before, after) for before, after in pairwise(history.attempts))
        recovery = f"back at a new step after {clock(trust.mttr)}" if trust.mttr else ""
        rows += [
            ["failures", str(trust.failures), recovery],
            ["steps lost", str(lost), "repeated after failures" if lost else ""],
            ["goodput", f"{account.share_of_uptime:.1%}", "of the time up is in steps that count"],
            ["up", clock(account.wall - account.idle), ""],
        ]
        return rows

    def facts(self) -> list[list[str]]:
        """Return (name, value) of the run's properties."""
        start, recipe = self.history.attempts[-1].start, flat(self._recipe())
        computed_by = start.computed_by
        facts = [
            ["model", start.model],
            ["strategy", _strategy(recipe)],
            ["machine", ", ".join(filter(None, [computed_by.get("gpu"), computed_by.get("cpu")]))],
            ["torch", computed_by.get("torch", "")],
            ["code", computed_by.get("code", "")],
            ["directory", str(self.path.resolve())],
        ]
        if start.directory:
            where = recipe.get("run.dir", str(self.path))
            command = f"cd {shlex.quote(start.directory)} && perdure train "
            facts.append(["resume", command + shlex.quote(f"{where}/recipe.yaml")])
        changed = [
            f"{key} {old} → {new} (after step {attempt.start.step})"
            for attempt in self.history.attempts
            for key, (old, new) in attempt.start.changed.items()
        ]
        facts.append(["changed", "; ".join(changed[-8:])])
        return [fact for fact in facts if fact[1]]

    def proof(self) -> dict[str, Any]:
        """Return whether every sequence was consumed exactly once (`fine`), and a `text` on it."""
        problems = self.history.problems
        text = "\n".join(problems[:20]) if problems else self.history.summary()
        return {"fine": not problems, "text": text}

    def ribbon(self) -> list[dict[str, Any]]:
        """Times, ranks, and spans of (activity, begin, end) of each attempt."""
        history, spans = self.history, []
        idle = {begin for begin, _ in idle_spans(history)}
        for attempt in history.attempts[-SHOWN_ATTEMPTS:]:
            following = history.next(attempt)
            good, bad, lost = time_in_steps(history, attempt)
            first = min(attempt.began + sum(startup(attempt).values()), attempt.finished)
            began_lost = max(first, attempt.finished - lost)
            parts = [["starting", attempt.began, first]]
            if good + bad > 0:
                parts.append(["steps", first, began_lost])
            if lost > 0:
                parts.append(["lost", began_lost, attempt.finished])
            if following and following.began > attempt.finished:
                kind = "down" if attempt.finished in idle else "recovery"
                parts.append([kind, attempt.finished, following.began])
            how = ending(history, attempt)
            spans.append(
                {
                    "attempt": attempt.number,
                    "ranks": attempt.start.world_size,
                    "nodes": attempt.start.nodes,
                    "from": attempt.start.step,
                    "to": attempt.last_step,
                    "source": attempt.start.source,
                    "failed": how.failed,
                    "end": how.text,
                    "parts": parts,
                }
            )
        return spans

    def events(self) -> list[dict[str, Any]]:
        """Newest events, in order of time."""
        return events_of(self.history)[-SHOWN_EVENTS:]

    def curves(
        self, most: int = POINTS, chosen: slice | np.ndarray = slice(None)
    ) -> dict[str, list[list[float]]]:
        """Return (steps, values) of each metric in the chosen records, in about `most` points."""
        steps = self.records.step[chosen]
        curves = {}
        for name in self.records.names():
            x, y = thinned(steps, self.records.column(name)[chosen], most)
            if len(x):
                curves[name] = [_digits(x), _digits(y)]
        return curves

    def stretch(self, low: float, high: float) -> dict[str, list[list[float]]]:
        """Return the curves of steps `low` to `high`."""
        steps = self.records.step
        return self.curves(chosen=(steps >= low) & (steps <= high))

    def more_curves(self) -> dict[str, list[list[float]]]:
        """Curves from the ledger: number of ranks, and seconds for which saves paused training."""
        ranks: list[list[float]] = [[], []]
        stall: list[list[float]] = [[], []]
        for attempt in self.history.attempts[-SHOWN_ATTEMPTS:]:
            for step in (attempt.start.step, attempt.last_step):
                ranks[0].append(max(step, *ranks[0][-1:]) if ranks[0] else step)
                ranks[1].append(attempt.start.world_size)
            for save in attempt.saves:
                if save.get("stall") is not None:
                    stall[0].append(save["step"])
                    stall[1].append(save["stall"])
        curves = {"ranks": ranks}
        if stall[0]:
            # a page draws at most POINTS, however long the run is
            x, y = thinned(np.array(stall[0], float), np.array(stall[1], float), POINTS)
            curves["checkpoint_stall"] = [_digits(x), _digits(y)]
        return curves

    def axis(self, most: int = 1000) -> dict[str, list[float]]:
        """Return the values of the horizontal axes at up to `most` records: step, seconds of uptime
        and tokens. They ascend, for interpolation. `tokens` is empty if none are counted."""
        steps, count = self.records.step, len(self.records.step)
        chosen = np.unique(np.linspace(0, max(0, count - 1), min(count, most)).astype(int))
        up = times = self.records.time[chosen]
        for begin, end in idle_spans(self.history):
            up = up - (np.clip(times, begin, end) - begin)
        up = np.maximum(up - self.history.attempts[0].began, 0.0)
        tokens = self.records.column("tokens")
        # records without a count, such as validations, take the previous count
        known = np.maximum.accumulate(np.nan_to_num(tokens, nan=0.0))[chosen]
        return {
            "step": _digits(np.maximum.accumulate(steps[chosen])),
            "time": _digits(np.maximum.accumulate(up)),
            "tokens": _digits(known, 9) if np.isfinite(tokens).any() else [],
        }

    def _recipe(self) -> dict[str, Any]:
        """Return the sections of recipe.yaml that a page may show; {} if it is unreadable."""
        try:
            tree = read_tree(self.path / "recipe.yaml", kept=True)[0]
        except RecipeError:
            return {}
        # Pages are sent around, and knowing a webhook is enough to post to it.
        if isinstance(tracking := tree.get("tracking"), dict):
            tracking.pop("alerts", None)
        return tree

    def log(self) -> list[str]:
        """Return the newest lines of the newest *.log in the run directory; without such a file,
        those of the ledger, except step lines."""
        with suppress(OSError):
            logs = [one for one in self.path.glob("*.log") if one.is_file()]
            # Others may have put a link there, to a file that only this user can read.
            if logs := [one for one in logs if not one.is_symlink()]:
                newest = max(logs, key=lambda path: path.stat().st_mtime)
                with os.fdopen(open_to_read(newest), "rb") as file:
                    file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
                    return file.read(_LOG_BYTES).decode(errors="replace").splitlines()[-200:]
        return self.ledger.newest_lines(60)

    def _seconds_left(self) -> float | None:
        """Estimated seconds to the last step, from the latest pace; None if unknown or done."""
        newest = self.history.attempts[-1]
        steps, planned = newest.steps, newest.start.steps
        if newest.end or not planned or len(steps) < 2 or planned <= newest.last_step:
            return None
        recent = steps[-min(_RECENT, len(steps)) :]
        pace = (recent[-1].after - recent[0].after) / (len(recent) - 1)
        return pace * (planned - newest.last_step)

    def all(self, most: int = POINTS) -> dict[str, Any]:
        """Everything that a page shows, and the cursor for updates."""
        tree, reading = self._recipe(), self.read_share < 1
        keys = flat(tree)
        return {
            **(self._while_reading() if reading else {**self._current(), **self._of_ledger()}),
            "name": self.name,
            "curves": (
                self.curves(min(most, FIRST_POINTS))
                if reading
                else self.curves(most) | self.more_curves()
            ),
            "clip": _positive(keys.get("optimizer.clip_norm")),
            "samples": read_samples(self.path),
            "recipe": yaml.safe_dump(tree, sort_keys=False, allow_unicode=True) if tree else "",
            "keys": {key: str(value)[:200] for key, value in keys.items()},
        }

    def _while_reading(self) -> dict[str, Any]:
        """Values shown until the ledger has been read. An update after that returns everything, as
        the cursor is of no file."""
        return {
            "state": ["reading", f"{self.read_share:.0%} of the ledger"], "now": time.time(),
            "card": [], "proof": None, "axis": {"step": [], "time": [], "tokens": []},
            "ribbon": [], "events": [], "facts": [], "attempts": 0, "log": [],
            "cursor": {"file": "", "since": 0, "seen": "", "samples": ""},
        }  # fmt: skip

    def _current(self) -> dict[str, Any]:
        """Values that change with each step. `since` continues from the cursor."""
        state = self.status()
        cursor = {
            "file": self._shown(), "since": self.records.offset, "seen": self.ledger.version,
            "samples": self.samples_version,
        }  # fmt: skip
        return {
            "state": [state.name, state.text], "now": self.now, "card": self.card(),
            "proof": self.proof(), "axis": self.axis(), "cursor": cursor,
        }  # fmt: skip

    def _of_ledger(self) -> dict[str, Any]:
        """Values that change with ledger lines other than step lines."""
        return {
            "ribbon": self.ribbon(), "events": self.events(), "facts": self.facts(),
            "attempts": len(self.history.attempts), "log": self.log(),
        }  # fmt: skip

    def _shown(self) -> str:
        """A text that changes when a page may show records that have left the lineage of the
        newest attempt."""
        return f"{self.records.inode}-{len(self.history.attempts)}"

    def since(self, file: str, offset: int, seen: str, samples: str) -> dict[str, Any]:
        """Return what is new after a cursor. Return everything if the page may show records that
        have left the lineage of the newest attempt: after a new attempt, or if metrics.jsonl was
        replaced or cut."""
        if self.read_share < 1:
            return {**self._while_reading(), "curves": {}, "last": []}
        records = self.records
        if file != self._shown() or not 0 <= offset <= records.offset:
            return {**self.all(), "restart": True}
        curves = self.curves(chosen=slice(records.after(offset), None))
        update = {**self._current(), "curves": curves, "last": self.ribbon()[-1:]}
        if seen != self.ledger.version:
            update |= {**self._of_ledger(), "more": self.more_curves()}
        if samples != self.samples_version:
            update["samples"] = read_samples(self.path)
        return update


def open_runs(paths: Sequence[Path]) -> list[SeenRun]:
    """Return views of runs, which are read. Raises LedgerError if a run has not started, or a path
    is no run."""
    runs = named_runs(paths)
    for run in runs:
        run.look()
    return runs


def named_runs(paths: Sequence[Path]) -> list[SeenRun]:
    """Return views of runs. Their names are those of the folders, with the parent folder if two are
    equal."""
    runs = [SeenRun(path) for path in paths]
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = f"{_name(run.path.resolve().parent)}/{run.name}"
    return runs


def differing_keys(runs: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Return (key, value in each run) of recipe keys with different values, except run.dir."""
    keys = dict.fromkeys(key for run in runs for key in run)
    rows = [[key, *(run.get(key, "") for run in runs)] for key in keys if key != "run.dir"]
    return [row for row in rows if len(set(row[1:])) > 1]


# --- words -----------------------------------------------------------------------------------


def _name(path: Path) -> str:
    """Return the name of a folder as text. On Linux a name is bytes, which may not be UTF-8."""
    return os.fsencode(path.name).decode(errors="replace")


def _strategy(recipe: Mapping[str, Any]) -> str:
    if "strategy.name" not in recipe:
        return ""
    words = [str(recipe["strategy.name"])]
    words += [str(recipe["strategy.sharding"])] if recipe.get("strategy.sharding") else []
    for key in (module.KEYS[0] for module in MODEL_PARALLEL):
        if recipe.get(f"strategy.{key}", 1) not in (1, None):
            words.append(f"{key}={recipe[f'strategy.{key}']}")
    words.append(str(recipe.get("precision.dtype", "")))
    return " ".join(filter(None, words))


def _positive(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and 0 < value < math.inf else None


def _digits(values: np.ndarray, digits: int = 6) -> list[float]:
    """Round values to `digits` significant digits; whole numbers become integers, unrounded."""
    # JavaScript stores larger integers inexactly
    whole = (values == np.trunc(values)) & (np.abs(values) < 2**53)
    if whole.all():  # as steps are
        return [*map(int, values.tolist())]
    return [
        int(value) if is_whole else float(f"{value:.{digits}g}")
        for value, is_whole in zip(values.tolist(), whole.tolist(), strict=True)
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if abs(value) < 100 else f"{value:,.1f}"


def _count(value: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= 10 * size or (size > 1e6 and value >= size):
            return f"{value / size:.3g} {name}"
    return f"{value:,.0f}" if math.isfinite(value) else "-"


def events_of(history: RecordHistory) -> list[dict[str, Any]]:
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


def steps_lost(before: RecordedAttempt, after: RecordedAttempt) -> int:
    """Return the number of steps of attempt `before` that the next attempt, `after`, repeats."""
    return max(0, before.last_step - after.start.step)


def _within(attempt: RecordedAttempt) -> list[dict[str, Any]]:
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


def _cost(before: RecordedAttempt, after: RecordedAttempt, recoveries: Mapping[int, float]) -> str:
    lost = steps_lost(before, after)
    words = [f"{count_of(lost, 'step')} lost" if lost else "no step lost"]
    if after.number in recoveries:
        words.append(f"back at a new step after {clock(recoveries[after.number])}")
    elif after.start.cause is not None:
        words.append(f"next start {clock(max(0.0, after.loaded - failed_at(before, after)))} later")
    elif after.began > before.finished:
        words.append(f"{clock(after.began - before.finished)} until the next start")
    return ", ".join(words)
