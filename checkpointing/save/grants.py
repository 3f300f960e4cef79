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
class Layout:
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


class WriterLimit:
    """How many units may be out at once.

    With `auto` it goes up and down by a quarter (at least one), and measures the bandwidth of each
    number over a few receipts. Had the storage room for all, bandwidth would change as much as the
    number did: as long as it changes at least half as much, more writers are tried, else fewer.
    """

    def __init__(self, setting: int | str | None, default: int) -> None:
        self.value = setting if isinstance(setting, int) else default
        self._auto = setting == "auto"
        self._since: float | None = None
        self._bytes = self._count = 0
        self._before: tuple[int, float] | None = None
        """The number before this one, and its bandwidth."""

    def starved(self) -> None:
        """There is no work for some writers, which says nothing about the storage: measure anew."""
        self._since = None

    def wrote(self, nbytes: int, now: float) -> None:
        """A receipt came in."""
        if not self._auto:
            return
        if self._since is None:
            self._since, self._bytes, self._count = now, 0, 0
            return
        self._bytes += nbytes
        self._count += 1
        if self._count < max(4, 2 * self.value) or now == self._since:
            return
        bandwidth = self._bytes / (now - self._since)
        more = True
        if self._before and self._before[0] != self.value:
            number, before = self._before
            more = (bandwidth / before - 1) / (self.value / number - 1) >= 0.5
        self._before, self._since = (self.value, bandwidth), None
        step = max(1, self.value // 4)
        self.value = max(1, self.value + step if more else self.value - step)


def default_writers(kind: str) -> int:
    """How many writers a kind of storage takes gladly: 16 on Lustre and on object stores (""),
    which are made for many clients; 4 on other shared filesystems; on a local disk as many as there
    are cores to serve it, up to 4."""
    if kind in ("lustre", ""):
        return 16
    if is_shared(kind):
        return 4
    return min(4, len(os.sched_getaffinity(0)))
