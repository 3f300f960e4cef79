"""The one thread of a writer that holds all state: it does what others put into its inbox."""

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
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

NICENESS = 10
"""Priority of threads that move bytes: training goes first where there are fewer cores than
threads."""


class Loop:
    """What is put into it is done in the thread of `run`, one after the other."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._aside = ThreadPoolExecutor(4, "aside", give_way)

    def put(self, work: Callable[[], None]) -> None:
        """Have work() done. From any thread."""
        self._inbox.put(work)

    def call_at(self, moment: float, work: Callable[[], None]) -> None:
        """Have work() done at a moment of time.monotonic(). From the loop's thread."""
        heapq.heappush(self._timers, (moment, next(self._numbers), work))

    def later(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Do work() in another thread, then done(its result or its exception) in this one."""

        def run() -> None:
            result: T | Exception
            try:
                result = work()
            except Exception as error:
                result = error
            self.put(lambda: done(result))

        self._aside.submit(run)

    def run(self) -> None:
        """For ever. An error that nobody foresaw ends the process, whatever its other threads do:
        its ranks start it again."""
        try:
            while True:
                self.turn()
        except Exception:
            logger.exception("the checkpoint writer process ends")
            os._exit(1)

    def turn(self, seconds: float | None = None) -> None:
        """Do what is due, then wait for one thing more, until the next timer or for so long."""
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        waits = [seconds] if seconds is not None else []
        waits += [self._timers[0][0] - now] if self._timers else []
        with suppress(queue.Empty):
            self._inbox.get(timeout=min(waits, default=None))()


def give_way() -> None:
    """Lower the priority of this thread (on Linux each thread has its own)."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
