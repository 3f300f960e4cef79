"""The agent's end of its zygote (zygote.py): the process, the socket, and the page of memory that
the agent shares with all that is forked from it."""

import json
import os
import re
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass

from elastic.node.progress import ProgressPage
from elastic.node.zygote import command, fork

PRELOAD = "PERDURE_PRELOAD"
"""Environment variable: modules that training processes need, separated by commas."""
HARMLESS = re.compile("/dev/(null|zero|full|u?random|tty.*|console|ptmx|pts/.*|shm/.*)")
"""Devices that a fork may share."""


@dataclass
class Zygote:
    """A running one."""

    page: ProgressPage
    pid: int
    socket: socket.socket

    @staticmethod
    def start(page: ProgressPage) -> "Zygote":
        """Start one, in a thread that lives as long as it is to; it begins to import at once. A
        fork of this process where that will do: it has imported torch already."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptors = theirs.fileno(), page.descriptor
        pid = fork(*descriptors) if _can_fork() else _start_new(*descriptors)
        theirs.close()
        preload = os.environ.get(PRELOAD, "").split(",")
        ours.send(json.dumps({"preload": ["torch", *filter(None, preload)]}).encode())
        return Zygote(page, pid, ours)

    def end(self) -> int:
        """Kill it, and all that it has forked; its exit code."""
        if not self.pid:
            return 0
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        self.socket.close()
        return os.waitstatus_to_exitcode(status)


def _can_fork() -> bool:
    """Whether a fork of this process is as good as a new one: it has no thread besides this and
    those of numpy, which can be forked, and no GPU, the use of which cannot."""
    if "torch" not in sys.modules or threading.active_count() > 1:
        return False
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one of this listing
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return not any(file.startswith("/dev/") and not HARMLESS.match(file) for file in files)


def _start_new(descriptor: int, page: int) -> int:
    return os.posix_spawn(
        sys.executable,
        *command(descriptor, os.getpid()),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, descriptor, descriptor),  # to be inherited
            (os.POSIX_SPAWN_DUP2, page, page),
        ],
        setpgroup=0,  # Ctrl-C is for the agent
    )


_early: list[Zygote] = []


def start_early() -> None:
    """Start the zygote of the agent that this process is going to be, unless that was done: before
    there are threads, and while this process still imports what an agent needs. torchrun makes the
    agent's handler itself, so there is nobody to give it to."""
    if not _early:
        _early.append(Zygote.start(ProgressPage.make()))


def first_zygote() -> Zygote:
    """The one that was started early, or a new one."""
    return _early.pop() if _early else Zygote.start(ProgressPage.make())
