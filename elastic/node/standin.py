"""What torchrun starts in each rank when the agent is ours: it stands in for the training process,
which the node's agent forks from a warm one (agent.py), again after every failure, while torchrun
sees a worker that runs. Imports nothing heavy."""

import atexit
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from elastic.exits import EXIT_DONE, EXIT_FAILED, EXIT_PEER_GONE, heeded
from elastic.node.progress import PROGRESS, Pulse
from elastic.node.zygote import MAX_MESSAGE, RankProgram
from elastic.process import die_with_parent, plain

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


PREPARED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
"""What torch imports when a loop first asks for it: once here rather than in each fork."""


def stands_in() -> bool:
    """Whether torchrun started this process, and an agent of ours has another do its work."""
    return NODE_SOCKET in os.environ and "RANK" in os.environ and PROGRESS not in os.environ


def this_program() -> list[str]:
    """What this process runs, as after `python`: a path, or -m and a module; then arguments.

    Raises:
        RuntimeError: it has no file that another process could run.
    """
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec:
        return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    if not path:
        raise RuntimeError("elastic.join() has the program started anew: put it into a file")
    return [path, *sys.argv[1:]]


def stand_in_for(program: list[str]) -> NoReturn:
    """Have the node's agent run a program as this rank; leave with the exit code that it gets."""
    stand_in(f"{__name__}:run", f"{__name__}:prepare", program)


def prepare(_: tuple[str, ...]) -> None:
    """Import what a loop is going to need. In the zygote; see `RankProgram.prepare`."""
    for module in PREPARED:
        importlib.import_module(module)


def run(program: list[str]) -> NoReturn:
    """Be a rank that runs a program, to its end. In a fork of the zygote."""
    from elastic.world import leave_world

    for stream in (sys.stdout, sys.stderr):  # torchrun starts programs by `python -u`
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(write_through=True)
    if numpy := sys.modules.get("numpy"):  # its generator is that of the zygote, in every fork
        numpy.random.seed()
    code = _ended(program)
    atexit._run_exitfuncs()  # the zygote's forks do not end as an interpreter does
    leave_world(code)


def execute(program: list[str]) -> None:
    """Run a program as `python` would, in this process."""
    first, *arguments = program
    module = first == "-m"
    if module:
        first, *arguments = arguments
    sys.argv = [first, *arguments]
    if "PYTHONSAFEPATH" not in os.environ:
        sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.abspath(first)))
    if module:
        runpy.run_module(first, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")


def _ended(program: list[str]) -> int:
    """Run a program; its exit code. The agent is told why it failed."""
    from elastic.world import is_lost_peer, read_environment

    pulse = Pulse.from_environment()
    try:
        execute(program)
        return EXIT_DONE
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or EXIT_DONE
        print(leaving.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type = type(error)  # as the interpreter leaves it to what runs at exit
        line = plain(error).partition("\n")[0]
        pulse.fail(f"{type(error).__name__}: {line}")
        if isinstance(error, RuntimeError) and is_lost_peer(error):
            print(f"rank {read_environment()[0]}: a peer is gone: {line}", file=sys.stderr)
            return EXIT_PEER_GONE
        sys.excepthook(type(error), error, error.__traceback__)
    return EXIT_FAILED
