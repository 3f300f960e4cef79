"""The ledger of a run: one append-only file of JSON lines.

[Note: ledger] `ledger.jsonl` belongs to the run, not to an attempt. Each start of training
processes (an *attempt*) appends to it, rank 0 alone writes it, and no line is ever changed. Every
line has a `kind`; a reader ignores unknown kinds. Every line names its `attempt`, because a rank 0
that was cut off or frozen may add a line after the next attempt has begun. Except in `start`, a
line has `after`: seconds since the attempt's start line, by a monotonic clock.

    start   a `StartLine`: what was loaded, by which world, why
    phases  {phases: {name: seconds}}: from the launch through the first step
    step    {step, sequences: [first, after_last], seconds, loss?, norm?, skipped?: true, why?,
            consumed?}
    rollback  {step, to, source}: after `step` the weights of step `to` were loaded again
    validation  {step, values: {name: mean, or null if not finite}}
    save    {step, ok, seconds, skipped?, rollbacks?, stall?, error?, weights?, moments?}
    notice  {why, …}: a node was asked to leave
    event   {event: …, …}: any other event
    end     {code, reason, step, skipped?, rollbacks?}

[Note: verdicts] `why` is the reason for which a step was skipped: "loss" or "norm" for a number
that is not finite, "weights" for anything else. `loss` is null where it is not finite; `norm` is
hexadecimal, as `float.fromhex` reads it. Both are exact. The counters `skipped` and `rollbacks` of
a start come from the loaded state; the counters of a save or an end count up to its step. So a
forged `skipped` contradicts a loss, a norm or a counter."""

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from elastic.exits import EXIT_FAILED, EXIT_INTERRUPTED
from elastic.node.recall import NodeRecall
from elastic.process import boot_id, plain_text
from elastic.record.lines import RecordFile, last_lines

LEDGER = "ledger.jsonl"
"""File name in the run directory."""
LoadedFrom = Literal["memory", "storage", "none", "init"]


def clock() -> float:
    """Seconds on a clock that also runs during a suspend and never jumps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True, kw_only=True)
class StartLine:
    """The first line of an attempt, written once its state is loaded."""

    step: int
    """Step of the loaded state; 0 for fresh weights."""
    sequences: int
    """Sequences consumed by the loaded state."""
    global_batch: int
    world_size: int
    steps: int | None = None
    """Steps of the whole run; None in older ledgers."""
    data: str = ""
    """Fingerprint of the data; with stages, of the data of the first stage."""
    stages: Sequence[Sequence[Any]] = ()
    """[first sequence, fingerprint] of each later stage of the data."""
    parent: str | None = None
    """Attempt that computed the loaded state; "" for fresh weights, None in older ledgers."""
    skipped: int | None = None
    """Steps up to the loaded state whose update was skipped; None: not counted."""
    rollbacks: int | None = None
    """Roll-backs up to the loaded state; None: not counted."""
    records: Sequence[str] = ()
    """Optional fields that every step line of this attempt has."""
    recipe: str = ""
    """Digest of the recipe, which names its file in `recipes/`; "" if there is no file."""
    directory: str = ""
    """Working directory, to which paths in the recipe are relative."""
    computed_by: Mapping[str, str] = field(default_factory=dict)
    """What else affects the bits of a step: "code", "torch", "cpu" or "gpu" → its digest, version
    or name."""
    threads: int = 0
    """Threads with which a rank computes on a CPU, which affect rounding; 0: unknown."""
    changed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Recipe key → (old, new) for keys that differ from the last attempt that completed a step."""
    model: str = ""
    nodes: int = 1
    round: int = 0
    generation: int = 0
    source: LoadedFrom = "none"
    """Origin of the state: memory, storage (a checkpoint of this run), init, none (fresh)."""
    cause: Mapping[str, Any] | None = None
    """The failure that caused this start: rank, node, step, why, at (Unix time); else None."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Phase → seconds, in order, from the launch to this line."""
    at: float = field(default_factory=time.time)
    monotonic: float = field(default_factory=clock)
    boot: str = field(default_factory=boot_id)
    """Boot id of rank 0's machine: starts with the same value have the same `clock`."""
    pid: int = field(default_factory=os.getpid)
    attempt: str = field(default_factory=lambda: secrets.token_hex(4))


class Ledger:
    """Writes the ledger of a run; a context manager on rank 0. See `RecordFile` for a full disk.

    [Note: unwritten lines] A state must not outlive the lines that prove its steps. So `unwritten`
    is saved with every state. An attempt that continues from that state passes these lines to its
    ledger, which first writes those that the file lacks."""

    def __init__(
        self,
        path: str | Path,
        start: StartLine,
        unwritten: Iterable[str] = (),
        trusted: Container[int] = (),
        also: Callable[[str], None] | None = None,
    ) -> None:
        """Begin an attempt.

        Args:
            path: path of the file, created if missing; its directory exists.
            unwritten: value of `unwritten` when the loaded state was saved.
            trusted: other users (uids) who may own the file; a file of any other user is renamed.
            also: called with each line, before it is written.
        """
        path, unwritten = Path(path), [line for line in unwritten if _is_line(line)]
        self.reached = max(_newest_step(last_lines(path)), _newest_step(unwritten))
        """Newest step that earlier attempts recorded."""
        self._start, self._also = start, also
        self._lines = RecordFile(path, unwritten, trusted)
        self._step = start.step
        self._skipped: list[int] = []
        self._rollbacks: list[int] = []
        self._ended = False
        self._write("start", asdict(start))

    @property
    def unwritten(self) -> list[str]:
        """Lines that could not be written yet, in order."""
        return self._lines.waiting

    def phases(self, phases: Mapping[str, float]) -> None:
        """Record phase → seconds, from the launch through the first step."""
        self._add("phases", phases={name: round(value, 4) for name, value in phases.items()})

    def step(
        self,
        step: int,
        first: int,
        after_last: int,
        seconds: float,
        *,
        loss: float | None = None,
        norm: float | None = None,
        skipped: str = "",
        consumed: str | None = None,
    ) -> None:
        """Record a finished optimizer step.

        Args:
            first: first sequence of the global order that the step consumed.
            after_last: sequence after the last one consumed.
            loss: mean loss over the global batch.
            norm: norm of the gradient, before clipping.
            skipped: why the update was skipped, see [Note: verdicts]; empty: it was not.
            consumed: digest of the sequences that all ranks consumed, to detect wrong ones.
        """
        self._step = step
        if skipped:
            self._skipped.append(step)
        mark: dict[str, Any] = {}
        if loss is not None:
            # JSON has no NaN and no infinity
            mark["loss"] = loss if math.isfinite(loss) else None
        if norm is not None:
            mark["norm"] = norm.hex()
        mark |= {"skipped": True, "why": skipped} if skipped else {}
        mark |= {"consumed": consumed} if consumed else {}
        self._add(
            "step", step=step, sequences=[first, after_last], seconds=round(seconds, 4), **mark
        )

    def rollback(self, step: int, to: int, source: str) -> None:
        """Record that after `step` the weights of step `to` were loaded from `source`."""
        self._rollbacks.append(step)
        self._add("rollback", step=step, to=to, source=source)

    def validation(self, step: int, values: Mapping[str, float | None]) -> None:
        """Record the means over the validation set after `step`, by name. None stands for a mean
        that is not finite."""
        self._add("validation", step=step, values=values)

    def save(
        self,
        step: int,
        seconds: float,
        *,
        error: str | None = None,
        stall: float | None = None,
        weights: str | None = None,
        moments: str | None = None,
    ) -> None:
        """Record the end of a save.

        Args:
            seconds: seconds from the call to the commit.
            error: why there is no checkpoint; None if there is one.
            stall: seconds outside of steps for which the save stopped training.
            weights: digest of the model's tensors.
            moments: digest of the optimizer's tensors.
        """
        known = {"stall": stall, "error": error, "weights": weights, "moments": moments}
        rest = {name: value for name, value in known.items() if value is not None}
        rest |= self._counters(step)
        self._add("save", step=step, ok=error is None, seconds=round(seconds, 4), **rest)

    def notice(self, why: str, **details: Any) -> None:
        """Record that a node was asked to leave."""
        self._add("notice", why=why, **details)

    def event(self, event: str, **details: Any) -> None:
        """Record another event, such as a hang or a slow rank."""
        self._add("event", event=event, **details)

    def end(self, code: int, reason: str) -> None:
        """Record the end of the attempt. Later calls are ignored."""
        if not self._ended:
            self._ended = True
            counters = self._counters(self._step)
            self._add("end", code=code, reason=reason, step=self._step, **counters)

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        if kind is KeyboardInterrupt:
            self.end(EXIT_INTERRUPTED, "interrupted")
        elif kind is not None and kind is not NodeRecall:  # the next attempt records the cause
            self.end(EXIT_FAILED, f"{kind.__name__}: {plain_text(error)}"[:500])
        self._lines.close()

    def _counters(self, step: int) -> dict[str, Any]:
        start = self._start
        if start.skipped is None or start.rollbacks is None:
            return {}
        return {
            "skipped": start.skipped + sum(number <= step for number in self._skipped),
            "rollbacks": start.rollbacks + sum(number <= step for number in self._rollbacks),
        }

    def _add(self, kind: str, **values: Any) -> None:
        after = round(clock() - self._start.monotonic, 3)
        self._write(kind, {**values, "after": after, "attempt": self._start.attempt})

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        # an event may have a value of any type, which must not end the run
        line = json.dumps({"kind": kind, **values}, separators=(",", ":"), default=str)
        if self._also:
            self._also(line)
        self._lines.add(line)


def _is_line(line: object) -> bool:
    """Whether `line` is a line of a ledger. Loaded state is not trusted."""
    with suppress(ValueError, TypeError, RecursionError):
        return isinstance(line, str) and "\n" not in line and "kind" in json.loads(line)
    return False


def _newest_step(lines: Sequence[bytes | str]) -> int:
    for line in reversed(lines):
        with suppress(ValueError, TypeError, KeyError):  # a line may be incomplete
            values = json.loads(line)
            if values["kind"] == "step":
                return int(values["step"])
    return 0
