"""The coordinator of saves: admits a save, grants blocks to writers, collects receipts, commits. It
is a state machine without threads or sockets, in the writer process of rank 0's node.

[Note: a save] The messages are defined in messages.py.
  SaveRequest     from every rank; all get SaveAdmitted (with a slot) or SaveSkipped
  RefuseSave      a rank cannot save: all ranks get SaveRefused, or the running save fails
  StagedReport    how far a node's ranks have copied their pieces, in the order of files. Blocks
                  that all nodes have staged may be written. The last report summarises the
                  numbers: if a number that must be finite is not, the save fails
  SlotRemembered  a node's slot is complete, and a restart may use it; a save that stays in memory
                  ends once all nodes have sent it
  WriteGrant      grants blocks to a writer; at most `limit` grants are outstanding
  WriteReceipt    the writer's receipt: a checksum for each block
  commit          the commit record, after all receipts
  SaveEnded       sent to all ranks, whether the save succeeded or failed
No handler waits for an answer. If a node is lost, the save fails and the node's grants are removed;
the next save may begin when the node is back. If this process is lost, the writers of the other
nodes keep their requests and send them to its successor. A rank that has its answer continues, and
restarts the writer of its node only with its next request. So rank 0 never repeats a request that
this process may have answered to some ranks: it would wait for writers that nobody restarts before
rank 0 itself continues. That request is skipped for all ranks that still make it. A save that
exceeds `deadline` fails, too; the writers that block it exit, and ranks restart them. A commit that
has begun is never interrupted, as removing the files at that moment could publish some of them. If
the commit hangs, the ranks of rank 0's node kill this process, which is like any other crash."""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, assert_never

from checkpointing.format.layout import TRAINER_STATE, TensorFile
from checkpointing.format.plan import SectionNumbers, not_finite
from checkpointing.options import CheckpointOptions
from checkpointing.save import messages as msg
from checkpointing.save.blocks import SaveFileLayout, SaveGrants, default_writers
from checkpointing.save.commit import SaveCommitter
from checkpointing.storage.interface import NewStoredStep
from checkpointing.storage.place import StoragePlace, location
from checkpointing.storage.posix import is_shared
from checkpointing.storage.steps import storage_of

logger = logging.getLogger(__name__)
T = TypeVar("T")

STAGGER_SECONDS = 0.02
"""Seconds between two grants on a shared filesystem, so that file opens are spread."""


@dataclass
class _Save:
    key: msg.Key
    contents: msg.SaveContents
    slot: int
    started: float
    target: NewStoredStep | None = None
    staged: dict[int, msg.Position] = field(default_factory=dict)
    """Node → position up to which it has copied everything."""
    numbers: dict[int, SectionNumbers] = field(default_factory=dict)
    """Node that has copied everything → summary of the numbers."""
    preparing: bool = False
    waiting: dict[int, deque[msg.SaveBlockRange]] = field(default_factory=dict)
    """Node → blocks of files that it owns and that are not granted yet."""
    checksums: dict[str, dict[int, int]] = field(default_factory=dict)
    committing: bool = False
    remembered: set[int] = field(default_factory=set)
    """Nodes whose slots a restart may use."""

    @property
    def step(self) -> int:
        return self.key[0]

    @property
    def memory_only(self) -> bool:
        return self.contents.memory_only


class SaveCoordinatorHost(Protocol):
    def send(self, node: int, message: msg.ToNode) -> None:
        """Send to a node's writer. The message is dropped if the writer has died."""

    def later(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Run work() in another thread, then done(its result or exception) in the coordinator's."""

    def drop(self, node: int) -> None:
        """Disconnect a node's writer, whose later messages are ignored. The writer exits if it is
        writing, or is this process; else it connects again."""

    def call_at(self, moment: float, work: Callable[[], None]) -> None:
        """Run work() in the coordinator's thread at `moment` of time.monotonic()."""


class SaveCoordinator:
    """Admits each save, assigns blocks of its files to writers, and commits the step, see
    [Note: a save]. It lives in the writer process of rank 0's node. All methods run in one thread;
    functions passed to `SaveCoordinatorHost.later` run in others."""

    def __init__(
        self,
        directory: StoragePlace,
        options: CheckpointOptions,
        nodes: int,
        host: SaveCoordinatorHost,
        voided: int = 0,
    ) -> None:
        self._voided = voided
        self._options, self._nodes, self._host = options, nodes, host
        self._move(directory)
        self._plan = ""
        self._layout = SaveFileLayout()
        self._indexes: dict[str, bytes] = {}
        self._hellos: dict[int, msg.SlotsReport] = {}
        """Node → its report of slots for a plan. Rank 0's node may not know the plan yet."""
        self._save: _Save | None = None
        self._requests: dict[msg.Key, msg.SaveRequest] = {}
        """Requests without an answer."""
        self._answers: dict[msg.Key, list[msg.Answer | msg.SaveEnded]] = {}
        """Messages about the last four requests, for nodes whose request comes later."""
        self._grants = SaveGrants(nodes)
        self._clearing = 0
        """Number of failed saves whose files are still being removed. The next save, perhaps of the
        same step, is prepared after that."""
        self._slot = -1
        self._next_grant = 0.0
        self._aside = 0
        """Number of functions in other threads, which must end before this process may."""
        self._closing: set[int] = set()
        self._failed: _Save | None = None
        """The save that failed last, whose slot may still become complete."""
        self._tidying = False
        self._untidy: set[SaveCommitter] = set()
        """Committers of the directories in which retention must run next."""

    def _move(self, directory: StoragePlace) -> None:
        self._directory = directory
        self._newest: int | None = None
        """Last step that this process committed in this directory."""
        self._steps = SaveCommitter(directory, self._options)
        kind = storage_of(directory).filesystem(directory)
        self._stagger = STAGGER_SECONDS if is_shared(kind) else 0.0
        self._limit = self._options.max_writers or default_writers(kind)

    # --- messages --------------------------------------------------------------------------------

    def on_message(self, node: int, message: msg.ToCoordinator) -> None:
        match message:
            case msg.SlotsReport():
                self._on_hello(node, message)
            case msg.SaveRequest():
                self._on_begin(node, message)
            case msg.RefuseSave(key, failure):
                if key not in self._answers:
                    self._answer(msg.SaveRefused(key, failure))
                # Ranks may be copying, as the save was admitted already. So the save fails instead.
                elif self._current(key):
                    why = f"rank {failure.rank} cannot save: {failure.message}"
                    self._fail(node, msg.NodeSaveFailure(why))
            case msg.StagedReport():
                self._on_staged(node, message)
            case msg.SlotRemembered(key):
                self._on_slots_complete(node, key)
            case msg.SlotComplete(key, slot, manifest):
                copy = msg.CopySlot(node, key, slot, manifest)
                self._host.send((node + 1) % self._nodes, copy)
            case msg.PeerCopyEnded(source, key):
                self._on_slots_complete(source, key)
            case msg.WriteReceipt():
                self._on_written(message)
            case msg.GrantDropped(key, blocks):
                dropped = msg.NodeSaveFailure(f"its writer process has given up {blocks.file}")
                self._on_failed(node, key, dropped, blocks)
            case msg.NodeCannotSave():
                self._on_failed(node, message.key, message.failure, message.blocks)
            case msg.WriterClosing():
                self._closing.add(node)
                self._maybe_closed()
            case _:
                assert_never(message)

    def on_lost(self, node: int) -> None:
        self._forget(node)
        self._fail(node, msg.NodeSaveFailure("its writer process is gone"))
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
        self._plan, self._layout, self._indexes = plan, SaveFileLayout(files, owners), dict(indexes)
        self._consider_all()

    @property
    def _slots(self) -> dict[int, int]:
        """Node → number of slots, for nodes that have slots for the current plan."""
        return {node: said.slots for node, said in self._hellos.items() if said.plan == self._plan}

    def _current(self, key: msg.Key) -> _Save | None:
        return self._save if self._save and self._save.key == key else None

    def _on_hello(self, node: int, hello: msg.SlotsReport) -> None:
        """Record that a node has slots for a plan. A repeated report is from a restarted writer,
        whose predecessor's loss has not been noticed yet."""
        if self._hellos.get(node) == hello:
            self.on_lost(node)
        self._hellos[node] = hello
        self._consider_all()

    def _on_begin(self, node: int, begin: msg.SaveRequest) -> None:
        key = begin.key
        if key in self._answers:
            # a late node, or one with a new writer, gets the same messages as the other nodes
            for message in self._answers[key]:
                self._host.send(node, message)
            return
        if key[1] <= self._voided:  # rank 0 has continued, and does not repeat this request
            self._answer(msg.SaveSkipped(key, msg.VOIDED))
            return
        if key not in self._requests:
            self._requests[key] = begin
            self._wait_for_nodes(key)
        if begin.contents is not None:
            self._requests[key] = begin
            self._consider(key)

    # --- admission -------------------------------------------------------------------------------

    def _consider_all(self) -> None:
        for key in list(self._requests):
            self._consider(key)

    def _consider(self, key: msg.Key) -> None:
        request = self._requests[key]
        # considered again when rank 0 requests this save, and when a further node has slots
        if request.contents is None or len(self._slots) < self._nodes:
            return
        if self._save is not None:
            # a save to memory ends soon, so a durable save waits for it
            durable = not request.contents.memory_only
            if not request.wait and not (self._save.memory_only and durable):
                self._answer(msg.SaveSkipped(key, f"step {self._save.step} is still being saved"))
            return  # `_end` considers a waiting request again
        # The directory changes only here, between saves, as a save commits in the one in which it
        # began.
        if request.contents.directory != str(self._directory):
            self._move(location(request.contents.directory))
        # Slots are used in turn, so that with two or more slots a save never overwrites the last
        # complete slot.
        self._slot = (self._slot + 1) % min(self._slots.values())
        self._save = save = _Save(key, request.contents, self._slot, time.monotonic())
        self._failed = None
        # Rank 0 may have sent its request before it learned of the last commit.
        known = [step for step in (save.contents.newest, self._newest) if step is not None]
        self._answer(
            msg.SaveAdmitted(key, save.slot, save.contents.state, max(known, default=None))
        )
        self._host.call_at(save.started + self._options.deadline, lambda: self._expire(save))
        self._maybe_prepare()

    def _wait_for_nodes(self, key: msg.Key) -> None:
        """Ensure that a request is answered even if a node never returns."""

        def look() -> None:
            if key not in self._requests:
                return
            missing = sorted(set(range(self._nodes)) - set(self._slots))
            if missing:
                self._answer(msg.SaveSkipped(key, f"there is no writer on node(s) {missing}"))
            else:
                self._wait_for_nodes(key)

        self._host.call_at(time.monotonic() + msg.ANSWER_SECONDS, look)

    def _answer(self, answer: msg.Answer) -> None:
        self._requests.pop(answer.key, None)
        self._answers[answer.key] = [answer]
        while len(self._answers) > 4:  # a node is at most a few requests behind
            self._answers.pop(next(iter(self._answers)))
        self._send_to_all(answer)

    def _send_to_all(self, message: msg.ToNode) -> None:
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

    def _prepared(self, save: _Save, target: NewStoredStep | Exception | None) -> None:
        save.preparing = False
        if save is not self._save:  # the save has failed meanwhile
            if target and not isinstance(target, Exception):
                self._clear(target)
            else:
                self._cleared()
        elif isinstance(target, Exception):
            self._fail(0, msg.NodeSaveFailure.of(target))
        elif target is None:
            logger.warning("step %d is committed already; not written again", save.step)
            self._end(save, msg.SaveOutcome(save.step, str(self._steps.path(save.step))))
        else:
            save.target = target
            save.waiting = self._layout.by_node(target.in_parts)
            self._grant()

    def _on_staged(self, node: int, message: msg.StagedReport) -> None:
        save = self._current(message.key)
        if save is None:
            return
        save.staged[node] = message.position
        if message.numbers:
            save.numbers[node] = message.numbers
            # fail at once, as nothing of this step may be committed
            if bad := message.numbers.bad:
                self._fail(node, msg.NodeSaveFailure(not_finite(bad)))
                return
        self._grant()

    def _on_slots_complete(self, node: int, key: msg.Key) -> None:
        """Handle that a node's slot is complete and, with `peer_copy`, copied by the next node."""
        save = self._save or self._failed
        if save is None or save.key != key:
            return
        save.remembered.add(node)
        if save is self._failed and self._save is None and len(save.remembered) == self._nodes:
            # The failed slot is complete after all, so the next save takes another slot.
            self._slot = save.slot
        elif save.memory_only and len(save.remembered) == self._nodes:
            self._end(save, msg.SaveOutcome(save.step, None, memory_only=True))

    def _on_written(self, receipt: msg.WriteReceipt) -> None:
        self._steps.trace(receipt.span)
        # If the writer was dropped meanwhile, its grant is gone, and the receipt is ignored.
        granted = self._grants.take_back(receipt.key, receipt.blocks)
        save = self._current(receipt.key)
        if granted and save:
            save.checksums.setdefault(receipt.blocks.file, {}).update(receipt.checksums)
        self._grant()

    def _on_failed(
        self,
        node: int,
        key: msg.Key,
        failure: msg.NodeSaveFailure,
        blocks: msg.SaveBlockRange | None,
    ) -> None:
        if blocks is not None:
            self._grants.take_back(key, blocks)
        if self._current(key):
            self._fail(node, failure)
        self._grant()

    def _grant(self) -> None:
        """Grant blocks while writers are free. Commit when all blocks are written."""
        save = self._save
        if save is None or save.target is None or save.committing:
            return
        everyone = len(save.staged) == self._nodes
        staged = min(save.staged.values()) if everyone else (0, 0)
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
            # At most `limit` writers share the bandwidth.
            share = rate / self._limit if rate else None
            self._host.send(node, msg.WriteGrant(save.key, save.slot, blocks, save.target, share))
        if not any(save.waiting.values()) and not self._grants.writes(save.key):
            save.committing, target = True, save.target
            state = {TRAINER_STATE: save.contents.state}
            files, small = self._layout.files, {**save.contents.files, **state, **self._indexes}
            numbers = sum(save.numbers.values(), SectionNumbers())
            self._later(
                lambda: self._steps.commit(
                    save.step, target, files, save.checksums,
                    small, numbers.odd, save.contents.before,
                ),
                lambda result: self._committed(save, target, numbers, result),
            )  # fmt: skip

    def _committed(
        self, save: _Save, target: NewStoredStep, numbers: SectionNumbers, result: Exception | None
    ) -> None:
        if isinstance(result, Exception):
            save.committing = False
            self._fail(0, msg.NodeSaveFailure.of(result))
            return
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
        self._maybe_tidy()  # before `_end`, after which this process may close
        self._end(save, outcome)

    def _maybe_tidy(self) -> None:
        if self._untidy and not self._tidying:
            self._tidying, steps = True, self._untidy.pop()
            self._later(
                lambda: steps.tidy(lambda: self._save is not None, lambda: bool(self._closing)),
                self._tidied,
            )

    def _tidied(self, result: Exception | None) -> None:
        # A failure is only logged, as the save itself has succeeded.
        if isinstance(result, Exception):
            logger.warning("could not tidy checkpoints: %s", msg.NodeSaveFailure.of(result).message)
        self._tidying = False
        self._maybe_tidy()

    def _fail(self, node: int, failure: msg.NodeSaveFailure) -> None:
        save = self._save
        if save is None or save.committing:  # all bytes are written, so no node is needed
            return
        where = f" on node {node}" if self._nodes > 1 else ""
        outcome = msg.SaveOutcome(
            save.step,
            None,
            f"saving step {save.step} failed{where}: {failure.message}; earlier "
            "checkpoints are untouched",
            node,
            failure.file,
            failure.errno,
            time.monotonic() - save.started,
            memory_only=save.memory_only,
        )
        # Writers stop at their next block. Until then they write to unlinked files.
        self._send_to_all(msg.StopWriting(save.key))
        # Also while the step is being prepared: then `_prepared` removes the files.
        if save.target or save.preparing:
            self._clearing += 1
        if save.target:
            self._clear(save.target)
        self._end(save, outcome)

    def _expire(self, save: _Save) -> None:
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
        # Before `_fail`, which considers the next save: that must wait until these nodes are back.
        for other in late:
            self._forget(other)
        self._fail(
            node, msg.NodeSaveFailure(f"{msg.overdue(self._options)}, waiting for {missing}", file)
        )
        for other in late:
            self._host.drop(other)

    def _clear(self, target: NewStoredStep) -> None:
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
            self._slot -= 1  # the next save reuses this slot, as the other slots may be complete
            self._failed = save
        ended = msg.SaveEnded(save.key, outcome)
        self._answers.get(save.key, []).append(ended)
        self._send_to_all(ended)
        self._consider_all()
        self._maybe_closed()

    def _later(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Like SaveCoordinatorHost.later, but keeps this process alive until `done` has run."""
        self._aside += 1

        def ended(result: T | Exception) -> None:
            self._aside -= 1
            done(result)
            self._maybe_closed()

        self._host.later(work, ended)

    def _maybe_closed(self) -> None:
        """Let all nodes close once each has sent WriterClosing and no work is left."""
        if self._save is not None or self._aside:
            return
        if self._closing and self._closing >= set(self._slots):
            for node in self._closing:
                self._host.send(node, msg.AllClosed())
            self._closing = set()
