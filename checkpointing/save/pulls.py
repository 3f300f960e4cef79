"""Bytes of slots on their way between nodes: a socket of their own, never a process group."""

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence

from checkpointing.errors import StorageError, explain
from checkpointing.save.channel import SILENT_SECONDS, Channel, call
from checkpointing.save.manifest import open_left
from checkpointing.save.messages import Caller, Fetch, Key, Slot, SlotInUse, SlotLeft
from checkpointing.save.slots import SlotFiles

logger = logging.getLogger(__name__)

BUNDLE_BYTES = 1 << 20
"""Ranges that are smaller together travel as one message: a shard of many tensors is many ranges,
and each message costs a MAC and two calls of the system on either side."""

Pull = Callable[[int, Slot, str, Sequence[tuple[int, int]]], Generator[bytes]]
"""(node, slot, file, ranges) → the bytes of each range; see Puller."""


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
    def _connections(self) -> dict[int, Channel]:
        """Those of this thread, by node."""
        connections: dict[int, Channel] = self._of_thread.__dict__.setdefault("by_node", {})
        return connections

    def __call__(
        self, node: int, slot: Slot, file: str, ranges: Sequence[tuple[int, int]]
    ) -> Generator[bytes]:
        """The bytes of each range. Whoever does not take all of them closes it, and with it the
        connection, where the others are on their way.

        Args:
            node: whose slot.
            slot: which one.
            file: in the slot.
            ranges: start and stop of each.

        Raises:
            StorageError: that node does not send them, or sent nothing for SILENT_SECONDS.
        """
        used_before = node in self._connections
        left = list(ranges)
        while left:
            try:
                connection = self._connection(node)
                connection.send(Fetch(slot, file, left))
                for bundle in bundles(tuple(left)):
                    data, at = connection.recv_bytes(), 0
                    for start, stop in bundle:
                        del left[0]
                        yield data[at : at + stop - start]
                        at += stop - start
            except GeneratorExit:
                self._connections.pop(node).close()
                raise
            except (EOFError, OSError) as error:
                self._connections.pop(node, None)
                if not used_before:
                    raise StorageError(
                        f"node {node} does not send its part of {file}: {explain(error)}"
                    ) from error
                used_before = False  # its process may be another one by now

    def _connection(self, node: int) -> Channel:
        if node not in self._connections:
            connection = self._connections[node] = call(self._addresses[node], self._secret)
            connection.limit(SILENT_SECONDS)
            connection.send(Caller("pull", node))
        return self._connections[node]


def serve_pulls(
    connection: Channel, slots: Callable[[int, Key | None], SlotFiles], run: str
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
        wanted: Fetch = connection.recv()
        file = wanted.file
        match wanted.slot:
            case SlotInUse(number, key):
                files = slots(number, key)
            case SlotLeft(folder):
                path = f"{folder}/{file}"
                if path not in left:
                    try:
                        left[path] = open_left(folder, file, run)
                    except StorageError as error:
                        logger.warning("refused to another node: %s", error)
                        raise EOFError from error
                files = left[path]
        image = memoryview(files.maps[file])
        for first, *more in bundles(wanted.ranges):
            data = image[slice(*first)]
            joined = b"".join([data, *(image[slice(*one)] for one in more)]) if more else data
            connection.send_bytes(joined)


def bundles(ranges: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Ranges by the message that they travel in: in their order, and as many as fit into
    BUNDLE_BYTES, but at least one."""
    bundle: list[tuple[int, int]] = []
    size = 0
    for start, stop in ranges:
        if bundle and size + stop - start > BUNDLE_BYTES:
            yield bundle
            bundle, size = [], 0
        bundle.append((start, stop))
        size += stop - start
    if bundle:
        yield bundle
