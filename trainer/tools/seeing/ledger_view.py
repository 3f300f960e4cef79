"""Follows a growing ledger, and resumes reading from what cache.py has stored."""

from contextlib import suppress
from pathlib import Path

from elastic.record.history import History, LedgerReader
from trainer.tools.seeing import cache


class LedgerView:
    """The ledger of a run, which is read repeatedly.

    Args:
        run: run directory.
    """

    def __init__(self, run: Path) -> None:
        self._reader = LedgerReader(run)
        self._kept = 0
        if (size := _size(self._reader.path)) >= cache.WORTH_BYTES:
            self._recall(size)

    @property
    def path(self) -> Path:
        """Path of the ledger."""
        return self._reader.path

    @property
    def version(self) -> str:
        """A text that changes with every new line that is not a step's."""
        return f"{self._reader.inode}-{len(self._reader.others)}"

    def read(self) -> History:
        """Read new lines, as `LedgerReader.read`."""
        history = self._reader.read()
        if self._reader.offset - self._kept >= cache.WORTH_BYTES:
            self._keep()
        return history

    def newest_lines(self, count: int) -> list[str]:
        """Last `count` lines that are not a step's."""
        newest = self._reader.others[-count:]
        return [line.decode(errors="replace").strip()[:2000] for _, line in newest]

    def _keep(self) -> None:
        reader = self._reader
        self._kept = reader.offset
        described, columns = [], []
        for attempt in reader.attempts:
            facts, data = attempt.steps.dump()
            described.append(facts)
            columns += data
        # latin-1 decodes any byte, and encodes it back without loss
        others = [[number, line.decode("latin-1")] for number, line in reader.others]
        begun = {"inode": reader.inode, "offset": reader.offset, "number": reader.number}
        cache.keep(
            reader.path, reader.offset, {**begun, "others": others, "steps": described}, columns
        )

    def _recall(self, size: int) -> None:
        cached = cache.recall(self._reader.path)
        if not cached:
            return
        facts, columns = cached
        reader = LedgerReader(self._reader.path)
        with suppress(ValueError, KeyError, TypeError, IndexError):  # the whole ledger is read then
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


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
