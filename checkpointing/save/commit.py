"""The coordinator's work in storage: claim the directory, prepare, commit, verify, delete steps.

All of this is slow and runs in threads. The coordinator never starts two operations at once that
would disturb each other.

[Note: claim] A machine that was cut off or frozen may wake after the other machines have continued
without it, with a save that it believes to be the newest. Each coordinator therefore claims the
directory at its first save. It checks that its claim is still the newest at the beginning of every
save and right before its commit (cf. fencing tokens; Kleppmann, Designing Data-Intensive
Applications, 2017, chapter 8). A new claim also removes the unfinished steps of earlier ones, so
that a commit after a check that was overtaken fails. Two runs with the same directory by mistake
notice each other in the same way."""

import json
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from checkpointing.errors import CheckpointError, StorageError, explain
from checkpointing.format.layout import (
    CommitRecord,
    FileRecord,
    TensorFile,
    block_checksums,
    step_name,
)
from checkpointing.format.untrusted import printable
from checkpointing.options import CheckpointOptions
from checkpointing.save.messages import SaveContents
from checkpointing.storage.interface import NewStoredStep
from checkpointing.storage.ownership import is_alive, keep_to, owner
from checkpointing.storage.place import P, StoragePlace, location
from checkpointing.storage.retention import StorageRetentionVerdicts, inspect_steps, prune
from checkpointing.storage.steps import new_step, storage_of
from checkpointing.storage.verification import (
    StorageVerificationStoppedError,
    is_damage,
    verify_step,
)

logger = logging.getLogger(__name__)


# --- the claim ------------------------------------------------------------------------------------

_MOST_BYTES = 4096
_CLAIM = re.compile(r"\.writer-(\d+)")


def hold(directory: P, mine: P | None) -> P:
    """Claim a checkpoint directory, or confirm the claim `mine`; returns the path of the claim's
    file, see [Note: claim].

    A new claim is created if `mine` is None or all claims are gone. It removes the unfinished steps
    of earlier owners, dead or alive: they can no longer commit. The file stays after the run, so
    that a process that wakes later finds it.

    Raises:
        StorageError: another process has claimed the directory since; the message names its owner
            and time.
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
        with suppress(FileExistsError):  # another process has created this number, so take the next
            storage.create(new, f"{owner()} {time.time():.3f}\n".encode())
            lost = [_owner(old)[0] for _, old in claims]
            if lost and lost[-1] != owner() and is_alive(lost[-1]):
                what = "taken over from a process that lives, which can no longer commit"
                logger.warning("%s", _words(claims[-1][1], what))
            # Before the old claims are removed: after a crash the next claim still finds them.
            storage.collect(directory, lost=lost)
            for _, old in claims:
                storage.remove(old)
            return new


def _words(path: StoragePlace, what: str) -> str:
    name, moment = _owner(path)
    since = ""
    # The text may be damaged; the directory is claimed anyway.
    with suppress(ValueError, OverflowError, OSError):
        since = time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(float(moment)))
    return (
        f"{path.parent}: {what} ({printable(name) or 'it'} saves there{since}); if these are two "
        "runs, end one or give it a checkpoint.directory of its own"
    )


def _owner(path: StoragePlace) -> tuple[str, str]:
    """Returns (owner, Unix time) of a claim; two empty texts if the file has none."""
    text = ""
    with suppress(FileNotFoundError):  # a newer claim has removed the file
        text = storage_of(path).read(path, _MOST_BYTES).decode(errors="replace")
    name, _, moment = text.strip().rpartition(" ")
    return name, moment


def _claims(directory: P) -> list[tuple[int, P]]:
    """Returns (number, path) of all claims, oldest first."""
    paths = storage_of(directory).children(directory)
    found = ((_CLAIM.fullmatch(path.name), path) for path in paths)
    return sorted(
        ((int(match[1]), path) for match, path in found if match), key=lambda claim: claim[0]
    )


# --- steps ----------------------------------------------------------------------------------------

READ_AT_END_BYTES = 256 << 20
"""Size in bytes up to which the last step is read back before the writers end."""


class SaveCommitter:
    """Prepares, commits, verifies and deletes a run's steps in storage."""

    def __init__(self, directory: StoragePlace, options: CheckpointOptions) -> None:
        self._directory, self._options = directory, options
        keep_to(directory, options.trust)
        self._claim: StoragePlace | None = None
        """File of this run's claim, from the first save on."""
        self._verified: set[str] = set()
        """Names of steps that were read completely and are undamaged."""
        self._damaged: set[str] = set()
        """Names of steps that a rank failed to load."""
        self._found_damaged: set[str] = set()
        """Names of steps that `tidy` found damaged."""
        self._spans: list[bytes] = []
        """Lines that are not in trace.jsonl yet."""

    def path(self, step: int) -> StoragePlace:
        return self._directory / step_name(step)

    def begin(
        self, step: int, files: Sequence[TensorFile], damaged: Collection[str]
    ) -> NewStoredStep | None:
        """Prepare a step for writing; returns None if it is committed already."""
        started = time.time()
        # Before anything is written, and even if `step` is committed: another run may have done it.
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
        target: NewStoredStep,
        files: Sequence[TensorFile],
        checksums: Mapping[str, Mapping[int, int]],
        small: Mapping[str, bytes],
        odd: Sequence[str] = (),
        before: Mapping[str, bytes] | None = None,
    ) -> None:
        """Turn a fully written step into a checkpoint.

        Args:
            checksums: file → block → CRC-32.
            small: name → contents of all other files except the commit record.
            odd: names of tensors that hold NaN or infinity and are allowed to.
            before: path or URL → contents of files and objects to create before the commit record.
        """
        started = time.time()
        hold(self._directory, self._claim)  # raises if another process has taken over
        records = {
            file.name: FileRecord(
                file.size, tuple(checksum for _, checksum in sorted(checksums[file.name].items()))
            )
            for file in files
        }
        for name, data in small.items():
            records[name] = FileRecord(len(data), block_checksums(data))
        for name, data in (before or {}).items():
            place = location(name)
            storage_of(place).create(place, data)
        target.commit(files, small, CommitRecord(step, records, odd).encode())
        self._trace_metadata("commit", step, started)

    def committed(self, name: str, contents: SaveContents) -> None:
        """Record that the step `name` was committed, and rank 0's knowledge of earlier steps."""
        # A damaged step is written again under its name, and the new one has not been read yet.
        self._verified.discard(name)
        self._found_damaged.discard(name)
        self._verified |= set(contents.verified)
        # Rank 0's list is complete.
        self._damaged = set(contents.damaged)

    def tidy(self, busy: Callable[[], bool], ending: Callable[[], bool]) -> None:
        """Read the newest step back to verify it, then delete steps that retention does not keep.

        Args:
            busy: whether a save is being written; reading then slows down.
            ending: whether the run is ending; a large step is then not read back.
        """
        unreadable: set[str] = set()

        def known() -> StorageRetentionVerdicts:
            return StorageRetentionVerdicts(
                self._damaged | self._found_damaged, unreadable, self._verified
            )

        while self._options.keep:
            # After a bad step, the step before it is read, to prove that a readable step exists.
            found = inspect_steps(self._directory, self._options.best_by, known())
            newest = next((item for item in found if item.is_good), None)
            if newest is None or newest.verified:
                # `decide` needs only the newest verified step, so older steps need not be read.
                break
            pause = _slowly(newest.size, busy, ending)
            try:
                # one thread, as training and the next save go first
                _, problems = verify_step(newest.path, threads=1, pause=pause)
            except StorageVerificationStoppedError:
                break
            if not problems:
                self._verified.add(newest.path.name)
                break
            logger.warning("%s was read back, and is not good: %s", newest.path.name, problems[0])
            bad = any(map(is_damage, problems))
            (self._found_damaged if bad else unreadable).add(newest.path.name)
        prune(self._directory, self._options, known())

    def abort(self, target: NewStoredStep) -> None:
        target.abort()
        self._write_trace()

    def trace(self, span: Mapping[str, Any]) -> None:
        """Queue a span for trace.jsonl if `trace` is set. Does no I/O."""
        if self._options.trace:
            self._spans.append(json.dumps(span).encode() + b"\n")

    def _trace_metadata(self, kind: str, step: int, started: float) -> None:
        self.trace({"node": 0, "kind": kind, "step": step, "start": started, "stop": time.time()})
        self._write_trace()

    def _write_trace(self) -> None:
        spans, self._spans = self._spans, []
        if not spans:
            return
        try:
            path = self._directory / "trace.jsonl"
            storage_of(self._directory).append(path, b"".join(spans))
        except (CheckpointError, OSError) as error:  # a failed trace must not fail the save
            logger.warning("%d spans of the trace are lost: %s", len(spans), explain(error))


def _slowly(
    nbytes: int, busy: Callable[[], bool], ending: Callable[[], bool]
) -> Callable[[], None]:
    """Returns the function that `SaveCommitter.tidy` calls before it reads a block back. It slows
    the reading down while a save is `busy`. While the run is `ending`, it stops the reading of a
    step of more than READ_AT_END_BYTES; `nbytes` is the step's size."""
    last = time.monotonic()

    def pause() -> None:
        nonlocal last
        if ending() and nbytes > READ_AT_END_BYTES:
            raise StorageVerificationStoppedError
        if busy():  # this leaves three quarters of the bandwidth to the save
            time.sleep(min(1.0, 3 * (time.monotonic() - last)))
        last = time.monotonic()

    return pause
