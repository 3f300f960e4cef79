"""Recall of ranks: after a failure of another rank, ranks keep their processes and train on.

[Note: recall] A newly forked process has no CUDA context, no compiled code, and an empty allocator.
So a rank whose peers have failed keeps its process. Its agent sends it the next generation over a
socket. A thread of the rank aborts the process groups, so that the main thread gets an error in its
current or next wait for other ranks. The exception `NodeRecall` ends the attempt of the main
thread, which frees the attempt's state, reports that it is ready, and begins the next attempt from
the first line, as a new process would. Only waits are interrupted: an exception between any two
lines could leave state that no `with` cleans up.

A rank can be recalled once it has completed a step (`able`). If a generation fails earlier, the
next generation has new processes. A rank that is stuck, or not ready within READY_SECONDS, gets a
new process.

A node whose ranks can be recalled keeps one process in reserve, which has imported and initialised
what is slow. It waits for a generation as a recalled rank does, and then becomes a rank that has no
process.

    agent → rank   {"generation": "ROUND.GENERATION", "env": {…}}, with the program's descriptors:
                   continue as a rank of this generation
                   {"stop": true}: the rank's round is over; its next generation follows
    rank → agent   {"able": true or false}: whether the rank can be recalled from now on
                   {"lost": true}: the rank lost a peer
                   {"ready": "ROUND.GENERATION"}: the rank begins its attempt in this generation
                   {"stuck": true}: the rank waits in a collective that nothing ends
                   {"waits": true}: the process in reserve waits for a generation
"""

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic.exits import SIGNALS
from elastic.node.zygote import MAX_MESSAGE, RECALL, ZygoteProgram
from elastic.process import plain_text, tolerate_lost_output

logger = logging.getLogger(__name__)

READY_SECONDS = 10.0
"""Seconds that a recalled rank has to become ready; after that it gets a new process."""
SETTLED_SECONDS = 1.0
"""Seconds after a process's first step before its node prepares for the next recovery, as the first
steps need the cores."""
ABORT_SECONDS = 0.2
STUCK_SECONDS, IDLE_SHARE = 2.0, 0.1
"""A wait for other ranks normally ends when its connections are shut down. If it still lasts after
STUCK_SECONDS, and the thread uses less than IDLE_SHARE of a core, it never ends. With gloo this
happened in 5 of 220 faults. A thread that keeps calling a dead store uses more of a core."""
WAITS = (
    "/torch/distributed/",
    *(str(Path(__file__).parents[1] / name) for name in ("world.py", "group", "node/exchange.py")),
)
"""Parts of the paths of files whose functions wait for other processes."""
LOST_SECONDS = 1.5
"""Seconds after a rank lost a peer for which its agent waits for another node's report of the
peer's failure. The lease of a dead node ends earlier, so its loss is reported in time."""
NEXT_GENERATION_SECONDS = 60.0
"""Seconds that a rank which lost a peer waits for the next generation; after that it ends."""


class NodeRecall(BaseException):
    """Ends an attempt whose process continues with the next attempt. Not an `Exception`, so that no
    handler catches it."""


class NodeRecallSocket:
    """A rank's end of the socket over which its agent recalls it; without a socket to an `agent`
    this process cannot be recalled. Created in the main thread."""

    def __init__(self, agent: socket.socket | None) -> None:
        self._agent = agent
        self._news = threading.Condition()
        self._next: tuple[str, dict[str, str]] | None = None
        self.called = self._armed = self._agent_gone = self._aborting = False
        self.allowed = False
        self.able = False
        """Whether this process has reported to the agent that it can be recalled."""
        self._able_since = 0.0
        self.stop: Callable[[], None] = lambda: None
        """Called from another thread at a recall, to end waits that are not in process groups."""
        self._before = set(_connections())  # later connections belong to attempts; see `abort`
        if agent is not None:
            threading.Thread(target=self._listen, name="perdure-recall", daemon=True).start()

    @classmethod
    def from_environment(cls) -> "NodeRecallSocket":
        descriptor = os.environ.get(RECALL)
        return cls(socket.socket(fileno=int(descriptor)) if descriptor else None)

    def allow(self) -> None:
        if self._agent is not None:
            self.allowed = True
            # Otherwise NCCL's watchdog ends the process when a peer is gone.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")

    def enable(self) -> None:
        """Report to the agent that this process can be recalled from now on."""
        if self.allowed:
            self.able, self._able_since = True, time.monotonic()
            self._send({"able": True})

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Context of an attempt: while the block runs, a recall aborts the process groups."""
        self._armed = True
        try:
            self.check()
            yield
            if self.able:  # the work is done: a process that only has to exit is not recalled
                self.able = False
                self._send({"able": False})
        finally:
            # Wait for a running abort, as the code that follows creates all groups anew.
            with self._news:
                self._armed = False
                self._news.notify_all()
                self._news.wait_for(lambda: not self._aborting)

    def check(self) -> None:
        """Raise `NodeRecall` if this attempt has been recalled. Called before received values
        are used: an aborted NCCL collective leaves garbage and raises no error."""
        if self.called:
            raise NodeRecall

    @property
    def settled(self) -> bool:
        """Whether this process could be recalled for SETTLED_SECONDS. Then it is time to prepare
        for the next recovery."""
        return self.able and time.monotonic() > self._able_since + SETTLED_SECONDS

    def recalls(self, error: Exception, lost_peer: bool) -> bool:
        """Handle `error`, raised in this attempt. With `lost_peer`, which says that another rank is
        gone and nothing else is wrong, report that to the agent, and count this attempt as
        recalled. Returns whether the process goes on to another attempt."""
        if not self.called and self.able and lost_peer:
            logger.warning(
                "a peer is gone, this process stays: %s", plain_text(error).partition("\n")[0]
            )
            self._send({"lost": True})
            self.called = True
        self._armed = self._armed and not self.called
        return self.called

    def abort(self) -> None:
        """Abort the process groups, and shut down all network connections that this process has
        opened since `NodeRecallSocket` was created. Called from any thread."""
        abort_groups()
        for name, connection in _connections().items():
            if name not in self._before:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def wait(self, seconds: float | None = NEXT_GENERATION_SECONDS) -> bool:
        """Wait for the next generation, replace the environment by that of the generation, and
        report that this process is ready. Returns False if no generation comes within `seconds`
        (None: no limit), or the agent has ended."""
        if seconds is None:
            self._send({"waits": True})
        with self._news:
            self._news.wait_for(lambda: self._next is not None or self._agent_gone, seconds)
            if self._next is None:
                return False
            generation, environment = self._next
            self._next, self.called, self.able = None, False, False
        os.environ.clear()  # no variable of the previous generation may stay
        os.environ.update(environment)
        self._send({"ready": generation})
        return True

    def _listen(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # another thread waits for them
        agent = self._agent
        while agent is not None:
            try:
                data, descriptors, _, _ = socket.recv_fds(agent, MAX_MESSAGE, 8)
            except OSError:
                data, descriptors = b"", []
            with self._news:
                if not data:  # the agent is gone, and the kernel will kill this process
                    self._agent_gone = True
                    self._news.notify_all()
                    return
                message = json.loads(data)
                # A message without "env" is a stop: the next generation comes in a later message.
                if "env" in message:
                    job, *streams = descriptors
                    for target, stream in enumerate(streams):
                        os.dup2(stream, target)
                    tolerate_lost_output()
                    environment = {**ZygoteProgram.unpack(job).environment, **message["env"]}
                    self._next = message["generation"], environment
                    for descriptor in descriptors:
                        os.close(descriptor)
                self.called, self._aborting = True, self._armed
                self._news.notify_all()
            if self._aborting:
                try:
                    self._abort_attempt()
                finally:
                    with self._news:
                        self._aborting = False
                        self._news.notify_all()

    def _abort_attempt(self) -> None:
        over, began, stuck, used = False, time.monotonic(), False, _main_thread_seconds()
        while not over:  # repeatedly, as the attempt may open further connections
            self.stop()
            self.abort()
            with self._news:
                over = self._news.wait_for(lambda: not self._armed, ABORT_SECONDS)
            passed = time.monotonic() - began
            if passed > STUCK_SECONDS and not (over or stuck):
                stuck = _main_thread_seconds() - used < IDLE_SHARE * passed and _waits_for_others()
                if stuck:
                    self._send({"stuck": True})
                began, used = time.monotonic(), _main_thread_seconds()

    def _send(self, message: dict[str, object]) -> None:
        if self._agent is not None:
            with suppress(OSError):
                self._agent.send(json.dumps(message).encode())


def _main_thread_seconds() -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))


def _waits_for_others() -> bool:
    """Whether the main thread is in a collective, or joins a process group."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in WAITS):
            return True
        frame = frame.f_back
    return False


def abort_groups() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized():
        return
    with suppress(RuntimeError):
        distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
        distributed_c10d._abort_process_group()


def _connections() -> dict[str, socket.socket]:
    """Returns the TCP connections of this process: target of the link in /proc/self/fd, such as
    "socket:[4711]" → socket object of a duplicate descriptor."""
    connections = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            name = os.readlink(path)
            if not name.startswith("socket:"):
                continue
            # dup(), because a socket object closes its descriptor
            connection = socket.socket(fileno=os.dup(int(path.name)))
            listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if internet and connection.type == socket.SOCK_STREAM and not listens:
                connections[name] = connection
    return connections
