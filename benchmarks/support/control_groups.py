"""Limits on the memory and the CPU time of processes: control groups of their own (version 1; needs
root)."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

PERIOD = 10_000
"""Microseconds over which the kernel counts: short beside a step, so that no step is spared."""


class NoLimitError(Exception):
    """Why there can be no limit here, in one line."""


@contextmanager
def memory_limit(nbytes: int) -> Iterator["MemoryGroup"]:
    """Limit what processes started in the group take of memory together, page cache included.

    Raises:
        NoLimitError: the memory controller of cgroup v1 is not there, or not for us.
    """
    with _group("memory", {"memory.limit_in_bytes": nbytes}) as path:
        yield MemoryGroup(path)


@contextmanager
def cpu_limit(cores: float) -> Iterator[Path]:
    """Limit what the processes of a new group take of the CPU together. Yields its directory; a
    process joins by writing its id to `cgroup.procs` there.

    Args:
        cores: such as 0.33, a third of one.

    Raises:
        NoLimitError: the CPU controller of cgroup v1 is not there, or not for us.
    """
    quota = {"cpu.cfs_period_us": PERIOD, "cpu.cfs_quota_us": round(cores * PERIOD)}
    with _group("cpu", quota) as path:
        yield path


@contextmanager
def _group(controller: str, limits: Mapping[str, int]) -> Iterator[Path]:
    """Make a control group below this process's, with limits by file; removed in the end."""
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    mine = [line.split(":", 2)[2] for line in groups if controller in line.split(":")[1].split(",")]
    if not mine:
        raise NoLimitError(f"there is no {controller} controller of cgroup v1")
    name = f"perdure-{uuid.uuid4().hex[:12]}"
    path = Path("/sys/fs/cgroup", controller, mine[0].lstrip("/"), name)
    try:
        path.mkdir()
        for file, limit in limits.items():
            (path / file).write_text(str(limit))
    except OSError as error:
        raise NoLimitError(f"{path}: {error.strerror}") from error
    try:
        yield path
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
