"""Bytes of slots on their way between nodes: a socket of their own, never a process group."""

import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import (
    Client,
    Connection,
    answer_challenge,
    deliver_challenge,
)
from typing import Any

from checkpointing.errors import StorageError, explain
from checkpointing.slots import SlotFiles, open_left

logger = logging.getLogger(__name__)

Slot = int | tuple[int, tuple[int, int]] | str
"""Number of a slot in use; with the key of the save that it must hold; or the folder of one that a
dead run left."""
Pull = Callable[[int, Slot, str, Sequence[tuple[int, int]]], Iterator[bytes]]
"""(node, slot, file, ranges) → the bytes of each range; see Puller."""

WELCOME_SECONDS = 20
"""How long somebody who has connected may take to say who they are."""


def call(address: tuple[str, int], secret: bytes) -> Connection:
    """Connect to the writer of another node.

    Raises:
        EOFError, OSError: it is not there.
    """
    connection = Client(address, authkey=secret)
    send_at_once(connection)
    return connection


def welcome(connection: Connection, secret: bytes) -> Any:
    """Let in who knows the secret; returns the first message, by which they say who they are.

    Raises:
        Exception: it is a stranger, or left, or said nothing for too long.
    """
    send_at_once(connection)
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        # Connections know no timeout, so the system is asked for one.
        same.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", WELCOME_SECONDS, 0)
        )
        deliver_challenge(connection, secret)
        answer_challenge(connection, secret)
        message = connection.recv()
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    return message


def send_at_once(connection: Connection) -> None:
    """Have TCP not hold small messages back until what went before is acknowledged, for which the
    other side takes 40 ms (Nagle's algorithm with delayed acknowledgements)."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        if same.family != socket.AF_UNIX:
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class Puller:
    """Fetches bytes of slots from the writers of other nodes; each thread over connections of its
    own, so that none takes what another asked for.

    Args:
        addresses: of the writers, by node.
        secret: of the job.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], secret: bytes) -> None:
        self._addresses, self._secret = addresses, secret
        self._of_thread = threading.local()

    @property
    def _connections(self) -> dict[int, Connection]:
        """Of this thread, by node."""
        connections: dict[int, Connection] = self._of_thread.__dict__.setdefault("by_node", {})
        return connections

    def __call__(
        self, node: int, slot: Slot, file: str, ranges: Sequence[tuple[int, int]]
    ) -> Iterator[bytes]:
        """The bytes of each range.

        Args:
            node: whose slot.
            slot: which one.
            file: in the slot.
            ranges: start and stop of each.

        Raises:
            StorageError: that node does not send them.
        """
        used_before = node in self._connections
        left = list(ranges)
        while left:
            try:
                connection = self._connection(node)
                connection.send((slot, file, left))
                while left:
                    data = connection.recv_bytes()
                    del left[0]
                    yield data
            except (EOFError, OSError) as error:
                self._connections.pop(node, None)
                if not used_before:
                    raise StorageError(
                        f"node {node} does not send its part of {file}: {explain(error)}"
                    ) from error
                used_before = False  # its process may be another one by now

    def _connection(self, node: int) -> Connection:
        if node not in self._connections:
            connection = self._connections[node] = call(self._addresses[node], self._secret)
            connection.send(("pull", node))
        return self._connections[node]


def serve_pulls(
    connection: Connection, slots: Callable[[int, tuple[int, int] | None], SlotFiles], run: str
) -> None:
    """Answer a Puller until it leaves.

    Args:
        connection: of the Puller.
        slots: a slot in use, by number and the save that it must hold (None: any); raises EOFError
            if it holds another.
        run: token of the run.

    Raises:
        EOFError, OSError: it has left, or asked for what is not there.
    """
    left: dict[str, SlotFiles] = {}
    while True:
        slot, file, ranges = connection.recv()
        if isinstance(slot, str):
            path = f"{slot}/{file}"
            if path not in left:
                try:
                    left[path] = open_left(slot, file, run)
                except StorageError as error:
                    logger.warning("refused to another node: %s", error)
                    raise EOFError from error
            image = memoryview(left[path].maps[file])
        else:
            number, key = slot if isinstance(slot, tuple) else (slot, None)
            image = memoryview(slots(number, key).maps[file])
        for start, stop in ranges:
            connection.send_bytes(image[start:stop])
