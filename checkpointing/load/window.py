"""Memory that the ranks of a node share while they load."""

import mmap
import os
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.errors import StorageError
from checkpointing.load.read_plan import ALIGNMENT
from checkpointing.storage.folders import is_private

HALF_BYTES = 32 << 20
"""Largest number of bytes that the ranks of a node fill in a round. They synchronise after each
round, so rounds must not be small."""
_FOLDERS = ("/dev/shm", tempfile.gettempdir())


def make_window(ranks: int, wanted: int, least: int) -> tuple[str, int]:
    """Create the file of a window, on one rank of the node. Returns (path for `SharedWindow` on all
    ranks of the node, bytes of an area). Raises StorageError if no folder has room for the file.

    Args:
        ranks: number of ranks of the node.
        wanted: preferred bytes of each rank's area.
        least: smallest usable area, in bytes.
    """
    for folder in _FOLDERS:
        try:
            status = os.statvfs(folder)
            # at most a quarter of the free space, as other processes use it, too
            free = status.f_bavail * status.f_frsize // 4
            area = min(-(-wanted // ALIGNMENT), free // (2 * ranks * ALIGNMENT)) * ALIGNMENT
            if area < least:
                continue
            descriptor, path = tempfile.mkstemp(prefix="perdure_window-", dir=folder)
            try:
                # reserved now, as a full folder would kill ranks by SIGBUS later
                os.posix_fallocate(descriptor, 0, 2 * ranks * area)
            finally:
                os.close(descriptor)
            return path, area
        except OSError:
            continue
    raise StorageError(
        f"ranks of a node share {2 * ranks * least / 1e6:.0f} MB while they load, and there is no "
        f"room for that in {' or '.join(_FOLDERS)}; free some there"
    )


class SharedWindow:
    """Memory that the ranks of a node share while they load, in two halves: ranks fill one half and
    copy from the other. Raises OSError or StorageError if the file is not the one that was created.

    Args:
        path: path of the file, which may be unlinked once all ranks have opened it.
        area: bytes of each rank's area in a half.
        ranks: global ranks of the node.
        group: process group that contains these ranks; it carries one word between them.
    """

    def __init__(
        self, path: str, area: int, ranks: Sequence[int], rank: int, group: dist.ProcessGroup
    ) -> None:
        self.area, self.places, self.place = area, len(ranks), ranks.index(rank)
        self._ranks, self._group = ranks, group
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if not is_private(os.fstat(descriptor)):
                raise StorageError(
                    f"{path} belongs to another user, or others can open it: somebody else has put "
                    "it there; remove it, and start again"
                )
            self._map = mmap.mmap(descriptor, 2 * area * len(ranks))
        finally:
            os.close(descriptor)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self.halves: tuple[Tensor, ...] = whole.tensor_split(2)
        """uint8, shape (places · area,) each."""

    def meet(self, failed: bool) -> bool:
        """Wait for the other ranks of the node; returns whether any rank of the node failed. Called
        on all of them. Raises RuntimeError if a rank is gone."""
        # by way of the first rank, as a collective would need ranks of other nodes, too
        word = torch.tensor([int(failed)])
        first, *others = self._ranks
        if self.place:
            dist.send(word, first, group=self._group)
            dist.recv(word, first, group=self._group)
            return bool(word)
        said = torch.empty_like(word)
        for other in others:
            dist.recv(said, other, group=self._group)
            word |= said
        for other in others:
            dist.send(word, other, group=self._group)
        return bool(word)
