"""A limit on the memory of processes: a control group of their own (version 1; needs root)."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class NoLimitError(Exception):
    """Why memory cannot be limited here, in one line."""


@contextmanager
def memory_limit(nbytes: int) -> Iterator["MemoryGroup"]:
    """Limit what processes started in the group take of memory together, page cache included.

    Raises:
        NoLimitError: the memory controller of cgroup v1 is not there, or not for us.
    """
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    mine = [line.split(":", 2)[2] for line in groups if "memory" in line.split(":")[1].split(",")]
    if not mine:
        raise NoLimitError("there is no memory controller of cgroup v1")
    path = Path("/sys/fs/cgroup/memory", mine[0].lstrip("/"), f"perdure-{os.getpid()}")
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(nbytes))
    except OSError as error:
        raise NoLimitError(f"{path}: {error.strerror}") from error
    try:
        yield MemoryGroup(path)
    finally:
        deadline = time.monotonic() + 5
        while (path / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)  # processes that were waited for leave the group a moment later
        path.rmdir()


class MemoryGroup:
    """A control group; see `memory_limit`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def command(self, command: Sequence[str]) -> list[str]:
        """`command`, so that it runs in the group."""
        enter = 'echo $$ > "$0" && exec "$@"'
        return ["sh", "-c", enter, str(self._path / "cgroup.procs"), *command]

    @property
    def anonymous(self) -> int:
        """Bytes that are held now and are no cache of a file: what cannot be given back."""
        counters = (self._path / "memory.stat").read_text().split()
        return int(counters[counters.index("rss") + 1])

    @property
    def most(self) -> int:
        """Bytes that were held at most, page cache included."""
        return int((self._path / "memory.max_usage_in_bytes").read_text())
