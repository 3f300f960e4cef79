"""Room for slots: how much memory, and disk, is free."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from checkpointing.errors import StorageError

RESERVE = 256 << 20
"""Bytes of memory that are left to others when slots are made."""


def no_memory(nbytes: int) -> StorageError:
    """What is told where not even one slot fits."""
    return StorageError(
        f"checkpoints are copied to memory before they are written, which takes "
        f"{nbytes / 1e9:.2f} GB on this node; only {available_bytes() / 1e9:.2f} GB are free (and "
        f"{RESERVE / 1e9:.2f} GB of that stay free). Use more nodes, a node with more memory, or "
        f"checkpoint.slot_directory"
    )


def fitting_on_disk(nbytes: int, disk: str) -> int:
    """How many slots fit on the disk of a directory: at least one."""
    status = os.statvfs(disk)
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        raise StorageError(
            f"slot_directory: {disk} has {free / 1e9:.2f} GB free; a copy of this node's part "
            f"of a checkpoint takes {nbytes / 1e9:.2f} GB. Make room, or name another directory"
        )
    return free // max(1, nbytes)


def fitting(nbytes: int, shared: Path | None, wanted: int) -> int:
    """How many slots of `nbytes` fit into memory, and into the filesystem `shared`. Fewer than
    `wanted` only if no more memory comes free."""

    def free() -> int:
        free = available_bytes() - RESERVE
        if shared:
            try:
                status = os.statvfs(shared)
            except OSError:
                return 0
            free = min(free, status.f_bavail * status.f_frsize)
        return free

    return max(0, settled(free, wanted * nbytes) // max(1, nbytes))


SETTLE_SECONDS = 1.0
_GROWTH = 16 << 20


def settled(free: Callable[[], int], enough: int) -> int:
    """Free memory, in bytes, once it is enough or has not grown for SETTLE_SECONDS. What the ranks
    of a run before held comes back late: the kernel takes seconds for memory that GPUs knew."""
    now = most = free()
    since = time.monotonic()
    while now < enough and time.monotonic() - since < SETTLE_SECONDS:
        time.sleep(0.05)
        now = free()
        if now >= most + _GROWTH:
            most, since = now, time.monotonic()
    return now


def available_bytes() -> int:
    """Memory that this process may still take: what the machine has, and what its control groups
    allow (page cache counts as free)."""
    free = [_meminfo("MemAvailable")]
    try:
        _, _, group = Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":", 2)
        path = Path("/sys/fs/cgroup") / group.lstrip("/")
        for level in (path, *path.parents):
            if (level / "memory.max").exists():
                limit = (level / "memory.max").read_text().strip()
                if limit != "max":
                    statistics = (level / "memory.stat").read_text().split()
                    cache = int(statistics[statistics.index("inactive_file") + 1])
                    used = int((level / "memory.current").read_text()) - cache
                    free.append(int(limit) - used)
    except (OSError, ValueError):  # no control groups, or of the first version
        pass
    return min(free)


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise StorageError(f"/proc/meminfo has no {key}")
