"""Whom a half-written directory or a piece of shared memory belongs to, and whether that process
still lives.

An owner is a process, as <host>-<machine>-<pid>-<start>: start is the process's start time, machine
stands for this boot of this machine and its process namespace. Together they tell, on the machine
itself, whether the owner still lives, also after its process id was given to another.
"""

import hashlib
import os
import re
import socket
from collections.abc import Collection
from functools import cache
from pathlib import Path

_OWNER = re.compile(r".*-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)")


def owner() -> str:
    """This process, in the form that names of directories carry."""
    host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())
    return f"{host}-{machine()}-{os.getpid()}-{_start_time(os.getpid())}"


def is_alive(name: str) -> bool | None:
    """Whether the owner at the end of a name lives; None if it is on another machine, or there is
    no owner in the name."""
    match = _OWNER.fullmatch(name)
    if match is None or match["machine"] != machine():
        return None
    return _start_time(int(match["pid"])) == int(match["start"])


def is_owner(name: str, owners: Collection[str]) -> bool:
    """Whether one of these is the owner at the end of a name."""
    return any(bool(_OWNER.fullmatch(one)) and name.endswith(f"-{one}") for one in owners)


@cache
def machine() -> str:
    """Stands for this boot of this machine and this process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        boot, namespace = "", ""
    return hashlib.sha256(f"{socket.gethostname()} {boot} {namespace}".encode()).hexdigest()[:8]


def _start_time(pid: int) -> int | None:
    """Start of a living process, in clock ticks since boot (0 where /proc does not tell); None if
    there is no such process."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return None
    except PermissionError:  # it lives, under another user
        pass
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = status.rpartition(")")[2].split()  # the name before it may hold spaces
    return None if fields[0] == "Z" else int(fields[19])
