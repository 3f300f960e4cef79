"""The writer process of a node: takes what its ranks have put into a slot and writes it, block by
block, where the coordinator says. Runs as `python -m checkpointing.save.writer`, a child of the
node's first rank, and ends with it. Imports no torch.

One thread holds all state; connections and slow work have threads of their own that only put work
into its loop. On rank 0's node the coordinator lives in the same thread.
"""

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
from checkpointing.format.sections import Numbers
from checkpointing.save import messages as msg
from checkpointing.save.blocks import StoppedError, write_blocks
from checkpointing.save.channel import Channel, call
from checkpointing.save.coordinator import Coordinator
from checkpointing.save.messages import Manifest
from checkpointing.save.node_memory import Filling, Made, NodeMemory
from checkpointing.save.peers import Puller, serve_pulls
from checkpointing.save.serving import Door, Loop, give_way, send
from checkpointing.storage.place import location
from checkpointing.storage.steps import storage_of
from checkpointing.wire import unpack

logger = logging.getLogger(__name__)

T = TypeVar("T")

RECONNECT_SECONDS = 0.25
CALL_SECONDS = 3.0
"""How long the coordinator may take to answer who connects: its machine may be gone, which says
nothing."""
ALONE_SECONDS = 1.5
"""How long requests wait for a coordinator that is lost. Rank 0 brings it back when it asks for the
same save; but it may have had its answer before a writer of this node was lost, too, and then waits
for the ranks of this node before it asks for the next."""
_scratch = threading.local()
"""A thread's own connections to other nodes."""
GIVEN_UP = "it was given up here when the writer process of rank 0's node was lost"


class Writer:
    """The node's part of the protocol; see coordinator.py [Note: a save]."""

    def __init__(self, setup: msg.Setup) -> None:
        self.setup, self.node, self.ranks = setup, setup.node, setup.nodes[setup.node]
        directory = location(setup.directory)
        storage_of(directory)  # from now on steps of this kind of storage can be unpacked
        self.loop = Loop()
        self.call_at, self.door = self.loop.call_at, Door(setup.node, setup.secret, self._serve)
        self.memory = NodeMemory(setup, str(directory), self.loop)
        self._threads = ThreadPoolExecutor(64, "writer", give_way)
        self._connected: dict[int, Channel] = {}
        """Ranks of this node."""
        self._lost: set[int] = set()
        """Ranks that were connected, and are not any more."""
        self._peers: dict[int, Channel] = {}
        """Connections of the coordinator to the other nodes."""
        self._addresses: Sequence[msg.Address] = ()
        """Where the writers of all nodes listen."""
        self._current: Filling | None = None
        """The save that this node takes part in."""
        self._waiting: set[int] = set()
        """Ranks that wait for the slots."""
        self._no_slots: dict[int, str] = {}
        """Why slots were refused, by rank of this node that is yet to ask for them."""
        self._writing = 0
        """Units that are being written."""
        self._requests: dict[msg.Key, msg.Begin] = {}
        """Requests to save that the coordinator has not answered."""
        self._answered = 0
        """Number of the last one that it has answered."""
        self._alone_since: float | None = None
        """When the coordinator was first missed, while it is."""
        self._newest_request: dict[int, int] = {}
        """Number of the last save that each rank has asked for."""
        self._undelivered: dict[int, list[msg.RankAnswer | msg.Ended]] = {}
        """What ranks are going to be told once they ask."""
        self._closing: dict[int, bool] = {}
        """Ranks that want to close, and whether to keep the slots."""
        self._uplink: Channel | None = None
        self.coordinator: Coordinator | None = None
        if self.node == 0:
            self.coordinator = Coordinator(
                directory, setup.options, len(setup.nodes), self, setup.voided
            )

    # --- what the coordinator needs (Host) -------------------------------------------------------

    def send(self, node: int, message: msg.ToNode) -> None:
        """See coordinator.Host."""
        if node == self.node:
            self.loop.put(lambda: self.on_coordinator(message))
        elif node in self._peers:
            send(self._peers[node], message)

    def later(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """See coordinator.Host."""
        self.loop.later(work, done)

    def drop(self, node: int) -> None:
        """See coordinator.Host."""
        if node == self.node:
            self.loop.put(self._end)  # once all have been told
        elif node in self._peers:
            self.send(node, msg.End())
            self._peers[node].shut()

    def _end(self) -> None:
        """Go, whatever other threads are in: its ranks start it again."""
        logger.warning("the checkpoint writer process of node %d gives up what hangs", self.node)
        os._exit(1)

    # --- connections -----------------------------------------------------------------------------

    def _serve(self, caller: msg.Caller, channel: Channel) -> None:
        """Pass on what one connection says."""
        if caller.kind == "pull":
            serve_pulls(channel, self.memory.slot_of, self.setup.run)
        elif caller.kind == "rank":
            self._pass_on(channel, caller.number, self._connected, self.on_rank, self._lost_rank)
        else:
            self._pass_on(channel, caller.number, self._peers, self._on_node, self._lost_node)

    def _pass_on(
        self,
        channel: Channel,
        number: int,
        register: dict[int, Channel],
        handle: Callable[[int, T], None],
        lost: Callable[[int, Channel], None],
    ) -> None:
        self.loop.put(lambda: register.__setitem__(number, channel))
        try:
            while True:
                message: T = channel.recv()
                self.loop.put(partial(handle, number, message))
        finally:
            self.loop.put(lambda: lost(number, channel))

    def _puller(self) -> Puller:
        """This thread's."""
        if not hasattr(_scratch, "puller"):
            _scratch.puller = Puller(self._addresses, self.setup.secret)
        puller: Puller = _scratch.puller
        return puller

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

    def _lost_node(self, node: int, connection: Channel) -> None:
        if self.coordinator and self._peers.get(node) is connection:
            del self._peers[node]
            self.coordinator.on_lost(node)

    def _join(self) -> None:
        """Connect to the coordinator, again and again; runs in a thread."""
        while True:
            try:
                uplink = call(self._addresses[0], self.setup.secret, CALL_SECONDS)
                uplink.send(msg.Caller("node", self.node))
                self.loop.put(partial(self.joined, uplink))
                while True:
                    message: msg.ToNode = uplink.recv()
                    self.loop.put(partial(self.on_coordinator, message))
            except Exception as error:  # also if another process has taken its port
                logger.debug("not connected to rank 0's node: %s", explain(error))
                self.loop.put(self.lost_coordinator)
                time.sleep(RECONNECT_SECONDS)

    def joined(self, uplink: Channel) -> None:
        """The coordinator is reached by this connection."""
        self._uplink, self._alone_since = uplink, None
        self._hello()
        for begin in self._requests.values():
            self._to_coordinator(begin)

    def _hello(self) -> None:
        if self.memory.plan and self.memory.slots:
            self._to_coordinator(msg.Hello(self.memory.plan.digest, len(self.memory.slots.paths)))

    def lost_coordinator(self) -> None:
        """The coordinator is not reached any more."""
        self._uplink, now = None, time.monotonic()
        self._alone_since = self._alone_since or now
        reason = "the writer process of rank 0's node is gone"
        if now > self._alone_since + ALONE_SECONDS:
            for key in list(self._requests):
                self.on_coordinator(msg.Skip(key, reason))
        if self._current:
            step = self._current.key[0]
            outcome = msg.SaveOutcome(step, None, f"saving step {step} failed: {reason}", 0)
            self.on_coordinator(msg.Ended(self._current.key, outcome))
        if self._closing:  # nobody starts it again if its ranks close too
            self._maybe_close()

    def on_coordinator(self, message: msg.ToNode) -> None:
        """Handle what the coordinator says."""
        match message:
            case msg.Go() | msg.Skip() | msg.Refused():
                self._on_answer(message)
            case msg.Write():
                self._on_write(message)
            case msg.Stop(key):
                if self._current and self._current.key == key:
                    self._current.stopped = True
            case msg.CopySlot(source, key):
                self.memory.keep_copy(
                    message, self._puller, lambda: self._to_coordinator(msg.Copied(source, key))
                )
            case msg.Ended(key, outcome):
                if self._current and self._current.key == key:  # else it was told before
                    self._current.stopped = True
                    self._current = None
                    if outcome.path:
                        self.memory.confirm(key[0])
                    self.memory.give_back(self._lost)
                    self._tell(message)
            case msg.Closed():
                self._on_closed()
            case msg.End():
                if self._writing:
                    self._end()
            case _:
                assert_never(message)

    def _on_answer(self, answer: msg.Answer) -> None:
        key = answer.key
        if key[1] <= self._answered:  # both asked and told
            if isinstance(answer, msg.Go) and (self._current is None or self._current.key != key):
                # By a coordinator that was started again; the one before had let this node begin
                # too, and its end has ended that here.
                self._to_coordinator(msg.Failed(key, msg.Failure(GIVEN_UP)))
            return
        self._answered = key[1]
        self._requests.pop(key, None)
        self._tell(self._begin(answer) if isinstance(answer, msg.Go) else answer)

    def _begin(self, go: msg.Go) -> msg.Stage | msg.Skip:
        """Take part in a save; returns what to tell the ranks."""
        self._current = self.memory.fill(go)
        for rank in self._lost:
            self._miss(rank)
        self.call_at(time.monotonic() + msg.ANSWER_SECONDS, lambda: self._miss_absent(go.key))
        try:
            self.memory.make_room()
        except StorageError as error:
            self._to_coordinator(msg.Failed(go.key, msg.Failure(str(error))))
            return msg.Skip(go.key, str(error))
        return msg.Stage(go.key, go.slot)

    def _tell(self, message: msg.RankAnswer | msg.Ended) -> None:
        """Tell the ranks about a save; one that has not asked for it yet hears of it when it does,
        as it may be busy with other messages, or not even be connected."""
        for rank in self.ranks:
            if self._newest_request.get(rank, 0) < message.key[1]:
                self._undelivered.setdefault(rank, []).append(message)
            elif rank in self._connected:
                send(self._connected[rank], message)

    def _on_write(self, write: msg.Write) -> None:
        plan, current, key, blocks = self.memory.plan, self._current, write.key, write.blocks
        if plan is None or current is None or current.key != key:
            self._to_coordinator(msg.Stopped(key, blocks))
            return
        files = self.memory.files[write.slot]
        self._writing += 1

        def answer(message: msg.ToCoordinator) -> None:
            self._writing -= 1
            self._to_coordinator(message)

        def work() -> msg.Written | msg.Stopped | msg.Failed:
            span = {
                "node": self.node, "thread": threading.current_thread().name, "kind": "write",
                "step": key[0], "file": blocks.file, "first": blocks.first, "start": time.time(),
            }  # fmt: skip
            try:
                checksums, nbytes = write_blocks(
                    blocks, plan, files, write.target,
                    self._puller(), msg.SlotInUse(write.slot, key),
                    write.rate, lambda: current.stopped,
                )  # fmt: skip
            except StoppedError:
                return msg.Stopped(key, blocks)
            except Exception as error:
                return msg.Failed(key, msg.Failure.of(error), blocks)
            return msg.Written(
                key, blocks, checksums, span | {"stop": time.time(), "bytes": nbytes}
            )

        def run() -> None:
            message = work()
            self.loop.put(lambda: answer(message))

        self._threads.submit(run)

    # --- ranks -----------------------------------------------------------------------------------

    def on_rank(self, rank: int, message: msg.FromRank) -> None:
        """Handle what a rank of this node says."""
        self._lost.discard(rank)
        match message:
            case msg.Addresses(addresses):
                known, self._addresses = self._addresses, addresses
                if self.node and not known:
                    threading.Thread(target=self._join, daemon=True).start()
            case msg.WantSlots():
                self._on_want_slots(rank, message)
            case msg.Begin():
                self._on_begin(rank, message)
            case msg.Refuse(key):
                self._newest_request[rank] = key[1]
                self._take_undelivered(rank, key)
                self._to_coordinator(message)
            case msg.Staged():
                self._on_staged(rank, message)
            case msg.CopyFailed(key, why):
                failure = msg.Failure(f"rank {rank} could not copy its tensors: {why}")
                self._to_coordinator(msg.Failed(key, failure))
            case msg.Close(keep_memory):
                self._closing[rank] = keep_memory
                self._maybe_close()
            case _:
                assert_never(message)

    def _on_want_slots(self, rank: int, want: msg.WantSlots) -> None:
        if want.plan is not None:
            self._no_slots.clear()  # that was another attempt
        elif rank in self._no_slots:  # the others were refused before it asked
            send(self._connected[rank], msg.NoSlots(self._no_slots.pop(rank)))
            return
        self._waiting.add(rank)
        plan, digest = want.plan, want.digest
        if self.memory.plan and self.memory.plan.digest == digest and self.memory.slots:
            self._give_slots(msg.SlotsMade(digest, self.memory.slots))
        elif plan is not None:
            self.memory.make(digest, plan, lambda made: self._made(want, made))

    def _made(self, want: msg.WantSlots, made: Made | Exception) -> None:
        if isinstance(made, Exception):
            self.memory.take(None)
            self._no_slots = dict.fromkeys(set(self.ranks) - self._waiting, explain(made))
            self._give_slots(msg.NoSlots(explain(made)))
            return
        self.memory.take(made)
        part, _, slots = made
        if self.coordinator and want.plan:
            self.coordinator.set_plan(want.digest, want.plan.files, want.plan.indexes, part.owners)
        self._hello()
        self._give_slots(msg.SlotsMade(want.digest, slots))
        self.memory.touch()

    def _give_slots(self, message: msg.SlotsMade | msg.NoSlots) -> None:
        for rank in self._waiting:
            send(self._connected[rank], message)
        self._waiting.clear()

    def _on_begin(self, rank: int, begin: msg.Begin) -> None:
        """The request of the node's first rank stands for all of them."""
        key = begin.key
        self._newest_request[rank] = key[1]
        if key[1] <= self.setup.voided:
            send(self._connected[rank], msg.Skip(key, msg.VOIDED))
            return
        for message in self._take_undelivered(rank, key):
            if message.key == key:
                send(self._connected[rank], message)
        if self._current and self._current.key[1] < key[1]:
            self._miss(rank)
        if rank == self.ranks[0] and key[1] > self._answered:
            self._requests[key] = begin
            self._to_coordinator(begin)

    def _take_undelivered(self, rank: int, key: msg.Key) -> list[msg.RankAnswer | msg.Ended]:
        """What a rank was going to be told up to a save; the first rank, whose save may have been
        refused at once, may be ahead of it by some more."""
        messages = self._undelivered.pop(rank, [])
        self._undelivered[rank] = [message for message in messages if message.key[1] > key[1]]
        return [message for message in messages if message.key[1] <= key[1]]

    def _on_staged(self, rank: int, message: msg.Staged) -> None:
        filling = self.memory.filling(message.key)
        if filling is None or self.memory.plan is None:
            return
        filling.staged[rank] = message.position
        if message.numbers:
            filling.numbers[rank] = message.numbers
        if len(filling.staged) < len(self.ranks):
            return
        all_ranks, numbers = min(filling.staged.values()), None
        if all_ranks == self.memory.end:
            numbers = sum(filling.numbers.values(), Numbers())
            if not numbers.bad:  # else no restart is to begin from it
                self.memory.remember(filling, lambda manifest: self._remembered(filling, manifest))
            if not self._current:
                self.memory.give_back(self._lost)
        self._to_coordinator(msg.Staged(message.key, all_ranks, numbers))

    def _remembered(self, filling: Filling, manifest: Manifest | None) -> None:
        if self.memory.filling(filling.key) is filling:
            if manifest and self.setup.options.peer_copy and len(self.setup.nodes) > 1:
                self._to_coordinator(msg.ForNext(filling.key, filling.slot, manifest))
            else:
                self._to_coordinator(msg.Remembered(filling.key))
        if self._closing:
            self._maybe_close()

    def _maybe_close(self) -> None:
        # Slots of a save that failed are remembered, too, before this ends.
        if set(self._closing) >= set(self._connected) and not self.memory.remembering:
            if self.coordinator or self._uplink:
                self._to_coordinator(msg.Closing())
            else:
                self._on_closed()

    def _on_closed(self) -> None:
        if not any(self._closing.values()):
            self.memory.forget()
        for rank, connection in self._connected.items():
            if rank in self._closing:
                send(connection, msg.Closed())
        self._closing.clear()

    def _lost_rank(self, rank: int, connection: Channel) -> None:
        if self._connected.get(rank) is not connection:
            return
        del self._connected[rank]
        self._lost.add(rank)
        self._waiting.discard(rank)
        self._miss(rank)
        if not self._connected:
            os._exit(0)
        if self._closing:
            self._maybe_close()

    def _miss_absent(self, key: msg.Key) -> None:
        """A rank that did not find a writer that was started again for another rank has given its
        save up: it is not connected, and is never lost."""
        if self._current and self._current.key == key:
            for rank in set(self.ranks) - set(self._connected):
                self._miss(rank)

    def _miss(self, rank: int) -> None:
        """A save that waits for the tensors of a rank that is lost, or has gone on without it, does
        so in vain."""
        current = self._current
        if current and self.memory.plan and current.staged.get(rank) != self.memory.end:
            failure = msg.Failure(f"rank {rank} was lost before its tensors were copied")
            self._to_coordinator(msg.Failed(current.key, failure))


def die_with(parent: int) -> None:
    """Have the system kill this process when its parent dies, however that happens. To Linux the
    parent is a thread: whoever starts a writer does so in one that lives as long as the run."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def serve(setup: msg.Setup, ready: Callable[[msg.Address], None]) -> None:
    """Be the writer process of a node; does not return.

    Args:
        setup: what to be.
        ready: is told where other nodes reach this one, once everybody can connect.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever started us decides
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # connections to every other node
    writer = Writer(setup)
    writer.door.listen(Listener(setup.address, "AF_UNIX", backlog=64))
    here = ("", 0)
    if len(setup.nodes) > 1:
        listener = Listener((setup.host, setup.port), backlog=1024)
        writer.door.listen(listener)
        here = setup.host, listener.address[1]
    ready(here)
    writer.loop.run()


def main() -> None:
    """`python -m checkpointing.save.writer`: Setup on standard input, port on standard output."""
    size = int.from_bytes(sys.stdin.buffer.read(msg.SIZE_BYTES), "little")
    if not size:  # nothing is to be saved, or whoever started us is dead
        return
    setup: msg.Setup = unpack(sys.stdin.buffer.read(size))
    die_with(setup.parent)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    threading.current_thread().name = socket.gethostname()

    def ready(here: msg.Address) -> None:
        sys.stdout.write(f"{here[1]}\n")
        sys.stdout.flush()

    serve(setup, ready)


if __name__ == "__main__":
    main()
