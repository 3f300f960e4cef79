"""The agent of a node: a thread in torchrun's process that runs the training processes of its
ranks.

[Note: node] torchrun starts a stand-in per rank (standin.py). torchrun restarts the stand-ins when
a node joins, leaves or is lost. A stand-in sends its program to the agent, over a Unix socket. The
agent has the zygote (zygote.py) fork a process that runs the program. When a training process
fails, its agent records the failure in the membership document, and a new generation of training
processes begins. The agents of all nodes then recall the processes of the old generation, which
continue as ranks of the new generation (recall.py), or kill them, and fork processes for the ranks
that have none. torchrun does not notice a new generation.

One thread handles one message at a time. It never waits for the store: the thread of `Member` does,
and wakes the agent's thread when the membership document has changed. `NodeAgent._look` shows, in
order, what follows from a change.
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
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from elastic.exits import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_MENDED,
    EXIT_OUTVOTED,
    EXIT_PAUSED,
    EXIT_PEER_GONE,
    EXIT_REQUEUE,
)
from elastic.group.member import Member
from elastic.group.membership import (
    Membership,
    MembershipEnd,
    MembershipFailure,
    MembershipRequest,
    accuse,
    close,
    round_over,
)
from elastic.node.companion import FAREWELL_SECONDS, HURRIED_SECONDS, NodeCompanion, end_companions
from elastic.node.program import NodeJobFacts, NodeProgram
from elastic.node.progress import PROGRESS
from elastic.node.rank_process import NodeRank, NodeRankProcess, NodeReserveProcess, judge_exit
from elastic.node.recall import LOST_SECONDS, READY_SECONDS, SETTLED_SECONDS
from elastic.node.standin import NODE_SOCKET
from elastic.node.vitals import oom_kills, take_dumps
from elastic.node.watchdog import SAVE_SECONDS, NodeHangWatch
from elastic.node.zygote import MAX_MESSAGE, RESERVE, Zygote, ZygoteProgram, first_zygote
from elastic.process import descends, lost_output
from elastic.world import CAUSE, GENERATION, ROUND

logger = logging.getLogger(__name__)

LAUNCHED_AT = "PERDURE_LAUNCHED_AT"
"""Environment variable: Unix time at which this start of the ranks began. It is the time of the
launch, or of the failure or membership change that caused a restart."""
LOOK_SECONDS = 0.1
GONE_SECONDS = 10.0
"""Longest wait for a killed process before its successor starts. If the killed process has not
ended by then, it hangs in the kernel."""
RESERVE_AGAIN_SECONDS = 60.0
"""Seconds until the next reserve process, after one has ended without becoming a rank."""


@dataclass
class _NodeRound:
    """The membership round of this node's ranks."""

    number: int = 0
    generation: int = 0
    size: int = 0
    pausing: bool = False
    stopping: bool = False
    """Whether torchrun is ending its processes for the ranks (the stand-ins), because the
    membership changed or one of them died."""

    @property
    def key(self) -> tuple[int, int]:
        return self.number, self.generation


@dataclass
class NodeAgent:
    """The agent of a node, see [Note: node]. Created in the main thread; `start` runs a thread."""

    group: Member
    program: NodeProgram
    leaving: int = 0
    """Exit code of this node after a notice that makes it leave; 0: it stays."""
    refused: int = 0
    _round: _NodeRound = field(default_factory=_NodeRound)
    _ranks: dict[int, NodeRank] = field(default_factory=dict)
    _kept: dict[int, NodeRank] = field(default_factory=dict)
    """Local rank → rank whose stand-in has ended, while its process waits for the next round."""
    _reserve: NodeReserveProcess | None = None
    _forks: int = 0
    _no_reserve_until: float = 0.0
    _ending: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Key of a killed process that has not ended yet → (local rank, time of the kill)."""
    _reached: int = 0
    _oom_kills: int = field(default_factory=oom_kills)
    _companions: dict[tuple[str, ...], NodeCompanion] = field(default_factory=dict)
    """(module, argument, …) → companion, which outlives the ranks that requested it."""

    def __post_init__(self) -> None:
        self._zygote = first_zygote()
        self.page = self._zygote.page
        self._hangs = NodeHangWatch(self.group, self.page)
        self._listener, self.socket_path = _listen()
        self._waker, self._wakened = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wakened, selectors.EVENT_READ, None)
        self._end = False
        self._facts: Future[NodeJobFacts] = Future()
        self._folders: Future[dict[str, str]] = Future()
        self._request_facts()
        self._selector.register(self._zygote.socket, selectors.EVENT_READ, "zygote")
        # torchrun passes this variable on to the stand-ins.
        os.environ[NODE_SOCKET] = self.socket_path
        self._thread = threading.Thread(target=self._run, name="perdure-node", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # Methods without an underscore may be called from any thread.

    def facts(self, timeout: float) -> NodeJobFacts | None:
        """Returns the program's description of the job, for which the zygote may take `timeout`
        seconds; None after that."""
        with suppress(TimeoutError):
            return self._facts.result(timeout)
        return None

    def folders(self, timeout: float) -> Mapping[str, str]:
        """Returns recipe key → path that the ranks need, for which the zygote may take `timeout`
        seconds; empty after that."""
        with suppress(TimeoutError):
            return self._folders.result(timeout)
        return {}

    def wake(self) -> None:
        self._waker.send(b"w")

    def stop(self) -> None:
        seconds = HURRIED_SECONDS if self.leaving else FAREWELL_SECONDS
        end_companions(self._companions.values(), seconds)
        self._end = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._zygote.end()

    def paused(self) -> int | None:
        """Returns the generation in which all ranks of this node have paused; None if some have
        not, or there is no rank."""
        generation, ranks = self._round.generation, list(self._ranks.values())
        paused = bool(ranks) and all(rank.code == EXIT_PAUSED for rank in ranks)
        return generation if paused else None

    def expect_stop(self) -> None:
        """Record that torchrun will end its processes for the ranks by SIGTERM. The agent then does
        not take this signal for a notice to leave the job."""
        self._round.stopping = True

    def leave(self, how: str, code: int = EXIT_REQUEUE) -> None:
        """Make the ranks save, pause and then end with `code`, because this machine will be taken
        away or the user ends the job on it. `how` is the cause, for the log. A signal handler may
        call this."""
        if not self.leaving:
            logger.warning("this node must leave the job (%s): saving after this step", how)
        self.leaving = self.leaving or code  # the first notice decides the exit code
        self.wake()

    @property
    def busy(self) -> bool:
        return bool(self._ranks)

    def pause(self) -> None:
        """Request that all ranks of the job save their state and end after the same step."""
        self._round.pausing = True
        for local_rank in list(self._ranks):
            self.page.request_pause(local_rank, leaving=bool(self.leaving))

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
                        self._on_zygote()
                    elif isinstance(key.data, NodeRank):
                        self._on_rank(key.data)
                    else:
                        self._on_stand_in(key.data)
                self._look()
            except Exception:
                logger.exception("agent: internal error; ranks may not be supervised")
                time.sleep(LOOK_SECONDS)  # an error that persists must not use up a core

    def _look(self) -> None:
        """Bring this node's processes in line with the membership: end, recall and start them."""
        state = self.group.state
        if state.closed or self.leaving or self.group.name not in (*state.members, *state.arrived):
            for rank in self._kept.values():  # these ranks will get no further round
                self._kill(rank)
            self._kept.clear()
        if state.closed and state.closed.code != EXIT_DONE:
            for rank in list(self._ranks.values()):
                self._dismiss(rank, state.closed.code)
            return
        self._read_progress()
        if self._round.number == state.round and self._round.generation != state.generation:
            self._round.generation, self._round.pausing = state.generation, False
            for rank in self._ranks.values():
                rank.code = None
                if not self._recall(rank):
                    self._kill(rank)
        self._replace_late()
        self._launch()
        self._keep_reserve()
        self._end_hanging(state)
        if self.leaving:
            self._leave(state)

    def _read_progress(self) -> None:
        mute = lost_output()
        for local_rank in self._ranks:
            if mute:
                self.page.set_mute(local_rank)
            progress = self.page.read(local_rank)
            self._reached = max(self._reached, progress.step)
            if not self.leaving and progress.noticed:
                self.leave("a signal")

    def _leave(self, state: Membership) -> None:
        """Request a pause of all ranks. Once all have ended, dismiss this node's ranks."""
        self.pause()
        alone = state.round == self._round.number and round_over(state)
        if alone or all(self.page.read(local_rank).safe for local_rank in self._ranks):
            # Either no peers are left to finish the step with, or all state is saved.
            for rank in self._ranks.values():
                if rank.process is not None:
                    self._kill(rank)
                    rank.code = EXIT_PAUSED
                # The process failed because its peers left.
                elif rank.code not in (None, EXIT_DONE):
                    rank.code = EXIT_PAUSED
        if self._ranks and all(rank.code is not None for rank in self._ranks.values()):
            # Requested before the stand-ins end, because torchrun and this thread end with them.
            self.group.request(MembershipRequest(leaves=True))
            for rank in list(self._ranks.values()):
                code = self.leaving if rank.code == EXIT_PAUSED else rank.code
                self._dismiss(rank, code or 0)

    # --- stand-ins ---------------------------------------------------------------------------

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        pid, uid, _ = struct.unpack(
            "3i",
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")),
        )
        # A process that connects can have the agent run code as this user.
        if uid == os.geteuid() and descends(pid, os.getpid()):
            self._selector.register(connection, selectors.EVENT_READ, connection)
            return
        connection.close()
        self.refused += 1
        if self.refused == 1:
            logger.warning(
                "process %d of user %d, which this node's agent has not started, tried to register "
                "as a rank: refused; further such processes are refused without a message",
                pid, uid,
            )  # fmt: skip

    def _on_stand_in(self, connection: socket.socket) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE, 8)
        except OSError:
            data, descriptors = b"", []
        message = json.loads(data) if data else {}
        if "run" in message:
            self._admit(connection, descriptors)
        elif "companion" in message:
            words = tuple(message["companion"])
            if words not in self._companions or not self._companions[words].lives:
                self._companions[words] = NodeCompanion(words)
        elif "notice" in message:
            if not self._round.stopping:
                self.leave(message["notice"])
            else:
                self._on_stand_in_gone(connection)
        else:  # the stand-in was killed, so torchrun is going to end the other stand-ins
            if not self._round.stopping:
                logger.warning(
                    "a process that torchrun started for a rank was killed: torchrun restarts the "
                    "ranks of this node"
                )
                failure = self._report_of(None, self._reached, "a stand-in was killed")
                self.group.change(partial(accuse, round=self._round.number, failure=failure))
            self._round.stopping = True
            self._on_stand_in_gone(connection)

    def _admit(self, connection: socket.socket, descriptors: list[int]) -> None:
        """Register the rank of a stand-in, the process that torchrun starts in place of a rank. If
        the last round left a process for this local rank that can be recalled, the rank gets it."""
        environment = ZygoteProgram.unpack(descriptors[0]).environment
        rank = NodeRank(
            connection,
            descriptors,
            int(environment[ROUND]),
            int(environment["RANK"]),
            int(environment["LOCAL_RANK"]),
            os.memfd_create("perdure-dumps"),
        )
        kept = self._kept.pop(rank.local_rank, None)
        if kept and kept.process and kept.process.recall:
            os.close(rank.dumps)
            rank.process, rank.dumps = kept.process, kept.dumps
            rank.process.stuck = False
            self._selector.modify(kept.process.recall, selectors.EVENT_READ, rank)
        old = self._ranks.pop(rank.local_rank, None)
        if old:
            self._kill(old)
            self._close(old)
        self._ranks[rank.local_rank] = rank
        state = self.group.state
        # torchrun is going to end this stand-in, as its round is over.
        if rank.round != state.round:
            return
        if self._round.number != rank.round:
            # With fewer nodes each rank's share of the work is larger.
            if state.size < self._round.size:
                self._hangs.times.forget_steps()
            self._round = _NodeRound(rank.round, state.generation, state.size)
        if rank.process and not self._recall(rank):
            self._kill(rank)

    def _on_stand_in_gone(self, connection: socket.socket) -> None:
        """Drop the rank of a stand-in, torchrun's process for the rank, which ends. If torchrun
        will start a new stand-in, and the rank's process can be recalled, the process waits for the
        next round; otherwise it is killed."""
        for local_rank, rank in list(self._ranks.items()):
            if rank.connection is connection:
                del self._ranks[local_rank]
                if self._round.stopping and self._send_rank(rank, {"stop": True}, []):
                    self._kept[local_rank] = rank
                else:
                    self._kill(rank)
                self._close(rank)
                return
        self._selector.unregister(connection)
        connection.close()

    def _dismiss(self, rank: NodeRank, code: int) -> None:
        """Kill the process of a rank, and make its stand-in, torchrun's process for the rank, exit
        with `code`."""
        self._kill(rank)
        self._ranks.pop(rank.local_rank, None)
        with suppress(OSError):  # the stand-in may have ended already
            rank.connection.send(json.dumps({"code": code}).encode())
        self._close(rank)

    def _close(self, rank: NodeRank) -> None:
        try:
            self._selector.unregister(rank.connection)
        except KeyError:
            return
        rank.connection.close()
        kept = rank in self._kept.values()
        for descriptor in (*rank.descriptors, *(() if kept else (rank.dumps,))):
            os.close(descriptor)

    # --- starting processes ------------------------------------------------------------------

    def _launch(self) -> None:
        for local_rank, rank in self._ranks.items():
            if rank.process or rank.code is not None or rank.round != self._round.number:
                continue
            # The GPU is free only once the previous process has ended.
            waits = [since for place, since in self._ending.values() if place == local_rank]
            if waits and time.monotonic() - max(waits) < GONE_SECONDS:
                continue
            self.page.clear(local_rank)
            self._hangs.times.begin(rank.rank)
            if self._reserve and self._reserve.waits() and self._take_reserve(rank):
                continue
            rank.process, recall = self._fork(rank, rank.dumps, self._environment(local_rank))
            self._selector.register(recall, selectors.EVENT_READ, rank)

    def _fork(
        self, rank: NodeRank, dumps: int, environment: Mapping[str, str]
    ) -> tuple[NodeRankProcess, socket.socket]:
        """Have the zygote fork a process for a rank's program; returns it and its `recall`."""
        # Not named by round and local rank: a stand-in that registers again in its round gets a
        # second process, while the end of the first is not reported yet.
        self._forks += 1
        key = f"{self._forks}"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        files = [*rank.descriptors, dumps, theirs.fileno()]
        self._send_zygote({"spawn": key, "env": environment}, files)
        theirs.close()  # so that the end of the process closes the connection
        return NodeRankProcess(key, ours), ours

    def _environment(self, local_rank: int) -> dict[str, str]:
        self.page.withdraw_pause(local_rank)
        if self._round.pausing or self.leaving:
            self.page.request_pause(local_rank, leaving=bool(self.leaving))
        state, generation = self.group.state, self._round.generation
        cause = state.failures[-1] if generation else state.cause
        environment = {
            GENERATION: str(generation),
            PROGRESS: f"{self.page.descriptor}:{local_rank}",
            CAUSE: json.dumps(cause and asdict(cause)),
        }
        if state.round > state.first or generation:
            # The time to the first step is measured from the failure, else from now.
            environment[LAUNCHED_AT] = str(cause.at if cause else time.time())
        return environment

    def _keep_reserve(self) -> None:
        """Start this node's spare process if there is none, once a rank of this node can be
        recalled; see recall.py."""
        rank = next(
            (rank for rank in self._ranks.values() if rank.process and rank.process.able), None
        )
        if rank and rank.process and rank.process.able and not self._reserve and not self.leaving:
            if time.monotonic() < max(rank.process.able + SETTLED_SECONDS, self._no_reserve_until):
                return
            dumps = os.memfd_create("perdure-dumps")
            process, _ = self._fork(rank, dumps, {RESERVE: "1"})
            self._reserve = NodeReserveProcess(process, dumps)

    def _take_reserve(self, rank: NodeRank) -> bool:
        """Make the reserve process the process of `rank`; returns False if it has ended."""
        reserve, self._reserve = self._reserve, None
        assert reserve
        assert reserve.process.recall
        os.close(rank.dumps)
        rank.process, rank.dumps = reserve.process, reserve.dumps
        rank.process.able = time.monotonic()
        self._selector.register(reserve.process.recall, selectors.EVENT_READ, rank)
        if self._recall(rank):
            return True
        self._kill(rank)
        return False

    def _drop_reserve(self) -> None:
        if self._reserve:
            if self._reserve.process.recall:
                self._reserve.process.recall.close()
            os.close(self._reserve.dumps)
            self._reserve = None

    # --- recalling processes, see recall.py --------------------------------------------------

    def _recall(self, rank: NodeRank) -> bool:
        """Make a rank's process continue in the current generation; returns False if it cannot."""
        environment = self._environment(rank.local_rank)
        message = {"generation": "{}.{}".format(*self._round.key), "env": environment}
        return self._send_rank(rank, message, rank.descriptors)

    def _send_rank(
        self, rank: NodeRank, message: Mapping[str, Any], descriptors: list[int]
    ) -> bool:
        """Send a recall, or the stop before it; returns False if no process can be recalled."""
        process = rank.process
        if process is None or process.recall is None or not (process.able or process.recalled):
            return False
        try:
            socket.send_fds(process.recall, [json.dumps(message).encode()], descriptors)
        except OSError:  # the process has just ended
            return False
        process.able, process.lost, process.recalled = None, None, time.monotonic()
        return True

    def _on_rank(self, rank: NodeRank) -> None:
        process = rank.process
        if process is None or process.recall is None:
            return
        try:
            data = process.recall.recv(MAX_MESSAGE)
        except OSError:
            data = b""
        message = json.loads(data) if data else {}
        if process.recalled is not None and not {"able", "lost"}.isdisjoint(message):
            pass  # sent before the process received the recall
        elif "able" in message:
            process.able = time.monotonic() if message["able"] else None
        elif "stuck" in message:
            process.stuck = process.recalled is not None
        elif "lost" in message:
            process.lost = time.monotonic()
            self.group.expect_loss(LOST_SECONDS)
        elif message.get("ready") == "{}.{}".format(*self._round.key):
            process.recalled, process.stuck = None, False
            self._hangs.times.begin(rank.rank)
        elif not data:  # the process has ended; the zygote will report its exit code
            self._selector.unregister(process.recall)
            process.recall.close()
            process.recall = None

    def _replace_late(self) -> None:
        """Kill recalled processes that are stuck, or not ready within READY_SECONDS. Report each
        rank that lost a peer, if no node has reported the peer's failure within LOST_SECONDS."""
        now = time.monotonic()
        for rank in self._ranks.values():
            process = rank.process
            if process is None:
                continue
            if process.lost and now > process.lost + LOST_SECONDS:
                process.lost = None
                why = f"rank {rank.rank} lost its connection to another"
                step = self.page.read(rank.local_rank).step
                self.group.report(*self._round.key, self._report_of(None, step, why))
            if process.recalled and (process.stuck or now > process.recalled + READY_SECONDS):
                place = Path(f"/proc/self/fd/{rank.dumps}")
                stack = take_dumps({rank.rank: (process.pid, place)}).get(rank.rank, "")
                logger.warning(
                    "rank %d was recalled after the failure of another rank, but did not end its "
                    "attempt within %.0f s: it gets a new process; its stack:\n%s",
                    rank.rank, now - process.recalled, stack,
                )  # fmt: skip
                self._kill(rank)

    # --- the end of processes ----------------------------------------------------------------

    def _kill(self, rank: NodeRank) -> None:
        process = self._detach(rank)
        if process:
            self._send_zygote({"kill": process.key})
            self._ending[process.key] = rank.local_rank, time.monotonic()

    def _detach(self, rank: NodeRank) -> NodeRankProcess | None:
        """Take the process from `rank`, so that later reports about it concern no rank."""
        process, rank.process = rank.process, None
        if process and process.recall:
            self._selector.unregister(process.recall)
            process.recall.close()
        return process

    def _end_hanging(self, state: Membership) -> None:
        running = {
            rank.rank: rank
            for rank in self._ranks.values()
            if rank.process and rank.process.recalled is None
        }
        done = {
            rank.rank: rank.local_rank
            for rank in self._ranks.values()
            if rank.code in (EXIT_PAUSED, EXIT_DONE)
        }
        for number in self._hangs.look(state, self._round.key, running, done):
            rank = running[number]
            step = self.page.read(rank.local_rank).step
            self._kill(rank)
            rank.code = EXIT_FAILED
            failure = self._report_of(number, step, f"hang: {state.suspicion}")
            failure = replace(failure, evidence=self._hangs.stack(number))
            self.group.report(*self._round.key, failure)

    def _on_zygote(self) -> None:
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
            if self._folders.done():  # an earlier zygote has answered, too
                self._folders = Future()
            self._folders.set_result(message["folders"])
        elif "facts" in message:
            facts = NodeJobFacts(**message["facts"])
            self._hangs.times.save_seconds = facts.save_seconds or SAVE_SECONDS
            if self._facts.done():
                self._facts = Future()
            self._facts.set_result(facts)
        elif "started" in message:
            reserve = [self._reserve.process] if self._reserve else []
            for process in [*reserve, *(rank.process for rank in self._ranks.values())]:
                if process and process.key == message["started"]:
                    process.pid = message["pid"]
        else:
            self._ending.pop(message["ended"], None)
            if self._reserve and self._reserve.process.key == message["ended"]:
                self._drop_reserve()
                self._no_reserve_until = time.monotonic() + RESERVE_AGAIN_SECONDS
            for rank in [*self._ranks.values(), *self._kept.values()]:
                if rank.process and rank.process.key == message["ended"]:
                    self._on_exit(rank, message["code"])

    def _on_exit(self, rank: NodeRank, code: int, how: str = "") -> None:
        """Handle the exit of a rank's process. `how`: what is known besides the exit code."""
        process = self._detach(rank)
        if process and process.recalled:  # the process belonged to a generation that was over
            return
        rank.code = code
        state, progress = self.group.state, self.page.read(rank.local_rank)
        kills = oom_kills() if code == -signal.SIGKILL else 0
        counted = f"oom_kill of the cgroup rose from {self._oom_kills} to {kills}"
        out_of_memory, self._oom_kills = kills > self._oom_kills, max(kills, self._oom_kills)
        verdict = judge_exit(
            rank.rank,
            code,
            progress,
            # A process that fails during its start has no step: use the highest step of this node.
            self._report_of(None, progress.step or self._reached),
            job_done=state.closed is not None and state.closed.code == EXIT_DONE,
            first_start=self._round.key == (state.first, 0),
            out_of_memory=out_of_memory,
            how=how,
        )
        if isinstance(verdict, MembershipEnd):
            self.group.change(partial(close, end=verdict))
            if verdict.code == EXIT_DONE:
                if code != EXIT_DONE:
                    logger.warning(
                        "rank %d ended with code %d after the last step", rank.rank, code
                    )
                self._dismiss(rank, EXIT_DONE)
        elif verdict:
            verdict = replace(verdict, evidence=counted if out_of_memory else "")
            # These exit codes mean something only to the agent.
            if code in (EXIT_PEER_GONE, EXIT_MENDED, EXIT_OUTVOTED):
                rank.code = EXIT_FAILED
            self._reached = max(self._reached, verdict.step)
            if code != EXIT_PEER_GONE:  # the rank has logged its own message
                logger.warning("rank %d: %s in step %d", rank.rank, verdict.why, progress.step)
            self.group.report(*self._round.key, verdict)

    def _report_of(self, rank: int | None, step: int, why: str = "") -> MembershipFailure:
        return MembershipFailure(self.group.name, rank, step, why, time.time())

    # --- zygote ------------------------------------------------------------------------------

    def _replace_zygote(self) -> None:
        self._selector.unregister(self._zygote.socket)
        code = self._zygote.end()
        logger.warning(
            "the process from which this node forks its ranks ended with code %d, and its forks "
            "with it; starting another", code,
        )  # fmt: skip
        self._zygote = Zygote.start(self.page)
        self._selector.register(self._zygote.socket, selectors.EVENT_READ, "zygote")
        self._request_facts()
        self._ending.clear()
        self._drop_reserve()
        for rank in self._kept.values():
            self._detach(rank)
        for rank in list(self._ranks.values()):
            if rank.process:
                by = f" by {signal.Signals(-code).name}" if code < 0 else ""
                self._on_exit(rank, EXIT_FAILED, f"its zygote was ended{by}")

    def _request_facts(self) -> None:
        program = self.program
        self._send_zygote({"describe": [program.package, program.ranks, *program.arguments]})

    def _send_zygote(
        self, message: Mapping[str, Any], descriptors: list[int] | None = None
    ) -> None:
        with suppress(OSError):  # the zygote has died, which the selector will report
            socket.send_fds(self._zygote.socket, [json.dumps(message).encode()], descriptors or [])


def _listen() -> tuple[socket.socket, str]:
    """Returns a listening socket for child processes, and the path by which they connect. Programs
    received over the socket run as this user, so the socket must have no name that other users
    could find: its file is removed at once, and only this user can open the path under /proc."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tempfile.TemporaryDirectory(prefix="perdure-") as folder:
        short = os.open(folder, os.O_PATH | os.O_CLOEXEC)  # the path of a socket may have 107 bytes
        path = f"/proc/self/fd/{short}/agent"
        listener.bind(path)
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        os.close(short)
    listener.listen(64)
    return listener, f"/proc/{os.getpid()}/fd/{descriptor}"
