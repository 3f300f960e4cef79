"""Follows a growing ledger, and resumes reading from what cache.py has stored."""

import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from checkpointing.storage.posix import filesystem, is_shared
from elastic.record.history import LedgerReader, RecordHistory
from trainer.tools.seeing import cache


class SeenLedger:
    """The ledger of a run, which is read repeatedly."""

    def __init__(self, run: Path) -> None:
        self._reader = LedgerReader(run)
        self._kept = 0
        self._version: tuple[int, int] | None = None
        self._written = 0.0
        """Time of the last write to the ledger, by `time.monotonic`."""
        with suppress(OSError):
            size = self._reader.path.stat().st_size
            if size >= cache.WORTH_BYTES:
                self._recall(size)

    @property
    def version(self) -> str:
        """A text that changes with every new line other than step lines."""
        return f"{self._reader.inode}-{len(self._reader.others)}"

    def read(self, meanwhile: Callable[[float], None] = lambda share: None) -> RecordHistory:
        """Read new lines, and return the history. `meanwhile`: as for `LedgerReader.read`."""
        return self._reader.read(forks=threading.active_count() == 1, meanwhile=meanwhile)

    def silent_seconds(self) -> float:
        """Return the time since the ledger was last written. Clocks of two machines may differ, so
        the first call asks the filesystem for the time, if a file can be created there. Later calls
        count from the last call that found the file changed."""
        path = self._reader.path
        with suppress(OSError):
            status = os.stat(path)
            now, version = time.monotonic(), (status.st_mtime_ns, status.st_size)
            if self._version is None:
                self._written = now - (filesystem_time(path.parent) - status.st_mtime)
            elif version != self._version:
                self._written = now
            self._version = version
        return max(0.0, time.monotonic() - self._written)

    def newest_lines(self, count: int) -> list[str]:
        """Return the last `count` lines other than step lines."""
        newest = self._reader.others[-count:]
        return [line.decode(errors="replace").strip()[:2000] for _, line in newest]

    def keep(self) -> None:
        """Cache the step lines, if enough of them are not in the cache yet."""
        reader = self._reader
        if reader.offset - self._kept < cache.WORTH_BYTES:
            return
        self._kept = reader.offset
        dumps = [attempt.steps.dump() for attempt in reader.attempts]
        facts = {
            "inode": reader.inode, "offset": reader.offset, "number": reader.number,
            # latin-1 decodes any byte, and encodes it back without loss
            "others": [[number, line.decode("latin-1")] for number, line in reader.others],
            "steps": [steps for steps, _ in dumps],
        }  # fmt: skip
        columns = [column for _, data in dumps for column in data]
        cache.keep(reader.path, reader.offset, facts, columns)

    def _recall(self, size: int) -> None:
        cached = cache.recall(self._reader.path)
        if not cached:
            return
        facts, columns = cached
        reader = LedgerReader(self._reader.path)
        # On an error the cache is not used, and the whole ledger is read.
        with suppress(ValueError, KeyError, TypeError, IndexError):
            reader.begin(facts["inode"])
            for number, text in facts["others"]:
                reader.take(text.encode("latin-1"), number)
            each = len(columns) // max(1, len(reader.attempts))
            for place, (attempt, steps) in enumerate(
                zip(reader.attempts, facts["steps"], strict=True)
            ):
                attempt.steps.fill(steps, columns[place * each : (place + 1) * each])
                attempt.settle()
            reader.offset, reader.number = facts["offset"], facts["number"]
            if 0 < reader.offset <= size:
                self._reader, self._kept = reader, reader.offset


def filesystem_time(directory: Path) -> float:
    """Return the Unix time by the clock that stamps new files in a directory: a server's clock if
    machines share the filesystem. If no file can be created there, return this machine's time."""
    if is_shared(filesystem(directory)):
        with suppress(OSError), tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_mtime
    return time.time()
