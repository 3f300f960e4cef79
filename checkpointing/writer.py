"""The writer process of a node: takes what its ranks have put into a slot and writes it, block by
block, where the coordinator says. Runs as `python -m checkpointing.writer`, a child of the node's
first rank, and ends with it. Imports no torch.

One thread holds all state; connections and slow work have threads of their own that only put work
into its inbox. On rank 0's node the coordinator lives in the same thread.
"""

import ctypes
import hashlib
import heapq
import itertools
import logging
import os
import pickle
import queue
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from checkpointing.blocks import NodePlan, PlanInput, StoppedError, plan_node, write_unit
from checkpointing.channel import Channel, StrangerError, call, welcome
from checkpointing.coordinator import (
    ANSWER_SECONDS,
    Coordinator,
    Failure,
    Key,
    Position,
    SaveOutcome,
    Unit,
    failure_of,
)
from checkpointing.errors import explain
from checkpointing.folders import Folder, collect_memory, forget
from checkpointing.options import CheckpointOptions
from checkpointing.plan import Nodes
from checkpointing.pulls import Puller, serve_pulls
from checkpointing.slots import (
    Manifest,
    Ranges,
    SlotFiles,
    Slots,
    close_slots,
    copy_slot,
    make_slots,
    write_manifest,
)
from checkpointing.storage import location
from checkpointing.target import Target

logger = logging.getLogger(__name__)

NICENESS = 10
"""Of threads that move bytes: training goes first where there are fewer cores than threads."""
RECONNECT_SECONDS = 1.0
WELCOME_SECONDS = 20
"""How long somebody who has connected may take to say who they are."""
_scratch = threading.local()
"""A thread's own connections to other nodes."""
GIVEN_UP = "it was given up here when the writer process of rank 0's node was lost"


@dataclass(frozen=True)
class Setup:
    """What a writer process is started with, pickled on its standard input."""

    parent: int
    """Process id of the rank that starts it."""
    node: int
    nodes: Nodes
    """Global ranks of each node; rank 0 is on node 0."""
    directory: str
    run: str
    """Token of the run; see `memory.token`."""
    options: CheckpointOptions
    address: str
    """Where it listens for its ranks: an abstract Unix socket."""
    host: str
    """Where it listens for other nodes, with `port`; unused if there are none."""
    port: int
    """0: any free one."""
    secret: bytes
    """Who does not know it is not listened to."""


@dataclass
class _Current:
    """The save that this node takes part in."""

    key: Key
    slot: int
    state: str
    newest: int | None
    """Newest step in storage when it began."""
    staged: dict[int, Position] = field(default_factory=dict)
    """Up to where each rank has copied its pieces."""
    stopped: bool = False


class Writer:
    """The node's part of the protocol; see coordinator.py [Note: a save]."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.node, self.nodes = setup, setup.node, setup.nodes
        self.directory = location(setup.directory)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._aside = ThreadPoolExecutor(4, "aside", _give_way)
        self._threads = ThreadPoolExecutor(64, "writer", _give_way)
        self._ranks: dict[int, Channel] = {}
        self._peers: dict[int, Channel] = {}
        """Connections of the coordinator to the other nodes."""
        self._lost: set[int] = set()
        """Ranks that were connected, and are not any more."""
        self._addresses: Sequence[tuple[str, int]] = ()
        """Where the writers of all nodes listen."""
        self._plan: NodePlan | None = None
        self._slots: Slots | None = None
        self._folder: Folder | None = None
        self._files: list[SlotFiles] = []
        self._current: _Current | None = None
        self._asked: set[int] = set()
        """Ranks that wait for the slots."""
        self._owed: dict[int, str] = {}
        """Why slots were refused, by rank of this node that has not asked yet."""
        self._filled: dict[int, _Current] = {}
        """Which save was the last to be copied into a slot: to its end, even if it failed."""
        self._said: dict[str, Manifest] = {}
        """What a restart is told of each slot, and of copies of others."""
        self._writing = 0
        """Units that are being written."""
        self._remembering = 0
        """Slots whose checksums are made: those of a save that failed, too, before this ends."""
        self._committed: int | None = None
        """Newest step that was committed."""
        self._begun: dict[Key, tuple[bool, dict[str, Any] | None]] = {}
        """Requests to save that the coordinator has not answered."""
        self._answered = 0
        """Number of the last one that it has answered."""
        self._asked_for: dict[int, int] = {}
        """Number of the last save that each rank has asked for."""
        self._untold: dict[int, list[tuple[Key, tuple[Any, ...]]]] = {}
        """What ranks are going to be told once they ask."""
        self._closing: dict[int, bool] = {}
        """Ranks that want to close, and whether to keep the slots."""
        self._refused = 0
        """Connections of strangers."""
        self._uplink: Channel | None = None
        self.coordinator: Coordinator | None = None
        if self.node == 0:
            self.coordinator = Coordinator(self.directory, setup.options, len(self.nodes), self)

    def run(self) -> None:
        """Handle the inbox for ever. An error that nobody foresaw ends the process, whatever its
        other threads do: its ranks start it again."""
        try:
            self._run()
        except Exception:
            logger.exception("the checkpoint writer process ends")
            os._exit(1)

    def _run(self) -> None:
        while True:
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                heapq.heappop(self._timers)[2]()
            wait = self._timers[0][0] - now if self._timers else None
            try:
                self._inbox.get(timeout=wait)()
            except queue.Empty:
                continue

    # --- what the coordinator needs (Host) -------------------------------------------------------

    def send(self, node: int, message: tuple[Any, ...]) -> None:
        """See coordinator.Host."""
        if node == self.node:
            self._inbox.put(lambda: self._on_coordinator(message))
        elif node in self._peers:
            _send(self._peers[node], message)

    def later(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """See coordinator.Host."""

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                result = error
            self._inbox.put(lambda: done(result))

        self._aside.submit(run)

    def drop(self, node: int) -> None:
        """See coordinator.Host."""
        if node == self.node:
            self._inbox.put(self._end)  # once all have been told
        elif node in self._peers:
            self.send(node, ("end",))
            self._peers[node].shut()

    def _end(self) -> None:
        """Go, whatever other threads are in: its ranks start it again."""
        logger.warning("the checkpoint writer process of node %d gives up what hangs", self.node)
        os._exit(1)

    def call_at(self, moment: float, work: Callable[[], None]) -> None:
        """See coordinator.Host."""
        heapq.heappush(self._timers, (moment, next(self._numbers), work))

    # --- connections -----------------------------------------------------------------------------

    def listen(self, listener: Listener) -> None:
        """Take connections, each in a thread of its own: whoever connects and stays silent keeps
        nobody else out."""

        def accept() -> None:
            while True:
                try:
                    connection = listener.accept()
                except OSError as error:  # one who left at once
                    logger.debug("lost a connection: %s", explain(error))
                    continue
                who = connection, listener.last_accepted
                threading.Thread(target=self._serve, args=who, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()

    def _serve(self, connection: Connection, peer: object) -> None:
        """Pass on what one connection says."""
        try:
            channel, (kind, number) = welcome(connection, self.setup.secret, WELCOME_SECONDS)
            if kind == "pull" and number != self.node:  # somebody on the way has led it here
                raise StrangerError(f"a call for node {number}")
        except Exception as error:  # a stranger, or one who left or is silent
            self._refuse(peer, error)
            connection.close()
            return
        try:
            if kind == "pull":
                serve_pulls(channel, self._filled_slot, self.setup.run)
                return
            register, handle, lost = {
                "rank": (self._ranks, self._on_rank, self._lost_rank),
                "node": (self._peers, self._on_node, self._lost_node),
            }[kind]
            self._inbox.put(lambda: register.__setitem__(number, channel))
            while True:
                message = channel.recv()
                self._inbox.put(partial(handle, number, message))
        except (EOFError, OSError) as error:
            if isinstance(error, StrangerError):
                self._refuse(peer, error)
            if kind != "pull":
                self._inbox.put(lambda: lost(number, channel))

    def _refuse(self, peer: object, error: Exception) -> None:
        """Told once: whoever has the time may try for ever."""
        if isinstance(error, EOFError | ConnectionError):
            logger.debug("lost a connection: %s", explain(error))
            return
        self._refused += 1
        level = logging.WARNING if self._refused == 1 else logging.DEBUG
        logger.log(
            level, "the checkpoint writer process of node %d refused a connection from %s: %s; it "
            "does so without a word from now on", self.node, peer or "here", explain(error),
        )  # fmt: skip

    def _filled_slot(self, slot: int, key: Key | None) -> SlotFiles:
        """A slot that a save is copied into; a process that was started again in the middle of it
        has nothing of that."""
        held = self._filled.get(slot)
        if held is None or key not in (None, held.key):
            raise EOFError
        return self._files[slot]

    def _puller(self) -> Puller:
        """Of this thread."""
        if not hasattr(_scratch, "puller"):
            _scratch.puller = Puller(self._addresses, self.setup.secret)
        puller: Puller = _scratch.puller
        return puller

    # --- the coordinator and this node -----------------------------------------------------------

    def _to_coordinator(self, message: tuple[Any, ...]) -> None:
        if self.coordinator:
            coordinator = self.coordinator
            self._inbox.put(lambda: coordinator.on_message(self.node, message))
        elif self._uplink:
            _send(self._uplink, message)

    def _on_node(self, node: int, message: tuple[Any, ...]) -> None:
        if self.coordinator:
            self.coordinator.on_message(node, message)

    def _lost_node(self, node: int, connection: Channel) -> None:
        if self.coordinator and self._peers.get(node) is connection:
            del self._peers[node]
            self.coordinator.on_lost(node)

    def _join(self) -> None:
        """Connect to the coordinator, again and again; runs in a thread."""
        while True:
            try:
                uplink = call(self._addresses[0], self.setup.secret)
                uplink.send(("node", self.node))
                self._inbox.put(partial(self._joined, uplink))
                while True:
                    message = uplink.recv()
                    self._inbox.put(partial(self._on_coordinator, message))
            except Exception as error:  # also if another process has taken its port
                logger.debug("not connected to rank 0's node: %s", explain(error))
                self._inbox.put(self._lost_coordinator)
                time.sleep(RECONNECT_SECONDS)

    def _joined(self, uplink: Channel) -> None:
        self._uplink = uplink
        self._hello()
        for key, (wait, payload) in self._begun.items():
            self._to_coordinator(("begin", key, wait, payload))

    def _hello(self) -> None:
        if self._plan and self._slots:
            self._to_coordinator(("hello", self._plan.digest, len(self._slots.paths)))

    def _lost_coordinator(self) -> None:
        self._uplink = None
        reason = "the writer process of rank 0's node is gone"
        for key in list(self._begun):
            self._on_coordinator(("skip", key, reason))
        if self._current:
            step = self._current.key[0]
            outcome = SaveOutcome(step, None, f"saving step {step} failed: {reason}", 0)
            self._on_coordinator(("outcome", self._current.key, outcome))
        if self._closing:  # nobody starts it again if its ranks close too
            self._maybe_close()

    def _on_coordinator(self, message: tuple[Any, ...]) -> None:
        kind, *arguments = message
        if kind == "write":
            self._write(*arguments)
        elif kind == "stop":
            self._stop(*arguments)
        elif kind == "copy":
            self._copy(*arguments)
        elif kind == "closed":
            self._closed()
        elif kind == "end":
            if self._writing:
                self._end()
        elif kind == "outcome":
            key, outcome = arguments
            if self._current and self._current.key == key:  # else it was told before
                self._current.stopped = True
                self._current = None
                if outcome.path:
                    self._confirm(key[0])
                self._tell(key, ("outcome", outcome))
        else:
            key = arguments[0]
            if key[1] <= self._answered:  # both asked and told
                if kind == "go" and (self._current is None or self._current.key != key):
                    # By a coordinator that was started again; the one before had let this node
                    # begin too, and its end has ended that here.
                    self._to_coordinator(("failed", key, Failure(GIVEN_UP)))
                return
            self._answered = key[1]
            self._begun.pop(key, None)
            if kind == "go":
                _, slot, state, newest = arguments
                self._current = self._filled[slot] = _Current(key, slot, state.decode(), newest)
                if self._folder:
                    self._said.pop(f"slot-{slot}", None)
                    write_manifest(self._folder.path, f"slot-{slot}", None, self.setup.run)
                for rank in self._lost:
                    self._miss(rank)
                self.call_at(time.monotonic() + ANSWER_SECONDS, lambda: self._miss_absent(key))
                message = ("go", key, slot)
            self._tell(key, message)

    def _tell(self, key: Key, message: tuple[Any, ...]) -> None:
        """Tell the ranks about a save; one that has not asked for it yet hears of it when it does,
        as it may be busy with other messages, or not even be connected."""
        for rank in self.nodes[self.node]:
            if self._asked_for.get(rank, 0) < key[1]:
                self._untold.setdefault(rank, []).append((key, message))
            elif rank in self._ranks:
                _send(self._ranks[rank], message)

    def _copy(self, node: int, key: Key, slot: int, manifest: Manifest) -> None:
        """Keep a copy of what another node has staged."""
        folder, name = self._folder, f"peer-{node}-{slot}"
        if folder is None:
            self._to_coordinator(("copied", node, key))
            return
        self._said.pop(name, None)

        def done(error: Any) -> None:
            if isinstance(error, Exception):
                logger.warning("node %d keeps no copy of node %d: %s", self.node, node, error)
            else:
                self._said[name] = manifest
                self._confirm(self._committed)
            self._to_coordinator(("copied", node, key))

        self.later(
            lambda: copy_slot(folder.path, node, slot, manifest, self._puller(), self.setup.run),
            done,
        )

    def _stop(self, key: Key) -> None:
        if self._current and self._current.key == key:
            self._current.stopped = True

    def _write(self, key: Key, slot: int, unit: Unit, target: Target, rate: float | None) -> None:
        plan, current = self._plan, self._current
        if plan is None or current is None or current.key != key:
            self._to_coordinator(("stopped", key, unit))
            return
        files = self._files[slot]
        self._writing += 1

        def answered(message: tuple[Any, ...]) -> None:
            self._writing -= 1
            self._to_coordinator(message)

        def answer(kind: str, *arguments: Any) -> None:
            self._inbox.put(lambda: answered((kind, key, *arguments)))

        def work() -> None:
            span = {
                "node": self.node, "thread": threading.current_thread().name, "kind": "write",
                "step": key[0], "file": unit.file, "first": unit.first, "start": time.time(),
            }  # fmt: skip
            try:
                checksums, nbytes = write_unit(
                    unit, plan, files, target,
                    self._puller(), (slot, key),
                    rate, lambda: current.stopped,
                )  # fmt: skip
            except StoppedError:
                answer("stopped", unit)
            except Exception as error:
                answer("failed", failure_of(error), unit)
            else:
                answer("written", unit, checksums, span | {"stop": time.time(), "bytes": nbytes})

        self._threads.submit(work)

    # --- ranks -----------------------------------------------------------------------------------

    def _on_rank(self, rank: int, message: tuple[Any, ...]) -> None:
        kind, *arguments = message
        self._lost.discard(rank)
        getattr(self, f"_on_rank_{kind}")(rank, *arguments)

    def _on_rank_addresses(self, rank: int, addresses: Sequence[tuple[str, int]]) -> None:
        """Where the writers of all nodes listen."""
        known, self._addresses = self._addresses, addresses
        if self.node and not known:
            threading.Thread(target=self._join, daemon=True).start()

    def _on_rank_plan(self, rank: int, digest: str, plan: PlanInput | None) -> None:
        """A rank wants the slots of a plan; the node's first rank brings it."""
        if plan is not None:
            self._owed.clear()  # that was another attempt
        elif rank in self._owed:  # the others were refused before it asked
            _send(self._ranks[rank], ("refused", self._owed.pop(rank)))
            return
        self._asked.add(rank)
        if self._plan and self._plan.digest == digest and self._slots:
            self._give_slots()
        elif plan is not None:
            self._filled.clear()
            self._said.clear()
            self._files = []  # their memory is free only when nobody maps it
            self.later(
                lambda: self._make(plan, digest), lambda result: self._made(plan, digest, result)
            )

    def _make(self, plan: PlanInput, digest: str) -> tuple[NodePlan, Folder | None, Slots]:
        if self._folder:
            forget(self._folder)
            self._folder = None
        if self._slots:
            close_slots(self._slots)
        part = plan_node(plan, digest, self.nodes, self.node)
        options = self.setup.options
        folder, slots = make_slots(
            str(self.directory), part.files, part.ranges, options.slots, digest, self.node,
            options.slot_directory,
        )  # fmt: skip
        return part, folder, slots

    def _made(self, plan: PlanInput, digest: str, result: Any) -> None:
        if isinstance(result, Exception):
            self._plan = self._slots = None
            self._owed = dict.fromkeys(set(self.nodes[self.node]) - self._asked, explain(result))
            for rank in self._asked:
                _send(self._ranks[rank], ("refused", explain(result)))
            self._asked.clear()
            return
        self._plan, self._folder, self._slots = result
        self._files = [SlotFiles(paths) for paths in self._slots.paths]
        for files in self._files:
            for name in self._plan.sources:
                header = self._plan.files[name].header
                files.maps[name][: len(header)] = header
        if self.coordinator:
            self.coordinator.set_plan(digest, plan.files, plan.indexes, self._plan.owners)
        self._hello()
        self._give_slots()
        to_touch = self._files if self._slots.in_memory else []
        threading.Thread(target=self._touch, args=(to_touch, self._plan.ranges)).start()

    def _touch(self, files: list[SlotFiles], ranges: Ranges) -> None:
        _give_way()
        for slot in files:
            slot.touch(ranges)
        collect_memory(str(self.directory))

    def _give_slots(self) -> None:
        digest = self._plan.digest if self._plan else ""
        for rank in self._asked:
            _send(self._ranks[rank], ("slots", digest, self._slots))
        self._asked.clear()

    def _on_rank_begin(
        self, rank: int, key: Key, wait: bool, payload: dict[str, Any] | None
    ) -> None:
        """The request of the node's first rank stands for all of them."""
        self._asked_for[rank] = key[1]
        for about, message in self._forget_untold(rank, key):
            if about == key:
                _send(self._ranks[rank], message)
        if self._current and self._current.key[1] < key[1]:
            self._miss(rank)
        if rank == self.nodes[self.node][0] and key[1] > self._answered:
            self._begun[key] = wait, payload
            self._to_coordinator(("begin", key, wait, payload))

    def _on_rank_refuse(self, rank: int, key: Key, failure: tuple[Any, ...]) -> None:
        """A rank cannot save, and waits for no answer."""
        self._asked_for[rank] = key[1]
        self._forget_untold(rank, key)
        self._to_coordinator(("refuse", key, failure))

    def _forget_untold(self, rank: int, key: Key) -> list[tuple[Key, tuple[Any, ...]]]:
        """What a rank was going to be told up to a save; the first rank, whose save may have been
        refused at once, may be ahead of it by some more."""
        untold = self._untold.pop(rank, [])
        self._untold[rank] = [entry for entry in untold if entry[0][1] > key[1]]
        return [entry for entry in untold if entry[0][1] <= key[1]]

    def _on_rank_staged(self, rank: int, key: Key, position: Position) -> None:
        plan = self._plan
        current = next((held for held in self._filled.values() if held.key == key), None)
        if current is None or plan is None:
            return
        current.staged[rank] = position
        if len(current.staged) < len(self.nodes[self.node]):
            return
        all_ranks = min(current.staged.values())
        if all_ranks == (len(plan.files), 0):
            if self._folder and self.setup.run:
                self._remember(self._folder.path, plan, current)
            else:
                self._to_coordinator(("remembered", key))
        self._to_coordinator(("staged", key, all_ranks))

    def _remember(self, folder: Path, plan: NodePlan, current: _Current) -> None:
        """Make the slot one that a restart may begin from, as soon as its checksums are known."""
        files = self._files[current.slot]

        def done(checksums: Any) -> None:
            self._remembering -= 1
            remember(checksums)
            if self._closing:
                self._maybe_close()

        def remember(checksums: Any) -> None:
            # Checksums that took long may be those of bytes of two saves.
            if self._filled.get(current.slot) is not current:
                return
            if isinstance(checksums, Exception):
                logger.warning("a restart cannot use memory: %s", explain(checksums))
                self._to_coordinator(("remembered", current.key))
                return
            manifest = Manifest(
                hashlib.sha256(self.setup.secret).hexdigest()[:16],
                current.key[0], current.newest, plan.tensors,
                self.node, len(self.nodes), plan.exact, checksums, current.state,
            )  # fmt: skip
            try:
                write_manifest(folder, f"slot-{current.slot}", manifest, self.setup.run)
            except OSError as error:  # shared memory is full
                logger.warning("a restart cannot use memory: %s", explain(error))
                self._to_coordinator(("remembered", current.key))
                return
            self._said[f"slot-{current.slot}"] = manifest
            self._confirm(self._committed)
            if self.setup.options.peer_copy and len(self.nodes) > 1:
                self._to_coordinator(("peer", (current.key, current.slot, manifest)))
            else:
                self._to_coordinator(("remembered", current.key))

        self._remembering += 1
        self.later(lambda: files.checksums(plan.exact), done)

    def _confirm(self, step: int | None) -> None:
        """Say in memory that a step is committed: should somebody delete it, memory of it is not
        to bring it back."""
        self._committed = step
        for slot, manifest in self._said.items():
            if self._folder and manifest.step == step != manifest.committed:
                self._said[slot] = replace(manifest, committed=step)
                try:
                    write_manifest(self._folder.path, slot, self._said[slot], self.setup.run)
                except OSError:  # shared memory is full
                    write_manifest(self._folder.path, slot, None, self.setup.run)

    def _on_rank_failed(self, rank: int, key: Key, message: str) -> None:
        failure = Failure(f"rank {rank} could not copy its tensors: {message}")
        self._to_coordinator(("failed", key, failure))

    def _on_rank_close(self, rank: int, keep: bool) -> None:
        self._closing[rank] = keep
        self._maybe_close()

    def _maybe_close(self) -> None:
        if set(self._closing) >= set(self._ranks) and not self._remembering:
            if self.coordinator or self._uplink:
                self._to_coordinator(("close",))
            else:
                self._closed()

    def _closed(self) -> None:
        if self._folder and not any(self._closing.values()):
            forget(self._folder)
            self._folder = None
            collect_memory(str(self.directory))
        for rank, connection in self._ranks.items():
            if rank in self._closing:
                _send(connection, ("closed",))
        self._closing.clear()

    def _lost_rank(self, rank: int, connection: Channel) -> None:
        if self._ranks.get(rank) is not connection:
            return
        del self._ranks[rank]
        self._lost.add(rank)
        self._asked.discard(rank)
        self._miss(rank)
        if not self._ranks:
            os._exit(0)
        if self._closing:
            self._maybe_close()

    def _miss_absent(self, key: Key) -> None:
        """A rank that did not find a writer that was started again for another rank has given its
        save up: it is not connected, and is never lost."""
        if self._current and self._current.key == key:
            for rank in set(self.nodes[self.node]) - set(self._ranks):
                self._miss(rank)

    def _miss(self, rank: int) -> None:
        """A save that waits for the tensors of a rank that is lost, or has gone on without it, does
        so in vain."""
        current, plan = self._current, self._plan
        if current and plan and current.staged.get(rank) != (len(plan.files), 0):
            failure = Failure(f"rank {rank} was lost before its tensors were copied")
            self._to_coordinator(("failed", current.key, failure))


def _send(connection: Channel, message: tuple[Any, ...]) -> None:
    with suppress(OSError):  # who reads from it learns that it is gone
        connection.send(message)


def _give_way() -> None:
    """Lower the priority of this thread (on Linux each thread has its own)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def die_with(parent: int) -> None:
    """Have the system kill this process when its parent dies, however that happens. To Linux the
    parent is a thread: whoever starts a writer does so in one that lives as long as the run."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def serve(setup: Setup, ready: Callable[[tuple[str, int]], None]) -> None:
    """Be the writer process of a node; does not return.

    Args:
        setup: what to be.
        ready: is told where other nodes reach this one, once everybody can connect.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # connections to every other node
    writer = Writer(setup)
    writer.listen(Listener(setup.address, "AF_UNIX", backlog=64))
    here = ("", 0)
    if len(setup.nodes) > 1:
        listener = Listener((setup.host, setup.port), backlog=1024)
        writer.listen(listener)
        here = setup.host, listener.address[1]
    ready(here)
    writer.run()


def main() -> None:
    """`python -m checkpointing.writer`: Setup on standard input, port on standard output."""
    try:
        setup: Setup = pickle.load(sys.stdin.buffer)
    except EOFError:  # nothing is to be saved, or whoever started us is dead
        return
    die_with(setup.parent)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    threading.current_thread().name = socket.gethostname()

    def ready(here: tuple[str, int]) -> None:
        sys.stdout.write(f"{here[1]}\n")
        sys.stdout.flush()

    serve(setup, ready)


if __name__ == "__main__":
    main()
