"""The coordinator as a state machine: messages in any order, nodes that die and come back, storage
that fails; and how it finds the number of writers."""

import errno
import heapq
import itertools
import os
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from checkpointing import coordinator as module
from checkpointing.coordinator import (
    ANSWER_SECONDS,
    UNIT_BLOCKS,
    Coordinator,
    Failure,
    Key,
    SaveOutcome,
    Unit,
)
from checkpointing.layout import BLOCK_BYTES, TensorFile
from checkpointing.options import CheckpointOptions

NODES = 3
BLOCKS = {"a": 1, "b": 2 * UNIT_BLOCKS + 1, "c": UNIT_BLOCKS, "d": 2, "e": 1}
OWNERS = {"a": 0, "b": 1, "c": 2, "d": 1, "e": 0}
FILES = [TensorFile(name, b"", {}, blocks * BLOCK_BYTES) for name, blocks in BLOCKS.items()]
PLAN = "plan"


class FakeTarget:
    """Where a save goes; says when it is used in a wrong order."""

    def __init__(self, world: "World", final: Path, in_parts: bool) -> None:
        self.world, self.final, self.in_parts = world, final, in_parts
        self.state = "new"

    def begin(self, files):
        assert self.state == "new"
        self.world.maybe_fail()
        self.state = "begun"

    def commit(self, files, small, record):
        assert self.state == "begun", f"committed when {self.state}"
        assert self.world.written[self] == BLOCKS, "committed before everything is written"
        self.world.maybe_fail()
        self.state = "committed"

    def abort(self):
        assert self.state in ("new", "begun"), f"aborted when {self.state}"
        self.state = "aborted"


@dataclass
class Node:
    """A node's ranks, and its writer process."""

    number: int
    alive: bool = True
    gone: bool = False
    """Whether the coordinator has noticed its death."""
    inbox: deque = field(default_factory=deque)
    outbox: deque = field(default_factory=deque)
    # its ranks
    asked: int = 0
    awaited: Key | None = None
    # its writer process
    answered: list[Key] = field(default_factory=list)
    current: Key | None = None
    stopped: bool = True
    staged: bool = False
    working: list[tuple[Key, Unit, FakeTarget]] = field(default_factory=list)


class World(RuleBasedStateMachine):
    """The host of the coordinator, and all that is around it."""

    @initialize(limit=st.integers(1, 4), shared=st.booleans(), in_parts=st.booleans())
    def start(self, limit, shared, in_parts):
        self.limit, self.in_parts = limit, in_parts
        self.clock, self.numbers, self.timers = 0.0, itertools.count(), []
        self.aside: list = []
        self.failures = 0
        self.nodes = [Node(number) for number in range(NODES)]
        self.keys: list[Key] = []
        self.waits: list[bool] = []
        self.went: list[Key] = []
        self.outcomes: list[SaveOutcome] = []
        self.out: set[tuple[Key, Unit, int]] = set()
        self.granted: set[tuple[Key, Unit]] = set()
        self.targets: list[FakeTarget] = []
        self.written: dict[FakeTarget, Counter] = {}
        self.patches = mock.patch.multiple(
            module,
            time=SimpleNamespace(monotonic=lambda: self.clock, time=lambda: self.clock),
            is_shared=lambda kind: shared,
            new_target=self.new_target,
            collect=lambda directory: None,
            prune=lambda *arguments: None,
        )
        self.patches.start()
        options = CheckpointOptions(max_writers=limit)
        self.coordinator = Coordinator(Path("/nowhere"), options, NODES, self)
        self.planned = False
        for node in self.nodes:
            node.outbox.append(("hello", PLAN, 2))

    def new_target(self, final, damaged):
        target = FakeTarget(self, final, self.in_parts)
        self.targets.append(target)
        self.written[target] = Counter()
        return target

    def maybe_fail(self):
        if self.failures:
            self.failures -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file")

    # --- Host ------------------------------------------------------------------------------------

    def send(self, node, message):
        kind, *arguments = message
        if kind == "go" and arguments[0] not in self.went:
            self.went.append(arguments[0])
        if kind == "outcome" and not any(arguments[0] is known for known in self.outcomes):
            self.outcomes.append(arguments[0])
        if not self.nodes[node].alive:
            return
        if kind == "write":
            key, _, unit, target, _ = arguments
            assert target.state == "begun"
            assert OWNERS[unit.file] == node
            assert (key, unit) not in self.granted, "granted twice"
            self.granted.add((key, unit))
            self.out.add((key, unit, node))
            assert len(self.out) <= self.limit, "more writers than allowed"
        self.nodes[node].inbox.append(message)

    def later(self, work, done):
        self.aside.append((work, done))

    def call_at(self, moment, work):
        heapq.heappush(self.timers, (moment, next(self.numbers), work))

    # --- what happens ----------------------------------------------------------------------------

    @precondition(lambda self: not self.planned)
    @rule()
    def plan(self):
        """Node 0 has made its slots; others may have been faster."""
        self.planned = True
        self.coordinator.set_plan(PLAN, FILES, {}, OWNERS)

    @rule(number=st.integers(0, NODES - 1), step=st.integers(1, 2), wait=st.booleans())
    def ask(self, number, step, wait):
        """A node's ranks save, in step with those of the others."""
        node = self.nodes[number]
        if any(
            other.asked < node.asked or (other.asked == node.asked and other.awaited)
            for other in self.nodes
        ):
            return
        if node.asked == len(self.keys):
            self.keys.append((step, len(self.keys) + 1))
            self.waits.append(wait)
        node.awaited = self.keys[node.asked]
        node.asked += 1
        self._tell_writer(node)

    def _tell_writer(self, node):
        if not node.alive or node.awaited is None:
            return
        if node.awaited in node.answered:  # told before it asked
            node.awaited = None
            return
        payload = {"state": b"", "files": {}, "damaged": [], "previous": None}
        wait = self.waits[node.asked - 1]
        node.outbox.append(("begin", node.awaited, wait, payload if node.number == 0 else None))

    @rule(number=st.integers(0, NODES - 1))
    def deliver(self, number):
        """The coordinator hears one message."""
        node = self.nodes[number]
        if not node.outbox:
            return
        message = node.outbox.popleft()
        if message == "lost":
            node.gone = True
            self.out = {entry for entry in self.out if entry[2] != number}
            self.coordinator.on_lost(number)
            return
        where = {"written": 2, "stopped": 2, "failed": 3}
        if message[0] in where and len(message) > where[message[0]]:
            self.out.discard((message[1], message[where[message[0]]], number))
        self.coordinator.on_message(number, message)

    @rule(number=st.integers(0, NODES - 1))
    def receive(self, number):
        """A node's writer hears one message."""
        node = self.nodes[number]
        if not node.inbox:
            return
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
                node.current, node.staged, node.stopped = key, False, False
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

    @rule(number=st.integers(0, NODES - 1), good=st.sampled_from([True, True, True, False]))
    def stage(self, number, good):
        """A node's ranks have copied."""
        node = self.nodes[number]
        if node.current is None or node.staged or not node.alive:
            return
        node.staged = True
        message = ("staged", node.current) if good else ("failed", node.current, Failure("copy"))
        node.outbox.append(message)

    @rule(number=st.integers(0, NODES - 1), good=st.sampled_from([True, True, True, False]))
    def finish(self, number, good):
        """A unit is written, or is not."""
        node = self.nodes[number]
        if not node.working:
            return
        key, unit, target = node.working.pop(0)
        if node.stopped or node.current != key:
            node.outbox.append(("stopped", key, unit))
        elif good:
            blocks = range(unit.first, unit.stop)
            self.written[target][unit.file] += len(blocks)
            span = {"bytes": len(blocks) * BLOCK_BYTES}
            node.outbox.append(("written", key, unit, dict.fromkeys(blocks, 0), span))
        else:
            node.outbox.append(("failed", key, Failure("disk"), unit))

    @precondition(lambda self: self.aside)
    @rule(data=st.data(), good=st.sampled_from([True, True, False]))
    def work_aside(self, data, good):
        """Something that the coordinator does aside ends."""
        index = data.draw(st.integers(0, len(self.aside) - 1))
        self._end_aside(index, good)

    def _end_aside(self, index, good):
        work, done = self.aside.pop(index)
        self.failures = 0 if good else 1
        try:
            result = work()
        except OSError as error:
            result = error
        done(result)

    @rule(number=st.integers(1, NODES - 1))
    def die(self, number):
        """A node's writer process is killed."""
        node = self.nodes[number]
        if node.alive:
            node.alive = node.gone = False
            node.inbox.clear()
            node.working.clear()
            node.current, node.stopped, node.answered = None, True, []
            node.outbox.append("lost")

    @rule(number=st.integers(1, NODES - 1))
    def come_back(self, number):
        """Its ranks start it again, and ask again."""
        node = self.nodes[number]
        if not node.alive and node.gone:
            node.alive = True
            node.outbox.append(("hello", PLAN, 2))
            self._tell_writer(node)

    @rule(seconds=st.sampled_from([0.01, 0.03, ANSWER_SECONDS + 1]))
    def time_passes(self, seconds):
        """Timers go off."""
        until = self.clock + seconds
        while self.timers and self.timers[0][0] <= until:
            self.clock, _, work = heapq.heappop(self.timers)
            work()
        self.clock = until

    # --- in the end ------------------------------------------------------------------------------

    def teardown(self):
        if not hasattr(self, "patches"):
            return
        try:
            if not self.planned:
                self.plan()
            self._settle()
            assert not any(node.awaited for node in self.nodes), "a request without an answer"
            assert len(self.outcomes) == len(self.went), "saves and outcomes"
            for number in range(NODES):
                self.ask(number, 9, True)
            self._settle()
            assert not self.out
            assert [o.step for o in self.outcomes if o.path][-1:] == [9], "the next save is good"
            good = [outcome for outcome in self.outcomes if outcome.path]
            states = Counter(target.state for target in self.targets)
            assert states["committed"] == len(good)
            assert states["begun"] == 0, "neither committed nor aborted"
        finally:
            self.patches.stop()

    def _settle(self):
        """All nodes are there, all goes well, until nothing is left to do."""
        for _ in range(200):
            for number in range(NODES):
                while self.nodes[number].outbox:
                    self.deliver(number)
                if number:
                    self.come_back(number)
                while self.nodes[number].inbox:
                    self.receive(number)
                self.stage(number, True)
                self.finish(number, True)
            while self.aside:
                self._end_aside(0, True)
            for number in range(NODES):
                if self.nodes[number].asked < len(self.keys):
                    self.ask(number, 1, True)
            self.time_passes(1)


World.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
test_any_order_of_events = World.TestCase
