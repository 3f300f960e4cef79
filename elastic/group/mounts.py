"""Whether folders answer. One on a network filesystem whose server is gone never does, and whoever
asks for it waits as long; so it is looked at in a thread (health.py) before anybody needs it."""

import os
import stat
from pathlib import Path

HARMLESS = (FileNotFoundError, NotADirectoryError, PermissionError)
"""Errors that say nothing of a mount: whoever needs the path tells of them."""


def look_at(path: Path) -> None:
    """List a folder, or read a byte of a file; of a path that is not there its nearest parent.

    Raises:
        OSError: the filesystem does not do it.
    """
    try:
        while True:
            try:
                mode = os.stat(path).st_mode
                break
            except FileNotFoundError:
                if path == path.parent:
                    return
                path = path.parent
        if stat.S_ISDIR(mode):
            with os.scandir(path) as entries:
                next(entries, None)
        else:
            with open(path, "rb") as file:
                file.read(1)
    except HARMLESS:
        return


def mount_of(path: Path, root: Path = Path("/")) -> str:
    """Where a path is mounted from, for people: ` (nfs4 server:/export on /mnt)`; empty if it is on
    the filesystem of `/`, or that is not known. Asks no filesystem but /proc.

    Args:
        path: absolute.
        root: folder with `proc` in it; `/` but in tests.
    """
    try:
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    depth, shown = 0, ""
    for line in lines.splitlines():
        before, _, after = line.partition(" - ")
        fields, filesystem = before.split(), after.split()
        if len(fields) < 5 or len(filesystem) < 2:
            continue
        point = Path(fields[4].replace("\\040", " "))
        if point in (path, *path.parents) and len(point.parts) > max(depth, 1):
            depth, shown = len(point.parts), f" ({filesystem[0]} {filesystem[1]} on {point})"
    return shown
