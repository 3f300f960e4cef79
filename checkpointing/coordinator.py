"""Rank 0's part of a save: admit writers, collect receipts, commit. A state machine without threads
or sockets of its own; it lives in the writer process of rank 0's node.

[Note: a save]
  begin     every rank asks; the coordinator answers once for all: go (into which slot) or skip
  refuse    a rank cannot save: refused is the answer for all, or the save is given up
  staged    how far a node's ranks have copied their pieces, in the order of files; what all nodes
            have staged may be written
  remembered  a node's slot is whole, and a restart may begin from it; a save that is to stay in
            memory ends here
  write     a writer is granted one unit of work at a time, and at most `limit` units are out
  written   its receipt: a checksum for each block
  commit    the commit record, after all receipts
  outcome   told to all ranks, whether good or bad
Nothing waits for an answer: every message is handled to its end. If a node is lost, the save is
given up and its units return; the next save may begin when the node is back. A save that takes
longer than `deadline` is given up, too, and the writers that hold it up end and come back anew.
Only a commit that is under way is waited for: to remove the files at that moment could publish some
of them. If it hangs, the ranks of rank 0's node kill this process, which is as any other crash.
"""

import json
import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PosixPath
from typing import Any, Protocol

from checkpointing.claim import hold
from checkpointing.errors import explain
from checkpointing.layout import (
    BLOCK_BYTES,
    TRAINER_STATE,
    CommitRecord,
    FileRecord,
    TensorFile,
    block_checksums,
    step_name,
)
from checkpointing.options import CheckpointOptions
from checkpointing.retention import Known, prune, survey
from checkpointing.target import Target, filesystem, is_shared, new_target
from checkpointing.verification import GivenUpError, is_damage, verify_step

logger = logging.getLogger(__name__)

STAGGER_SECONDS = 0.02
"""Between two grants on a shared filesystem, so that writers do not open their files at once."""
UNIT_BLOCKS = 16
"""Blocks that a writer takes at a time where a file may be written in parts."""


READ_AT_END_BYTES = 256 << 20
"""A last step that is not larger is read back before the writers end."""
ANSWER_SECONDS = 30
"""A request to save is answered after so long even if a node does not answer."""


@dataclass(frozen=True)
class Unit:
    """Work for one writer: some blocks of one file, from `first` to before `stop`."""

    file: str
    first: int
    stop: int


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended."""

    step: int
    path: str | None
    """The committed checkpoint; None if it failed or was skipped."""
    error: str | None = None
    """Why there is none, and where; one line."""
    node: int | None = None
    """Where it failed."""
    file: str | None = None
    """What it failed on."""
    errno: int | None = None
    """The system's error number, if any."""
    seconds: float = 0.0
    """From the request to the commit."""
    staging_seconds: float = 0.0
    """From the request until all ranks had copied their tensors."""
    nbytes: int = 0
    """Bytes of tensor files."""
    writers: int = 0
    """How many wrote at once."""
    memory_only: bool = False
    """It was not to be written."""


@dataclass(frozen=True)
class Failure:
    """What went wrong on a node; travels to the coordinator."""

    message: str
    file: str | None = None
    errno: int | None = None


@dataclass
class _Request:
    wait: bool
    payload: dict[str, Any] | None = None

    @property
    def is_durable(self) -> bool:
        return self.payload is not None and not self.payload["memory_only"]


Position = tuple[int, int]
"""A place in the order of all bytes: number of a file, byte in it."""

Key = tuple[int, int]
"""Names a save: its step, and how many saves were asked for before it."""


@dataclass
class _Save:
    key: Key
    payload: dict[str, Any]
    """Of rank 0: state, files, damaged, right, previous, memory_only."""
    slot: int
    started: float
    target: Target | None = None
    staged: dict[int, Position] = field(default_factory=dict)
    """Up to where each node has copied everything."""
    staged_at: float = 0.0
    preparing: bool = False
    """Whether its target is being prepared right now."""
    waiting: dict[int, deque[Unit]] = field(default_factory=dict)
    """Units by the node that owns their file."""
    checksums: dict[str, dict[int, int]] = field(default_factory=dict)
    committing: bool = False
    turn: int = 0
    remembered: set[int] = field(default_factory=set)
    """Nodes from whose slot a restart may begin."""

    @property
    def step(self) -> int:
        return self.key[0]

    @property
    def memory_only(self) -> bool:
        return bool(self.payload["memory_only"])


class Host(Protocol):
    """What the coordinator needs of the process that it lives in."""

    def send(self, node: int, message: tuple[Any, ...]) -> None:
        """Send to a node's writer; nothing happens if it is gone."""

    def later(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Run work() aside, then done(its result or its exception) in the coordinator's thread."""

    def drop(self, node: int) -> None:
        """Part with a node's writer, whose last news this may be: it ends if it is writing, or
        if it is this one, and else connects again."""

    def call_at(self, moment: float, work: Callable[[], None]) -> None:
        """Run work() in the coordinator's thread at a moment of time.monotonic()."""


class Coordinator:
    """See [Note: a save]. All methods run in one thread, except for what `Host.later` is given."""

    def __init__(self, directory: Path, options: CheckpointOptions, nodes: int, host: Host) -> None:
        self._directory, self._options, self._nodes, self._host = directory, options, nodes, host
        kind = filesystem(directory)
        self._stagger = STAGGER_SECONDS if is_shared(kind) else 0.0
        self._limit = WriterLimit(options.max_writers, default_writers(kind))
        self._plan = ""
        self._files: list[TensorFile] = []
        self._indexes: dict[str, bytes] = {}
        self._owners: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._hellos: dict[int, tuple[str, int]] = {}
        """The plan that each node is ready for, and how many slots it has; a node may be ready
        before this one knows the plan."""
        self._save: _Save | None = None
        self._requests: dict[Key, _Request] = {}
        """Not answered yet."""
        self._answers: dict[Key, list[tuple[Any, ...]]] = {}
        """What was told about the last few requests, for nodes that ask later than others: the
        answer, and the outcome once there is one."""
        self._out: dict[tuple[Key, Unit], int] = {}
        """Granted units, and to which node; also those of saves that were given up, until their
        writers have stopped."""
        self._clearing = 0
        """Saves that were given up and whose places are not removed yet; the next one, which may be
        of the same step, gets its place after that."""
        self._slot = -1
        self._next_grant = 0.0
        self._aside = 0
        """Work aside that must end before this process may."""
        self._closing: set[int] = set()
        self._claim: Path | None = None
        """Stands for the right to commit, from the first save on."""
        self._failed: _Save | None = None
        """The save that failed last; its copy may yet become whole."""
        self._newest: int | None = None
        """Step that was committed last, since this process began."""
        self._right: set[str] = set()
        """Names of steps of which every byte was read and found right."""
        self._damaged: set[str] = set()
        """Names of steps that could not be loaded."""
        self._found_damaged: set[str] = set()
        """Names of steps that were read back here."""
        self._tidying = self._untidy = False
        """Whether retention is at work, and whether it is to begin again."""

    # --- messages --------------------------------------------------------------------------------

    def on_message(self, node: int, message: tuple[Any, ...]) -> None:
        """Handle what a node says."""
        kind, *arguments = message
        getattr(self, f"_on_{kind}")(node, *arguments)

    def on_lost(self, node: int) -> None:
        """A node's writer process is gone."""
        self._forget(node)
        self._fail(node, Failure("its writer process is gone"))
        self._maybe_closed()

    def _forget(self, node: int) -> None:
        self._hellos.pop(node, None)
        self._closing.discard(node)
        self._out = {what: where for what, where in self._out.items() if where != node}

    def set_plan(
        self,
        plan: str,
        files: Sequence[TensorFile],
        indexes: Mapping[str, bytes],
        owners: Mapping[str, int],
    ) -> None:
        """What is saved from now on, and the node that writes each file."""
        self._plan, self._files, self._indexes = plan, list(files), dict(indexes)
        self._owners = dict(owners)
        self._numbers = {file.name: number for number, file in enumerate(files)}
        self._consider_all()

    @property
    def _slots(self) -> dict[int, int]:
        """How many slots each node has for the plan in use."""
        return {node: slots for node, (plan, slots) in self._hellos.items() if plan == self._plan}

    def _on_hello(self, node: int, plan: str, slots: int) -> None:
        """A node has made its slots for a plan. If it has said so before, it is another process,
        faster here than the news of the end of the one before."""
        if self._hellos.get(node) == (plan, slots):
            self.on_lost(node)
        self._hellos[node] = plan, slots
        self._consider_all()

    def _on_begin(self, node: int, key: Key, wait: bool, payload: dict[str, Any] | None) -> None:
        """A node's ranks want to save; `payload` comes from rank 0 alone."""
        if key in self._answers:
            for message in self._answers[key]:
                self._host.send(node, message)
            return
        if key not in self._requests:
            self._requests[key] = _Request(wait)
            self._wait_for_nodes(key)
        if payload is not None:
            self._requests[key].payload = payload
            self._consider(key)

    def _on_refuse(self, node: int, key: Key, failure: tuple[Any, ...]) -> None:
        """A rank cannot save; `failure` is what it tells the others (arguments of RankError)."""
        if key not in self._answers:
            self._answer(key, ("refused", key, failure))
        elif self._save is not None and self._save.key == key:
            self._fail(node, Failure(f"rank {failure[0]} cannot save: {failure[2]}"))

    def _consider_all(self) -> None:
        for key in list(self._requests):
            self._consider(key)

    def _consider(self, key: Key) -> None:
        """Answer a request as soon as that is possible."""
        request = self._requests[key]
        if request.payload is None or len(self._slots) < self._nodes:
            return
        if self._save is not None:
            # What stays in memory is over in a moment; nobody skips a checkpoint for it.
            if not request.wait and not (self._save.memory_only and request.is_durable):
                reason = f"step {self._save.step} is still being saved"
                self._answer(key, ("skip", key, reason))
            return  # one that waits is considered again when that save ends
        self._slot = (self._slot + 1) % min(self._slots.values())
        self._save = save = _Save(key, request.payload, self._slot, time.monotonic())
        self._failed = None
        # Rank 0 has asked, perhaps, before it heard of the last commit.
        known = [step for step in (save.payload["newest"], self._newest) if step is not None]
        newest = max(known, default=None)
        self._answer(key, ("go", key, save.slot, save.payload["state"], newest))
        self._host.call_at(save.started + self._options.deadline, lambda: self._expire(save))
        self._maybe_prepare()

    def _wait_for_nodes(self, key: Key) -> None:
        """See to it that a request is answered, even if a node never comes back."""

        def look() -> None:
            if key not in self._requests:
                return
            missing = sorted(set(range(self._nodes)) - set(self._slots))
            if missing:
                self._answer(key, ("skip", key, f"there is no writer on node(s) {missing}"))
            else:
                self._wait_for_nodes(key)

        self._host.call_at(time.monotonic() + ANSWER_SECONDS, look)

    def _answer(self, key: Key, answer: tuple[Any, ...]) -> None:
        self._requests.pop(key, None)
        self._answers[key] = [answer]
        while len(self._answers) > 4:
            self._answers.pop(next(iter(self._answers)))
        self._tell(answer)

    def _tell(self, message: tuple[Any, ...]) -> None:
        for node in range(self._nodes):
            self._host.send(node, message)

    def _maybe_prepare(self) -> None:
        save = self._save
        if save is None or save.target or save.preparing or self._clearing or save.memory_only:
            return
        save.preparing = True
        self._later(lambda: self._prepare(save), lambda target: self._prepared(save, target))

    def _prepare(self, save: _Save) -> Target | None:
        """Make the place to write to; None if the step is committed already. Runs aside."""
        started = time.time()
        final = self._directory / step_name(save.step)
        # First: who claims it next removes what is begun here. Also where the step is committed
        # already, by others that train beside us, perhaps.
        self._claim = hold(self._directory, self._claim)
        target = new_target(final, self._found_damaged.union(save.payload["damaged"]))
        if target:
            try:
                target.begin(self._files)
            except Exception:
                target.abort()
                raise
        self._trace_metadata(save, "begin", started)
        return target

    def _prepared(self, save: _Save, target: Any) -> None:
        save.preparing = False
        if save is not self._save:  # given up meanwhile
            if target and not isinstance(target, Exception):
                self._clear(target)
            else:
                self._cleared()
        elif isinstance(target, Exception):
            self._fail(0, failure_of(target))
        elif target is None:
            logger.warning("step %d is committed already; not written again", save.step)
            final = self._directory / step_name(save.step)
            self._end(save, SaveOutcome(save.step, str(final)))
        else:
            save.target = target
            self._queue(save, target)
            self._grant()

    def _queue(self, save: _Save, target: Target) -> None:
        for file in self._files:
            blocks = math.ceil(file.size / BLOCK_BYTES)
            some = UNIT_BLOCKS if target.in_parts else blocks
            units = [
                Unit(file.name, first, min(first + some, blocks))
                for first in range(0, blocks, some)
            ]
            save.waiting.setdefault(self._owners[file.name], deque()).extend(units)

    def _on_staged(self, node: int, key: Key, position: Position) -> None:
        save = self._save
        if save is None or save.key != key:
            return
        save.staged[node] = position
        if self._staged_to(save) == self._end_position and not save.staged_at:
            save.staged_at = time.monotonic()
        self._grant()

    def _on_copied(self, node: int, source: int, key: Key) -> None:
        """A node has a copy of what another has staged, or has failed to make one."""
        self._on_remembered(source, key)

    def _on_remembered(self, node: int, key: Key) -> None:
        """A node's slot holds all of its part, its checksums are known, and the node after it has
        its copy, if it is to."""
        save = self._save or self._failed
        if save is None or save.key != key:
            return
        save.remembered.add(node)
        if save is self._failed and self._save is None and len(save.remembered) == self._nodes:
            self._slot = save.slot  # now the other slot is the one to give up
        elif save.memory_only and len(save.remembered) == self._nodes:
            self._end(save, SaveOutcome(save.step, None, memory_only=True))

    @property
    def _end_position(self) -> Position:
        return len(self._files), 0

    def _staged_to(self, save: _Save) -> Position:
        """Up to where all nodes have copied everything."""
        return min(save.staged.values()) if len(save.staged) == self._nodes else (0, 0)

    def _on_written(
        self, node: int, key: Key, unit: Unit, checksums: dict[int, int], span: dict[str, Any]
    ) -> None:
        self._trace(span)
        granted = self._out.pop((key, unit), None) is not None
        save = self._save
        if granted and save is not None and save.key == key:
            save.checksums.setdefault(unit.file, {}).update(checksums)
            self._limit.wrote(span["bytes"], time.monotonic())
        self._grant()

    def _on_stopped(self, node: int, key: Key, unit: Unit) -> None:
        """A writer has given a unit up, since its save was; or it knows nothing of that save."""
        self._out.pop((key, unit), None)
        if self._save is not None and self._save.key == key:
            self._fail(node, Failure(f"its writer process has given up {unit.file}"))
        self._grant()

    def _on_failed(self, node: int, key: Key, failure: Failure, unit: Unit | None = None) -> None:
        """A unit could not be written; or a rank could not copy, then there is none."""
        if unit is not None:
            self._out.pop((key, unit), None)
        if self._save is not None and self._save.key == key:
            self._fail(node, failure)
        self._grant()

    def _on_peer(self, node: int, message: tuple[Any, ...]) -> None:
        """A node has something to tell the one after it."""
        self._host.send((node + 1) % self._nodes, ("copy", node, *message))

    def _on_close(self, node: int) -> None:
        """A node's ranks have nothing more to save."""
        self._closing.add(node)
        self._maybe_closed()

    # --- work ------------------------------------------------------------------------------------

    def _grant(self) -> None:
        """Hand out units while writers are free; commit when none is left."""
        save = self._save
        if save is None or save.target is None or save.committing:
            return
        staged = self._staged_to(save)
        while len(self._out) < self._limit.value:
            nodes = [
                node
                for node, units in save.waiting.items()
                if units and self._place(units[0]) <= staged
            ]
            if not nodes:
                self._limit.starved()
                break
            now = time.monotonic()
            if now < self._next_grant:
                self._host.call_at(self._next_grant, self._grant)
                return
            self._next_grant = now + self._stagger
            # The node with the fewest units out; among those in turn.
            busy = Counter(self._out.values())
            save.turn += 1
            node = min(nodes, key=lambda node: (busy[node], (node - save.turn) % self._nodes))
            unit = save.waiting[node].popleft()
            self._out[save.key, unit] = node
            rate = self._options.bytes_per_second
            share = rate / self._limit.value if rate else None
            self._host.send(node, ("write", save.key, save.slot, unit, save.target, share))
        if not any(save.waiting.values()) and all(key != save.key for key, _ in self._out):
            save.committing = True
            target = save.target
            self._later(
                lambda: self._commit(save, target),
                lambda result: self._committed(save, target, result),
            )

    def _place(self, unit: Unit) -> Position:
        """Up to where must be staged for this unit to be written."""
        number = self._numbers[unit.file]
        return number, min(unit.stop * BLOCK_BYTES, self._files[number].size)

    def _commit(self, save: _Save, target: Target) -> None:
        """Make a save that is written a checkpoint. Runs aside."""
        started = time.time()
        hold(self._directory, self._claim)
        records = {
            file.name: FileRecord(
                file.size,
                tuple(checksum for _, checksum in sorted(save.checksums[file.name].items())),
            )
            for file in self._files
        }
        small = {**save.payload["files"], TRAINER_STATE: save.payload["state"], **self._indexes}
        for name, data in small.items():
            records[name] = FileRecord(len(data), block_checksums(data))
        record = CommitRecord(save.step, records).encode()
        target.commit(self._files, small, record)
        self._trace_metadata(save, "commit", started)

    def _committed(self, save: _Save, target: Target, result: Any) -> None:
        if save is not self._save:
            return
        if isinstance(result, Exception):
            save.committing = False
            self._fail(0, failure_of(result))
            return
        now = time.monotonic()
        outcome = SaveOutcome(
            save.step,
            str(target.final),
            seconds=now - save.started,
            staging_seconds=save.staged_at - save.started,
            nbytes=sum(file.size for file in self._files),
            writers=self._limit.value,
        )
        self._right.discard(target.final.name)
        self._found_damaged.discard(target.final.name)
        self._right |= set(save.payload["right"])
        self._damaged = set(save.payload["damaged"])
        self._untidy = True
        self._maybe_tidy()  # before the end, so that writers do not end before it
        self._end(save, outcome)

    def _maybe_tidy(self) -> None:
        """Carry out retention aside, one after the other."""
        if self._untidy and not self._tidying:
            self._tidying, self._untidy = True, False
            self._later(self._tidy, self._tidied)

    def _tidy(self) -> None:
        """Read the newest step back, and delete what need not stay besides. Runs aside."""
        unreadable: set[str] = set()

        def known() -> Known:
            return Known(self._damaged | self._found_damaged, unreadable, self._right)

        while self._options.keep:
            found = survey(self._directory, self._options.best_by, known())
            newest = next((item for item in found if item.is_good), None)
            if newest is None or newest.right:
                break
            try:
                _, problems = verify_step(newest.path, threads=1, pause=self._slowly(newest.size))
            except GivenUpError:
                break
            if not problems:
                self._right.add(newest.path.name)
                break
            logger.warning("%s was read back: %s", newest.path.name, problems[0])
            bad = any(map(is_damage, problems))
            (self._found_damaged if bad else unreadable).add(newest.path.name)
        prune(self._directory, self._options, known())

    def _slowly(self, nbytes: int) -> Callable[[], None]:
        """What reading back calls before each block: a save that is being written goes first, and
        so does the end of the run, if there is much to read."""
        last = time.monotonic()

        def pause() -> None:
            nonlocal last
            if self._closing and nbytes > READ_AT_END_BYTES:
                raise GivenUpError
            if self._save is not None:
                time.sleep(min(1.0, 3 * (time.monotonic() - last)))
            last = time.monotonic()

        return pause

    def _tidied(self, result: Any) -> None:
        if isinstance(result, Exception):  # the save itself has succeeded
            logger.warning("could not tidy %s: %s", self._directory, failure_of(result).message)
        self._tidying = False
        self._maybe_tidy()

    def _fail(self, node: int, failure: Failure) -> None:
        save = self._save
        if save is None or save.committing:  # all is written: nobody else is needed any more
            return
        where = f"on node {node}" if self._nodes > 1 else ""
        outcome = SaveOutcome(
            save.step,
            None,
            f"saving step {save.step} failed{where and ' ' + where}: {failure.message}; earlier "
            "checkpoints are untouched",
            node,
            failure.file,
            failure.errno,
            time.monotonic() - save.started,
            memory_only=save.memory_only,
        )
        # Writers stop at their next block; what they still write is in files that are gone.
        self._tell(("stop", save.key))
        if save.target or save.preparing:
            self._clearing += 1
        if save.target:
            self._clear(save.target)
        self._end(save, outcome)

    def _expire(self, save: _Save) -> None:
        """Give up a save that has taken too long, see [Note: a save]."""
        if save is not self._save or save.committing:
            return
        done = {node for node, place in save.staged.items() if place == self._end_position}
        silent = set(range(self._nodes)) - (save.remembered if save.memory_only else done)
        writing = {node: unit.file for (_, unit), node in self._out.items()}
        file = None
        if silent:
            node, missing = min(silent), f"the copy of its tensors on node(s) {sorted(silent)}"
        elif save.target is None:
            node, missing = 0, f"a place in {self._directory}"
        else:
            node = min(writing, default=0)
            file = writing.get(node)
            missing = f"{file or 'its files'} to be written"
        late = set(writing) | (silent - {0})
        if save.target is None and not silent:
            late.add(0)
        for other in late:
            self._forget(other)
        self._fail(node, Failure(f"{overdue(self._options)}, waiting for {missing}", file))
        for other in late:
            self._host.drop(other)

    def _clear(self, target: Target) -> None:
        self._later(target.abort, lambda _: self._cleared())

    def _cleared(self) -> None:
        self._clearing -= 1
        self._maybe_prepare()

    def _end(self, save: _Save, outcome: SaveOutcome) -> None:
        self._save = None
        if outcome.path:
            self._newest = max(save.step, self._newest or 0)
        elif len(save.remembered) < self._nodes:
            self._slot -= 1  # the next save gets this slot again: others may be whole
            self._failed = save
        message = "outcome", save.key, outcome
        self._answers.get(save.key, []).append(message)
        self._tell(message)
        self._consider_all()
        self._maybe_closed()

    def _trace_metadata(self, save: _Save, kind: str, started: float) -> None:
        self._trace(
            {"node": 0, "kind": kind, "step": save.step, "start": started, "stop": time.time()}
        )

    def _trace(self, span: Mapping[str, Any]) -> None:
        if not self._options.trace or not isinstance(self._directory, PosixPath):
            return
        try:
            with open(self._directory / "trace.jsonl", "a") as file:
                file.write(json.dumps(span) + "\n")
        except OSError as error:  # storage that fails must not end the one who is to tell of it
            logger.warning("a span of the trace is lost: %s", explain(error))

    def _later(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """As Host.later; this process does not end before."""
        self._aside += 1

        def ended(result: Any) -> None:
            self._aside -= 1
            done(result)
            self._maybe_closed()

        self._host.later(work, ended)

    def _maybe_closed(self) -> None:
        """Once every node has asked to close and nothing is left to do, let them."""
        if self._save is not None or self._aside:
            return
        if self._closing and self._closing >= set(self._slots):
            for node in self._closing:
                self._host.send(node, ("closed",))
            self._closing = set()


def overdue(options: CheckpointOptions) -> str:
    """What is told of a save that has taken too long."""
    return f"not done within {options.deadline:g} s (checkpoint.deadline)"


def failure_of(error: Exception) -> Failure:
    """What other nodes are told of an error."""
    if isinstance(error, OSError):
        path = error.filename and str(error.filename)
        return Failure(explain(error), path, error.errno)
    return Failure(explain(error))


# --- how many write at once ------------------------------------------------------------------


class WriterLimit:
    """How many units may be out at once.

    With `auto` it goes up and down by a quarter (at least one), and measures the bandwidth of each
    number over a few receipts. Had the storage room for all, bandwidth would change as much as the
    number did: as long as it changes at least half as much, more writers are tried, else fewer.
    """

    def __init__(self, setting: int | str | None, default: int) -> None:
        self.value = setting if isinstance(setting, int) else default
        self._auto = setting == "auto"
        self._since: float | None = None
        self._bytes = self._count = 0
        self._before: tuple[int, float] | None = None
        """The number before this one, and its bandwidth."""

    def starved(self) -> None:
        """There is no work for some writers, which says nothing about the storage: measure anew."""
        self._since = None

    def wrote(self, nbytes: int, now: float) -> None:
        """A receipt came in."""
        if not self._auto:
            return
        if self._since is None:
            self._since, self._bytes, self._count = now, 0, 0
            return
        self._bytes += nbytes
        self._count += 1
        if self._count < max(4, 2 * self.value) or now == self._since:
            return
        bandwidth = self._bytes / (now - self._since)
        more = True
        if self._before and self._before[0] != self.value:
            number, before = self._before
            more = (bandwidth / before - 1) / (self.value / number - 1) >= 0.5
        self._before, self._since = (self.value, bandwidth), None
        step = max(1, self.value // 4)
        self.value = max(1, self.value + step if more else self.value - step)


def default_writers(kind: str) -> int:
    """How many writers a kind of storage takes gladly: 16 on Lustre and on object stores (""),
    which are made for many clients; 4 on other shared filesystems; on a local disk as many as there
    are cores to serve it, up to 4."""
    if kind in ("lustre", ""):
        return 16
    if is_shared(kind):
        return 4
    return min(4, len(os.sched_getaffinity(0)))
