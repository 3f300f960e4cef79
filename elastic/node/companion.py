"""Companions: processes beside the ranks that continue when ranks are restarted.

A companion belongs to the node's agent, or, without an agent, to the process that started it. It
dies with its owner, and ends by itself when its standard input is closed.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from elastic.exits import SIGNALS
from elastic.node.standin import NODE_SOCKET
from elastic.process import search_path

logger = logging.getLogger(__name__)

FAREWELL_SECONDS, HURRIED_SECONDS = 30.0, 5.0
"""Seconds that companions have to end: normally; after a notice, with little time left."""


def until_input_ends(niceness: int) -> threading.Event:
    """Make this process a companion; returns an event that is set once its standard input ends.
    `niceness`: for `os.nice`."""
    # Slurm signals companions too; they go on, as their owner may still send them work.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.nice(niceness)
    ended = threading.Event()

    def wait() -> None:
        while os.read(0, 1):
            pass
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    return ended


class NodeCompanion:
    """A companion process. Created in a thread that lives as long as the companion is needed.
    `words`: module, as after `python -m`, and its arguments."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "elastic.process", *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path())},
            stdin=subprocess.PIPE,
            process_group=0,  # a group of its own, so that Ctrl-C reaches only the owner
        )

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Wait for the process to end, and kill it after `seconds`. Logs its failure, as a killed
        process cannot do that itself."""
        try:
            if code := self._process.wait(seconds):
                logger.warning(
                    "%s ended with exit code %d; what it had not done is lost",
                    " ".join(self._words), code,
                )  # fmt: skip
        except subprocess.TimeoutExpired:
            logger.warning(
                "%s did not end in time, and was killed; what it had not done is lost",
                " ".join(self._words),
            )
            self._process.kill()
            self._process.wait()


def end_companions(companions: Iterable[NodeCompanion], seconds: float) -> None:
    companions = list(companions)
    # Close all inputs first, so that each companion has the whole time for its last work.
    for companion in companions:
        companion.close()
    deadline = time.monotonic() + seconds
    for companion in companions:
        companion.wait(max(0.0, deadline - time.monotonic()))


def accompany(words: Sequence[str]) -> Callable[[], None]:
    """Start a companion, unless the node's agent has started it already. Does not wait until the
    companion runs. Returns a function to call when this process has no more work for it. `words`:
    module, as after `python -m`, and its arguments."""
    if NODE_SOCKET not in os.environ:
        companion = NodeCompanion(words)
        return lambda: end_companions([companion], FAREWELL_SECONDS)
    # Without its agent this process cannot live on, so a failed connection is no problem.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.connect(os.environ[NODE_SOCKET])
        agent.send(json.dumps({"companion": list(words)}).encode())
    return lambda: None
