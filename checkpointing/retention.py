"""Which directories stay: committed steps, half-written ones of the dead, deleted ones.

[Note: names]
  step-00001000                 committed, if its commit record is valid
  step-00001000.tmp-<owner>     being written by <owner>
  step-00001000.trash-<owner>   being deleted by <owner>
An owner is a process, as <host>-<machine>-<pid>-<start>: start is the process's start time, machine
stands for this boot of this machine and its process namespace. Together they tell, on the machine
itself, whether the owner still lives, also after its process id was given to another. Nothing with
any other name is ever touched.
"""

import hashlib
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

from checkpointing.errors import DamagedCheckpoint, StorageError
from checkpointing.steps import list_steps, open_step

logger = logging.getLogger(__name__)

FOREIGN_SECONDS = 3600
"""A half-written directory of another machine, whose processes cannot be seen from here, counts as
left behind when nothing in it has changed for so long."""

_ASIDE = re.compile(
    r"step-\d{8,}\.(?:tmp|trash)-.*-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-(?P<start>\d+)"
)


def tmp_path(final: Path) -> Path:
    """Where this process writes the step that is going to be `final`."""
    return final.with_name(f"{final.name}.tmp-{owner()}")


def delete(path: Path) -> None:
    """Delete a step such that it is never seen half deleted: renamed first. On rank 0."""
    aside = path.with_name(f"{path.name}.trash-{owner()}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def prune(directory: Path, keep: int, damaged: Collection[str] = ()) -> None:
    """Delete the steps that need not stay, and what dead processes left behind. On rank 0.

    Args:
        directory: of the checkpoints.
        keep: how many good steps stay, newest first; 0: all.
        damaged: names of steps that are known to be damaged, though their records are good.
    """
    steps = []
    for path in list_steps(directory):
        try:
            open_step(path)
            steps.append((path, path.name not in damaged))
        except DamagedCheckpoint:
            steps.append((path, False))
        except StorageError as error:  # no reason to delete it
            logger.warning("%s", error)
    for path in to_delete(steps, keep):
        try:
            delete(path)
        except OSError as error:
            logger.warning("could not delete an old checkpoint: %s", error)
    collect(directory)


def to_delete(steps: Sequence[tuple[Path, bool]], keep: int) -> list[Path]:
    """Which steps go: good ones beyond the newest `keep`, and damaged ones once a good one stays.

    Args:
        steps: (path, whether it is good), newest first.
        keep: 0 keeps everything.
    """
    good = [path for path, is_good in steps if is_good]
    if not keep or not good:
        return []
    stay = set(good[:keep])
    return [path for path, _ in steps if path not in stay]


def collect(directory: Path) -> None:
    """Remove half-written and half-deleted directories whose owners are dead. On rank 0."""
    if not directory.is_dir():
        return
    for path in directory.iterdir():
        match = _ASIDE.fullmatch(path.name)
        if match and _is_abandoned(path, match["machine"], int(match["pid"]), int(match["start"])):
            logger.info("removing %s, which a dead run left behind", path)
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path, machine: str, pid: int, start: int) -> bool:
    if machine == _machine():
        return _start_time(pid) != start
    try:
        times = [entry.stat().st_mtime for entry in (path, *path.rglob("*"))]
    except OSError:  # it changes at this moment
        return False
    return time.time() - max(times) > FOREIGN_SECONDS


def owner() -> str:
    """This process, in the form that directory names carry."""
    host = re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())
    return f"{host}-{_machine()}-{os.getpid()}-{_start_time(os.getpid())}"


@cache
def _machine() -> str:
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
    except ProcessLookupError:
        return None
    except PermissionError:  # it lives, under another user
        pass
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = status.rpartition(")")[2].split()  # the name before it may hold spaces
    return None if fields[0] == "Z" else int(fields[19])
