"""Stores ledger and metrics of a run in a bucket while it trains; at a start copies them from the
bucket. On rank 0. See parts.py [Note: parts] and terms.py [Note: terms].

[Note: shipping] Ledger and metrics are written to `Recipe.directory` on the local disk, as in any
run. In addition, each line is appended to a journal on disk, and kept in memory until a thread has
stored it in the bucket, every SHIP_SECONDS. So no step waits for the bucket. No line of a committed
step is lost:

- Lines that are not stored when a save begins are stored right before its commit record, by the
  process that commits. If that fails, the save fails.
- Every copy of the state, in memory or storage, contains the lines that were not stored. An attempt
  that resumes from the copy stores them first.
- The journal of a killed process is stored by the next rank 0 on its machine.
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
from elastic.record.lines import SAMPLES, RecordFile
from trainer.run.parts import (
    FILES,
    RECIPES,
    RunPartRange,
    RunRecordCopy,
    holds_its_lines,
    part_name,
    parts_of,
    stored_until,
)
from trainer.run.terms import claim, holder_of

logger = logging.getLogger(__name__)

SHIP_SECONDS = 5.0
MERGED = 32
"""Number of parts that are merged into a larger part; that many larger parts are merged again."""
END_SECONDS, HURRIED_SECONDS = 60.0, 5.0
"""Longest wait for the last lines to be stored, at the end of training and after an error."""
JOURNAL, UP_TO = "journal", "up-to-term"
"""Names in the run's local directory: the folder of journals; a file with the newest term of which
the directory has all lines."""
TAIL = "lines_to_store"
"""Key in the state of a checkpoint for the `RunPartRange` of lines that were not stored, if any."""
_JOURNAL = re.compile(r"(\d{6,})-(\d{9,})-([0-9a-f]{16})")


class RunShipper:
    """Claims a run in a bucket for this attempt as `terms.claim` does, and stores its lines there.
    A context manager. `directory`: the run's local directory; created, or updated from the bucket.
    """

    def __init__(self, run: ObjectPath, directory: Path, job: str, launcher: str) -> None:
        own_directory(directory)
        directory.chmod(0o700)
        (directory / JOURNAL).mkdir(exist_ok=True)
        self._run, self._directory = run, directory
        self._term = claim(run, job, launcher)
        self.goes_on = False
        """Whether another attempt of this job follows, so that the run stays claimed."""
        self._lock, self._shipping = threading.Lock(), threading.Lock()
        self._first, self._waiting = 0, list[str]()
        """Number of the first line that is not stored; all lines that are not stored."""
        self._journal: tuple[Path, RecordFile] | None = None
        self._levels: list[list[tuple[int, int]]] = [[]]
        """Parts in the bucket as (first line, line after the last); index: how often merged."""
        self._damaged = False
        """Whether a part did not hold the lines that it is named by. Then no part is merged, and
        the journal is kept: the next start stores its lines again."""
        self._stored_files: dict[str, tuple[int, int]] = {}
        """Name of a small file → its modification time and size when it was last stored."""
        self._wake, self._end = threading.Event(), threading.Event()
        try:
            self._store_journals()
            if not self._up_to_date():
                RunRecordCopy(run, directory).refresh()
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
        # NodeRecall is no Exception: the process becomes a rank of the next attempt, and must
        # not wait for the thread.
        if kind is None or issubclass(kind, Exception):
            self._thread.join(HURRIED_SECONDS if kind else END_SECONDS)
            if count := len(self._waiting):
                logger.warning(
                    "%s: %d lines of ledger and metrics are not in the bucket; they are in %s, and "
                    "the next start on this machine stores them",
                    self._run, count, self._directory / JOURNAL,
                )  # fmt: skip
        if kind is None and not self.goes_on:
            self._term.release()
        else:
            self._term.stop()
        with self._lock:
            if self._journal:
                self._journal[1].close()

    def add(self, line: str) -> None:
        """Add a line of the ledger or of metrics.jsonl, without its newline."""
        with self._lock:
            self._waiting.append(line)
            if self._journal is None:
                self._journal = self._new_journal()
            self._journal[1].add(line)
            if self._first + len(self._waiting) == 1:
                self._wake.set()  # store the first line at once: readers wait for it

    @property
    def tail(self) -> RunPartRange:
        """Lines that are not stored yet."""
        with self._lock:
            return RunPartRange(self._term.number, self._first, list(self._waiting))

    def to_state(self) -> dict[str, Any]:
        """Return `tail` as an entry for the state of a checkpoint; {} if it is empty."""
        tail = self.tail
        return {TAIL: tail._asdict()} if tail.lines else {}

    def before_commit(self) -> dict[str, bytes]:
        """Return what must be stored before a commit of the present state: URL → contents."""
        tail = self.tail
        return {str(self._run / tail.name): tail.data} if tail.lines else {}

    def take(self, state: Mapping[str, Any] | None) -> None:
        """Store the lines in a loaded state, unless they are stored already."""
        span = RunPartRange.of(state.get(TAIL)) if state else None
        if span and span.term < self._term.number and self._store_rest(span):
            RunRecordCopy(self._run, self._directory).refresh()

    def _store_rest(self, span: RunPartRange) -> bool:
        """Store the lines of an earlier term that no part holds; returns whether there were any."""
        rest = span.after(stored_until(self._run, span.term, span.first))
        if rest.lines:
            store, part = store_of(self._run), self._run / rest.name
            try:
                store.write_new(part, rest.data)
            except FileExistsError:  # a part of this name that holds other lines
                store.write(part, rest.data)
        return bool(rest.lines)

    def _store_journals(self) -> None:
        """Store the journals that killed processes left on this machine, and delete them."""
        for path in sorted((self._directory / JOURNAL).iterdir()):
            if not (found := _JOURNAL.fullmatch(path.name)):
                continue
            term, first = int(found[1]), int(found[2])
            holder = holder_of(self._run, term)
            with open(open_to_read(path), encoding="utf-8", errors="replace") as file:
                lines = file.read().split("\n")[:-1]  # the last element is empty or incomplete
            if holder and holder.token == found[3]:  # else the journal is of a deleted run
                self._store_rest(RunPartRange(term, first, lines))
            path.unlink()

    def _up_to_date(self) -> bool:
        """Return whether this directory has the lines of all earlier terms."""
        before = self._term.before
        with suppress(OSError, ValueError):
            number, _, token = read_text(self._directory / UP_TO).partition(" ")
            return before is not None and (int(number), token) == (
                self._term.number - 1,
                before.token,
            )
        return self._term.number == 1 and not any(self._directory.glob("*.jsonl"))

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
                        "ledger and metrics are kept on this machine until the bucket takes them: "
                        "%s",
                        explain(error),
                    )
                failing = True

    def flush(self) -> None:
        """Store new lines and changed small files in the bucket. Raises StorageError if the store
        does not answer, OSError if another process has stored different lines."""
        with self._shipping:
            self._store_files()  # first, because a start line refers to its recipe
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
        for path in (*self._directory.iterdir(), *(self._directory / RECIPES).glob("*.yaml")):
            name = str(path.relative_to(self._directory))
            # samples.jsonl (continued prompts) is stored by its writer, tools/run_samples.py
            if name == SAMPLES or not FILES.fullmatch(name):
                continue
            try:
                status = path.lstat()
                version = status.st_mtime_ns, status.st_size
                if self._stored_files.get(name) == version:
                    continue
                data = read_bytes(path)
            except OSError:  # a small file that cannot be read must not hold up lines
                continue
            store_of(self._run).write(self._run / name, data)
            self._stored_files[name] = version

    def _merge(self) -> None:
        """Where a level has at least MERGED parts, write them as one part of the next level, and
        delete the old parts. If any were merged, begin a new journal with the lines that are not in
        the bucket. After a damaged or missing part nothing is merged until the next start."""
        store, term, merged = store_of(self._run), self._term.number, False
        for level, parts in enumerate(self._levels):
            if len(parts) < MERGED or self._damaged:
                break
            first, after = whole = parts[0][0], parts[-1][1]
            data = b""
            for part in parts:
                text, name = b"", part_name(term, *part)
                with suppress(FileNotFoundError):
                    text = store.read(self._run / name)
                if not holds_its_lines(name, text):
                    self._damaged = True
                    logger.warning(
                        "%s does not hold its lines. Parts are not merged until the next start on "
                        "this machine, which stores them again as far as %s has them",
                        self._run / name, self._directory / JOURNAL,
                    )  # fmt: skip
                    return
                data += text
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

    def _new_journal(self) -> tuple[Path, RecordFile]:
        name = f"{self._term.number:06}-{self._first:09}-{self._term.token}"
        path = self._directory / JOURNAL / name
        return path, RecordFile(path)
