"""The writer of a node without its process: what its ranks, the coordinator and the loss of either
make of each other in orders that real processes seldom meet."""

from pathlib import Path
from typing import Any

from checkpointing.errors import StorageError
from checkpointing.options import CheckpointOptions
from checkpointing.writer import Setup, Writer


class Peer:
    """Stands for a connection: keeps all that is sent."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def send(self, message: tuple[Any, ...]) -> None:
        self.told.append(message)


def node_1(directory: Path) -> tuple[Writer, dict[int, Peer], Peer]:
    """The writer of ranks 1 and 2, on another node than rank 0; the ranks and the coordinator."""
    nodes = (0,), (1, 2)
    writer = Writer(Setup(0, 1, nodes, str(directory), "run", CheckpointOptions(), "", "", 0, b""))
    ranks, uplink = {1: Peer(), 2: Peer()}, Peer()
    writer._ranks |= ranks
    writer._joined(uplink)
    return writer, ranks, uplink


def test_ranks_that_close_are_let_go_when_the_coordinator_is_lost(tmp_path):
    writer, ranks, uplink = node_1(tmp_path)
    writer._on_rank(1, ("close", False))
    writer._lost_coordinator()
    assert not ranks[1].told, "one of them may still save"
    writer._joined(uplink)
    writer._on_rank(2, ("close", False))
    assert uplink.told == [("close",)]
    assert not ranks[1].told, "the coordinator may need this node"
    writer._lost_coordinator()
    assert ranks[1].told == ranks[2].told == [("closed",)]


def test_a_refusal_is_of_one_attempt(tmp_path):
    writer, ranks, _ = node_1(tmp_path)
    writer._on_rank(1, ("plan", "digest", "plan"))
    writer._made("plan", "digest", StorageError("full"))
    assert ranks[1].told == [("refused", "full")]
    writer._on_rank(1, ("plan", "digest", "plan"))
    writer._on_rank(2, ("plan", "digest", None))  # it had not asked before
    assert not ranks[2].told
