"""Counts attempts, failures, lost steps and goodput from a run's ledger. Imports no torch."""

from array import array
from collections import deque
from contextlib import suppress
from pathlib import Path

from elastic.record.ledger import LEDGER
from trainer.run.events import Event, EventReader, Restart, RollBack, Start, Step


class LedgerSummary:
    """Summarises the ledger of a run while it grows."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._offset, self._reader = run_dir / LEDGER, 0, EventReader()
        self._ahead = deque[Event]()
        """Events that were read, but are later than the time of the last call of `at`."""
        self._began = self._kept = 0.0
        self._seconds = array("d")
        """Seconds of each step (index 0 is step 1); 0 if the present weights do not contain it."""
        self._counts = dict.fromkeys(("attempt", "world_size", "failures", "steps_lost"), 0)

    def at(self, moment: float) -> dict[str, float]:
        """Return attempts, ranks, failures, lost steps and goodput up to a Unix time; {} before the
        run begins. The time must not decrease from call to call."""
        with suppress(OSError):
            for end, event in self._reader.read(self._path, self._offset):
                self._offset = end
                if event:
                    self._ahead.append(event)
        while self._ahead and self._ahead[0].at <= moment:
            self._add(self._ahead.popleft())
        if not self._began:
            return {}
        wall = max(moment - self._began, 0.0)
        return {**self._counts, "goodput": min(1.0, self._kept / wall) if wall else 0.0}

    def _add(self, event: Event) -> None:
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
        """Subtract the time of steps after `last`, which the present weights do not contain."""
        for index in range(last, len(self._seconds)):
            self._kept -= self._seconds[index]
            self._seconds[index] = 0.0
