"""The writer process of a node: writes blocks that the node's ranks have copied into a slot, as
granted by the coordinator. Runs as `python -m checkpointing.save.writer`, a child of the node's
first rank, and ends with that rank. Imports no torch.

One thread changes all state, and runs an event loop. Connections and slow work have other threads,
which submit functions to the loop; those that serve pulls also read slots. On rank 0's node the
coordinator runs in the same thread."""

import ctypes
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Listener  # noqa: TID251  # read by a Channel
from typing import TypeVar, assert_never

from checkpointing.errors import StorageError, explain
from checkpointing.format.plan import SectionNumbers
from checkpointing.save import messages as msg
from checkpointing.save.blocks import SaveStoppedError, write_blocks
from checkpointing.save.channel import SaveChannel, call
from checkpointing.save.coordinator import SaveCoordinator
from checkpointing.save.messages import SaveManifest
from checkpointing.save.node_memory import NewSlots, SaveNodeMemory, SaveSlotFilling
from checkpointing.save.peers import SavePuller, serve_pulls
from checkpointing.save.serving import (
    WriterConnectionAcceptor,
    WriterEventLoop,
    give_way,
    send,
    start_thread,
)
from checkpointing.storage.place import location
from checkpointing.storage.steps import storage_of
from checkpointing.wire import unpack

logger = logging.getLogger(__name__)
T = TypeVar("T")

RECONNECT_SECONDS = 0.25
CALL_SECONDS = 3.0
"""Longest time in seconds to connect to the coordinator: a dead machine never answers."""
ALONE_SECONDS = 1.5
"""Seconds for which requests wait for a lost coordinator; then they are skipped. Rank 0 restarts
the coordinator when it requests the same save. But if rank 0 already has its answer, its next
request comes only after the ranks of this node have continued."""


class Writer:
    """The writer process of a node: state and handlers, see coordinator.py [Note: a save]."""

    def __init__(self, setup: msg.WriterSetup) -> None:
        self.setup, self.node, self.ranks = setup, setup.node, setup.nodes[setup.node]
        directory = location(setup.directory)
        # Imports the module of this storage, which registers its types with wire.py.
        storage_of(directory)
        self.loop = WriterEventLoop()
        self.call_at, self.later = self.loop.call_at, self.loop.later
        self.acceptor = WriterConnectionAcceptor(setup.node, setup.secret, self._serve)
        self.memory = SaveNodeMemory(setup, str(directory), self.loop)
        # Many threads, as the coordinator limits how many grants are written at the same time.
        self._threads = ThreadPoolExecutor(64, "writer", give_way)
        self._connected: dict[int, SaveChannel] = {}
        """Rank of this node → its channel."""
        self._lost: set[int] = set()
        """Ranks of this node that have disconnected."""
        self._peers: dict[int, SaveChannel] = {}
        """Other node → its channel to the coordinator in this process."""
        self._addresses: Sequence[msg.Address] = ()
        self._pull = SavePuller((), setup.secret)
        self._current: SaveSlotFilling | None = None
        self._waiting: set[int] = set()
        """Ranks that wait for slots."""
        self._no_slots: dict[int, str] = {}
        """Rank that has not requested slots yet → why they were refused."""
        self._writing = 0
        """Number of grants that are being written."""
        self._requests: dict[msg.Key, msg.SaveRequest] = {}
        """Requests to save that the coordinator has not answered."""
        self._answered = 0
        """Number of the last request that was answered."""
        self._alone_since: float | None = None
        """Time at which the connection to the coordinator was lost; None while it is connected."""
        self._newest_request: dict[int, int] = {}
        """Rank → number of its last request."""
        self._undelivered: dict[int, list[msg.RankAnswer | msg.SaveEnded]] = {}
        """Rank → messages about a save that it has not requested yet."""
        self._closing: dict[int, bool] = {}
        """Rank that has sent RankClosing → whether to keep the slots."""
        self._uplink: SaveChannel | None = None
        self.coordinator: SaveCoordinator | None = None
        if self.node == 0:
            self.coordinator = SaveCoordinator(
                directory, setup.options, len(setup.nodes), self, setup.voided
            )

    # --- coordinator.CoordinatorHost -------------------------------------------------------------

    def send(self, node: int, message: msg.ToNode) -> None:
        if node == self.node:
            # queued instead of called, so that no handler runs inside another
            self.loop.put(lambda: self.on_coordinator(message))
        elif node in self._peers:
            send(self._peers[node], message)

    def drop(self, node: int) -> None:
        if node == self.node:
            self.loop.put(self._end)  # after the messages that are queued
        elif node in self._peers:
            self.send(node, msg.ExitWriter())
            self._peers[node].shut()

    def _end(self) -> None:
        """Exit at once, even if other threads hang. A rank restarts this process."""
        logger.warning("the checkpoint writer process of node %d exits, as a save hangs", self.node)
        os._exit(1)

    # --- connections -----------------------------------------------------------------------------

    def _serve(self, caller: msg.SaveCallerGreeting, channel: SaveChannel) -> None:
        if caller.kind == "pull":
            serve_pulls(channel, self.memory.slot_of, self.setup.run)
        elif caller.kind == "rank":
            self._pass_on(channel, caller.number, self._connected, self.on_rank, self._lost_rank)
        else:
            self._pass_on(channel, caller.number, self._peers, self._on_node, self._lost_node)

    def _pass_on(
        self,
        channel: SaveChannel,
        number: int,
        register: dict[int, SaveChannel],
        handle: Callable[[int, T], None],
        lost: Callable[[int, SaveChannel], None],
    ) -> None:
        self.loop.put(lambda: register.__setitem__(number, channel))
        try:
            while True:
                message: T = channel.recv()
                self.loop.put(partial(handle, number, message))
        finally:
            # through the loop, so that messages that came before the loss are handled first
            self.loop.put(lambda: lost(number, channel))

    # --- the coordinator and this node -----------------------------------------------------------

    def _to_coordinator(self, message: msg.ToCoordinator) -> None:
        if self.coordinator:
            coordinator = self.coordinator
            self.loop.put(lambda: coordinator.on_message(self.node, message))
        elif self._uplink:
            send(self._uplink, message)

    def _on_node(self, node: int, message: msg.ToCoordinator) -> None:
        if self.coordinator:
            self.coordinator.on_message(node, message)

    def _lost_node(self, node: int, connection: SaveChannel) -> None:
        # otherwise the node has connected again already
        if self.coordinator and self._peers.get(node) is connection:
            del self._peers[node]
            self.coordinator.on_lost(node)

    def _join(self) -> None:
        """Connect to the coordinator, again after each loss. Runs in a separate thread."""
        while True:
            try:
                uplink = call(self._addresses[0], self.setup.secret, CALL_SECONDS)
                uplink.send(msg.SaveCallerGreeting("node", self.node))
                self.loop.put(partial(self.joined, uplink))
                while True:
                    message: msg.ToNode = uplink.recv()
                    self.loop.put(partial(self.on_coordinator, message))
            except Exception as error:  # any exception, as another program may use the port
                logger.debug("not connected to rank 0's node: %s", explain(error))
                self.loop.put(self.lost_coordinator)
                time.sleep(RECONNECT_SECONDS)

    def joined(self, uplink: SaveChannel) -> None:
        """Handle a new connection to the coordinator: send slots and pending requests again."""
        self._uplink, self._alone_since = uplink, None
        self._hello()
        for begin in self._requests.values():
            self._to_coordinator(begin)

    def _hello(self) -> None:
        if self.memory.plan and self.memory.slots:
            self._to_coordinator(
                msg.SlotsReport(self.memory.plan.digest, len(self.memory.slots.paths))
            )

    def lost_coordinator(self) -> None:
        self._uplink, now = None, time.monotonic()
        self._alone_since = self._alone_since or now
        reason = "the writer process of rank 0's node is gone"
        if now > self._alone_since + ALONE_SECONDS:
            for key in list(self._requests):
                self.on_coordinator(msg.SaveSkipped(key, reason))
        # a new coordinator does not know this save, and cannot commit it
        if self._current:
            step = self._current.key[0]
            outcome = msg.SaveOutcome(step, None, f"saving step {step} failed: {reason}", 0)
            self.on_coordinator(msg.SaveEnded(self._current.key, outcome))
        if self._closing:  # while all ranks close, none restarts the coordinator
            self._maybe_close()

    def on_coordinator(self, message: msg.ToNode) -> None:
        match message:
            case msg.SaveAdmitted() | msg.SaveSkipped() | msg.SaveRefused():
                self._on_answer(message)
            case msg.WriteGrant():
                self._on_write(message)
            case msg.StopWriting(key):
                if self._current and self._current.key == key:
                    self._current.stopped = True
            case msg.CopySlot(source, key):
                ended = msg.PeerCopyEnded(source, key)
                self.memory.keep_copy(message, self._pull, lambda: self._to_coordinator(ended))
            case msg.SaveEnded(key, outcome):
                # Otherwise the end of this save was handled before.
                if self._current and self._current.key == key:
                    self._current.stopped = True
                    self._current = None
                    if outcome.path:
                        self.memory.confirm(key[0])
                    self.memory.give_back(self._lost)
                    self._send_to_ranks(message)
            case msg.AllClosed():
                self._on_closed()
            case msg.ExitWriter():
                if self._writing:
                    self._end()
            case _:
                assert_never(message)

    def _on_answer(self, answer: msg.Answer) -> None:
        key = answer.key
        if key[1] <= self._answered:  # this request was answered before
            admitted = isinstance(answer, msg.SaveAdmitted)
            if admitted and (self._current is None or self._current.key != key):
                why = "this node gave the save up when it lost the writer process of rank 0's node"
                self._to_coordinator(msg.NodeCannotSave(key, msg.NodeSaveFailure(why)))
            return
        self._answered = key[1]  # an answer that arrives again after a reconnect is ignored
        self._requests.pop(key, None)
        self._send_to_ranks(self._begin(answer) if isinstance(answer, msg.SaveAdmitted) else answer)

    def _begin(self, go: msg.SaveAdmitted) -> msg.StageInto | msg.SaveSkipped:
        """Begin to take part in a save; returns the answer for the ranks."""
        self._current = self.memory.fill(go)
        for rank in self._lost:  # lost ranks cannot copy: fail now, not at the deadline
            self._fail_without(rank)
        self.call_at(time.monotonic() + msg.ANSWER_SECONDS, lambda: self._fail_if_absent(go.key))
        try:
            self.memory.make_room()
        except StorageError as error:
            # the other nodes take part already, so the save must fail on all of them
            self._to_coordinator(msg.NodeCannotSave(go.key, msg.NodeSaveFailure(str(error))))
            return msg.SaveSkipped(go.key, str(error))
        return msg.StageInto(go.key, go.slot)

    def _send_to_ranks(self, message: msg.RankAnswer | msg.SaveEnded) -> None:
        """Send a message about a save to the ranks. A rank that has not requested the save yet gets
        the message when it does: it may be busy, or not connected."""
        for rank in self.ranks:
            if self._newest_request.get(rank, 0) < message.key[1]:
                self._undelivered.setdefault(rank, []).append(message)
            elif rank in self._connected:
                send(self._connected[rank], message)

    def _on_write(self, write: msg.WriteGrant) -> None:
        plan, current, key, blocks = self.memory.plan, self._current, write.key, write.blocks
        # the save ended on this node while the grant was on its way
        if plan is None or current is None or current.key != key:
            self._to_coordinator(msg.GrantDropped(key, blocks))
            return
        files = self.memory.files[write.slot]
        self._writing += 1

        def answer(message: msg.ToCoordinator) -> None:
            self._writing -= 1
            self._to_coordinator(message)

        def work() -> msg.WriteReceipt | msg.GrantDropped | msg.NodeCannotSave:
            span = {
                "node": self.node, "thread": threading.current_thread().name, "kind": "write",
                "step": key[0], "file": blocks.file, "first": blocks.first, "start": time.time(),
            }  # fmt: skip
            try:
                checksums, nbytes = write_blocks(
                    blocks, plan, files, write.target,
                    self._pull, msg.SlotInUse(write.slot, key),
                    write.rate, lambda: current.stopped,
                )  # fmt: skip
            except SaveStoppedError:
                return msg.GrantDropped(key, blocks)
            except Exception as error:
                return msg.NodeCannotSave(key, msg.NodeSaveFailure.of(error), blocks)
            return msg.WriteReceipt(
                key, blocks, checksums, span | {"stop": time.time(), "bytes": nbytes}
            )

        def run() -> None:
            message = work()
            # counters and connections belong to the loop's thread
            self.loop.put(lambda: answer(message))

        start_thread(lambda: self._threads.submit(run))

    # --- ranks -----------------------------------------------------------------------------------

    def on_rank(self, rank: int, message: msg.FromRank) -> None:
        self._lost.discard(rank)
        match message:
            case msg.SaveAddresses(addresses):
                if not self._addresses:  # every rank sends the same addresses
                    self._addresses = addresses
                    self._pull = SavePuller(addresses, self.setup.secret)
                    if self.node:  # on node 0 the coordinator is in this process
                        start_thread(threading.Thread(target=self._join, daemon=True).start)
            case msg.WantSlots():
                self._on_want_slots(rank, message)
            case msg.SaveRequest():
                self._on_begin(rank, message)
            case msg.RefuseSave(key):
                self._newest_request[rank] = key[1]
                self._take_undelivered(rank, key)
                self._to_coordinator(message)
            case msg.StagedReport():
                self._on_staged(rank, message)
            case msg.CopyFailed(key, why):
                failure = msg.NodeSaveFailure(f"rank {rank} could not copy its tensors: {why}")
                self._to_coordinator(msg.NodeCannotSave(key, failure))
            case msg.RankClosing(keep_memory):
                self._closing[rank] = keep_memory
                self._maybe_close()
            case _:
                assert_never(message)

    def _on_want_slots(self, rank: int, want: msg.WantSlots) -> None:
        if want.plan is not None:
            self._no_slots.clear()  # these belong to an earlier request
        # Slots were refused to the other ranks before this rank requested them.
        elif rank in self._no_slots:
            send(self._connected[rank], msg.NoSlots(self._no_slots.pop(rank)))
            return
        self._waiting.add(rank)
        plan, digest = want.plan, want.digest
        if self.memory.plan and self.memory.plan.digest == digest and self.memory.slots:
            self._send_slots(msg.SlotsMade(digest, self.memory.slots))
        elif plan is not None:
            self.memory.make(digest, plan, lambda result: self._on_slots(want, result))

    def _on_slots(self, want: msg.WantSlots, result: NewSlots | Exception) -> None:
        if isinstance(result, Exception):
            self.memory.use(None)
            self._no_slots = dict.fromkeys(set(self.ranks) - self._waiting, explain(result))
            self._send_slots(msg.NoSlots(explain(result)))
            return
        self.memory.use(result)
        part, _, slots = result
        if self.coordinator and want.plan:
            self.coordinator.set_plan(want.digest, want.plan.files, want.plan.indexes, part.owners)
        # first, as the coordinator must know of the slots before the ranks request a save
        self._hello()
        self._send_slots(msg.SlotsMade(want.digest, slots))
        # last, since no rank waits for it
        self.memory.touch()

    def _send_slots(self, message: msg.SlotsMade | msg.NoSlots) -> None:
        for rank in self._waiting:
            send(self._connected[rank], message)
        self._waiting.clear()

    def _on_begin(self, rank: int, begin: msg.SaveRequest) -> None:
        """Handle a rank's request to save. Only that of the node's first rank goes to the
        coordinator, as all ranks request the same save."""
        key = begin.key
        self._newest_request[rank] = key[1]
        if key[1] <= self.setup.voided:
            send(self._connected[rank], msg.SaveSkipped(key, msg.VOIDED))
            return
        for message in self._take_undelivered(rank, key):
            if message.key == key:
                send(self._connected[rank], message)
        if self._current and self._current.key[1] < key[1]:
            self._fail_without(rank)
        if rank == self.ranks[0] and key[1] > self._answered:
            self._requests[key] = begin
            self._to_coordinator(begin)

    def _take_undelivered(self, rank: int, key: msg.Key) -> list[msg.RankAnswer | msg.SaveEnded]:
        """Remove and return the messages kept for a rank, up to the save `key`. Later messages
        stay, as another rank may be several saves ahead."""
        messages = self._undelivered.pop(rank, [])
        self._undelivered[rank] = [message for message in messages if message.key[1] > key[1]]
        return [message for message in messages if message.key[1] <= key[1]]

    def _on_staged(self, rank: int, message: msg.StagedReport) -> None:
        filling = self.memory.filling(message.key)
        if filling is None or self.memory.plan is None:
            return
        filling.staged[rank] = message.position
        if message.numbers:
            filling.numbers[rank] = message.numbers
        if len(filling.staged) < len(self.ranks):
            return
        # the slowest rank decides, as blocks may hold pieces of every rank
        all_ranks, numbers = min(filling.staged.values()), None
        if all_ranks == self.memory.end:
            numbers = sum(filling.numbers.values(), SectionNumbers())
            if not numbers.bad:  # a restart must not load NaN
                self.memory.remember(filling, lambda manifest: self._remembered(filling, manifest))
            if not self._current:
                self.memory.give_back(self._lost)
        self._to_coordinator(msg.StagedReport(message.key, all_ranks, numbers))

    def _remembered(self, filling: SaveSlotFilling, manifest: SaveManifest | None) -> None:
        if self.memory.filling(filling.key) is filling:
            if manifest and self.setup.options.peer_copy and len(self.setup.nodes) > 1:
                self._to_coordinator(msg.SlotComplete(filling.key, filling.slot, manifest))
            else:
                self._to_coordinator(msg.SlotRemembered(filling.key))
        if self._closing:
            self._maybe_close()

    def _maybe_close(self) -> None:
        # Not before all complete slots have checksums, even those of a failed save, as a restart
        # may use them.
        if set(self._closing) >= set(self._connected) and not self.memory.remembering:
            if self.coordinator or self._uplink:
                self._to_coordinator(msg.WriterClosing())
            else:
                self._on_closed()

    def _on_closed(self) -> None:
        if not any(self._closing.values()):
            self.memory.forget()
        for rank, connection in self._connected.items():
            if rank in self._closing:
                send(connection, msg.AllClosed())
        self._closing.clear()

    def _lost_rank(self, rank: int, connection: SaveChannel) -> None:
        # the rank may have connected again before the loss of its old connection is noticed
        if self._connected.get(rank) is not connection:
            return
        del self._connected[rank]
        self._lost.add(rank)
        self._waiting.discard(rank)
        self._fail_without(rank)
        if not self._connected:
            os._exit(0)  # no rank is left to write for; the slots stay for a restart
        if self._closing:
            self._maybe_close()

    def _fail_if_absent(self, key: msg.Key) -> None:
        """Fail the save if a rank is not connected. A rank that could not reach this restarted
        writer has abandoned the save. It never was connected, so `_lost_rank` is not called."""
        if self._current and self._current.key == key:
            for rank in set(self.ranks) - set(self._connected):
                self._fail_without(rank)

    def _fail_without(self, rank: int) -> None:
        """Fail the save if it still needs tensors of the lost `rank`."""
        current = self._current
        if current and self.memory.plan and current.staged.get(rank) != self.memory.end:
            failure = msg.NodeSaveFailure(f"rank {rank} was lost before its tensors were copied")
            self._to_coordinator(msg.NodeCannotSave(current.key, failure))


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies. On Linux the parent is a thread, so
    writers must be started in a thread that lives as long as the run."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Read a WriterSetup from standard input, write the TCP port to standard output once the
    process accepts connections (0: no port), and serve."""
    size = int.from_bytes(sys.stdin.buffer.read(msg.SIZE_BYTES), "little")
    if not size:  # no save will take place, or the rank is dead
        return
    setup: msg.WriterSetup = unpack(sys.stdin.buffer.read(size))
    die_with(setup.parent)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    threading.current_thread().name = socket.gethostname()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the rank that started this process handles signals
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # So that connections to every node are possible.
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    writer = Writer(setup)
    writer.acceptor.listen(Listener(setup.address, "AF_UNIX", backlog=64))
    port = 0
    if len(setup.nodes) > 1:  # a job of one node opens no port to the network
        listener = Listener((setup.host, setup.port), backlog=1024)
        writer.acceptor.listen(listener)
        port = listener.address[1]
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    writer.loop.run()


if __name__ == "__main__":
    main()
