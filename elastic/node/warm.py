"""The agent's end of its zygote (zygote.py): the process, the socket, and the page of memory that
the agent shares with all that is forked from it."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass

from elastic.node.progress import ProgressPage
from elastic.process import search_path

PRELOAD = "PERDURE_PRELOAD"
"""Environment variable: modules that training processes need, separated by commas."""


@dataclass
class Zygote:
    """A running one."""

    page: ProgressPage
    process: "subprocess.Popen[bytes]"
    socket: socket.socket

    @staticmethod
    def start(page: ProgressPage) -> "Zygote":
        """Start one, in a thread that lives as long as it is to; it begins to import at once."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "elastic.node.zygote",
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path())},
            pass_fds=[theirs.fileno(), page.descriptor],
            stdin=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C is for the agent
        )
        theirs.close()
        preload = os.environ.get(PRELOAD, "").split(",")
        ours.send(json.dumps({"preload": ["torch", *filter(None, preload)]}).encode())
        return Zygote(page, process, ours)

    def end(self) -> None:
        """Kill it, and all that it has forked."""
        self.process.kill()
        self.process.wait()
        self.socket.close()


_early: list[Zygote] = []


def start_early() -> None:
    """Start the zygote of the agent that this process is going to be, while it still imports what
    an agent needs. torchrun makes the agent's handler itself, so there is nobody to give it to."""
    _early.append(Zygote.start(ProgressPage.make()))


def first_zygote() -> Zygote:
    """The one that was started early, or a new one."""
    return _early.pop() if _early else Zygote.start(ProgressPage.make())
