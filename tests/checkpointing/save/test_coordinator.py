"""The coordinator as a state machine: messages in any order, nodes that die and come back, storage
that fails; and how it finds the number of writers."""

import errno
import heapq
import itertools
import os
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.errors import RankFailure
from checkpointing.format.layout import BLOCK_BYTES, TensorFile
from checkpointing.options import CheckpointOptions
from checkpointing.save import commit, coordinator
from checkpointing.save import messages as msg
from checkpointing.save.blocks import UNIT_BLOCKS
from checkpointing.save.coordinator import SaveCoordinator

NODES = 3
SAVE_SECONDS = 25.0
BLOCKS = {"a": 1, "b": 2 * UNIT_BLOCKS + 1, "c": UNIT_BLOCKS, "d": 2}
OWNERS = {"a": 0, "b": 1, "c": 2, "d": 1}
FILES = [TensorFile(name, b"", {}, blocks * BLOCK_BYTES) for name, blocks in BLOCKS.items()]
NUMBERS = {file: number for number, file in enumerate(BLOCKS)}
POSITIONS = [(0, 0), (1, 20 * BLOCK_BYTES), (2, 0), (len(FILES), 0)]
"""Up to where a node says that it has copied, from none to all."""


class FakeTarget:
    """Where a save goes. Fails when it is used in a wrong order."""

    def __init__(self, world: "World", final: Path) -> None:
        self.world, self.final, self.in_parts = world, final, world.in_parts
        self.state = "new"
        self.written: Counter[str] = Counter()
        """Blocks by file."""

    def begin(self, files):
        assert self.state == "new"
        same = [other for other in self.world.targets if other.final == self.final]
        assert all(other.state in ("aborted", "committed") for other in same if other is not self)
        self.world.fail_if_due()
        self.state = "begun"

    def commit(self, files, small, record):
        assert self.state == "begun", f"committed when {self.state}"
        assert self.written == BLOCKS, "committed before everything is written"
        self.world.fail_if_due()
        self.state = "committed"

    def abort(self):
        assert self.state in ("new", "begun"), f"aborted when {self.state}"
        self.state = "aborted"


LOST = "lost"
"""The last word of a process: it is gone."""


@dataclass
class Node:
    """A node's ranks and its writer process, as the coordinator meets them."""

    number: int
    inbox: deque[msg.ToNode] = field(default_factory=deque)
    outbox: deque[msg.ToCoordinator] = field(default_factory=deque)
    last_words: deque[msg.ToCoordinator | str] = field(default_factory=deque)
    """Of the process before, on a connection of its own; the last one is LOST."""
    # The ranks.
    asked: int = 0
    awaited: msg.Key | None = None
    # The writer process.
    alive: bool = True
    answered: int = 0
    """Number of the last save that it has heard of."""
    current: msg.Key | None = None
    stopped: bool = True
    staged: int = 0
    """Which of POSITIONS it has reached."""
    working: deque[tuple[msg.Key, msg.SaveBlockRange, FakeTarget]] = field(default_factory=deque)


class World:
    """The host of a coordinator and the nodes around it, where one thing happens at a time."""

    def __init__(self, limit: int, shared: bool, in_parts: bool) -> None:
        self.limit, self.in_parts = limit, in_parts
        self.clock, self.numbers = 0.0, itertools.count()
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.aside: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.fault_due = False
        self.planned = False
        self.saves: list[tuple[msg.Key, bool]] = []
        """Key of each, and whether it waits for the one before."""
        self.went: set[msg.Key] = set()
        self.outcomes: list[msg.SaveOutcome] = []
        self.dropped: list[int] = []
        self.remembered: defaultdict[msg.Key, set[int]] = defaultdict(set)
        self.slots: dict[msg.Key, int] = {}
        self.last: msg.Key | None = None
        """That went last."""
        self.whole_slot: int | None = None
        """Of two: the one that holds the last save that was committed, or remembered by all."""
        self.staged: defaultdict[msg.Key, dict[int, msg.Position]] = defaultdict(dict)
        self.granted: set[tuple[msg.Key, msg.SaveBlockRange]] = set()
        self.out: set[tuple[msg.Key, msg.SaveBlockRange, int]] = set()
        """Granted, and not known to have ended."""
        self.targets: list[FakeTarget] = []
        self.nodes = [Node(number) for number in range(NODES)]
        for node in self.nodes:
            node.outbox.append(msg.SlotsReport("plan", 2))
        time = SimpleNamespace(monotonic=lambda: self.clock, time=lambda: self.clock)
        self.patches = [
            mock.patch.multiple(coordinator, time=time, is_shared=lambda kind: shared),
            mock.patch.multiple(
                commit,
                time=time,
                new_step=self.new_step,
                inspect_steps=lambda *arguments: [],
                prune=lambda *arguments: None,
                hold=lambda directory, mine: directory / ".writer-000001",
            ),
        ]
        with self.patched():
            options = CheckpointOptions(max_writers=limit, deadline=SAVE_SECONDS)
            self.coordinator = SaveCoordinator(Path("/nowhere"), options, NODES, self)

    @contextmanager
    def patched(self) -> Iterator[None]:
        with ExitStack() as patches:
            for patch in self.patches:
                patches.enter_context(patch)
            yield

    def new_step(self, final: Path, damaged: list[str]) -> FakeTarget:
        self.targets.append(FakeTarget(self, final))
        return self.targets[-1]

    def fail_if_due(self):
        if self.fault_due:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file")

    # --- Host ------------------------------------------------------------------------------------

    def send(self, number: int, message: msg.ToNode) -> None:
        if isinstance(message, msg.SaveAdmitted):
            self.went.add(message.key)
            committed = (outcome.step for outcome in self.outcomes if outcome.path)
            assert message.newest == max(committed, default=None), "else memory is not believed"
            assert message.slot != self.whole_slot, "a save that fails at once spares what is whole"
            self.slots[message.key] = message.slot
            self.last = max(self.last or message.key, message.key, key=lambda key: key[1])
        if isinstance(message, msg.SaveEnded) and not any(
            message.outcome is known for known in self.outcomes
        ):
            self.outcomes.append(message.outcome)
            if message.outcome.path or len(self.remembered[message.key]) == NODES:
                self.whole_slot = self.slots[message.key]
        if not self.nodes[number].alive:
            return
        if isinstance(message, msg.WriteGrant):
            key, unit, target = message.key, message.blocks, message.target
            assert target.state == "begun"
            assert OWNERS[unit.file] == number
            needed = NUMBERS[unit.file], unit.stop * BLOCK_BYTES
            reached = self.staged[key].values()
            assert len(reached) == NODES, "written before all nodes have copied anything"
            assert min(reached) >= needed, "written before it is copied"
            assert (key, unit) not in self.granted, "granted twice"
            self.granted.add((key, unit))
            self.out.add((key, unit, number))
            assert len(self.out) <= self.limit, "more writers than allowed"
        self.nodes[number].inbox.append(message)

    def drop(self, number: int) -> None:
        """A writer that holds a save up is ended. That of node 0 is the coordinator's process: here
        it ends without the coordinator."""
        self.dropped.append(number)
        node = self.nodes[number]
        if node.alive:
            self.die(node)
        if number == 0:
            node.last_words.remove(LOST)
            self.out = {entry for entry in self.out if entry[2] != 0}
            self.come_back(node)

    def later(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.aside.append((work, done))

    def call_at(self, moment: float, work: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (moment, next(self.numbers), work))

    # --- what may happen -------------------------------------------------------------------------

    def progress(self) -> list[Callable[[], None]]:
        """All that may happen next if nothing goes wrong."""
        events: list[Callable[[], None]] = []
        if not self.planned:
            events.append(self.plan)
        for node in self.nodes:
            if self.may_ask(node):
                events += [partial(self.ask, node, *save) for save in ((1, False), (2, True))]
                events.append(partial(self.refuse, node))
            if node.outbox:
                events.append(partial(self.deliver, node))
            if node.last_words:
                events.append(partial(self.deliver_last_words, node))
            if node.inbox:
                events.append(partial(self.receive, node))
            if self.may_stage(node):
                events.append(partial(self.stage, node, True))
            if node.working:
                events.append(partial(self.finish, node, True))
            if not node.alive:
                events.append(partial(self.come_back, node))
        events += [partial(self.end_aside, index, True) for index in range(len(self.aside))]
        if self.timers:
            events += [partial(self.pass_time, seconds) for seconds in (0.03, 10.0)]
        return events

    def trouble(self) -> list[Callable[[], None]]:
        """All that may go wrong next."""
        events: list[Callable[[], None]] = [partial(self.pass_time, msg.ANSWER_SECONDS + 1.0)]
        for node in self.nodes:
            if self.may_stage(node):
                events.append(partial(self.stage, node, False))
            if node.working:
                events.append(partial(self.finish, node, False))
            if node.number and node.alive:
                events.append(partial(self.die, node))
        return events + [partial(self.end_aside, index, False) for index in range(len(self.aside))]

    def happen(self, event: Callable[[], None]) -> None:
        with self.patched():
            event()

    def plan(self):
        """Node 0 has made its slots; others may have been faster."""
        self.planned = True
        self.coordinator.set_plan("plan", FILES, {}, OWNERS)

    def may_ask(self, node: Node) -> bool:
        """Ranks save in step."""
        return not any(
            other.asked < node.asked or (other.asked == node.asked and other.awaited)
            for other in self.nodes
        )

    def ask(self, node: Node, step: int, wait: bool) -> None:
        """A node's ranks want to save."""
        if node.asked == len(self.saves):
            self.saves.append(((step, len(self.saves) + 1), wait))
        node.awaited = self.saves[node.asked][0]
        node.asked += 1
        self.tell_writer(node)

    def refuse(self, node: Node) -> None:
        """A node's ranks cannot save, and wait for no answer; others may have begun."""
        if node.asked == len(self.saves):
            self.saves.append(((1, len(self.saves) + 1), False))
        key = self.saves[node.asked][0]
        node.asked += 1
        if node.alive:
            node.outbox.append(
                msg.RefuseSave(key, RankFailure(node.number, "ValueError", "no JSON"))
            )

    def tell_writer(self, node: Node) -> None:
        if node.awaited and node.awaited[1] <= node.answered:  # told before it was asked
            node.awaited = None
        elif node.awaited and node.alive:
            contents = msg.SaveContents("/nowhere", b"", {}, [], [], None, False)
            wait = self.saves[node.asked - 1][1]
            node.outbox.append(
                msg.SaveRequest(node.awaited, wait, None if node.number else contents)
            )

    def deliver(self, node: Node) -> None:
        """The coordinator hears one message."""
        message = node.outbox.popleft()
        if (
            isinstance(message, msg.SlotsReport) and LOST in node.last_words
        ):  # that is no news any more
            node.last_words = deque(word for word in node.last_words if word != LOST)
            self.out = {entry for entry in self.out if entry[2] != node.number}
        self.hear(node, message)

    def deliver_last_words(self, node: Node) -> None:
        """The same of a process that is dead."""
        message = node.last_words.popleft()
        if message == LOST:
            self.out = {entry for entry in self.out if entry[2] != node.number}
            self.coordinator.on_lost(node.number)
        else:
            self.hear(node, message)

    def hear(self, node: Node, message: msg.ToCoordinator) -> None:
        if isinstance(message, msg.WriteReceipt | msg.GrantDropped | msg.NodeCannotSave):
            self.out.discard((message.key, message.blocks, node.number))
        if isinstance(message, msg.StagedReport):
            self.staged[message.key][node.number] = message.position
        if isinstance(message, msg.SlotRemembered):
            self.remembered[message.key].add(node.number)
            ended = len(self.outcomes) == len(self.went)
            if ended and message.key == self.last and len(self.remembered[self.last]) == NODES:
                self.whole_slot = self.slots[self.last]
        self.coordinator.on_message(node.number, message)

    def receive(self, node: Node) -> None:
        """A node's writer hears one message."""
        message = node.inbox.popleft()
        if isinstance(message, msg.SaveAdmitted | msg.SaveSkipped | msg.SaveRefused):
            key = message.key
            if key[1] <= node.answered:
                return
            node.answered = key[1]
            if node.awaited == key:
                node.awaited = None
            if isinstance(message, msg.SaveAdmitted):
                assert node.current is None, "two saves at once"
                node.current, node.staged, node.stopped = key, 0, False
        elif isinstance(message, msg.WriteGrant):
            key, unit, target = message.key, message.blocks, message.target
            if node.current == key and not node.stopped:
                node.working.append((key, unit, target))
            else:
                node.outbox.append(msg.GrantDropped(key, unit))
        elif isinstance(message, msg.StopWriting):
            node.stopped |= node.current == message.key
        elif isinstance(message, msg.SaveEnded) and node.current == message.key:
            node.current, node.stopped = None, True

    def may_stage(self, node: Node) -> bool:
        return node.current is not None and node.staged < len(POSITIONS) - 1

    def stage(self, node: Node, good: bool) -> None:
        """A node's ranks have copied more, or cannot."""
        node.staged += 1
        if good:
            node.outbox.append(msg.StagedReport(node.current, POSITIONS[node.staged]))
            if node.staged == len(POSITIONS) - 1:
                node.outbox.append(msg.SlotRemembered(node.current))
        else:
            node.outbox.append(msg.NodeCannotSave(node.current, msg.NodeSaveFailure("copy")))

    def finish(self, node: Node, good: bool) -> None:
        """A unit is written, or is not."""
        key, unit, target = node.working.popleft()
        if node.stopped or node.current != key:
            node.outbox.append(msg.GrantDropped(key, unit))
        elif good:
            blocks = range(unit.first, unit.stop)
            target.written[unit.file] += len(blocks)
            span = {"bytes": len(blocks) * BLOCK_BYTES}
            node.outbox.append(msg.WriteReceipt(key, unit, dict.fromkeys(blocks, 0), span))
        else:
            node.outbox.append(msg.NodeCannotSave(key, msg.NodeSaveFailure("disk"), unit))

    def die(self, node: Node) -> None:
        """A node's writer process is killed."""
        node.alive = False
        node.last_words = deque([*node.last_words, *node.outbox, LOST])
        node.outbox.clear()
        node.inbox.clear()
        node.working.clear()
        node.current, node.stopped, node.answered = None, True, 0

    def come_back(self, node: Node) -> None:
        """Its ranks start it again, and ask again."""
        node.alive = True
        node.outbox.append(msg.SlotsReport("plan", 2))
        self.tell_writer(node)

    def end_aside(self, index: int, good: bool) -> None:
        """Something that the coordinator does aside has ended."""
        work, done = self.aside.pop(index)
        self.fault_due = not good
        try:
            result = work()
        except OSError as error:
            result = error
        self.fault_due = False
        done(result)

    def pass_time(self, seconds: float) -> None:
        """Timers go off."""
        until = self.clock + seconds
        while self.timers and self.timers[0][0] <= until:
            self.clock, _, work = heapq.heappop(self.timers)
            work()
        self.clock = until

    def settle(self, *, all_return: bool = True) -> None:
        """All goes well until nothing is left to do; dead nodes may stay dead."""
        for _ in range(100):
            for node in self.nodes:
                if node.asked < len(self.saves) and self.may_ask(node):
                    self.ask(node, 0, True)
                while node.last_words:
                    self.deliver_last_words(node)
                while node.outbox:
                    self.deliver(node)
                if not node.alive and all_return:
                    self.come_back(node)
                while node.inbox:
                    self.receive(node)
                while self.may_stage(node):
                    self.stage(node, True)
                while node.working:
                    self.finish(node, True)
            while self.aside:
                self.end_aside(0, True)
            self.pass_time(1.0)

    def end(self) -> None:
        """Whatever happened: in the end all is well."""
        if not self.planned:
            self.plan()
        self.settle(all_return=False)
        assert not any(node.awaited and node.alive for node in self.nodes), "nobody is kept waiting"
        self.settle()
        assert not any(node.awaited for node in self.nodes), "a request without an answer"
        assert len(self.outcomes) == len(self.went), "a save without an outcome"
        for node in self.nodes:
            self.ask(node, 9, True)
        self.settle()
        assert not self.out, "a writer that never ended"
        assert [outcome.step for outcome in self.outcomes if outcome.path][-1:] == [9]
        states = Counter(target.state for target in self.targets)
        assert states["committed"] == sum(outcome.path is not None for outcome in self.outcomes)
        assert not states["begun"], "neither committed nor aborted"


@given(
    limit=st.integers(1, 4),
    shared=st.booleans(),
    in_parts=st.booleans(),
    trouble=st.sampled_from([0.0, 0.01, 0.03, 0.1]),
    events=st.integers(0, 400),
    seed=st.integers(0, 2**32),
)
def test_whatever_happens_in_whatever_order(limit, shared, in_parts, trouble, events, seed):
    """The seed draws evenly what happens next; hypothesis itself would mostly repeat."""
    draw = random.Random(seed)
    world = World(limit, shared, in_parts)
    for _ in range(events):
        world.happen(
            draw.choice(
                world.trouble() if draw.random() < trouble else world.progress() or [world.settle]
            )
        )
    world.happen(world.end)


def test_a_unit_that_was_given_up_fails_its_save():
    """As a writer does that knows nothing of the save."""
    world = World(limit=1, shared=False, in_parts=False)
    draw = random.Random(0)
    for _ in range(1000):
        if not world.out:
            world.happen(draw.choice(world.progress()))
    ((key, unit, number),) = world.out
    world.happen(partial(world.hear, world.nodes[number], msg.GrantDropped(key, unit)))
    assert world.outcomes[-1].error.endswith(
        f"its writer process has given up {unit.file}; earlier checkpoints are untouched"
    )
    world.happen(world.end)


def hold_up(node, what):
    """A world in which a save has begun, and all has happened but what a node is to do last."""
    world = World(limit=1, shared=False, in_parts=False)
    world.happen(world.plan)
    for held in world.nodes:
        world.happen(partial(world.deliver, held))
    for held in world.nodes:
        world.happen(partial(world.ask, held, 1, False))

    def may_happen(event):
        if event.func in (world.pass_time, world.ask, world.refuse):
            return False
        if what == "commit":
            return event.func != world.end_aside or "begun" not in states()
        return event.func.__name__ != what or (event.args[:1] != (world.nodes[node],) and node)

    def states():
        return {target.state for target in world.targets}

    while events := [event for event in world.progress() if may_happen(event)]:
        world.happen(events[0])
    return world


@pytest.mark.parametrize(
    ("node", "what", "missing", "file"),
    [
        (1, "stage", "the copy of its tensors on node(s) [1]", None),
        (2, "finish", "c to be written", "c"),
        (0, "end_aside", "a place in /nowhere", None),
    ],
)
def test_a_save_that_takes_too_long_fails_with_what_is_missing(node, what, missing, file):
    world = hold_up(node, what)
    assert not world.outcomes
    world.happen(partial(world.pass_time, SAVE_SECONDS))
    (outcome,) = world.outcomes
    assert f"on node {node}: not done within 25 s (checkpoint.deadline)" in outcome.error
    assert f"waiting for {missing};" in outcome.error
    assert (outcome.node, outcome.file) == (node, file)
    assert world.dropped == [node]
    world.happen(world.end)


def test_what_is_being_committed_is_not_removed_meanwhile():
    world = hold_up(0, "commit")
    world.happen(partial(world.pass_time, SAVE_SECONDS))
    assert not world.outcomes
    assert not world.dropped
    world.happen(world.settle)
    assert [outcome.step for outcome in world.outcomes if outcome.path][:1] == [1]
    world.happen(world.end)
