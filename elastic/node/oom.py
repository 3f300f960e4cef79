"""How often the kernel has killed a process of this container for lack of memory. Linux; 0 where
the kernel does not tell."""

from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def oom_kills() -> int:
    """Processes killed in the cgroup of this one, and in those inside it; on the machine, where
    the cgroup does not count."""
    for path in (_cgroup() / "memory.events", Path("/proc/vmstat")):
        with suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
    return 0


def _cgroup() -> Path:
    """The folder of the cgroup of this process (version 2)."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return CGROUPS / line.removeprefix("0::").strip("/")
    return CGROUPS
