"""Sinks and hooks: `python -m trainer.run.trackers RUN_DIRECTORY KIND [module:function]`, each in a
companion of rank 0 (elastic/node/companion.py).

A sink gets metrics.jsonl, a hook the ledger, both read while they grow; where it is, it remembers.
So no step waits for one, none is started again with the ranks, and one that is slow, fails or hangs
costs the run nothing; what a killed one has left undone the next one does.
"""

import json
import math
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from elastic.exits import SIGNALS
from elastic.node.files import open_to_read, read_text, write_whole
from elastic.record.ledger import LEDGER
from elastic.record.lines import read_record
from trainer.run.alerts import Alerts
from trainer.run.events import EventReader
from trainer.run.ledger_summary import LedgerSummary
from trainer.run.sinks import Prometheus, Sink, TensorBoard, WeightsAndBiases, own_sink

METRICS = "metrics.jsonl"
LOOK_SECONDS = 0.5
AGAIN_SECONDS, AGAIN_SECONDS_MOST = 5.0, 300.0
"""After which a tracker that a file or a connection has failed begins again where it was, at first
and after many times."""
Tracker = tuple[Iterator[float], Callable[[], None]]
"""Its turns, each of which yields how far it is, and what closes it."""
SINKS: dict[str, Callable[[Path], Sink]] = {
    "wandb": WeightsAndBiases,
    "tensorboard": TensorBoard,
    "prometheus": Prometheus,
    "alerts": Alerts,
}
NAMES = {
    "wandb": "W&B",
    "tensorboard": "TensorBoard",
    "prometheus": "tracking.prometheus",
    "alerts": "tracking.alerts",
}


class Tail:
    """The records of a file that grows, or is replaced by one without its last records.

    Args:
        path: of the file.
        after: moment of the last record that is known already.
    """

    def __init__(self, path: Path, after: float) -> None:
        self.after = after
        self._path, self._inode, self._offset = path, 0, 0

    def read(self) -> tuple[int | None, list[dict[str, Any]]]:
        """What is new: (the first step that comes again, if the file is another one now; records
        since the last call)."""
        try:
            descriptor = open_to_read(self._path)
        except OSError:  # not there yet, or no file of a run
            return None, []
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            replaced = status.st_ino != self._inode or status.st_size < self._offset
            self._inode, self._offset = status.st_ino, 0 if replaced else self._offset
            file.seek(self._offset)
            lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # it is just being written
            lines.pop()
        self._offset += sum(map(len, lines))
        records = [record for record in map(read_record, lines) if record]
        new = [record for record in records if record["time"] > self.after]
        kept = [record["step"] for record in records if record["time"] <= self.after]
        self.after = max([self.after, *(record["time"] for record in new)])
        return (max(kept, default=0) + 1 if replaced else None), new


def to_sink(sink: Sink, run_dir: Path, after: float) -> Iterator[float]:
    """Give a sink all that is new at each turn; yields the moment of the last record that it keeps
    whatever is killed.

    Args:
        sink: of the run.
        run_dir: of the run.
        after: moment of the last record that it is known to keep.
    """
    kept, rewind = getattr(sink, "kept", None), getattr(sink, "rewind", None)
    tail, standing = Tail(run_dir / METRICS, kept(after) if kept else after), LedgerSummary(run_dir)
    while True:
        again, records = tail.read()
        if again is not None and rewind:
            rewind(again)
        for record in records:
            step, _ = record.pop("step"), record.pop("event", None)
            values = {key: math.nan if value is None else value for key, value in record.items()}
            if "loss" in values:
                values |= standing.at(values["time"])
            sink.record(step, values)
        yield kept(after) if kept else tail.after


def to_hook(name: str, run_dir: Path, after: float) -> Iterator[float]:
    """Call a hook with every event that is new at each turn; yields how many bytes of the ledger it
    had. The first error is told; events that follow it come all the same."""
    from trainer.recipe.factory import import_factory

    hook, reader, told, offset = import_factory("tracking.hooks", name), EventReader(), False, 0
    while True:
        with os.fdopen(open_to_read(run_dir / LEDGER), "rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):  # it is just being written
                    break
                offset += len(line)
                event = reader.event(line)
                if not event or offset <= after:
                    continue
                try:
                    hook(event)
                except (Exception, SystemExit) as error:
                    if not told:
                        called = f"{name}, called with {type(event).__name__} of step {event.step},"
                        print(
                            f"warning: {_failure(f'tracking.hooks: {called}', error)}", flush=True
                        )
                    told = True
        yield offset


def keep_up(mark: Path, begin: Callable[[float], Tracker], ended: threading.Event) -> None:
    """Let a tracker take its turns, until there will be nothing new, or another process does this.

    Args:
        mark: file that keeps how far the tracker is.
        begin: makes the tracker, from how far it is.
        ended: no more will be written.
    """
    me, done, last = secrets.token_hex(4), _read_mark(mark)[1], False
    # First, so that a process on another node stops before this one looks how far the tracker is.
    _write_mark(mark, me, done)
    turns, close = begin(done)

    def turn() -> None:
        nonlocal done
        before, done = done, next(turns)
        if done != before:
            with suppress(OSError):  # the disk is full; a later mark says it as well
                _write_mark(mark, me, done)

    while not last and _read_mark(mark)[0] == me:
        last = ended.wait(LOOK_SECONDS)
        turn()
    close()
    if last:  # what it keeps only now
        turn()


def _read_mark(path: Path) -> tuple[str, float]:
    """(who tracks, moment of the last record that is tracked)."""
    try:
        mark = json.loads(read_text(path))
        return mark["owner"], mark["after"]
    except (OSError, ValueError, KeyError, TypeError):
        return "", 0.0


def _write_mark(path: Path, owner: str, after: float) -> None:
    write_whole(path, json.dumps({"owner": owner, "after": after}))


def _failure(name: str, error: BaseException) -> str:
    """What went wrong in a tracker, where, and what it costs the run."""
    from trainer.recipe import RecipeError
    from trainer.recipe.factory import failure

    what = str(error) if isinstance(error, RecipeError) else f"{name} {failure(error)}"
    return f"{what}; training goes on"


def _begin(kind: str, name: str, run_dir: Path, after: float) -> Tracker:
    if kind == "hooks":
        return to_hook(name, run_dir, after), lambda: None
    sink = own_sink(name, run_dir) if kind == "sinks" else SINKS[kind](run_dir)
    return to_sink(sink, run_dir, after), sink.close


def main(directory: str, kind: str, name: str = "") -> None:
    """Run a tracker until standard input ends."""
    for number in SIGNALS:  # Slurm's reach every process; there are still records to come
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    ended = threading.Event()

    def wait() -> None:
        while os.read(0, 1):
            pass
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    run_dir = Path(directory)
    mark = run_dir / f".tracker-{'-'.join(filter(None, [kind, name]))}.json"
    told, again, last = False, AGAIN_SECONDS, False
    while not last:
        last = ended.is_set()
        try:
            keep_up(mark, partial(_begin, kind, name, run_dir), ended)
            return
        except (Exception, SystemExit) as error:
            text = _failure(NAMES.get(kind, f"tracking.{kind}: {name}"), error)
            if not told:
                print(f"warning: {text}, and {run_dir / METRICS} has all it would have", flush=True)
            told = True
            if kind not in SINKS and not isinstance(error, OSError):
                ended.wait()  # whoever finds no process would start another
                return
            # A disk that is full now, or a server that is away, may be back: also at the end.
            ended.wait(again)
            again = min(2 * again, AGAIN_SECONDS_MOST)


if __name__ == "__main__":
    main(*sys.argv[1:])
