"""The coordinator's work in storage: claim the directory, prepare, commit, verify, delete steps.

All of it is slow and runs in threads. The coordinator orders what must not run at the same time.

[Note: claim] A machine that was cut off or frozen may wake after the others went on without it,
with a save that it takes for the newest. Each coordinator therefore claims the directory at its
first save. It checks that its claim is still the newest at the beginning of every save and right
before its commit (a fencing token; Kleppmann, Designing Data-Intensive Applications, 2017, chapter
8). Two runs with the same directory by mistake notice each other in the same way.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from checkpointing.errors import CheckpointError, StorageError, explain
from checkpointing.format.layout import (
    TRAINER_STATE,
    CommitRecord,
    FileRecord,
    TensorFile,
    block_checksums,
    step_name,
)
from checkpointing.format.untrusted import printable
from checkpointing.options import CheckpointOptions
from checkpointing.save.messages import Contents
from checkpointing.storage.interface import NewStep
from checkpointing.storage.ownership import is_alive, keep_to, owner
from checkpointing.storage.place import P, Place
from checkpointing.storage.retention import Known, prune, survey
from checkpointing.storage.steps import new_step, storage_of
from checkpointing.storage.verification import GivenUpError, is_damage, verify_step

logger = logging.getLogger(__name__)


# --- the claim ------------------------------------------------------------------------------------

_MOST_BYTES = 4096
_CLAIM = re.compile(r"\.writer-(\d+)")


def hold(directory: P, mine: P | None) -> P:
    """Claim a checkpoint directory (`mine` is None, or all claims are gone), or make sure that
    nobody has claimed it since; returns the file that stands for the claim. It stays when the run
    has ended, for whoever wakes up then. What those before were writing, wherever they are and
    whether or not they live, is removed: they commit nothing any more.

    Raises:
        StorageError: somebody has; says who and when.
        OSError: the directory cannot be read or written.
    """
    storage = storage_of(directory)
    storage.make_directory(directory)
    while True:
        claims = _claims(directory)
        if mine and claims:
            if claims[-1][1].name == mine.name:
                return mine
            raise StorageError(_words(claims[-1][1], "another process has taken over this run"))
        new = directory / f".writer-{claims[-1][0] + 1 if claims else 1:06}"
        with suppress(FileExistsError):  # another was faster: be newer than that one
            storage.create(new, f"{owner()} {time.time():.3f}\n".encode())
            lost = [_owner(old)[0] for _, old in claims]
            if lost and lost[-1] != owner() and is_alive(lost[-1]):
                what = "taken over from a process that lives, and can commit no more"
                logger.warning("%s", _words(claims[-1][1], what))
            storage.collect(directory, lost=lost)
            for _, old in claims:
                storage.remove(old)
            return new


def _words(path: Place, what: str) -> str:
    name, moment = _owner(path)
    since = ""
    with suppress(ValueError, OverflowError, OSError):  # whatever stands there, it is taken
        since = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(float(moment)))
    return (
        f"{path.parent}: {what} ({printable(name) or 'it'} saves there{since}); if these are two "
        "runs, end one or give it a checkpoint.directory of its own"
    )


def _owner(path: Place) -> tuple[str, str]:
    """Who made a claim, and when; empty if it does not say."""
    text = ""
    with suppress(FileNotFoundError):  # somebody newer has removed it
        text = storage_of(path).read(path, _MOST_BYTES).decode(errors="replace")
    name, _, moment = text.strip().rpartition(" ")
    return name, moment


def _claims(directory: P) -> list[tuple[int, P]]:
    """All that are there, oldest first."""
    found = (
        (_CLAIM.fullmatch(path.name), path) for path in storage_of(directory).children(directory)
    )
    return sorted(
        ((int(match[1]), path) for match, path in found if match), key=lambda claim: claim[0]
    )


# --- steps ----------------------------------------------------------------------------------------

READ_AT_END_BYTES = 256 << 20
"""A last step that is not larger is read back before the writers end."""


class Steps:
    """The steps of a run in storage, as the coordinator writes them.

    Args:
        directory: holds them.
        options: the `checkpoint:` section.
    """

    def __init__(self, directory: Place, options: CheckpointOptions) -> None:
        self._directory, self._options = directory, options
        keep_to(directory, options.trust)
        self._claim: Place | None = None
        """Stands for the right to commit, from the first save on."""
        self._right: set[str] = set()
        """Names of steps of which every byte was read and found right."""
        self._damaged: set[str] = set()
        """Names of steps that could not be loaded."""
        self._found_damaged: set[str] = set()
        """Names of steps that were read back here."""
        self._spans: list[bytes] = []
        """Lines of the trace that are not written yet."""

    def path(self, step: int) -> Place:
        """Where a step lies once it is committed."""
        return self._directory / step_name(step)

    def begin(
        self, step: int, files: Sequence[TensorFile], damaged: Collection[str]
    ) -> NewStep | None:
        """Make the place to write to; None if the step is committed already."""
        started = time.time()
        # First: who claims it next removes what is begun here. Also where the step is committed
        # already, by others that train beside us, perhaps.
        self._claim = hold(self._directory, self._claim)
        target = new_step(self.path(step), self._found_damaged.union(damaged))
        if target:
            try:
                target.begin(files)
            except Exception:
                target.abort()
                raise
        self._trace_metadata("begin", step, started)
        return target

    def commit(
        self,
        step: int,
        target: NewStep,
        files: Sequence[TensorFile],
        checksums: Mapping[str, Mapping[int, int]],
        small: Mapping[str, bytes],
        odd: Sequence[str] = (),
    ) -> None:
        """Make a step that is written a checkpoint.

        Args:
            step: its number.
            target: where it was written.
            files: its tensor files.
            checksums: CRC-32 of their blocks.
            small: all other files, except for the commit record.
            odd: tensors that hold NaN or infinity, and may.
        """
        started = time.time()
        hold(self._directory, self._claim)
        records = {
            file.name: FileRecord(
                file.size, tuple(checksum for _, checksum in sorted(checksums[file.name].items()))
            )
            for file in files
        }
        for name, data in small.items():
            records[name] = FileRecord(len(data), block_checksums(data))
        target.commit(files, small, CommitRecord(step, records, odd).encode())
        self._trace_metadata("commit", step, started)

    def committed(self, name: str, contents: Contents) -> None:
        """Take note of a new step, and of what rank 0 knows about those before."""
        self._right.discard(name)
        self._found_damaged.discard(name)
        self._right |= set(contents.right)
        self._damaged = set(contents.damaged)

    def tidy(self, busy: Callable[[], bool], ending: Callable[[], bool]) -> None:
        """Read the newest step back, and delete what need not stay besides.

        Args:
            busy: whether a save is being written, which goes first.
            ending: whether the run ends, which does not wait for much to be read.
        """
        unreadable: set[str] = set()

        def known() -> Known:
            return Known(self._damaged | self._found_damaged, unreadable, self._right)

        while self._options.keep:
            found = survey(self._directory, self._options.best_by, known())
            newest = next((item for item in found if item.is_good), None)
            if newest is None or newest.right:
                break
            pause = _slowly(newest.size, busy, ending)
            try:
                _, problems = verify_step(newest.path, threads=1, pause=pause)
            except GivenUpError:
                break
            if not problems:
                self._right.add(newest.path.name)
                break
            logger.warning("%s was read back: %s", newest.path.name, problems[0])
            bad = any(map(is_damage, problems))
            (self._found_damaged if bad else unreadable).add(newest.path.name)
        prune(self._directory, self._options, known())

    def abort(self, target: NewStep) -> None:
        """Remove what was written of a step that failed."""
        target.abort()
        self._write_trace()

    def trace(self, span: Mapping[str, Any]) -> None:
        """Keep a span for trace.jsonl, if the run wants it. Asks nothing of storage."""
        if self._options.trace:
            self._spans.append(json.dumps(span).encode() + b"\n")

    def _trace_metadata(self, kind: str, step: int, started: float) -> None:
        self.trace({"node": 0, "kind": kind, "step": step, "start": started, "stop": time.time()})
        self._write_trace()

    def _write_trace(self) -> None:
        """Append the spans since the last time to trace.jsonl."""
        spans, self._spans = self._spans, []
        if not spans:
            return
        try:
            path = self._directory / "trace.jsonl"
            storage_of(self._directory).append(path, b"".join(spans))
        except (CheckpointError, OSError) as error:  # a save does not fail by its trace
            logger.warning("%d spans of the trace are lost: %s", len(spans), explain(error))


def small_files(contents: Contents, indexes: Mapping[str, bytes]) -> dict[str, bytes]:
    """All files of a step but tensor files and commit record, by name."""
    return {**contents.files, TRAINER_STATE: contents.state, **indexes}


def _slowly(
    nbytes: int, busy: Callable[[], bool], ending: Callable[[], bool]
) -> Callable[[], None]:
    """What reading back calls before each block; see `Steps.tidy`."""
    last = time.monotonic()

    def pause() -> None:
        nonlocal last
        if ending() and nbytes > READ_AT_END_BYTES:
            raise GivenUpError
        if busy():
            time.sleep(min(1.0, 3 * (time.monotonic() - last)))
        last = time.monotonic()

    return pause
