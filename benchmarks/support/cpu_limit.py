"""A limit on the CPU time of processes: a control group of their own (version 1; needs root)."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.support.memory_limit import NoLimitError

PERIOD = 10_000
"""Microseconds over which the kernel counts: short beside a step, so that no step is spared."""


@contextmanager
def cpu_limit(cores: float) -> Iterator[Path]:
    """Limit what the processes of a new group take of the CPU together. Yields its directory; a
    process joins by writing its id to `cgroup.procs` there.

    Args:
        cores: such as 0.33, a third of one.

    Raises:
        NoLimitError: the CPU controller of cgroup v1 is not there, or not for us.
    """
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    mine = [line.split(":", 2)[2] for line in groups if "cpu" in line.split(":")[1].split(",")]
    if not mine:
        raise NoLimitError("there is no CPU controller of cgroup v1")
    path = Path("/sys/fs/cgroup/cpu", mine[0].lstrip("/"), f"perdure-{uuid.uuid4().hex[:12]}")
    try:
        path.mkdir()
        (path / "cpu.cfs_period_us").write_text(str(PERIOD))
        (path / "cpu.cfs_quota_us").write_text(str(round(cores * PERIOD)))
    except OSError as error:
        raise NoLimitError(f"{path}: {error.strerror}") from error
    try:
        yield path
    finally:
        deadline = time.monotonic() + 5
        while (path / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)  # processes that were waited for leave the group a moment later
        path.rmdir()
