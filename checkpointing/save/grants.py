"""Which blocks of a save are handed to which writer, and how many writers write at once."""

import math
import os
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from checkpointing.format.layout import BLOCK_BYTES, TensorFile
from checkpointing.save.messages import BlockRange, Key, Position
from checkpointing.storage.filesystems import is_shared

UNIT_BLOCKS = 16
"""Blocks that a writer takes at a time where a file may be written in parts."""


@dataclass
class FileLayout:
    """The tensor files of a plan."""

    files: Sequence[TensorFile] = ()
    owners: Mapping[str, int] = field(default_factory=dict)
    """The node that writes each file."""

    def __post_init__(self) -> None:
        self._numbers = {file.name: number for number, file in enumerate(self.files)}

    @property
    def end(self) -> Position:
        """After all bytes."""
        return len(self.files), 0

    def place(self, blocks: BlockRange) -> Position:
        """Up to where must be staged for these blocks to be written."""
        number = self._numbers[blocks.file]
        return number, min(blocks.stop * BLOCK_BYTES, self.files[number].size)

    def by_node(self, in_parts: bool) -> dict[int, deque[BlockRange]]:
        """All blocks, in units of work, by the node that writes them.

        Args:
            in_parts: whether several writers may write to one file.
        """
        units: dict[int, deque[BlockRange]] = {}
        for file in self.files:
            blocks = math.ceil(file.size / BLOCK_BYTES)
            some = UNIT_BLOCKS if in_parts else blocks
            units.setdefault(self.owners[file.name], deque()).extend(
                BlockRange(file.name, first, min(first + some, blocks))
                for first in range(0, blocks, some)
            )
        return units


class Grants:
    """Blocks that are out at writers; also those of saves that were given up, until their writers
    have stopped.

    Args:
        nodes: how many there are.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes, self._turn = nodes, 0
        self._out: dict[tuple[Key, BlockRange], int] = {}

    def __len__(self) -> int:
        return len(self._out)

    def choose(self, nodes: Sequence[int]) -> int:
        """The node with the fewest units out; among those in turn."""
        busy = Counter(self._out.values())
        self._turn += 1
        return min(nodes, key=lambda node: (busy[node], (node - self._turn) % self._nodes))

    def give(self, key: Key, blocks: BlockRange, node: int) -> None:
        """Blocks go out."""
        self._out[key, blocks] = node

    def take_back(self, key: Key, blocks: BlockRange) -> bool:
        """They are not out any more; whether they were."""
        return self._out.pop((key, blocks), None) is not None

    def forget(self, node: int) -> None:
        """A node's writer is gone."""
        self._out = {what: where for what, where in self._out.items() if where != node}

    def writes(self, key: Key) -> bool:
        """Whether blocks of a save are out."""
        return any(of == key for of, _ in self._out)

    @property
    def files(self) -> dict[int, str]:
        """By node, a file that it writes."""
        return {node: blocks.file for (_, blocks), node in self._out.items()}


def default_writers(kind: str) -> int:
    """How many writers a kind of storage takes gladly: 16 on Lustre and on object stores (""),
    which are made for many clients; 4 on other shared filesystems; on a local disk as many as there
    are cores to serve it, up to 4."""
    if kind in ("lustre", ""):
        return 16
    if is_shared(kind):
        return 4
    return min(4, len(os.sched_getaffinity(0)))
