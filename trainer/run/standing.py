"""How a run stands by its ledger, for trackers: attempts, failures, steps lost, goodput. Imports no
torch."""

import os
from array import array
from collections import deque
from contextlib import suppress
from pathlib import Path

from elastic.node.files import open_to_read
from elastic.record.ledger import LEDGER
from trainer.run.events import Event, Reader, Restart, RollBack, Start, Step


class Standing:
    """How a run stands by its ledger, which is read while it grows."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._offset, self._reader = run_dir / LEDGER, 0, Reader()
        self._ahead = deque[Event]()
        """Events later than what was asked for."""
        self._began = self._kept = 0.0
        self._seconds = array("d")
        """By step, from 1: in which its result was computed; 0 where it left none."""
        self._counts = dict.fromkeys(("attempt", "world_size", "failures", "steps_lost"), 0)

    def at(self, moment: float) -> dict[str, float]:
        """Attempts, ranks, failures, steps lost and goodput until a Unix time, which must not be
        before those asked for earlier; empty as long as the ledger has no start."""
        self._read()
        while self._ahead and self._ahead[0].at <= moment:
            self._take(self._ahead.popleft())
        if not self._began:
            return {}
        wall = max(moment - self._began, 0.0)
        return {**self._counts, "goodput": min(1.0, self._kept / wall) if wall else 0.0}

    def _read(self) -> None:
        with suppress(OSError), os.fdopen(open_to_read(self._path), "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # it is just being written
                    break
                self._offset += len(line)
                if event := self._reader.event(line):
                    self._ahead.append(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, Start | Restart):
            self._began = self._began or event.at
            self._counts["attempt"] += 1
            self._counts["world_size"] = event.world_size
        if isinstance(event, Restart):
            self._counts["failures"] += bool(event.cause)
            self._counts["steps_lost"] += event.lost
            self._drop(event.step)
        elif isinstance(event, RollBack):
            self._drop(event.to)
        elif isinstance(event, Step) and not event.skipped:
            self._seconds.extend([0.0] * (event.step - len(self._seconds)))
            self._kept += event.seconds - self._seconds[event.step - 1]
            self._seconds[event.step - 1] = event.seconds

    def _drop(self, last: int) -> None:
        """Results of the steps after `last` are in no weights any more."""
        for index in range(last, len(self._seconds)):
            self._kept -= self._seconds[index]
            self._seconds[index] = 0.0
