"""What happened in a run, for good: one append-only file of JSON lines.

[Note: ledger] `ledger.jsonl` belongs to the run, not to an attempt: each start of training
processes (an *attempt*) adds to it, rank 0 alone writes it, and nothing is ever taken back. Every
line has a `kind`; a reader ignores kinds that it does not know. Every line names its `attempt`: a
rank 0 that was cut off or frozen may add a line after others have begun the next one. Apart from
`start`, a line has `after`: seconds on the monotonic clock since the start line of its attempt, so
that a clock that is set does no harm.

    start   a `Start`: what was loaded, by which world, why
    phases  {phases: {name: seconds}}: the whole way to the first step, known after it
    step    {step, sequences: [first, after_last], seconds, loss?, norm?, skipped?: true, why?,
            consumed?}
    rollback  {step, to, source}: after `step` the weights were taken back to those of step `to`
    validation  {step, values: {name: mean}}
    save    {step, ok, seconds, skipped, rollbacks, stall?, error?, weights?, moments?}
    notice  {why, …} somebody was told to go
    event   {event: …, …} free-form
    end     {code, reason, step, skipped, rollbacks}

[Note: verdicts] `why` a step was skipped names what was not right: "loss" or "norm" for a number
that is not finite, "weights" for anything else. `loss` is null where it is not finite; `norm` is
hexadecimal, as `float.fromhex` reads it. Both have every bit. The counters `skipped` and
`rollbacks` of a start come from the state that was loaded; those of a save or an end are the counts
up to its step. So a mark that is added or taken away later contradicts a number or a counter.
"""

import json
import math
import os
import secrets
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from elastic.exits import EXIT_FAILED, EXIT_INTERRUPTED
from elastic.node.files import open_to_read
from elastic.node.recall import Recalled
from elastic.process import boot_id, plain
from elastic.record.lines import Lines

LEDGER = "ledger.jsonl"
"""Its name in the run directory."""
LoadedFrom = Literal["memory", "storage", "none", "init"]


def clock() -> float:
    """Seconds that go on through a suspend and never jump."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True, kw_only=True)
class Start:
    """The line that begins an attempt, written once state is loaded."""

    step: int
    """Step of the state that was loaded; 0 for fresh weights."""
    sequences: int
    """The cursor loaded: sequences consumed by that state."""
    global_batch: int
    """Sequences per step."""
    world_size: int
    steps: int | None = None
    """Steps of the whole run; None in ledgers older than this field."""
    data: str = ""
    """Fingerprint of the data that the positions are in."""
    parent: str | None = None
    """Attempt that computed the state loaded; "" for fresh weights, None in ledgers older than this
    field."""
    skipped: int | None = None
    """Steps up to the state loaded that left the weights alone; None: not counted."""
    rollbacks: int | None = None
    """Roll-backs up to the state loaded; None: not counted."""
    records: Sequence[str] = ()
    """Fields that every step line of this attempt has, besides those that all have."""
    recipe: str = ""
    """Digest of the recipe, the name of its file in `recipes/`; "" where none was kept."""
    directory: str = ""
    """Working directory, which relative paths of the recipe start from."""
    computed_by: Mapping[str, str] = field(default_factory=dict)
    """What decides the bits of a step besides the recipe: code, torch, cpu, gpu."""
    changed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Keys in which this start differs from what the run last trained with → (old, new)."""
    nodes: int = 1
    round: int = 0
    generation: int = 0
    source: LoadedFrom = "none"
    """Where the state came from: memory, storage (a checkpoint of this run), init (the weights of
    another model), none (fresh)."""
    cause: Mapping[str, Any] | None = None
    """The failure that made this start necessary: rank, node, step, why, at (Unix time)."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Where the time from the launch to this line went: name → seconds, in order."""
    at: float = field(default_factory=time.time)
    """Unix time."""
    monotonic: float = field(default_factory=clock)
    """The same moment on a clock that nobody sets, seconds."""
    boot: str = field(default_factory=boot_id)
    """Starts with the same one share that clock."""
    pid: int = field(default_factory=os.getpid)
    attempt: str = field(default_factory=lambda: secrets.token_hex(4))
    """Names this attempt in its lines."""


class Ledger:
    """The writing end, held by rank 0; a context manager.

    Each line is handed to the operating system at once, so it survives the death of this process. A
    disk that is full or gone costs the run nothing: lines are kept in memory until one can be
    written (see lines.py).

    [Note: unwritten lines] What proves a step is to live where the state of the step lives. So who
    keeps state of a step, in memory or in storage, keeps `unwritten` with it, and who goes on from
    that state gives it to the ledger of the next attempt, which writes what the file has not got
    meanwhile, before its own lines.
    """

    def __init__(
        self,
        path: str | Path,
        start: Start,
        unwritten: Iterable[str] = (),
        trusted: Container[int] = (),
    ) -> None:
        """Begin an attempt.

        Args:
            path: of the file, made when it is not there; its directory exists.
            start: the first line.
            unwritten: what `unwritten` was when the state that was loaded was saved.
            trusted: other users (uids) whose file it may be; any other file is put aside.
        """
        path, unwritten = Path(path), [line for line in unwritten if _is_line(line)]
        self.reached = max(_newest_step(_tail(path)), _newest_step(unwritten))
        """Newest step of the attempts before this one."""
        self._start = start
        self._lines = Lines(path, unwritten, trusted)
        self._step = start.step
        self._skipped: list[int] = []
        self._rollbacks: list[int] = []
        self._ended = False
        self._write("start", asdict(start))

    @property
    def unwritten(self) -> list[str]:
        """Lines that the disk has not taken yet, in order."""
        return self._lines.waiting

    def phases(self, phases: Mapping[str, float]) -> None:
        """The whole way from the launch through the first step, which is done: name → seconds."""
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
        """One optimizer step is done.

        Args:
            step: its number, from 1.
            first: first sequence of the global order that it consumed.
            after_last: the one after the last.
            seconds: it took.
            loss: mean over its global batch.
            norm: of its gradient, before clipping.
            skipped: what was wrong, see [Note: verdicts], if it consumed its sequences and left the
                weights alone; else empty.
            consumed: digest of what all ranks really took for it, so that a rank that took
                something else than these sequences can be found out.
        """
        self._step = step
        if skipped:
            self._skipped.append(step)
        mark: dict[str, Any] = {}
        if loss is not None:
            mark["loss"] = loss if math.isfinite(loss) else None
        if norm is not None:
            mark["norm"] = norm.hex()
        mark |= {"skipped": True, "why": skipped} if skipped else {}
        mark |= {"consumed": consumed} if consumed else {}
        self._add(
            "step", step=step, sequences=[first, after_last], seconds=round(seconds, 4), **mark
        )

    def rollback(self, step: int, to: int, source: str) -> None:
        """After `step` the weights were taken back to those of step `to`, read from `source`."""
        self._rollbacks.append(step)
        self._add("rollback", step=step, to=to, source=source)

    def validation(self, step: int, values: Mapping[str, float | None]) -> None:
        """The weights after `step` were validated; `values` is null where one is not finite."""
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
        """A checkpoint of `step` has ended.

        Args:
            step: that it holds.
            seconds: from the call to the commit.
            error: why there is none; None if it is there.
            stall: seconds for which training stood still, beyond those inside steps.
            weights: digest of the model's tensors that it holds.
            moments: digest of the optimizer's.
        """
        known = {"stall": stall, "error": error, "weights": weights, "moments": moments}
        rest = {name: value for name, value in known.items() if value is not None}
        rest |= self._counters(step)
        self._add("save", step=step, ok=error is None, seconds=round(seconds, 4), **rest)

    def notice(self, why: str, **details: Any) -> None:
        """A node was told to go."""
        self._add("notice", why=why, **details)

    def event(self, event: str, **details: Any) -> None:
        """Anything else worth keeping: a hang, a slow rank."""
        self._add("event", event=event, **details)

    def end(self, code: int, reason: str) -> None:
        """The attempt is over; only the first call counts."""
        if not self._ended:
            self._ended = True
            counters = self._counters(self._step)
            self._add("end", code=code, reason=reason, step=self._step, **counters)

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> None:
        if kind is KeyboardInterrupt:
            self.end(EXIT_INTERRUPTED, "interrupted")
        elif kind is not None and kind is not Recalled:  # then the next attempt says why
            self.end(EXIT_FAILED, f"{kind.__name__}: {plain(error)}"[:500])
        self._lines.close()

    def _counters(self, step: int) -> dict[str, Any]:
        """Steps skipped and roll-backs up to `step`, where the start counts them."""
        start = self._start
        if start.skipped is None or start.rollbacks is None:
            return {}
        return {
            "skipped": start.skipped + sum(one <= step for one in self._skipped),
            "rollbacks": start.rollbacks + sum(one <= step for one in self._rollbacks),
        }

    def _add(self, kind: str, **values: Any) -> None:
        after = round(clock() - self._start.monotonic, 3)
        self._write(kind, {**values, "after": after, "attempt": self._start.attempt})

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        line = json.dumps({"kind": kind, **values}, separators=(",", ":"), default=str)
        self._lines.add(line)


_TAIL_BYTES = 1 << 16


def _is_line(line: object) -> bool:
    """Whether this is a line of a ledger. A state may come from elsewhere than a `Ledger`."""
    with suppress(ValueError, TypeError, RecursionError):
        return isinstance(line, str) and "\n" not in line and "kind" in json.loads(line)
    return False


def _tail(path: Path) -> list[bytes]:
    """The last lines of a file, the first of them perhaps cut; empty if it cannot be read."""
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().splitlines()
    except OSError:
        return []


def _newest_step(lines: Sequence[bytes | str]) -> int:
    """The newest step in lines of a ledger; 0 if they tell of none."""
    for line in reversed(lines):
        with suppress(ValueError, TypeError, KeyError):  # a line may be cut
            found = json.loads(line)
            if found["kind"] == "step":
                return int(found["step"])
    return 0
