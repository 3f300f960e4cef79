"""Ledger and metrics of a run in a bucket, and their copy in a local directory. Imports no torch.

[Note: parts] A bucket has no append, so lines are stored as objects of up to thousands of lines:

    RUN/terms/000007                        term 7: a start of rank 0, see terms.py
    RUN/lines/000007/000000051-000000102    a part: lines 51 to 101 of term 7; never changed
    RUN/recipe.yaml, recipes/, …            small files

A line is identified by its term and its number within the term. So parts may overlap, and any
process that has lines may store them: rank 0, the process that commits a checkpoint, or a later
attempt that finds lines in memory or on its disk. Readers sort lines by (term, number). They leave
out a part that holds other lines than its name says; whoever has these lines stores them again.
"""

import hashlib
import logging
import os
import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from checkpointing.errors import StorageError
from checkpointing.storage.interface import ObjectStat
from checkpointing.storage.object_storage import store_of
from checkpointing.storage.place import ObjectPath
from elastic.node.files import write_whole
from elastic.record.ledger import LEDGER
from elastic.record.lines import METRICS

logger = logging.getLogger(__name__)

LINES, RECIPES = "lines", "recipes"
FILES = re.compile(
    r"recipe\.yaml|recipes/[0-9a-f]{16}\.yaml|micro_batch\.json|(?:wandb|mlflow)-run-id"
    r"|\.tracker-[\w.:-]+\.json|samples\.jsonl"
)
"""Names of the small files of a run that are stored in its bucket."""
TRIES = 20
"""Attempts at reading the listed parts, which merging may delete meanwhile."""
_PART = re.compile(LINES + r"/(\d{6,})/(\d{9,})-(\d{9,})")
_READERS = 8


class RunPartRange(NamedTuple):
    """Consecutive lines of a term, see [Note: parts]."""

    term: int
    first: int
    """Number of the first line, from 0."""
    lines: list[str]

    @property
    def name(self) -> str:
        """Name of the part that holds these lines, below the run."""
        return part_name(self.term, self.first, self.first + len(self.lines))

    @property
    def data(self) -> bytes:
        return "".join(f"{line}\n" for line in self.lines).encode()

    def after(self, number: int) -> "RunPartRange":
        skipped = min(max(0, number - self.first), len(self.lines))
        return RunPartRange(self.term, self.first + skipped, self.lines[skipped:])

    @staticmethod
    def of(value: object) -> "RunPartRange | None":
        """Parse a range in the state of a checkpoint; None if `value` is not one."""
        match value:
            case {"term": int(term), "first": int(first), "lines": list(lines)} if (
                term > 0 <= first
                and all(isinstance(line, str) and "\n" not in line for line in lines)
            ):
                return RunPartRange(term, first, lines)
        return None


def part_name(term: int, first: int, after_last: int) -> str:
    return f"{LINES}/{term:06}/{first:09}-{after_last:09}"


def parts_of(run: ObjectPath, term: int) -> list[tuple[int, int]]:
    """Return (first line, line after the last) of each part of a term, sorted."""
    folder = f"{LINES}/{term:06}"
    found = store_of(run).walk(run / folder)
    return sorted((first, after) for _, first, after in _parsed(f"{folder}/{n}" for n in found))


def stored_until(run: ObjectPath, term: int, first: int) -> int:
    """Return the number of the first line of a term, from `first` on, that no part holds."""
    store = store_of(run)
    for begin, end in parts_of(run, term):
        name = part_name(term, begin, end)
        # The part may have been merged meanwhile: then its lines are stored twice.
        with suppress(FileNotFoundError):
            # Read, because readers leave out a part that holds other lines than its name says.
            if begin <= first < end and holds_its_lines(name, store.read(run / name)):
                first = end
    return first


def _parsed(names: Iterable[str]) -> list[tuple[int, int, int]]:
    """Return (term, first line, line after the last) for the names of parts among `names`."""
    return [(int(one[1]), int(one[2]), int(one[3])) for one in map(_PART.fullmatch, names) if one]


class RunPartsReader:
    """Reads the lines of a run's ledger and metrics. A part stays in memory until a larger part
    replaces it."""

    def __init__(self, run: ObjectPath) -> None:
        self._run = run
        self._known: dict[str, bytes] = {}
        self._wrong = dict[str, ObjectStat]()
        """Part that does not hold the lines that it is named by → its size and time."""
        self.changed = 0.0
        """Unix time of the newest part, by the store's clock."""

    def lines(self) -> list[bytes]:
        """Return all lines with their newlines, each once, sorted by (term, number). Raises
        StorageError if the store does not answer, or parts change faster than they are read."""
        store = store_of(self._run)
        for _ in range(TRIES):
            listed = store.walk(self._run / LINES)
            found = {f"{LINES}/{name}": stat for name, stat in listed.items()}
            wanted, reach = [], dict[int, int]()
            parts = sorted(_parsed(found), key=lambda part: (part[0], part[1], -part[2]))
            for term, first, after in parts:
                name = part_name(term, first, after)
                # if the part does not reach further, another part holds all its lines
                if after > reach.get(term, 0) and self._wrong.get(name) != found.get(name):
                    reach[term] = after
                    wanted.append((term, first, name))
            names = [name for _, _, name in wanted]
            try:
                missing = [name for name in names if name not in self._known]
                with ThreadPoolExecutor(_READERS) as pool:
                    texts = pool.map(lambda name: store.read(self._run / name), missing)
                    self._known |= dict(zip(missing, texts, strict=True))
            except FileNotFoundError:  # it was merged into a larger part meanwhile
                continue
            self._known = {name: self._known[name] for name in names}
            # A part with other lines than its name says would hide the parts inside its range.
            if wrong := {name for name in names if not holds_its_lines(name, self._known[name])}:
                logger.warning(
                    "%s: parts left out, as they hold other lines than their names say: %s",
                    self._run,
                    ", ".join(sorted(wrong)),
                )
                self._wrong |= {name: found[name] for name in wrong}
                continue
            self.changed = max((stat.st_mtime for stat in found.values()), default=0.0)
            return _in_order((term, first, self._known[name]) for term, first, name in wanted)
        raise StorageError(f"{self._run / LINES}: parts change faster than they can be read")


def holds_its_lines(name: str, data: bytes) -> bool:
    """Whether a part has as many lines as its name says."""
    first, after = map(int, name.rpartition("/")[2].split("-"))
    return data.count(b"\n") == after - first


def _in_order(parts: Iterable[tuple[int, int, bytes]]) -> list[bytes]:
    """Return the lines of sorted parts (term, first line, contents), which may overlap."""
    found: list[bytes] = []
    newest = reach = 0
    for term, first, data in parts:
        reach = reach if term == newest else 0
        lines = data.split(b"\n")[:-1]
        found += [line + b"\n" for line in lines[max(0, reach - first) :]]
        newest, reach = term, first + len(lines)
    return found


def by_file(lines: Iterable[bytes]) -> tuple[list[bytes], list[bytes]]:
    ledger: list[bytes] = []
    records: list[bytes] = []
    for line in lines:
        (ledger if line.startswith(b'{"kind":') else records).append(line)
    return ledger, records


class RunRecordCopy:
    """Copies ledger, metrics and small files of a run from a bucket to an existing local directory,
    where it replaces files that differ from the run's."""

    def __init__(self, run: ObjectPath, directory: Path) -> None:
        self._run, self._directory, self._parts = run, directory, RunPartsReader(run)
        self._written: dict[str, tuple[int, bytes]] = {}
        """Name of a file → number of bytes written to it, and their digest."""
        self._brought: dict[str, ObjectStat | None] = {}
        """Name of a small file → size and time of its object when it was copied."""
        self._changed = self._moment = 0.0
        """Time of the newest part by the store's clock, and of the files by this machine's."""

    def refresh(self) -> bool:
        """Copy what is new in the bucket; returns whether the run has begun. Raises StorageError if
        the store does not answer, OSError if the directory cannot be written."""
        self._bring_files()
        ledger, records = by_file(self._parts.lines())
        if (changed := self._parts.changed) != self._changed:
            # Later calls date a change to when they see it. What the first call finds may be old:
            # its age is by the store's clock alone, which may differ from this machine's.
            now = time.time()
            age = 0.0 if self._changed else max(0.0, store_of(self._run).now(self._run) - changed)
            self._moment = now - age
            self._changed = changed
        self._grow(LEDGER, b"".join(ledger))
        self._grow(METRICS, b"".join(records))
        return bool(ledger)

    def _bring_files(self) -> None:
        store = store_of(self._run)
        found = [*store.children(self._run), *store.children(self._run / RECIPES)]
        names = [place.key[len(self._run.key) + 1 :] for place in found]
        names = [
            name
            for name in filter(FILES.fullmatch, names)
            # a recipe is named by its digest, and never changed
            if not (name.startswith(RECIPES) and (self._directory / name).exists())
        ]
        (self._directory / RECIPES).mkdir(exist_ok=True)
        present = store.find_all([self._run / name for name in names])
        for name, stat in zip(names, present, strict=True):
            if stat and stat == self._brought.get(name):
                continue
            with suppress(FileNotFoundError):
                data = store.read(self._run / name)
                write_whole(self._directory / name, data.decode(errors="replace"))
                self._brought[name] = stat

    def _grow(self, name: str, data: bytes) -> None:
        """Set the contents of a file to `data`; append if possible, for readers that follow it."""
        path, (size, digest) = self._directory / name, self._written.get(name, (0, b""))
        if digest and path.exists() and _digest(data[:size]) == digest:
            with path.open("ab") as file:
                file.write(data[size:])
        else:
            write_whole(path, data.decode(errors="replace"))
        self._written[name] = len(data), _digest(data)
        # shows readers when the run last stored a line
        os.utime(path, (self._moment, self._moment))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
