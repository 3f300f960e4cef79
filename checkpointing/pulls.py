"""Bytes of slots on their way between nodes: a socket of their own, never a process group."""

from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Client, Connection

from checkpointing.errors import StorageError
from checkpointing.slots import SlotFiles, open_left

Pull = Callable[[int, int | str, str, Sequence[tuple[int, int]]], Iterator[bytes]]
"""(node, slot, file, ranges) → the bytes of each range; see Puller."""


class Puller:
    """Fetches bytes of slots from the writers of other nodes.

    Args:
        addresses: of the writers, by node.
        secret: of the job.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], secret: bytes) -> None:
        self._addresses, self._secret = addresses, secret
        self._connections: dict[int, Connection] = {}

    def __call__(
        self, node: int, slot: int | str, file: str, ranges: Sequence[tuple[int, int]]
    ) -> Iterator[bytes]:
        """The bytes of each range.

        Args:
            node: whose slot.
            slot: number of a slot in use, or folder of one that a dead run left.
            file: in the slot.
            ranges: start and stop of each.

        Raises:
            StorageError: that node does not send them.
        """
        try:
            if node not in self._connections:
                self._connections[node] = Client(self._addresses[node], authkey=self._secret)
                self._connections[node].send(("pull", node))
            connection = self._connections[node]
            connection.send((slot, file, ranges))
            for _ in ranges:
                yield connection.recv_bytes()
        except (EOFError, OSError) as error:
            self._connections.pop(node, None)
            raise StorageError(f"node {node} does not send its part of {file}: {error}") from error


def serve_pulls(connection: Connection, slots: Callable[[int], SlotFiles]) -> None:
    """Answer a Puller until it leaves.

    Args:
        connection: of the Puller.
        slots: the slots in use, by number.

    Raises:
        EOFError, OSError: it has left.
    """
    left: dict[str, SlotFiles] = {}
    while True:
        slot, file, ranges = connection.recv()
        if isinstance(slot, str):
            path = f"{slot}/{file}"
            if path not in left:
                left[path] = open_left(slot, file)
            image = memoryview(left[path].maps[file])
        else:
            image = memoryview(slots(slot).maps[file])
        for start, stop in ranges:
            connection.send_bytes(image[start:stop])
