"""Whoever connects to a writer: shown in if they know the secret, else out."""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Listener  # noqa: TID251  # read by a Channel

from checkpointing.errors import explain
from checkpointing.save.channel import Channel, StrangerError, welcome
from checkpointing.save.messages import Caller

logger = logging.getLogger(__name__)

WELCOME_SECONDS = 20
"""How long somebody who has connected may take to say who they are."""


class Door:
    """Takes connections to the writer of a node.

    Args:
        node: its number.
        secret: of the run.
        serve: told of each caller in a thread of its own; raises EOFError or OSError when the
            caller is gone.
    """

    def __init__(self, node: int, secret: bytes, serve: Callable[[Caller, Channel], None]) -> None:
        self._node, self._secret, self._serve = node, secret, serve
        self._refused = 0
        """How many strangers there were."""

    def listen(self, listener: Listener) -> None:
        """Take connections, each in a thread of its own: whoever connects and stays silent keeps
        nobody else out."""

        def accept() -> None:
            while True:
                try:
                    connection = listener.accept()
                except OSError as error:  # one who left at once
                    logger.debug("lost a connection: %s", explain(error))
                    continue
                who = connection, listener.last_accepted
                threading.Thread(target=self._admit, args=who, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()

    def _admit(self, connection: Connection, peer: object) -> None:
        caller: Caller
        try:
            channel, caller = welcome(connection, self._secret, WELCOME_SECONDS)
            if caller.kind == "pull" and caller.number != self._node:  # somebody has led it here
                raise StrangerError(f"a call for node {caller.number}")
        except Exception as error:  # a stranger, or one who left or is silent
            self._refuse(peer, error)
            connection.close()
            return
        try:
            self._serve(caller, channel)
        except StrangerError as error:
            self._refuse(peer, error)
        except (EOFError, OSError):
            pass

    def _refuse(self, peer: object, error: Exception) -> None:
        """Told once: whoever has the time may try for ever."""
        if isinstance(error, EOFError | ConnectionError):
            logger.debug("lost a connection: %s", explain(error))
            return
        self._refused += 1
        level = logging.WARNING if self._refused == 1 else logging.DEBUG
        logger.log(
            level, "the checkpoint writer process of node %d refused a connection from %s: %s; it "
            "does so without a word from now on", self._node, peer or "here", explain(error),
        )  # fmt: skip


def send(channel: Channel, message: object) -> None:
    """Send to one who may be gone: who reads from the channel learns of that."""
    with suppress(OSError):
        channel.send(message)
