"""What torchrun starts in each rank when the agent is ours: it stands in for the training process,
which the node's agent forks from a warm one (agent.py), again after every failure, while torchrun
sees a worker that runs. Imports nothing heavy."""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from elastic.exits import heeded
from elastic.node.zygote import MAX_MESSAGE, RankProgram
from elastic.process import die_with_parent

NODE_SOCKET = "PERDURE_NODE"
"""Environment variable: path of the Unix socket of the node's agent."""


def stand_in(entry: str, prepare: str, arguments: list[str]) -> NoReturn:
    """Have the node's agent run a job as this rank, and leave with the exit code that it gets in
    the end. For the arguments see `RankProgram`."""
    die_with_parent()
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent.connect(os.environ[NODE_SOCKET])

    def told(number: int, _: FrameType | None) -> None:
        with suppress(OSError):  # it has left, or said how to leave
            agent.send(json.dumps({"notice": signal.Signals(number).name}).encode())

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the agent as well
    for number in heeded() - {signal.SIGINT}:
        signal.signal(number, told)
    job = RankProgram(entry, prepare, arguments, dict(os.environ), os.getcwd())
    socket.send_fds(agent, [b'{"run": true}'], [job.pack(), 0, 1, 2])
    try:
        data = agent.recv(MAX_MESSAGE)
    except ConnectionResetError:  # the agent was killed
        data = b""
    sys.stdout.flush()
    os._exit(json.loads(data)["code"] if data else 1)
