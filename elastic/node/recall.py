"""Ranks that outlive a failure of others: the agent recalls them, and they train on in place.

[Note: recall] A process that is forked anew has no CUDA context, no compiled code, and nothing in
its allocator. So a rank whose peers have failed keeps its process. Its agent sends it, over a
socket that it was forked with, what the next generation is. A thread aborts the process groups,
so that the main thread gets an error where it waits for others, or will. It unwinds out of its
attempt by `Recalled`, lets go of all that belonged to it, says that it is ready, and begins the
next attempt from the first line, as a process that was just forked would. Nothing interrupts it
elsewhere: an exception between any two lines would leave behind what no `with` puts right.

A rank can be recalled once it has done a step (`able`): a generation that fails before is followed
by one of new processes, and so is a rank that is not ready within READY_SECONDS, or is stuck.

A node whose ranks can be recalled keeps one process in reserve. It is no rank yet: it has done once
what is slow the first time, and waits for its generation as if it had been recalled. It becomes the
next rank that has no process.

    agent → rank   {"generation": "ROUND.GENERATION", "env": {…}}, with the descriptors of the job
                   {"stop": true}: its round is over; the next generation follows
    rank → agent   {"able": true or false}, {"lost": true}, {"ready": "ROUND.GENERATION"};
                   {"stuck": true}: it waits in a collective that nothing ends;
                   {"waits": true} of a process in reserve
"""

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic.node.zygote import MAX_MESSAGE, RECALL, RankProgram
from elastic.process import outlive, plain

logger = logging.getLogger(__name__)

READY_SECONDS = 10.0
"""After which a rank that was recalled and is not ready is forked anew: it may be in a kernel that
never ends."""
SETTLED_SECONDS = 1.0
"""After its first step, whose followers need the cores: what makes the next recovery faster is
started then."""
ABORT_SECONDS = 0.2
"""How often what an attempt waits for is ended, until it is over."""
STUCK_SECONDS, IDLE = 2.0, 0.1
"""A wait for other processes ends when all connections are shut. One that has not after so long
never will, if its thread uses less than this share of a core: with gloo that was seen in 5 of 220
faults, and a store that was killed has clients that go on calling it."""
WAITS = (
    "/torch/distributed/",
    *(str(Path(__file__).parents[1] / name) for name in ("world.py", "group", "node/exchange.py")),
)
"""Parts of the paths of files whose functions wait for other processes."""
LOST_SECONDS = 1.5
"""A rank that has lost a peer waits so long for others to say whose failure it was: the lease of a
node ends before."""
WORD_SECONDS = 60.0
"""A rank that has lost a peer, and hears nothing of its agent for so long, ends."""


class Recalled(BaseException):
    """This attempt is over, and its process goes on with another. No `Exception`: nobody who
    handles errors is to handle it."""


class Recall:
    """The rank's end. Made in the main thread.

    Args:
        agent: the socket; None: nobody recalls this process.
    """

    def __init__(self, agent: socket.socket | None) -> None:
        self._agent = agent
        self._news = threading.Condition()
        self._next: tuple[str, dict[str, str]] | None = None
        self._called = self._armed = self._gone = self._aborting = False
        self.allowed = False
        """The program would be recalled, and there is somebody who might."""
        self.able = False
        """The agent knows that this process can be recalled."""
        self._able_since = 0.0
        self.stop: Callable[[], None] = lambda: None
        """Called from another thread when this process is recalled, to end what waits for others
        besides process groups."""
        self._before = set(_connections())
        if agent is not None:
            threading.Thread(target=self._listen, name="perdure-recall", daemon=True).start()

    @classmethod
    def from_environment(cls) -> "Recall":
        """The one of this process."""
        descriptor = os.environ.get(RECALL)
        return cls(socket.socket(fileno=int(descriptor)) if descriptor else None)

    def allow(self) -> None:
        """The program would be recalled. Before it joins a process group."""
        if self._agent is not None:
            self.allowed = True
            # Else NCCL's watchdog ends the process when it finds that a peer is gone.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")

    def enable(self) -> None:
        """Say that this process can be recalled from now on, if it would be: a step is done."""
        if self.allowed:
            self.able, self._able_since = True, time.monotonic()
            self._tell({"able": True})

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """In it the process groups are aborted when this process is recalled."""
        self._armed = True
        try:
            self.check()
            yield
            if self.able:  # what is left to do is to leave
                self.able = False
                self._tell({"able": False})
        finally:
            with self._news:  # the thread may be aborting; what comes next makes all of it anew
                self._armed = False
                self._news.notify_all()
                self._news.wait_for(lambda: not self._aborting)

    def check(self) -> None:
        """Raise `Recalled` if this attempt is to end. Before what was received is used: an aborted
        NCCL collective leaves garbage, and no error."""
        if self._called:
            raise Recalled

    @property
    def settled(self) -> bool:
        """Whether this process can be recalled, and has trained for a moment."""
        return self.able and time.monotonic() > self._able_since + SETTLED_SECONDS

    @property
    def called(self) -> bool:
        """Whether this attempt is to end."""
        return self._called

    def recalls(self, error: Exception, lost_peer: bool) -> bool:
        """Whether an error is to end this attempt, and not this process.

        Args:
            error: by which an attempt ends.
            lost_peer: it only says that another rank is gone.
        """
        if not self._called and self.able and lost_peer:
            logger.warning(
                "a peer is gone, this process stays: %s", plain(error).partition("\n")[0]
            )
            self._tell({"lost": True})
            self._called = True
        self._armed = self._armed and not self._called
        return self._called

    def abort(self) -> None:
        """Abort the process groups, and whatever else this process was connected to over the
        network since it began. From any thread."""
        abort_groups()
        for name, connection in _connections().items():
            if name not in self._before:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def wait(self, seconds: float | None = WORD_SECONDS) -> bool:
        """Wait for the next generation, say that this process is ready for it, and take its
        environment; False if there is none within so long (None: no limit)."""
        if seconds is None:
            self._tell({"waits": True})
        with self._news:
            self._news.wait_for(lambda: self._next is not None or self._gone, seconds)
            if self._next is None:
                return False
            generation, environment = self._next
            self._next, self._called, self.able = None, False, False
        os.environ.clear()
        os.environ.update(environment)
        self._tell({"ready": generation})
        return True

    def _listen(self) -> None:
        agent = self._agent
        while agent is not None:
            try:
                data, descriptors, _, _ = socket.recv_fds(agent, MAX_MESSAGE, 8)
            except OSError:
                data, descriptors = b"", []
            with self._news:
                if not data:  # the agent is gone, and this process in a moment
                    self._gone = True
                    self._news.notify_all()
                    return
                message = json.loads(data)
                if "env" in message:
                    job, *streams = descriptors
                    for target, stream in enumerate(streams):
                        os.dup2(stream, target)
                    outlive()
                    environment = {**RankProgram.unpack(job).environment, **message["env"]}
                    self._next = message["generation"], environment
                    for descriptor in descriptors:
                        os.close(descriptor)
                self._called, self._aborting = True, self._armed
                self._news.notify_all()
            if self._aborting:
                try:
                    self._abort_attempt()
                finally:
                    with self._news:
                        self._aborting = False
                        self._news.notify_all()

    def _abort_attempt(self) -> None:
        """End what the attempt waits for until it is over: it may be about to connect to others."""
        over, began, stuck, used = False, time.monotonic(), False, _main_thread_seconds()
        while not over:
            self.stop()
            self.abort()
            with self._news:
                over = self._news.wait_for(lambda: not self._armed, ABORT_SECONDS)
            passed = time.monotonic() - began
            if passed > STUCK_SECONDS and not (over or stuck):
                stuck = _main_thread_seconds() - used < IDLE * passed and _waits_for_others()
                if stuck:
                    self._tell({"stuck": True})
                began, used = time.monotonic(), _main_thread_seconds()

    def _tell(self, message: dict[str, object]) -> None:
        if self._agent is not None:
            with suppress(OSError):
                self._agent.send(json.dumps(message).encode())


def _main_thread_seconds() -> float:
    """Processor time that the main thread has used."""
    return time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident or 0))


def _waits_for_others() -> bool:
    """Whether the main thread is in a collective, or on its way to a process group."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in WAITS):
            return True
        frame = frame.f_back
    return False


def abort_groups() -> None:
    """Have the NCCL communicators of this process end what they do; gloo has no such call."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized():
        return
    with suppress(RuntimeError):
        distributed_c10d._get_default_group()._get_backend(torch.device("cuda"))
        distributed_c10d._abort_process_group()


def _connections() -> dict[str, socket.socket]:
    """TCP connections of this process, by their name in /proc."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            name = os.readlink(path)
            if not name.startswith("socket:"):
                continue
            one = socket.socket(fileno=os.dup(int(path.name)))
            listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            internet = one.family in (socket.AF_INET, socket.AF_INET6)
            if internet and one.type == socket.SOCK_STREAM and not listens:
                found[name] = one
    return found
