"""Processes beside the ranks, which live on when ranks are started again.

They belong to the node's agent, or without one to the process that asks. A companion ends when its
standard input does, and dies with whom it belongs to.
"""

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from elastic.node.standin import NODE_SOCKET
from elastic.process import search_path

logger = logging.getLogger(__name__)

FAREWELL_SECONDS, HURRIED_SECONDS = 30.0, 5.0
"""How long companions may take to end; with little time left, such as after a notice."""


class Companion:
    """One of them. To be made in a thread that lives as long as it is to.

    Args:
        words: module, as after `python -m`, and its arguments.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "elastic.process", *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path())},
            stdin=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for whom it belongs to
        )

    @property
    def lives(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def let_go(self) -> None:
        """Tell it that there will be no more work."""
        if self._process.stdin:
            self._process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Wait for its end; after `seconds` it is killed. That it has failed is told: who is killed
        cannot tell that itself."""
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


def part_with(companions: Iterable[Companion], seconds: float) -> None:
    """End some of them, within `seconds` together."""
    companions = list(companions)
    for companion in companions:
        companion.let_go()
    deadline = time.monotonic() + seconds
    for companion in companions:
        companion.wait(max(0.0, deadline - time.monotonic()))


def accompany(words: Sequence[str]) -> Callable[[], None]:
    """Have a companion run beside this process, if it does not run already. Does not wait for it.

    Args:
        words: as for `Companion`.

    Returns:
        What to call when this process has no more work for it.
    """
    if NODE_SOCKET not in os.environ:
        companion = Companion(words)
        return lambda: part_with([companion], FAREWELL_SECONDS)
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.connect(os.environ[NODE_SOCKET])
        agent.send(json.dumps({"companion": list(words)}).encode())
    return lambda: None
