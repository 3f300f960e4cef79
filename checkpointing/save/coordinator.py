"""Rank 0's part of a save: admit writers, collect receipts, commit. A state machine without threads
or sockets of its own; it lives in the writer process of rank 0's node.

[Note: a save] The messages are those of messages.py.
  Begin       every rank asks; the coordinator answers once for all: Go (into which slot) or Skip
  Refuse      a rank cannot save: Refused is the answer for all, or the save is given up
  Staged      how far a node's ranks have copied their pieces, in the order of files; what all nodes
              have staged may be written. With the last comes what their numbers are: if any is not
              finite that must be, the save is given up
  Remembered  a node's slot is whole, and a restart may begin from it; a save that is to stay in
              memory ends here
  Write       a writer is granted one unit of work at a time, and at most `limit` units are out
  Written     its receipt: a checksum for each block
  commit      the commit record, after all receipts
  Ended       told to all ranks, whether good or bad
Nothing waits for an answer: every message is handled to its end. If a node is lost, the save is
given up and its units return; the next save may begin when the node is back. If this process is
lost, requests are kept by the writers of their nodes and sent to the next. A rank that has its
answer goes on, and brings the writer of its node back only when it asks again: so a request that
this process may have answered to some is never asked again by rank 0, who would wait for writers
that nobody brings back before rank 0 itself goes on. It is skipped for all that still ask. A save
that takes longer than `deadline` is given up, too, and the writers that hold it up end and come
back anew. Only a commit that is under way is waited for: to remove the files at that moment could
publish some of them. If it hangs, the ranks of rank 0's node kill this process, which is as any
other crash.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, assert_never

from checkpointing.format.layout import TensorFile
from checkpointing.format.sections import Numbers, not_finite
from checkpointing.options import CheckpointOptions
from checkpointing.save import messages as msg
from checkpointing.save.blocks import FileLayout, Grants, default_writers
from checkpointing.save.commit import Steps, small_files
from checkpointing.storage.interface import NewStep
from checkpointing.storage.place import Place, location
from checkpointing.storage.posix import is_shared
from checkpointing.storage.steps import storage_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

STAGGER_SECONDS = 0.02
"""Between two grants on a shared filesystem, so that writers do not open their files at once."""


@dataclass
class _Request:
    wait: bool
    contents: msg.Contents | None = None

    @property
    def is_durable(self) -> bool:
        return self.contents is not None and not self.contents.memory_only


@dataclass
class _Save:
    key: msg.Key
    contents: msg.Contents
    slot: int
    started: float
    target: NewStep | None = None
    staged: dict[int, msg.Position] = field(default_factory=dict)
    """Up to where each node has copied everything."""
    numbers: dict[int, Numbers] = field(default_factory=dict)
    """What the pieces hold, by node that has copied all."""
    preparing: bool = False
    """Whether its target is being prepared right now."""
    waiting: dict[int, deque[msg.BlockRange]] = field(default_factory=dict)
    """Blocks by the node that owns their file."""
    checksums: dict[str, dict[int, int]] = field(default_factory=dict)
    committing: bool = False
    remembered: set[int] = field(default_factory=set)
    """Nodes from whose slot a restart may begin."""

    @property
    def step(self) -> int:
        return self.key[0]

    @property
    def memory_only(self) -> bool:
        return self.contents.memory_only


class Host(Protocol):
    """What the coordinator needs of the process that it lives in."""

    def send(self, node: int, message: msg.ToNode) -> None:
        """Send to a node's writer; nothing happens if it is gone."""

    def later(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Run work() aside, then done(its result or its exception) in the coordinator's thread."""

    def drop(self, node: int) -> None:
        """Part with a node's writer, whose last news this may be: it ends if it is writing, or
        if it is this one, and else connects again."""

    def call_at(self, moment: float, work: Callable[[], None]) -> None:
        """Run work() in the coordinator's thread at a moment of time.monotonic()."""


class Coordinator:
    """See [Note: a save]. All methods run in one thread, except for what `Host.later` is given."""

    def __init__(
        self, directory: Place, options: CheckpointOptions, nodes: int, host: Host, voided: int = 0
    ) -> None:
        self._voided = voided
        """See messages.Setup."""
        self._options, self._nodes, self._host = options, nodes, host
        self._newest: int | None = None
        """Step that was committed last, since this process began or moved."""
        self._move(directory)
        self._plan = ""
        self._layout = FileLayout()
        self._indexes: dict[str, bytes] = {}
        self._hellos: dict[int, msg.Hello] = {}
        """The plan that each node is ready for; a node may be ready before this one knows the
        plan."""
        self._save: _Save | None = None
        self._requests: dict[msg.Key, _Request] = {}
        """Not answered yet."""
        self._answers: dict[msg.Key, list[msg.Answer | msg.Ended]] = {}
        """What was told about the last few requests, for nodes that ask later than others: the
        answer, and the outcome once there is one."""
        self._grants = Grants(nodes)
        self._clearing = 0
        """Saves that were given up and whose places are not removed yet; the next one, which may be
        of the same step, gets its place after that."""
        self._slot = -1
        self._next_grant = 0.0
        self._aside = 0
        """Work aside that must end before this process may."""
        self._closing: set[int] = set()
        self._failed: _Save | None = None
        """The save that failed last; its copy may yet become whole."""
        self._tidying = False
        """Whether retention is at work."""
        self._untidy: set[Steps] = set()
        """Where it is to begin again."""

    def _move(self, directory: Place) -> None:
        """Save there from now on."""
        self._directory, self._newest = directory, None
        self._steps = Steps(directory, self._options)
        kind = storage_of(directory).filesystem(directory)
        self._stagger = STAGGER_SECONDS if is_shared(kind) else 0.0
        self._limit = self._options.max_writers or default_writers(kind)

    # --- messages --------------------------------------------------------------------------------

    def on_message(self, node: int, message: msg.ToCoordinator) -> None:
        """Handle what a node says."""
        match message:
            case msg.Hello():
                self._on_hello(node, message)
            case msg.Begin():
                self._on_begin(node, message)
            case msg.Refuse(key, failure):
                if key not in self._answers:
                    self._answer(msg.Refused(key, failure))
                elif self._is_current(key):
                    why = f"rank {failure.rank} cannot save: {failure.message}"
                    self._fail(node, msg.Failure(why))
            case msg.Staged():
                self._on_staged(node, message)
            case msg.Remembered(key):
                self._on_remembered(node, key)
            case msg.ForNext(key, slot, manifest):
                copy = msg.CopySlot(node, key, slot, manifest)
                self._host.send((node + 1) % self._nodes, copy)
            case msg.Copied(source, key):
                self._on_remembered(source, key)
            case msg.Written():
                self._on_written(message)
            case msg.Stopped(key, blocks):
                self._on_failed(
                    node, key, msg.Failure(f"its writer process has given up {blocks.file}"), blocks
                )
            case msg.Failed():
                self._on_failed(node, message.key, message.failure, message.blocks)
            case msg.Closing():
                self._closing.add(node)
                self._maybe_closed()
            case _:
                assert_never(message)

    def on_lost(self, node: int) -> None:
        """A node's writer process is gone."""
        self._forget(node)
        self._fail(node, msg.Failure("its writer process is gone"))
        self._maybe_closed()

    def _forget(self, node: int) -> None:
        self._hellos.pop(node, None)
        self._closing.discard(node)
        self._grants.forget(node)

    def set_plan(
        self,
        plan: str,
        files: Sequence[TensorFile],
        indexes: Mapping[str, bytes],
        owners: Mapping[str, int],
    ) -> None:
        """What is saved from now on, and the node that writes each file."""
        self._plan, self._layout, self._indexes = plan, FileLayout(files, owners), dict(indexes)
        self._consider_all()

    @property
    def _slots(self) -> dict[int, int]:
        """How many slots each node has for the plan in use."""
        return {node: said.slots for node, said in self._hellos.items() if said.plan == self._plan}

    def _is_current(self, key: msg.Key) -> bool:
        return self._save is not None and self._save.key == key

    def _on_hello(self, node: int, hello: msg.Hello) -> None:
        """A node has made its slots for a plan. If it has said so before, it is another process,
        faster here than the news of the end of the one before."""
        if self._hellos.get(node) == hello:
            self.on_lost(node)
        self._hellos[node] = hello
        self._consider_all()

    def _on_begin(self, node: int, begin: msg.Begin) -> None:
        """A node's ranks want to save."""
        key = begin.key
        if key in self._answers:
            for message in self._answers[key]:
                self._host.send(node, message)
            return
        if key[1] <= self._voided:  # rank 0 has gone on, and will not ask again
            self._answer(msg.Skip(key, msg.VOIDED))
            return
        if key not in self._requests:
            self._requests[key] = _Request(begin.wait)
            self._wait_for_nodes(key)
        if begin.contents is not None:
            self._requests[key].contents = begin.contents
            self._consider(key)

    # --- admission -------------------------------------------------------------------------------

    def _consider_all(self) -> None:
        for key in list(self._requests):
            self._consider(key)

    def _consider(self, key: msg.Key) -> None:
        """Answer a request as soon as that is possible."""
        request = self._requests[key]
        if request.contents is None or len(self._slots) < self._nodes:
            return
        if self._save is not None:
            # What stays in memory is over in a moment; nobody skips a checkpoint for it.
            if not request.wait and not (self._save.memory_only and request.is_durable):
                self._answer(msg.Skip(key, f"step {self._save.step} is still being saved"))
            return  # one that waits is considered again when that save ends
        if request.contents.directory != str(self._directory):
            self._move(location(request.contents.directory))
        self._slot = (self._slot + 1) % min(self._slots.values())
        self._save = save = _Save(key, request.contents, self._slot, time.monotonic())
        self._failed = None
        # Rank 0 has asked, perhaps, before it heard of the last commit.
        known = [step for step in (save.contents.newest, self._newest) if step is not None]
        self._answer(msg.Go(key, save.slot, save.contents.state, max(known, default=None)))
        self._host.call_at(save.started + self._options.deadline, lambda: self._expire(save))
        self._maybe_prepare()

    def _wait_for_nodes(self, key: msg.Key) -> None:
        """See to it that a request is answered, even if a node never comes back."""

        def look() -> None:
            if key not in self._requests:
                return
            missing = sorted(set(range(self._nodes)) - set(self._slots))
            if missing:
                self._answer(msg.Skip(key, f"there is no writer on node(s) {missing}"))
            else:
                self._wait_for_nodes(key)

        self._host.call_at(time.monotonic() + msg.ANSWER_SECONDS, look)

    def _answer(self, answer: msg.Answer) -> None:
        self._requests.pop(answer.key, None)
        self._answers[answer.key] = [answer]
        while len(self._answers) > 4:
            self._answers.pop(next(iter(self._answers)))
        self._tell(answer)

    def _tell(self, message: msg.ToNode) -> None:
        for node in range(self._nodes):
            self._host.send(node, message)

    def _maybe_prepare(self) -> None:
        save = self._save
        if save is None or save.target or save.preparing or self._clearing or save.memory_only:
            return
        save.preparing, steps = True, self._steps
        self._later(
            lambda: steps.begin(save.step, self._layout.files, save.contents.damaged),
            lambda target: self._prepared(save, target),
        )

    def _prepared(self, save: _Save, target: NewStep | Exception | None) -> None:
        save.preparing = False
        if save is not self._save:  # given up meanwhile
            if target and not isinstance(target, Exception):
                self._clear(target)
            else:
                self._cleared()
        elif isinstance(target, Exception):
            self._fail(0, msg.Failure.of(target))
        elif target is None:
            logger.warning("step %d is committed already; not written again", save.step)
            self._end(save, msg.SaveOutcome(save.step, str(self._steps.path(save.step))))
        else:
            save.target = target
            save.waiting = self._layout.by_node(target.in_parts)
            self._grant()

    # --- work ------------------------------------------------------------------------------------

    def _on_staged(self, node: int, message: msg.Staged) -> None:
        save = self._save
        if save is None or save.key != message.key:
            return
        save.staged[node] = message.position
        if message.numbers:
            save.numbers[node] = message.numbers
            if bad := message.numbers.bad:
                self._fail(node, msg.Failure(not_finite(bad)))
                return
        self._grant()

    def _on_remembered(self, node: int, key: msg.Key) -> None:
        """A node's slot holds all of its part, its checksums are known, and the node after it has
        its copy, if it is to."""
        save = self._save or self._failed
        if save is None or save.key != key:
            return
        save.remembered.add(node)
        if save is self._failed and self._save is None and len(save.remembered) == self._nodes:
            self._slot = save.slot  # now the other slot is the one to give up
        elif save.memory_only and len(save.remembered) == self._nodes:
            self._end(save, msg.SaveOutcome(save.step, None, memory_only=True))

    def _staged_to(self, save: _Save) -> msg.Position:
        """Up to where all nodes have copied everything."""
        return min(save.staged.values()) if len(save.staged) == self._nodes else (0, 0)

    def _on_written(self, receipt: msg.Written) -> None:
        self._steps.trace(receipt.span)
        granted = self._grants.take_back(receipt.key, receipt.blocks)
        save = self._save
        if granted and save is not None and save.key == receipt.key:
            save.checksums.setdefault(receipt.blocks.file, {}).update(receipt.checksums)
        self._grant()

    def _on_failed(
        self, node: int, key: msg.Key, failure: msg.Failure, blocks: msg.BlockRange | None
    ) -> None:
        if blocks is not None:
            self._grants.take_back(key, blocks)
        if self._is_current(key):
            self._fail(node, failure)
        self._grant()

    def _grant(self) -> None:
        """Hand out blocks while writers are free; commit when none is left."""
        save = self._save
        if save is None or save.target is None or save.committing:
            return
        staged = self._staged_to(save)
        while len(self._grants) < self._limit:
            nodes = [
                node
                for node, waiting in save.waiting.items()
                if waiting and self._layout.place(waiting[0]) <= staged
            ]
            if not nodes:
                break
            now = time.monotonic()
            if now < self._next_grant:
                self._host.call_at(self._next_grant, self._grant)
                return
            self._next_grant = now + self._stagger
            node = self._grants.choose(nodes)
            blocks = save.waiting[node].popleft()
            self._grants.give(save.key, blocks, node)
            rate = self._options.bytes_per_second
            share = rate / self._limit if rate else None
            self._host.send(node, msg.Write(save.key, save.slot, blocks, save.target, share))
        if not any(save.waiting.values()) and not self._grants.writes(save.key):
            save.committing = True
            target = save.target
            files, small = self._layout.files, small_files(save.contents, self._indexes)
            numbers = sum(save.numbers.values(), Numbers())
            self._later(
                lambda: self._steps.commit(
                    save.step, target, files, save.checksums, small, numbers.odd
                ),
                lambda result: self._committed(save, target, result),
            )

    # --- the end ---------------------------------------------------------------------------------

    def _committed(self, save: _Save, target: NewStep, result: Exception | None) -> None:
        if save is not self._save:
            return
        if isinstance(result, Exception):
            save.committing = False
            self._fail(0, msg.Failure.of(result))
            return
        numbers = sum(save.numbers.values(), Numbers())
        outcome = msg.SaveOutcome(
            save.step,
            str(target.final),
            seconds=time.monotonic() - save.started,
            nbytes=sum(file.size for file in self._layout.files),
            writers=self._limit,
            weights=f"{numbers.weights:016x}",
            moments=f"{numbers.moments:016x}",
        )
        self._steps.committed(target.final.name, save.contents)
        self._untidy.add(self._steps)
        self._maybe_tidy()  # before the end, so that writers do not end before it
        self._end(save, outcome)

    def _maybe_tidy(self) -> None:
        """Carry out retention aside, one after the other."""
        if self._untidy and not self._tidying:
            self._tidying, steps = True, self._untidy.pop()
            self._later(
                lambda: steps.tidy(lambda: self._save is not None, lambda: bool(self._closing)),
                self._tidied,
            )

    def _tidied(self, result: Exception | None) -> None:
        if isinstance(result, Exception):  # the save itself has succeeded
            logger.warning("could not tidy checkpoints: %s", msg.Failure.of(result).message)
        self._tidying = False
        self._maybe_tidy()

    def _fail(self, node: int, failure: msg.Failure) -> None:
        save = self._save
        if save is None or save.committing:  # all is written: nobody else is needed any more
            return
        where = f"on node {node}" if self._nodes > 1 else ""
        outcome = msg.SaveOutcome(
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
        self._tell(msg.Stop(save.key))
        if save.target or save.preparing:
            self._clearing += 1
        if save.target:
            self._clear(save.target)
        self._end(save, outcome)

    def _expire(self, save: _Save) -> None:
        """Give up a save that has taken too long, see [Note: a save]."""
        if save is not self._save or save.committing:
            return
        done = {node for node, place in save.staged.items() if place == self._layout.end}
        silent = set(range(self._nodes)) - (save.remembered if save.memory_only else done)
        writing = self._grants.files
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
        self._fail(node, msg.Failure(f"{msg.overdue(self._options)}, waiting for {missing}", file))
        for other in late:
            self._host.drop(other)

    def _clear(self, target: NewStep) -> None:
        steps = self._steps
        self._later(lambda: steps.abort(target), lambda _: self._cleared())

    def _cleared(self) -> None:
        self._clearing -= 1
        self._maybe_prepare()

    def _end(self, save: _Save, outcome: msg.SaveOutcome) -> None:
        self._save = None
        if outcome.path:
            self._newest = max(save.step, self._newest or 0)
        elif len(save.remembered) < self._nodes:
            self._slot -= 1  # the next save gets this slot again: others may be whole
            self._failed = save
        ended = msg.Ended(save.key, outcome)
        self._answers.get(save.key, []).append(ended)
        self._tell(ended)
        self._consider_all()
        self._maybe_closed()

    def _later(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """As Host.later; this process does not end before."""
        self._aside += 1

        def ended(result: T | Exception) -> None:
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
                self._host.send(node, msg.Closed())
            self._closing = set()
