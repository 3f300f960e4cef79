"""Threads of a writer process: the loop that holds its state, and the listeners."""

import heapq
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Listener  # noqa: TID251  # read by a Channel
from typing import TypeVar

from checkpointing.errors import explain
from checkpointing.save.channel import SaveChannel, SaveChannelError, welcome
from checkpointing.save.messages import SaveCallerGreeting

logger = logging.getLogger(__name__)
T = TypeVar("T")

NICENESS = 10
"""Nice value of threads that move bytes, so that training goes first if cores are scarce."""


class WriterEventLoop:
    """Runs submitted functions one after the other, in the thread of `run`."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._aside = ThreadPoolExecutor(4, "aside", give_way)

    def put(self, work: Callable[[], None]) -> None:
        """Run work() in the loop's thread. Callable from any thread."""
        self._inbox.put(work)

    def call_at(self, moment: float, work: Callable[[], None]) -> None:
        """Run work() at `moment` of time.monotonic(). Callable from the loop's thread only."""
        # the number breaks ties, as functions cannot be compared
        heapq.heappush(self._timers, (moment, next(self._numbers), work))

    def later(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Run work() in another thread, then done(its result or exception) in the loop's."""

        def run() -> None:
            result: T | Exception
            try:
                result = work()
            except Exception as error:
                result = error
            self.put(lambda: done(result))

        start_thread(lambda: self._aside.submit(run))

    def run(self) -> None:
        """Run for ever. An unexpected exception ends the process, which a rank restarts."""
        try:
            while True:
                self.turn()
        except Exception:
            logger.exception("the checkpoint writer process ends")
            os._exit(1)  # sys.exit would wait for threads that may hang in storage

    def turn(self, seconds: float | None = None) -> None:
        """Run the timers that are due, then one function, if it arrives within `seconds` and before
        the next timer."""
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        waits = [seconds] if seconds is not None else []
        waits += [self._timers[0][0] - now] if self._timers else []
        with suppress(queue.Empty):
            self._inbox.get(timeout=min(waits, default=None))()


def start_thread(start: Callable[[], object]) -> None:
    """Call `start`, which starts a thread. If the system refuses the thread, end the process with
    a line that says why: work that never runs would let ranks wait for their deadlines. A rank
    restarts the process."""
    try:
        start()
    except RuntimeError as error:
        logger.error(  # without the traceback, which would hide what to do
            "the checkpoint writer process ends: %s; raise the limit of processes (ulimit -u, or "
            "pids.max of the cgroup) or of memory (ulimit -v)", explain(error)
        )  # fmt: skip
        os._exit(1)  # sys.exit would end only this thread


def give_way() -> None:
    """Lower the priority of the calling thread (Linux has one per thread)."""
    thread = threading.get_native_id()
    # Only root may raise it again, where the run was started at a lower one.
    niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
    os.setpriority(os.PRIO_PROCESS, thread, niceness)


WELCOME_SECONDS = 20
"""Longest time in seconds that a caller may take to authenticate."""


class WriterConnectionAcceptor:
    """Accepts connections to a node's writer; rejects peers without the run's secret.

    Args:
        serve: called with each authenticated caller, each in a separate thread; raises EOFError or
            OSError when the caller is gone, and SaveChannelError if a message was tampered with.
    """

    def __init__(
        self, node: int, secret: bytes, serve: Callable[[SaveCallerGreeting, SaveChannel], None]
    ) -> None:
        self._node, self._secret, self._serve = node, secret, serve
        self._refused = 0

    def listen(self, listener: Listener) -> None:
        """Accept connections in the background. Each has a separate thread, so that a silent caller
        delays no other."""

        def accept() -> None:
            while True:
                try:
                    connection = listener.accept()
                except OSError as error:  # the caller has disconnected already
                    logger.debug("lost a connection: %s", explain(error))
                    continue
                who = connection, listener.last_accepted
                start_thread(threading.Thread(target=self._admit, args=who, daemon=True).start)

        start_thread(threading.Thread(target=accept, daemon=True).start)

    def _admit(self, connection: Connection, peer: object) -> None:
        caller: SaveCallerGreeting
        try:
            channel, caller = welcome(connection, self._secret, WELCOME_SECONDS)
            # The caller got a forged address for the node that it intends to reach.
            if caller.kind == "pull" and caller.number != self._node:
                raise SaveChannelError(f"it calls for node {caller.number}")
        except Exception as error:  # a stranger, or a caller that has disconnected or is silent
            self._refuse(peer, error)
            connection.close()
            return
        try:
            self._serve(caller, channel)
        except SaveChannelError as error:
            self._refuse(peer, error)
        except (EOFError, OSError):
            pass

    def _refuse(self, peer: object, error: Exception) -> None:
        # Usual: a rank or a node that dies ends its connections.
        if isinstance(error, EOFError | ConnectionError):
            logger.debug("lost a connection: %s", explain(error))
            return
        self._refused += 1
        # Later refusals are logged for debugging only: there may be many.
        level = logging.WARNING if self._refused == 1 else logging.DEBUG
        logger.log(
            level, "the checkpoint writer process of node %d refused a connection from %s: %s; "
            "later refusals are logged at level DEBUG",
            self._node, peer or "this machine", explain(error),
        )  # fmt: skip


def send(channel: SaveChannel, message: object) -> None:
    """Send a message. If the receiver is gone, nothing is raised here: the thread that reads from
    the channel notices the loss."""
    with suppress(OSError):
        channel.send(message)
