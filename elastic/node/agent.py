"""What a node's agent does besides torchrun's own loop: it runs the training processes of its
ranks.

[Note: node] torchrun starts a stand-in per rank (standin.py), and restarts them when the membership
changes. Each stand-in asks the agent, over a Unix socket, to run its job; the agent has the zygote
fork it. When a training process fails, the agent reports it to the membership, which begins a new
generation; the agents of all nodes then recall what still runs of the old one (recall.py), or kill
it, and fork the ranks that are missing. The stand-ins, and so torchrun, notice nothing.

One thread does all of it, one message at a time. It never waits for the store: the membership has a
thread of its own, and wakes this one when something has changed.
"""

import json
import logging
import os
import selectors
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic.exits import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_MENDED,
    EXIT_PAUSED,
    EXIT_PEER_GONE,
    EXIT_REQUEUE,
    EXIT_WRONG_INPUT,
)
from elastic.group.member import Member
from elastic.group.membership import Ask, Closed, Failure, Membership, over
from elastic.node.companion import FAREWELL_SECONDS, HURRIED_SECONDS, Companion, part_with
from elastic.node.program import Facts, Program
from elastic.node.progress import PROGRESS
from elastic.node.recall import LOST_SECONDS, READY_SECONDS, SETTLED_SECONDS
from elastic.node.standin import NODE_SOCKET
from elastic.node.vitals import oom_kills, take_dumps
from elastic.node.watchdog import SAVE_SECONDS, HangWatch
from elastic.node.zygote import MAX_MESSAGE, RESERVE, RankProgram, Zygote, first_zygote
from elastic.process import lost
from elastic.world import CAUSE, GENERATION, ROUND

logger = logging.getLogger(__name__)

LAUNCHED_AT = "PERDURE_LAUNCHED_AT"
LOOK_SECONDS = 0.1
GONE_SECONDS = 10.0
"""A killed process that is there for longer hangs in the kernel, and is waited for no more."""
FROM_OUTSIDE = {
    *(signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
}
"""Signals that a process does not send itself by an error."""
RESERVE_AGAIN_SECONDS = 60.0
"""After which there is another process in reserve, when one has ended without being a rank."""


@dataclass
class Rank:
    """One rank of this node: its stand-in, and its training process."""

    connection: socket.socket
    descriptors: list[int]
    """The job, stdin, stdout, stderr."""
    round: int
    rank: int = 0
    local_rank: int = 0
    key: str | None = None
    """Name of the training process that runs; None while there is none."""
    pid: int = 0
    dumps: int = -1
    """File in memory for its stack dumps."""
    code: int | None = None
    """How the last one ended."""
    recall: socket.socket | None = None
    """To the process; see recall.py."""
    able: float | None = None
    """Since when it can be recalled."""
    recalled: float | None = None
    """When it was, as long as it is not ready for its generation."""
    stuck: bool = False
    """Since it was recalled it waits in a collective that nothing ends."""
    lost: float | None = None
    """When it said that it lost a peer, as long as nobody has said whose failure it was."""


@dataclass
class Reserve:
    """A process that is no rank yet, but ready to be any of this node; see recall.py."""

    key: str
    dumps: int
    recall: socket.socket
    pid: int = 0
    _waits: bool = False

    def waits(self) -> bool:
        """Whether it has done what it does before, and waits to be a rank."""
        with suppress(OSError):
            self._waits = self._waits or bool(self.recall.recv(MAX_MESSAGE, socket.MSG_DONTWAIT))
        return self._waits


@dataclass
class Node:
    """The ranks of this node. Made in the main thread; `start` starts the thread that runs it.

    Args:
        group: the membership.
        program: what its ranks run.
    """

    group: Member
    program: Program
    leaving: int = 0
    """This node was told to go, and leaves with this exit code."""
    _ranks: dict[int, Rank] = field(default_factory=dict)
    _generation: tuple[int, int] = (0, 0)
    """(round, generation) that the ranks are to be in."""
    _size: int = 0
    """Nodes of their round."""
    _asked: bool = False
    """The ranks are asked to pause."""
    _reached: int = 0
    """Highest step that a rank of this node was seen in."""
    _expecting_stop: bool = False
    """torchrun was told of a change, or has lost a stand-in, and is going to end the others."""
    _companions: dict[tuple[str, ...], Companion] = field(default_factory=dict)
    """By what they run. They outlive the ranks that asked for them."""
    _kept: dict[int, Rank] = field(default_factory=dict)
    """By local rank: whose stand-in is gone with its round, and whose process goes on in the next.
    """
    _reserve: Reserve | None = None
    """What takes the place of the next rank that has no process."""
    _reserves: int = 0
    """How many there were."""
    _no_reserve_until: float = 0.0
    """By time.monotonic(); after one has ended by itself."""
    _ending: dict[str, tuple[int, float]] = field(default_factory=dict)
    """(local rank, since when) of processes that were killed and are not gone yet, by key: only
    then is their device free for another."""
    _oom_kills: int = field(default_factory=oom_kills)
    """Processes that the kernel had killed for lack of memory, when that was looked at last."""
    refused: int = 0
    """Connections of processes that this agent has not started."""

    def __post_init__(self) -> None:
        self._zygote = first_zygote()
        self.page = self._zygote.page
        self._hangs = HangWatch(self.group, self.page)
        self._listener, self.socket_path = _listen()
        self._waker, self._wakened = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wakened, selectors.EVENT_READ, None)
        self._end = False
        self._facts: Facts | None = None
        self._folders: dict[str, str] = {}
        self._told, self._told_folders = threading.Event(), threading.Event()
        self._ask()
        self._selector.register(self._zygote.socket, selectors.EVENT_READ, "zygote")
        os.environ[NODE_SOCKET] = self.socket_path
        self._thread = threading.Thread(target=self._run, name="perdure-node", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def facts(self, timeout: float) -> Facts | None:
        """What the program of the ranks says of its job, once the zygote has imported what there is
        to import; None if that takes longer than `timeout` seconds. From any thread."""
        self._told.wait(timeout)
        return self._facts

    def folders(self, timeout: float) -> Mapping[str, str]:
        """Paths that the ranks need, by the key that names each, once the zygote has said so; none
        if that takes longer than `timeout` seconds. From any thread."""
        self._told_folders.wait(timeout)
        return self._folders

    def wake(self) -> None:
        """Have the node look at the membership now. From any thread."""
        self._waker.send(b"w")

    def stop(self) -> None:
        """End all training processes, companions and the zygote. From any thread."""
        seconds = HURRIED_SECONDS if self.leaving else FAREWELL_SECONDS
        part_with(self._companions.values(), seconds)
        self._end = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._zygote.end()

    def paused(self) -> int | None:
        """The generation in which all ranks have ended because they were asked to, if they have."""
        (_, generation), ranks = self._generation, list(self._ranks.values())
        paused = bool(ranks) and all(rank.code == EXIT_PAUSED for rank in ranks)
        return generation if paused else None

    def expect_stop(self) -> None:
        """torchrun is going to end the stand-ins: their SIGTERM is no notice to this node."""
        self._expecting_stop = True

    def told_to_go(self, how: str, code: int = EXIT_REQUEUE) -> None:
        """This machine is going to be taken away, and its ranks are to leave with `code`. From any
        thread, or a signal handler."""
        if not self.leaving:
            logger.warning("this node was told to go (%s): saving after this step", how)
        self.leaving = self.leaving or code
        self.wake()

    @property
    def busy(self) -> bool:
        """Whether there are ranks."""
        return bool(self._ranks)

    def pause(self) -> None:
        """Ask the ranks to pause: all ranks of the job end after the same step, with their state
        saved."""
        self._asked = True
        for local_rank in list(self._ranks):
            self.page.ask_to_pause(local_rank, leaving=bool(self.leaving))

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._end:
            try:
                for key, _ in self._selector.select(LOOK_SECONDS):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wakened:
                        self._wakened.recv(4096)
                    elif key.data == "zygote":
                        self._hear_zygote()
                    elif isinstance(key.data, Rank):
                        self._hear_rank(key.data)
                    else:
                        self._hear_stand_in(key.data)
                self._look()
            except Exception:
                logger.exception("node: an error of ours; the ranks are not supervised well")
                time.sleep(LOOK_SECONDS)

    def _look(self) -> None:
        """Follow the membership, and notices that ranks got."""
        state = self.group.state
        if state.closed or self.leaving or self.group.name not in (*state.members, *state.arrived):
            for rank in self._kept.values():
                self._kill(rank)
            self._kept.clear()
        if state.closed and state.closed.code != EXIT_DONE:
            for rank in list(self._ranks.values()):
                self._dismiss(rank, state.closed.code)
            return
        if lost():
            for local_rank in self._ranks:
                self.page.say_mute(local_rank)
        for rank in list(self._ranks.values()):
            progress = self.page.read(rank.local_rank)
            self._reached = max(self._reached, progress.step)
            if not self.leaving and progress.noticed:
                self.told_to_go("a signal")
        wanted = state.round, state.generation
        if wanted != self._generation and self._generation[0] == state.round:
            self._generation = wanted
            self._asked = False
            for rank in self._ranks.values():
                rank.code = None
                if not self._recall(rank):
                    self._kill(rank)
        self._hurry()
        self._launch()
        self._keep_reserve()
        self._watch(state)
        if self.leaving:
            self.pause()
            alone = state.round == self._generation[0] and over(state)
            if alone or all(self.page.read(local_rank).safe for local_rank in self._ranks):
                # Nobody is left to finish the step with, or there is nothing to save.
                for rank in self._ranks.values():
                    if rank.key is not None:
                        self._kill(rank)
                        rank.code = EXIT_PAUSED
                    elif rank.code not in (None, EXIT_DONE):  # it failed as others went
                        rank.code = EXIT_PAUSED
            if self._ranks and all(rank.code is not None for rank in self._ranks.values()):
                self.group.ask(Ask(leaves=True))
                for rank in list(self._ranks.values()):
                    code = self.leaving if rank.code == EXIT_PAUSED else rank.code
                    self._dismiss(rank, code or 0)

    def _accept(self) -> None:
        """A connection: of a process that this agent has started, or none."""
        connection, _ = self._listener.accept()
        pid, uid, _ = struct.unpack(
            "3i",
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")),
        )
        if uid == os.geteuid() and descends(pid, os.getpid()):
            self._selector.register(connection, selectors.EVENT_READ, connection)
            return
        connection.close()
        self.refused += 1
        if self.refused == 1:
            logger.warning(
                "process %d of user %d tried to be a rank of this node, which did not start it: "
                "refused, as others will be without a word", pid, uid,
            )  # fmt: skip

    def _hear_stand_in(self, connection: socket.socket) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE, 8)
        except OSError:
            data, descriptors = b"", []
        message = json.loads(data) if data else {}
        if "run" in message:
            self._admit(connection, descriptors)
        elif "companion" in message:
            self._accompany(tuple(message["companion"]))
        elif "notice" in message:
            if not self._expecting_stop:
                self.told_to_go(message["notice"])
            else:
                self._forget(connection)
        else:  # it was killed, so torchrun is going to end the others
            if not self._expecting_stop:
                logger.warning("a stand-in of torchrun's was killed: the ranks start again")
            self._expecting_stop = True
            self._forget(connection)

    def _admit(self, connection: socket.socket, descriptors: list[int]) -> None:
        environment = RankProgram.unpack(descriptors[0]).environment
        rank = Rank(
            connection,
            descriptors,
            int(environment[ROUND]),
            int(environment["RANK"]),
            int(environment["LOCAL_RANK"]),
        )
        rank.dumps = os.memfd_create("perdure-dumps")
        kept = self._kept.pop(rank.local_rank, None)
        if kept and kept.recall:
            os.close(rank.dumps)
            rank.key, rank.pid, rank.dumps, rank.recall = (
                kept.key, kept.pid, kept.dumps, kept.recall,
            )  # fmt: skip
            rank.recalled = kept.recalled
            self._selector.modify(rank.recall, selectors.EVENT_READ, rank)
        old = self._ranks.pop(rank.local_rank, None)
        if old:
            self._kill(old)
            self._close(old)
        self._ranks[rank.local_rank] = rank
        state = self.group.state
        if rank.round != state.round:  # torchrun is going to end it: its round is over already
            return
        if self._generation[0] != rank.round:
            if state.size < self._size:  # each rank has more to do now
                self._hangs.times.forget_steps()
            self._size = state.size
            self._asked = self._expecting_stop = False
            self._generation = rank.round, state.generation
        if rank.key is not None and not self._recall(rank):
            self._kill(rank)

    def _accompany(self, words: tuple[str, ...]) -> None:
        if words not in self._companions or not self._companions[words].lives:
            self._companions[words] = Companion(words)

    def _forget(self, connection: socket.socket) -> None:
        """A stand-in is gone, or is to go: so does its training process."""
        for local_rank, rank in list(self._ranks.items()):
            if rank.connection is connection:
                del self._ranks[local_rank]
                if self._expecting_stop and self._keep(rank):
                    self._kept[local_rank] = rank
                else:
                    self._kill(rank)
                self._close(rank)
                return
        self._selector.unregister(connection)
        connection.close()

    def _dismiss(self, rank: Rank, code: int) -> None:
        """End a rank for good: its stand-in leaves with `code`."""
        self._kill(rank)
        self._ranks.pop(rank.local_rank, None)
        with suppress(OSError):  # the stand-in was faster
            rank.connection.send(json.dumps({"code": code}).encode())
        self._close(rank)

    def _close(self, rank: Rank) -> None:
        try:
            self._selector.unregister(rank.connection)
        except KeyError:
            return
        rank.connection.close()
        kept = rank in self._kept.values()
        for descriptor in (*rank.descriptors, *(() if kept else (rank.dumps,))):
            os.close(descriptor)

    def _watch(self, state: Membership) -> None:
        """End the ranks of this node that hang."""
        running = {
            rank.rank: rank
            for rank in self._ranks.values()
            if rank.key is not None and rank.recalled is None
        }
        done = {
            rank.rank: rank.local_rank
            for rank in self._ranks.values()
            if rank.code in (EXIT_PAUSED, EXIT_DONE)
        }
        for number in self._hangs.look(state, self._generation, running, done):
            rank = running[number]
            step = self.page.read(rank.local_rank).step
            why = f"hang: {state.suspicion}"
            self._kill(rank)
            rank.code = EXIT_FAILED
            failure = Failure(self.group.name, number, step, why, time.time())
            self.group.report(*self._generation, failure)

    # --- training processes ------------------------------------------------------------------

    def _launch(self) -> None:
        """Fork every rank that has no process and none that ended well, once the one before is
        gone."""
        round, generation = self._generation
        for local_rank, rank in self._ranks.items():
            if rank.key is not None or rank.code is not None or rank.round != round:
                continue
            waits = [since for place, since in self._ending.values() if place == local_rank]
            if waits and time.monotonic() - max(waits) < GONE_SECONDS:
                continue
            self.page.clear(local_rank)
            self._hangs.times.begin(rank.rank)
            if self._reserve and self._reserve.waits() and self._take_reserve(rank):
                continue
            rank.key = f"{round}.{generation}.{local_rank}"
            rank.recall = self._fork(rank, rank.key, rank.dumps, self._environment(local_rank))
            self._selector.register(rank.recall, selectors.EVENT_READ, rank)

    def _fork(
        self, rank: Rank, key: str, dumps: int, environment: Mapping[str, str]
    ) -> socket.socket:
        """Have the zygote fork a process that runs the job of a rank; returns the socket to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files = [*rank.descriptors, dumps, theirs.fileno()]
        self._tell({"spawn": key, "env": environment}, files)
        theirs.close()
        return ours

    def _environment(self, local_rank: int) -> dict[str, str]:
        """What a rank is to know of the generation that it begins."""
        self.page.unask(local_rank)
        if self._asked or self.leaving:
            self.page.ask_to_pause(local_rank, leaving=bool(self.leaving))
        state, (_, generation) = self.group.state, self._generation
        cause = state.failures[-1] if generation else state.cause
        environment = {
            GENERATION: str(generation),
            PROGRESS: f"{self.page.descriptor}:{local_rank}",
            CAUSE: json.dumps(cause and asdict(cause)),
        }
        if (
            state.round > state.first or generation
        ):  # the way to the first step began with the failure
            environment[LAUNCHED_AT] = str(cause.at if cause else time.time())
        return environment

    # --- processes that go on, see recall.py --------------------------------------------------

    def _recall(self, rank: Rank) -> bool:
        """Have a process go on in the generation that begins; False if it cannot."""
        if rank.key is None or rank.recall is None or not (rank.able or rank.recalled):
            return False
        environment = self._environment(rank.local_rank)
        message = {"generation": "{}.{}".format(*self._generation), "env": environment}
        return self._call(rank, message, rank.descriptors)

    def _keep(self, rank: Rank) -> bool:
        """Have a process end its attempt, and wait for the next round; False if it cannot."""
        if rank.key is None or not (rank.able or rank.recalled):
            return False
        return self._call(rank, {"stop": True}, [])

    def _keep_reserve(self) -> None:
        """Have a process in reserve, once ranks train that can be recalled."""
        rank = next((rank for rank in self._ranks.values() if rank.able), None)
        if rank and rank.able and not self._reserve and not self.leaving:
            if time.monotonic() < max(rank.able + SETTLED_SECONDS, self._no_reserve_until):
                return
            self._reserves += 1
            key, dumps = f"reserve.{self._reserves}", os.memfd_create("perdure-dumps")
            self._reserve = Reserve(key, dumps, self._fork(rank, key, dumps, {RESERVE: "1"}))

    def _take_reserve(self, rank: Rank) -> bool:
        """Have the process in reserve be a rank that has none; False if it cannot."""
        reserve, self._reserve = self._reserve, None
        assert reserve
        os.close(rank.dumps)
        rank.key, rank.pid = reserve.key, reserve.pid
        rank.dumps, rank.recall, rank.able = reserve.dumps, reserve.recall, time.monotonic()
        self._selector.register(rank.recall, selectors.EVENT_READ, rank)
        if self._recall(rank):
            return True
        self._kill(rank)
        return False

    def _drop_reserve(self) -> None:
        """Its process has ended."""
        if self._reserve:
            self._reserve.recall.close()
            os.close(self._reserve.dumps)
            self._reserve = None

    def _call(self, rank: Rank, message: Mapping[str, Any], descriptors: list[int]) -> bool:
        assert rank.recall
        try:
            socket.send_fds(rank.recall, [json.dumps(message).encode()], descriptors)
        except OSError:  # it has just ended
            return False
        rank.able, rank.lost, rank.recalled = None, None, time.monotonic()
        return True

    def _hear_rank(self, rank: Rank) -> None:
        try:
            data = rank.recall.recv(MAX_MESSAGE) if rank.recall else b""
        except OSError:
            data = b""
        message = json.loads(data) if data else {}
        if rank.recalled is not None and not {"able", "lost"}.isdisjoint(message):
            pass  # it has not heard of that yet
        elif "able" in message:
            rank.able = time.monotonic() if message["able"] else None
        elif "stuck" in message:
            rank.stuck = rank.recalled is not None
        elif "lost" in message:
            rank.lost = time.monotonic()
            self.group.doubt(LOST_SECONDS)
        elif message.get("ready") == "{}.{}".format(*self._generation):
            rank.recalled, rank.stuck = None, False
            self._hangs.times.begin(rank.rank)
        elif rank.recall and not data:  # it has ended, which the zygote says in a moment
            self._selector.unregister(rank.recall)
            rank.recall.close()
            rank.recall = None

    def _hurry(self) -> None:
        """Who was recalled and is not ready in time is ended, and forked anew. For who has lost a
        peer, and nobody says whose failure that was, there is another generation."""
        now = time.monotonic()
        for rank in self._ranks.values():
            if rank.recalled and (rank.stuck or now > rank.recalled + READY_SECONDS):
                place = Path(f"/proc/self/fd/{rank.dumps}")
                stack = take_dumps({rank.rank: (rank.pid, place)}).get(rank.rank, "")
                logger.warning(
                    "rank %d has not let go of what it did after %.0f s: it is forked anew; its "
                    "stack:\n%s", rank.rank, now - rank.recalled, stack,
                )  # fmt: skip
                self._kill(rank)
            if rank.lost and now > rank.lost + LOST_SECONDS:
                rank.lost = None
                step = self.page.read(rank.local_rank).step
                why = f"rank {rank.rank} lost its connection to another"
                failure = Failure(self.group.name, None, step, why, time.time())
                self.group.report(*self._generation, failure)

    def _hang_up(self, rank: Rank) -> None:
        if rank.recall is not None:
            self._selector.unregister(rank.recall)
            rank.recall.close()
        rank.recall = rank.able = rank.recalled = rank.lost = None
        rank.stuck = False

    # --- the end of processes -----------------------------------------------------------------

    def _kill(self, rank: Rank) -> None:
        self._hang_up(rank)
        if rank.key is not None:
            self._tell({"kill": rank.key})
            self._ending[rank.key] = rank.local_rank, time.monotonic()
            rank.key = None  # what is heard of it later is about a process of the past

    def _hear_zygote(self) -> None:
        try:
            data = self._zygote.socket.recv(MAX_MESSAGE)
        except OSError:
            data = b""
        if not data:
            if not self._end:
                self._replace_zygote()
            return
        message = json.loads(data)
        if "folders" in message:
            self._folders = message["folders"]
            self._told_folders.set()
        elif "facts" in message:
            self._facts = Facts(**message["facts"])
            self._hangs.times.save_seconds = self._facts.save_seconds or SAVE_SECONDS
            self._told.set()
        elif "started" in message:
            for rank in self._ranks.values():
                if rank.key == message["started"]:
                    rank.pid = message["pid"]
            if self._reserve and self._reserve.key == message["started"]:
                self._reserve.pid = message["pid"]
        else:
            self._ending.pop(message["ended"], None)
            if self._reserve and self._reserve.key == message["ended"]:
                self._drop_reserve()
                self._no_reserve_until = time.monotonic() + RESERVE_AGAIN_SECONDS
            for rank in [*self._ranks.values(), *self._kept.values()]:
                if rank.key == message["ended"]:
                    self._ended(rank, message["code"])

    def _ended(self, rank: Rank, code: int) -> None:
        if rank.recalled:  # from a generation that was over
            rank.key = None
            self._hang_up(rank)
            return
        self._hang_up(rank)
        rank.key, rank.code = None, code
        state, progress = self.group.state, self.page.read(rank.local_rank)
        why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if progress.error:
            why += f" ({progress.error})"
        if code == EXIT_DONE or (state.closed and state.closed.code == EXIT_DONE):
            if code != EXIT_DONE:
                logger.warning("rank %d ended with code %d after the last step", rank.rank, code)
            self.group.change(lambda state: _close(state, EXIT_DONE, "the run is finished"))
            self._dismiss(rank, EXIT_DONE)
        elif code == EXIT_DO_NOT_REQUEUE or (
            # What was good input once is so again: storage may be away for a moment.
            code == EXIT_WRONG_INPUT and self._generation == (state.first, 0) and not progress.step
        ):
            reason = f"rank {rank.rank} ended with {why}"
            self.group.change(lambda state: _close(state, code, reason))
        elif code != EXIT_PAUSED:
            blamed: int | None = rank.rank
            if code == EXIT_PEER_GONE:  # whoever failed is on a node that cannot say so any more
                rank.code, blamed = EXIT_FAILED, None
                why = f"rank {rank.rank} lost its connection to another"
            # One that fails while it starts has got no further than the run had.
            step = progress.step or self._reached
            self._reached = max(self._reached, step)
            error = progress.error if blamed is not None else ""
            mended = code == EXIT_MENDED
            if mended:
                rank.code = EXIT_FAILED
            outside = -code in FROM_OUTSIDE and not error
            if code == -signal.SIGKILL and (kills := oom_kills()) > self._oom_kills:
                self._oom_kills, outside = kills, False
                error = "the kernel killed it: out of memory"
                why += f" ({error})"
            failure = Failure(
                self.group.name, blamed, step, why, time.time(), error, mended, outside
            )
            if code != EXIT_PEER_GONE:  # it said so itself
                logger.warning("rank %d: %s in step %d", rank.rank, why, progress.step)
            self.group.report(*self._generation, failure)

    # --- zygote ------------------------------------------------------------------------------

    def _replace_zygote(self) -> None:
        """It died, and its forks with it."""
        self._selector.unregister(self._zygote.socket)
        logger.warning("the zygote died (%s); starting another", self._zygote.end())
        self._zygote = Zygote.start(self.page)
        self._selector.register(self._zygote.socket, selectors.EVENT_READ, "zygote")
        self._ask()
        self._ending.clear()
        self._drop_reserve()
        for rank in self._kept.values():
            self._hang_up(rank)
        for rank in self._ranks.values():
            if rank.key is not None:
                self._ended(rank, EXIT_FAILED)

    def _ask(self) -> None:
        """For the facts; it answers when it is warm."""
        program = self.program
        self._tell({"describe": [program.package, program.ranks, *program.arguments]})

    def _tell(self, message: Mapping[str, Any], descriptors: list[int] | None = None) -> None:
        with suppress(OSError):  # it died, which the selector says in a moment
            socket.send_fds(self._zygote.socket, [json.dumps(message).encode()], descriptors or [])


def _listen() -> tuple[socket.socket, str]:
    """A socket for the processes that this one starts, and the path by which they reach it.

    A job that comes through it is run as this user, so it has no name by which others could find
    it: its file is gone from its folder, which nobody else could enter, before the first connection
    comes. What is left is the descriptor, under /proc, where the kernel lets none but this user in.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tempfile.TemporaryDirectory(prefix="perdure-") as folder:
        short = os.open(folder, os.O_PATH | os.O_CLOEXEC)  # paths of sockets have 107 bytes
        path = f"/proc/self/fd/{short}/agent"
        listener.bind(path)
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        os.close(short)
    listener.listen(64)
    return listener, f"/proc/{os.getpid()}/fd/{descriptor}"


def descends(pid: int, ancestor: int) -> bool:
    """Whether a living process was started by another, or by one that it has started."""
    while pid > 1 and pid != ancestor:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # it has ended
            return False
        pid = int(status.rpartition(")")[2].split()[1])
    return pid == ancestor


def _close(state: Membership, code: int, reason: str) -> Membership:
    return state if state.closed else replace(state, closed=Closed(code, reason))
