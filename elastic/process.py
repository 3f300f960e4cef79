"""Processes that end when the one that started them does, and what they may use.

`python -m elastic.process MODULE ARGUMENT …` runs a module like `python -m`, in such a process.
"""

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

from elastic.output import outlive


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the one that started it dies (on Linux).

    `parent` is its process id, where that is known: it may have died before this call.

    torchrun puts each rank into a session of its own, so a launcher that is killed with SIGKILL
    leaves ranks behind that train on, and write where the restarted run writes.
    """
    if sys.platform != "linux":
        return
    parent = parent or os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died just before
        os._exit(1)


def set_name(name: str) -> None:
    """Show this process under a name, besides its command line, in /proc, `ps -o comm` and
    `top`."""
    if sys.platform == "linux":
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, f"perdure-{name}".encode())


def search_path() -> list[str]:
    """Where a process that this one starts is to look for modules: where this one does, but for the
    working directory that `python -m` puts first. A folder there that is called like a module of
    ours, of torch's or of Python's would be taken for it. Goes with `python -P`."""
    found = list(sys.path)
    if not sys.flags.safe_path and found[:1] in ([""], [os.getcwd()]):
        del found[0]
    home = str(Path(__file__).parents[1])
    return [*filter(None, found), *([] if home in found else [home])]


def boot_id() -> str:
    """Names this boot of this machine; "" where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def usable_cores() -> int:
    """Cores that this process may run on, which Slurm and cpusets make fewer than the machine
    has."""
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    die_with_parent()
    outlive()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
