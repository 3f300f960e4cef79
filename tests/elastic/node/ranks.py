"""What ranks do in tests of a node. It needs no torch, which takes a zygote two seconds."""

import fcntl
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from elastic.node.recall import NodeRecall, NodeRecallSocket

GENERATION = "PERDURE_GENERATION"
"""As elastic/world.py has it, which imports torch."""


def hold(arguments):
    """Hold a lock, and so much memory that dying takes a while; say whether it was free."""
    file = os.fdopen(os.open(arguments[0], os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        said = "free"
    except BlockingIOError:
        said = "taken"
    memory = b"1" * (200 << 20)
    file.write(f"{said}\n")
    file.flush()
    signal.pause()
    del memory


def stay(arguments):
    """Say who works in which generation, and stay for the next; "stubborn" lets go of nothing."""
    recall = NodeRecallSocket.from_environment()
    recall.allow()
    while True:
        with suppress(NodeRecall), recall.attempt():
            recall.enable()
            with Path(arguments[0]).open("a") as file:
                file.write(f"{os.getpid()} {os.environ[GENERATION]}\n")
            while True:
                time.sleep(0.01)
                if arguments[1:] != ["stubborn"]:
                    recall.check()
        recall.wait()
