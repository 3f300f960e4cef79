"""The coordinator as a state machine: messages in any order, nodes that die and come back, storage
that fails; and how it finds the number of writers."""

import errno
import heapq
import itertools
import os
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing import coordinator as module
from checkpointing.coordinator import (
    ANSWER_SECONDS,
    UNIT_BLOCKS,
    Coordinator,
    Failure,
    Key,
    Position,
    SaveOutcome,
    Unit,
)
from checkpointing.layout import BLOCK_BYTES, TensorFile
from checkpointing.options import CheckpointOptions

NODES = 3
BLOCKS = {"a": 1, "b": 2 * UNIT_BLOCKS + 1, "c": UNIT_BLOCKS, "d": 2}
OWNERS = {"a": 0, "b": 1, "c": 2, "d": 1}
FILES = [TensorFile(name, b"", {}, blocks * BLOCK_BYTES) for name, blocks in BLOCKS.items()]
NUMBERS = {file: number for number, file in enumerate(BLOCKS)}
POSITIONS = [(number, part * BLOCK_BYTES) for number in range(len(FILES)) for part in (0, 9, 20)]
POSITIONS.append((len(FILES), 0))
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


@dataclass
class Node:
    """A node's ranks and its writer process, as the coordinator meets them."""

    number: int
    inbox: deque[tuple[Any, ...]] = field(default_factory=deque)
    outbox: deque[tuple[Any, ...]] = field(default_factory=deque)
    # The ranks.
    asked: int = 0
    awaited: Key | None = None
    # The writer process.
    alive: bool = True
    missed: bool = False
    """Whether the coordinator knows of its death."""
    answered: list[Key] = field(default_factory=list)
    current: Key | None = None
    stopped: bool = True
    staged: int = 0
    """Which of POSITIONS it has reached."""
    working: deque[tuple[Key, Unit, FakeTarget]] = field(default_factory=deque)


class World:
    """The host of a coordinator and the nodes around it, where one thing happens at a time."""

    def __init__(self, limit: int, shared: bool, in_parts: bool) -> None:
        self.limit, self.in_parts = limit, in_parts
        self.clock, self.numbers = 0.0, itertools.count()
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.aside: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self.fault_due = False
        self.deaths = 0
        self.planned = False
        self.saves: list[tuple[Key, bool]] = []
        """Key of each, and whether it waits for the one before."""
        self.went: set[Key] = set()
        self.outcomes: list[SaveOutcome] = []
        self.staged: defaultdict[Key, dict[int, Position]] = defaultdict(dict)
        self.granted: set[tuple[Key, Unit]] = set()
        self.out: set[tuple[Key, Unit, int]] = set()
        """Granted, and not known to have ended."""
        self.targets: list[FakeTarget] = []
        self.nodes = [Node(number) for number in range(NODES)]
        for node in self.nodes:
            node.outbox.append(("hello", "plan", 2))
        self.patches = mock.patch.multiple(
            module,
            time=SimpleNamespace(monotonic=lambda: self.clock, time=lambda: self.clock),
            is_shared=lambda kind: shared,
            new_target=self.new_target,
            collect=lambda directory: None,
            prune=lambda *arguments: None,
        )
        with self.patches:
            options = CheckpointOptions(max_writers=limit)
            self.coordinator = Coordinator(Path("/nowhere"), options, NODES, self)

    def new_target(self, final: Path, damaged: list[str]) -> FakeTarget:
        self.targets.append(FakeTarget(self, final))
        return self.targets[-1]

    def fail_if_due(self):
        if self.fault_due:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file")

    # --- Host ------------------------------------------------------------------------------------

    def send(self, number: int, message: tuple[Any, ...]) -> None:
        kind, *arguments = message
        if kind == "go":
            self.went.add(arguments[0])
        if kind == "outcome" and not any(arguments[0] is known for known in self.outcomes):
            self.outcomes.append(arguments[0])
        if not self.nodes[number].alive:
            return
        if kind == "write":
            key, _, unit, target, _ = arguments
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

    def later(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self.aside.append((work, done))

    def call_at(self, moment: float, work: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (moment, next(self.numbers), work))

    # --- what may happen -------------------------------------------------------------------------

    def possible(self) -> list[Callable[[], None]]:
        """All that may happen next."""
        events: list[Callable[[], None]] = []
        if not self.planned:
            events.append(self.plan)
        for node in self.nodes:
            if self.may_ask(node):
                events += [partial(self.ask, node, *save) for save in ((1, False), (2, True))]
            if node.outbox:
                events += [partial(self.deliver, node)] * 2
            if node.inbox:
                events += [partial(self.receive, node)] * 2
            if node.current and node.staged < len(POSITIONS) - 1:
                events += [partial(self.stage, node, good) for good in (True, True, True, False)]
            if node.working:
                events += [partial(self.finish, node, good) for good in (True, True, True, False)]
            if node.number and node.alive and self.deaths < 3:
                events.append(partial(self.die, node))
            if not node.alive and node.missed:
                events.append(partial(self.come_back, node))
        for index in range(len(self.aside)):
            events += [partial(self.end_aside, index, good) for good in (True, True, True, False)]
        if self.timers:
            events += [partial(self.pass_time, span) for span in (0.03, ANSWER_SECONDS + 1)]
        return events

    def happen(self, event: Callable[[], None]) -> None:
        with self.patches:
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

    def tell_writer(self, node: Node) -> None:
        if node.awaited in node.answered:  # told before it was asked
            node.awaited = None
        elif node.awaited and node.alive:
            payload = {"state": b"", "files": {}, "damaged": [], "previous": None}
            wait = self.saves[node.asked - 1][1]
            node.outbox.append(("begin", node.awaited, wait, None if node.number else payload))

    def deliver(self, node: Node) -> None:
        """The coordinator hears one message."""
        message = node.outbox.popleft()
        if message == ("lost",):
            node.missed = True
            self.out = {entry for entry in self.out if entry[2] != node.number}
            self.coordinator.on_lost(node.number)
            return
        unit = {"written": 2, "stopped": 2, "failed": 3}.get(message[0], len(message))
        if unit < len(message):
            self.out.discard((message[1], message[unit], node.number))
        if message[0] == "staged":
            self.staged[message[1]][node.number] = message[2]
        self.coordinator.on_message(node.number, message)

    def receive(self, node: Node) -> None:
        """A node's writer hears one message."""
        kind, *arguments = node.inbox.popleft()
        if kind in ("go", "skip"):
            key = arguments[0]
            if key in node.answered:
                return
            node.answered.append(key)
            if node.awaited == key:
                node.awaited = None
            if kind == "go":
                assert node.current is None, "two saves at once"
                node.current, node.staged, node.stopped = key, 0, False
        elif kind == "write":
            key, _, unit, target, _ = arguments
            if node.current == key and not node.stopped:
                node.working.append((key, unit, target))
            else:
                node.outbox.append(("stopped", key, unit))
        elif kind == "stop":
            node.stopped |= node.current == arguments[0]
        elif kind == "outcome":
            node.current, node.stopped = None, True

    def stage(self, node: Node, good: bool) -> None:
        """A node's ranks have copied more, or cannot."""
        node.staged += 1
        if good:
            node.outbox.append(("staged", node.current, POSITIONS[node.staged]))
        else:
            node.outbox.append(("failed", node.current, Failure("copy")))

    def finish(self, node: Node, good: bool) -> None:
        """A unit is written, or is not."""
        key, unit, target = node.working.popleft()
        if node.stopped or node.current != key:
            node.outbox.append(("stopped", key, unit))
        elif good:
            blocks = range(unit.first, unit.stop)
            target.written[unit.file] += len(blocks)
            span = {"bytes": len(blocks) * BLOCK_BYTES}
            node.outbox.append(("written", key, unit, dict.fromkeys(blocks, 0), span))
        else:
            node.outbox.append(("failed", key, Failure("disk"), unit))

    def die(self, node: Node) -> None:
        """A node's writer process is killed."""
        self.deaths += 1
        node.alive = node.missed = False
        node.inbox.clear()
        node.working.clear()
        node.current, node.stopped, node.answered = None, True, []
        node.outbox.append(("lost",))

    def come_back(self, node: Node) -> None:
        """Its ranks start it again, and ask again."""
        node.alive, node.missed = True, False
        node.outbox.append(("hello", "plan", 2))
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

    def settle(self) -> None:
        """All goes well until nothing is left to do."""
        for _ in range(100):
            for node in self.nodes:
                if node.asked < len(self.saves) and self.may_ask(node):
                    self.ask(node, 0, True)
                while node.outbox:
                    self.deliver(node)
                if not node.alive:
                    self.come_back(node)
                while node.inbox:
                    self.receive(node)
                while node.current and node.staged < len(POSITIONS) - 1:
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


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 999), min_size=100, max_size=300),
)
def test_whatever_happens_in_whatever_order(limit, shared, in_parts, choices):
    world = World(limit, shared, in_parts)
    for choice in choices:
        events = world.possible()
        world.happen(events[choice % len(events)])
    world.happen(world.end)
