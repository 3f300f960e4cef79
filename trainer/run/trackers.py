"""W&B and TensorBoard: `python -m trainer.run.trackers wandb|tensorboard RUN_DIRECTORY`, each in a
companion of rank 0 (elastic/node/companion.py).

A tracker reads metrics.jsonl while it grows, and remembers up to where. So no step waits for one,
none is started again with the ranks, and one that is slow, fails or hangs costs the run nothing;
what a killed one has left undone the next one does.
"""

import json
import math
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from elastic.exits import SIGNALS

METRICS = "metrics.jsonl"
LOOK_SECONDS = 0.5
NAMES = {"wandb": "W&B", "tensorboard": "TensorBoard"}


class Tracker(Protocol):
    """Where records go."""

    def rewind(self, step: int) -> None:
        """The run goes on before `step`: what was logged from there on counts no more."""

    def log(self, step: int, moment: float, values: Mapping[str, float]) -> None:
        """One record; `moment` is Unix time."""

    def flush(self) -> None:
        """Keep what was logged, also if this process is killed now."""

    def close(self) -> None:
        """The last."""


class TensorBoard:
    """Event files in the run directory. Without torch, whose import takes seconds."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))

    def rewind(self, step: int) -> None:
        """See Tracker."""
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(
            self._events.Event(wall_time=time.time(), step=step, session_log=start)
        )

    def log(self, step: int, moment: float, values: Mapping[str, float]) -> None:
        """See Tracker."""
        summary = self._summaries.Summary(
            value=[
                self._summaries.Summary.Value(tag=key, simple_value=value)
                for key, value in values.items()
            ]
        )
        self._writer.add_event(self._events.Event(wall_time=moment, step=step, summary=summary))

    def flush(self) -> None:
        """See Tracker."""
        self._writer.flush()

    def close(self) -> None:
        """See Tracker."""
        self._writer.close()


class WeightsAndBiases:
    """A W&B run. Its id is kept in the run directory, so that a restart continues it."""

    def __init__(self, run_dir: Path) -> None:
        import wandb

        recipe = yaml.safe_load((run_dir / "recipe.yaml").read_text(encoding="utf-8"))
        tracking = recipe["tracking"]
        id_file = run_dir / "wandb-run-id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        self._run = wandb.init(
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            mode=tracking["wandb"],
            project=tracking["project"],
            name=tracking["name"] or run_dir.name,
            dir=str(run_dir),
            config=recipe,
            settings=wandb.Settings(silent=True, console="off"),
        )

    def rewind(self, step: int) -> None:
        """W&B itself leaves out the steps that it has already."""

    def log(self, step: int, moment: float, values: Mapping[str, float]) -> None:
        """See Tracker."""
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """It writes by itself."""

    def close(self) -> None:
        """See Tracker."""
        self._run.finish()


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
            file = self._path.open("rb")
        except FileNotFoundError:
            return None, []
        with file:
            status = os.fstat(file.fileno())
            replaced = status.st_ino != self._inode or status.st_size < self._offset
            self._inode, self._offset = status.st_ino, 0 if replaced else self._offset
            file.seek(self._offset)
            lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):  # it is just being written
            lines.pop()
        self._offset += sum(map(len, lines))
        records = [record for record in map(_record, lines) if record]
        new = [record for record in records if record["time"] > self.after]
        kept = [record["step"] for record in records if record["time"] <= self.after]
        self.after = max([self.after, *(record["time"] for record in new)])
        return (max(kept, default=0) + 1 if replaced else None), new


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"step", "time"} <= record.keys() else None


def track(tracker: Tracker, run_dir: Path, kind: str, ended: threading.Event) -> None:
    """Give a tracker all records, until there will be no more, or another process does this."""
    mark, me = run_dir / f".tracker-{kind}.json", secrets.token_hex(4)
    tail = Tail(run_dir / METRICS, _read_mark(mark)[1])
    _write_mark(mark, me, tail.after)
    last = False
    while not last and _read_mark(mark)[0] == me:
        last = ended.wait(LOOK_SECONDS)
        again, records = tail.read()
        if again is not None:
            tracker.rewind(again)
        for record in records:
            step, moment, _ = record.pop("step"), record.pop("time"), record.pop("event", None)
            values = {key: math.nan if value is None else value for key, value in record.items()}
            tracker.log(step, moment, values)
        if records:
            tracker.flush()
            _write_mark(mark, me, tail.after)
    tracker.close()


def _read_mark(path: Path) -> tuple[str, float]:
    """(who tracks, moment of the last record that is tracked)."""
    try:
        mark = json.loads(path.read_text(encoding="utf-8"))
        return mark["owner"], mark["after"]
    except (OSError, ValueError, KeyError):
        return "", 0.0


def _write_mark(path: Path, owner: str, after: float) -> None:
    aside = path.with_suffix(f".{owner}")
    aside.write_text(json.dumps({"owner": owner, "after": after}), encoding="utf-8")
    aside.replace(path)


def main(kind: str, directory: str) -> None:
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
    try:
        tracker = WeightsAndBiases(run_dir) if kind == "wandb" else TensorBoard(run_dir)
        track(tracker, run_dir, kind, ended)
    except Exception as error:
        line = f"{type(error).__name__}: {error}".partition("\n")[0]
        text = f"warning: {NAMES[kind]} failed ({line}); {run_dir / METRICS} has all it would have"
        print(text, flush=True)
        ended.wait()  # whoever finds no process would start another


if __name__ == "__main__":
    main(*sys.argv[1:])
