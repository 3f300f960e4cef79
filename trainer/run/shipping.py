"""Rank 0's end of a run in a bucket: what it brings here at its start, and the lines that it stores
there while it trains. See parts.py [Note: parts] and terms.py [Note: terms].

[Note: shipping] The files of the run in `Recipe.directory`, on this machine's disk, are written as
those of any run. In addition, each line goes into a journal, and waits in memory until a thread has
stored it, every SHIP_SECONDS. So no step waits for the bucket. No line of a committed step is lost:

- The lines that wait when a save begins are stored right before its commit record, by whoever
  commits. If that fails, the save fails.
- Every copy of the state, in memory or storage, holds the lines that waited. Whoever goes on from
  it stores them first.
- A journal that a dead process left is stored by the next rank 0 of its machine.
"""

import logging
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from checkpointing.errors import CheckpointError, explain
from checkpointing.storage.object_storage import store_of
from checkpointing.storage.place import ObjectPath
from elastic.node.files import open_to_read, own_directory, read_bytes, read_text, write_whole
from elastic.record.lines import LineFile
from trainer.run.parts import (
    FILES,
    RECIPES,
    LineRange,
    LocalCopy,
    part_name,
    parts_of,
    stored_until,
)
from trainer.run.terms import claim, holder_of

logger = logging.getLogger(__name__)

SHIP_SECONDS = 5.0
MERGED = 32
"""So many parts become one, and so many of these again."""
END_SECONDS, HURRIED_SECONDS = 60.0, 5.0
"""Longest wait at the end for lines that are not stored yet; after an error."""
JOURNAL, UP_TO = "journal", "up-to-term"
"""Names in the run's local directory: a folder of lines that may not be stored yet; a file that
names the newest term of which the directory has all lines."""
TAIL = "lines_to_store"
"""Key of a trainer state: a `LineRange`. Absent where all lines are stored."""
_JOURNAL = re.compile(r"(\d{6,})-(\d{9,})-([0-9a-f]{16})")


class Shipper:
    """An attempt's hold on the record of a run in a bucket. A context manager.

    Args:
        run: in the bucket.
        directory: the run's local directory; created, or brought up to date.
        job: identity of this launch, see `terms.TermHolder`.
        launcher: the process that keeps this launch alive, see there.

    Raises:
        OccupiedError: another launch trains there.
        StorageError: the store does not answer, or does not obey conditions.
        OSError: the directory cannot be written.
    """

    def __init__(self, run: ObjectPath, directory: Path, job: str, launcher: str) -> None:
        own_directory(directory)
        directory.chmod(0o700)
        (directory / JOURNAL).mkdir(exist_ok=True)
        self._run, self._directory = run, directory
        self._term = claim(run, job, launcher)
        self.goes_on = False
        """Whether the next attempt of this job takes over: the run is not released."""
        self._lock, self._shipping = threading.Lock(), threading.Lock()
        self._first, self._waiting = 0, list[str]()
        """Number of the first line that waits; the lines that wait."""
        self._journal: tuple[Path, LineFile] | None = None
        self._levels: list[list[tuple[int, int]]] = [[]]
        """(first, after last) of the stored parts, by how often they were merged."""
        self._stored_files: dict[str, tuple[int, int]] = {}
        """Time and size of each small file when it was stored."""
        self._wake, self._end = threading.Event(), threading.Event()
        try:
            self._store_journals()
            if not self._up_to_date():
                self._bring()
            write_whole(directory / UP_TO, f"{self._term.number} {self._term.token}")
        except BaseException:
            self._term.stop()
            raise
        self._thread = threading.Thread(target=self._ship, name="perdure-lines", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._end.set()
        self._wake.set()
        if kind is None or issubclass(kind, Exception):  # else this process goes on at once
            self._thread.join(HURRIED_SECONDS if kind else END_SECONDS)
            if count := len(self._waiting):
                logger.warning(
                    "%s: %d lines of the record are not stored; they lie in %s, and the next start "
                    "on this machine stores them",
                    self._run, count, self._directory / JOURNAL,
                )  # fmt: skip
        if kind is None and not self.goes_on:
            self._term.release()
        else:
            self._term.stop()
        with self._lock:
            if self._journal:
                self._journal[1].close()

    # --- lines -----------------------------------------------------------------------------------

    def add(self, line: str) -> None:
        """Take a line of the ledger or of metrics.jsonl, without its newline."""
        with self._lock:
            self._waiting.append(line)
            if self._journal is None:
                self._journal = self._new_journal()
            self._journal[1].add(line)
            if self._first + len(self._waiting) == 1:
                self._wake.set()  # readers wait for the first line

    @property
    def tail(self) -> LineRange:
        """The lines that are not stored yet."""
        with self._lock:
            return LineRange(self._term.number, self._first, list(self._waiting))

    def to_state(self) -> dict[str, Any]:
        """What a copy of the state holds of the record."""
        tail = self.tail
        return {TAIL: tail._asdict()} if tail.lines else {}

    def before_commit(self) -> dict[str, bytes]:
        """What has to be stored before the state of now is committed: contents by URL."""
        tail = self.tail
        return {str(self._run / tail.name): tail.data} if tail.lines else {}

    def take(self, state: Mapping[str, Any] | None) -> None:
        """Store lines that came with a loaded state, unless they are stored already.

        Raises:
            StorageError: the store does not answer.
        """
        span = LineRange.of(state.get(TAIL)) if state else None
        if span and span.term < self._term.number and self._store_rest(span):
            self._bring()

    def _store_rest(self, span: LineRange) -> bool:
        """Store the lines of an earlier term that no part has; returns whether there are any."""
        rest = span.after(stored_until(self._run, span.term, span.first))
        if rest.lines:
            store_of(self._run).write_new(self._run / rest.name, rest.data)
        return bool(rest.lines)

    # --- the start -------------------------------------------------------------------------------

    def _store_journals(self) -> None:
        """Store what earlier processes of this machine left, and forget it."""
        for path in sorted((self._directory / JOURNAL).iterdir()):
            if not (found := _JOURNAL.fullmatch(path.name)):
                continue
            term, first = int(found[1]), int(found[2])
            holder = holder_of(self._run, term)
            with open(open_to_read(path), encoding="utf-8", errors="replace") as file:
                lines = file.read().split("\n")[:-1]  # the last one is empty, or was cut off
            if holder and holder.token == found[3]:  # else the run was deleted, and is another
                self._store_rest(LineRange(term, first, lines))
            path.unlink()

    def _up_to_date(self) -> bool:
        """Whether the newest term was of this directory, which so has all lines."""
        before = self._term.before
        with suppress(OSError, ValueError):
            number, _, token = read_text(self._directory / UP_TO).partition(" ")
            return before is not None and (int(number), token) == (
                self._term.number - 1,
                before.token,
            )
        return self._term.number == 1 and not any(self._directory.glob("*.jsonl"))

    def _bring(self) -> None:
        """Bring the record here."""
        LocalCopy(self._run, self._directory).refresh()

    # --- the thread ------------------------------------------------------------------------------

    def _ship(self) -> None:
        failing = last = False
        while not last:
            self._wake.wait(SHIP_SECONDS)
            self._wake.clear()
            last = self._end.is_set()
            try:
                self.flush()
                failing = False
            except (CheckpointError, OSError) as error:
                if not failing:
                    logger.warning(
                        "lines of the run are kept here until the bucket takes them: %s",
                        explain(error),
                    )
                failing = True

    def flush(self) -> None:
        """Store everything that is new.

        Raises:
            StorageError: the store does not answer.
            OSError: a file cannot be read, or another process has stored other lines.
        """
        with self._shipping:
            self._store_files()  # first: a start line names its recipe
            tail = self.tail
            if not tail.lines:
                return
            store_of(self._run).write_new(self._run / tail.name, tail.data)
            with self._lock:
                self._first += len(tail.lines)
                del self._waiting[: len(tail.lines)]
            self._levels[0].append((tail.first, tail.first + len(tail.lines)))
            self._merge()

    def _store_files(self) -> None:
        """Store the small files that have changed."""
        for path in (*self._directory.iterdir(), *(self._directory / RECIPES).glob("*.yaml")):
            name = str(path.relative_to(self._directory))
            if not FILES.fullmatch(name):
                continue
            try:
                status = path.lstat()
                version = status.st_mtime_ns, status.st_size
                if self._stored_files.get(name) == version:
                    continue
                data = read_bytes(path)
            except OSError:  # no file of ours; lines do not wait for it
                continue
            store_of(self._run).write(self._run / name, data)
            self._stored_files[name] = version

    def _merge(self) -> None:
        """Make one part of MERGED, at each level, and delete what lies inside it. The journal
        begins anew with what waits."""
        store, term, merged = store_of(self._run), self._term.number, False
        for level, parts in enumerate(self._levels):
            if len(parts) < MERGED:
                break
            names = [self._run / part_name(term, *part) for part in parts]
            first, after = whole = parts[0][0], parts[-1][1]
            data = b"".join(store.read(name) for name in names)
            store.write_new(self._run / part_name(term, *whole), data)
            parts.clear()
            if level + 1 == len(self._levels):
                self._levels.append([])
            self._levels[level + 1].append(whole)
            merged = True
            store.delete(
                [
                    self._run / part_name(term, begin, end)
                    for begin, end in parts_of(self._run, term)
                    if first <= begin and end <= after and (begin, end) != whole
                ]
            )
        if not merged:
            return
        with self._lock:
            old, self._journal = self._journal, self._new_journal()
            for line in self._waiting:
                self._journal[1].add(line)
        if old:
            old[1].close()
            old[0].unlink(missing_ok=True)

    def _new_journal(self) -> tuple[Path, LineFile]:
        name = f"{self._term.number:06}-{self._first:09}-{self._term.token}"
        path = self._directory / JOURNAL / name
        return path, LineFile(path)
