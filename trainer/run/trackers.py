"""Runs sinks and hooks: `python -m trainer.run.trackers RUN_DIRECTORY KIND [module:function]`, each
in a companion process of rank 0 (elastic/node/companion.py).

Such a process, a tracker, reads metrics.jsonl (for a sink) or the ledger (for a hook) while it
grows, and keeps its position in a file, at which a successor continues. So steps never wait for a
tracker, and a tracker that is slow, fails or hangs does not disturb the run.
"""

import json
import math
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from elastic.node.companion import until_input_ends
from elastic.node.files import open_to_read, read_text, write_whole
from elastic.record.history import in_lineage, lineage_of, read_starts
from elastic.record.ledger import LEDGER, StartLine
from elastic.record.lines import METRICS, read_record
from trainer.run.alerts import AlertSink
from trainer.run.events import RunEventReader, RunEventSummary
from trainer.run.sinks import PrometheusSink, Sink, TensorBoardSink, WandbSink, own_sink

LOOK_SECONDS = 0.5
AGAIN_SECONDS, AGAIN_SECONDS_MOST = 5.0, 300.0
"""First and longest wait, in seconds, before a tracker retries after a failure."""
Tracker = tuple[Iterator[float], Callable[[], None]]
"""An iterator that passes on new records at each `next`, and yields the position; and a function
that is called at the end, and closes the sink."""
SINKS: dict[str, Callable[[Path], Sink]] = {
    "wandb": WandbSink,
    "tensorboard": TensorBoardSink,
    "prometheus": PrometheusSink,
    "alerts": AlertSink,
}
NAMES = {"wandb": "W&B", "tensorboard": "TensorBoard"}


class RunMetricsTail:
    """Follows metrics.jsonl: returns the records in the newest attempt's lineage, the steps that
    led to its weights, see [Note: lineage] in elastic/record/history.py. The newest attempt is the
    last started of those that have a record. Also returns records without an attempt, and records
    of an attempt that the ledger lacks. `after`: `time` of the last record that was read earlier.
    """

    def __init__(self, run_dir: Path, after: float) -> None:
        self.after = after
        self._run_dir, self._inode, self._offset = run_dir, 0, 0
        self._starts: dict[str, StartLine] = {}
        self._newest: str | None = None
        self._lineage: dict[str, float] = {}
        """Lineage of `_newest`, the attempt that is followed (None before the first record)."""

    def read(self) -> tuple[int | None, list[dict[str, Any]]]:
        """Return (first step whose earlier records became void, else None; new records). The first
        records that are read also make steps void, because an earlier process may have stored more
        than it knew. Records that are again in the lineage are returned as new."""
        records, void = self._records(), None
        if not records:
            return None, []
        names = {one.get("attempt", "") for one in records}
        if not names <= self._starts.keys():
            self._starts = read_starts(self._run_dir)
        newest = self._newest_of(self._newest or "", *names)
        if newest != self._newest:
            void, records = self._change_to(newest)
        new = [one for one in records if in_lineage(one, self._lineage)]
        self.after = max([self.after, *(one["time"] for one in new)])
        return void, new

    def _change_to(self, newest: str) -> tuple[int, list[dict[str, Any]]]:
        """Follow the lineage of attempt `newest` from now on. Return (first step whose earlier
        records are void; all records that were not returned before)."""
        self._offset, before = 0, self._lineage
        records = self._records()
        if self._newest is None:  # the process before this followed its newest attempt's lineage
            known = (one.get("attempt", "") for one in records if one["time"] <= self.after)
            before = lineage_of(self._starts, self._newest_of("", *known))
        self._newest, self._lineage = newest, lineage_of(self._starts, newest)
        returned = [one["time"] <= self.after and in_lineage(one, before) for one in records]
        stand = [
            one["step"]
            for one, was in zip(records, returned, strict=True)
            if was and in_lineage(one, self._lineage)
        ]
        others = [one for one, was in zip(records, returned, strict=True) if not was]
        return max(stand, default=0) + 1, others

    def _records(self) -> list[dict[str, Any]]:
        """Return the records that were appended since the last call."""
        try:
            descriptor = open_to_read(self._run_dir / METRICS)
        except OSError:  # the file does not exist yet, or is none that may be read
            return []
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            # The file was cut, or replaced, as when rank 0 renames that of a user whom it does not
            # trust: read from the beginning.
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset, self._newest = status.st_ino, 0, None
            file.seek(self._offset)
            lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # still being written
            lines.pop()
        self._offset += sum(map(len, lines))
        return [record for record in map(read_record, lines) if record]

    def _newest_of(self, *names: str) -> str:
        order = {name: place for place, name in enumerate(self._starts)}
        return max(names, key=lambda name: order.get(name, -1))


def to_sink(sink: Sink, run_dir: Path, after: float) -> Iterator[float]:
    """Pass new records to a sink at each `next`; yields the `time` of the last record that would
    survive a kill. `after`: `time` of the last record that the sink has stored."""
    kept, rewind = getattr(sink, "kept", None), getattr(sink, "rewind", None)
    tail = RunMetricsTail(run_dir, kept(after) if kept else after)
    ledger = RunEventSummary(run_dir)
    while True:
        again, records = tail.read()
        if again is not None and rewind:
            rewind(again)
        for record in records:
            step = record.pop("step")
            for text in ("event", "attempt"):
                record.pop(text, None)
            values = {key: math.nan if value is None else value for key, value in record.items()}
            if "loss" in values:
                values |= ledger.at(values["time"])
            sink.record(step, values)
        yield kept(after) if kept else tail.after


def to_hook(name: str, run_dir: Path, after: float) -> Iterator[float]:
    """Call a hook with new events at each `next`; yields the position in the ledger, in bytes.
    Prints the first error of the hook only; later events are still delivered."""
    from trainer.recipe.factory import import_factory

    hook, reader, reported, offset = (
        import_factory("tracking.hooks", name),
        RunEventReader(),
        False,
        0,
    )
    while True:
        for end, event in reader.read(run_dir / LEDGER, offset):
            offset = end
            if not event or offset <= after:
                continue
            try:
                hook(event)
            except (Exception, SystemExit) as error:
                if not reported:
                    called = f"{name}, called with {type(event).__name__} of step {event.step},"
                    text = describe_failure(f"tracking.hooks: {called}", error)
                    print(f"warning: {text}", flush=True)
                reported = True
        yield offset


def keep_up(mark: Path, begin: Callable[[float], Tracker], ended: threading.Event) -> None:
    """Run a tracker until the run has ended (`ended` is set) and all is passed on, or until another
    process becomes its owner; then close it. The file `mark` holds the tracker's owner and the
    position at which it starts, and is updated as it proceeds. `begin`: position → tracker. Raises
    what the tracker raises."""
    me, done, last = secrets.token_hex(4), _read_mark(mark)[1], False
    # The owner is written first: a tracker left on another node stops when it sees a new owner.
    _write_mark(mark, me, done)
    turns, close = begin(done)

    def turn() -> bool:
        nonlocal done
        before, done = done, next(turns)
        if done != before:
            with suppress(OSError):  # on a full disk: the next position will be written
                _write_mark(mark, me, done)
        return done != before

    while not last and _read_mark(mark)[0] == me:
        last = ended.wait(LOOK_SECONDS)
        # At the end, repeat until all is passed on: a turn may handle only a part.
        while turn() and last:
            pass
    close()
    if last:  # `close` may have stored more records
        turn()


def _read_mark(path: Path) -> tuple[str, float]:
    """Return (owner, position) from a tracker's file; ("", 0) if it cannot be read."""
    try:
        mark = json.loads(read_text(path))
        return mark["owner"], mark["after"]
    except (OSError, ValueError, KeyError, TypeError):
        return "", 0.0


def _write_mark(path: Path, owner: str, after: float) -> None:
    write_whole(path, json.dumps({"owner": owner, "after": after}))


def describe_failure(name: str, error: BaseException) -> str:
    from trainer.recipe import RecipeError
    from trainer.recipe.factory import failure

    what = str(error) if isinstance(error, RecipeError) else f"{name} {failure(error)}"
    return f"{what}; training continues"


def _begin(kind: str, name: str, run_dir: Path, after: float) -> Tracker:
    if kind == "hooks":
        return to_hook(name, run_dir, after), lambda: None
    sink = own_sink(name, run_dir) if kind == "sinks" else SINKS[kind](run_dir)
    return to_sink(sink, run_dir, after), sink.close


def persist(
    mark: Path,
    begin: Callable[[float], Tracker],
    ended: threading.Event,
    describe: Callable[[BaseException], str],
    passes: Callable[[BaseException], bool],
) -> None:
    """Run a tracker as `keep_up` does, and restart it after failures. Prints `describe` of the
    first failure. `passes`: whether a failure may be temporary; after any other failure the tracker
    does nothing more."""
    reported, again, last = False, AGAIN_SECONDS, False
    while not last:
        last = ended.is_set()
        try:
            keep_up(mark, begin, ended)
            return
        except (Exception, SystemExit) as error:
            if not reported:
                print(f"warning: {describe(error)}", flush=True)
            reported = True
            if not passes(error):
                ended.wait()  # rank 0 would restart a process that ends
                return
            # A full disk or an unreachable server may recover, even after the run has ended.
            ended.wait(again)
            again = min(2 * again, AGAIN_SECONDS_MOST)


def mark_of(run_dir: Path, name: str) -> Path:
    return run_dir / f".tracker-{name}.json"


def main(directory: str, kind: str, name: str = "") -> None:
    """Run a tracker until standard input is closed."""
    ended = until_input_ends(niceness=10)
    run_dir = Path(directory)

    def describe(error: BaseException) -> str:
        key = f"tracking.{kind}: {name}" if name else f"tracking.{kind}"
        text = describe_failure(NAMES.get(kind, key), error)
        return f"{text}; {run_dir / (LEDGER if kind == 'hooks' else METRICS)} has all data"

    persist(
        mark_of(run_dir, "-".join(filter(None, [kind, name]))),
        partial(_begin, kind, name, run_dir),
        ended,
        describe,
        lambda error: kind in SINKS or isinstance(error, OSError),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
