"""The stand-in: the process that torchrun starts in place of each rank. The training process itself
is forked by the zygote (zygote.py), at the start and after every failure. Meanwhile torchrun sees a
worker that keeps running. This module imports nothing heavy.

[Note: script] If the ranks run a user's program, its call of `elastic.join` turns the process that
torchrun started into a stand-in. The zygote forks another process, which runs the same program from
its first line as `__main__`; there `join` returns. So code before `join` runs in both processes.
`python -m elastic.job PROGRAM` becomes a stand-in before it reads the program."""

import atexit
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from elastic.exits import EXIT_DONE, EXIT_FAILED, EXIT_PEER_GONE, handled_signals
from elastic.node.progress import Pulse
from elastic.node.zygote import MAX_MESSAGE, RECALL, ZygoteProgram
from elastic.process import die_with_parent, plain_text, unbuffer_output

NODE_SOCKET = "PERDURE_NODE"
"""Environment variable: path of the Unix socket of the node's agent."""


def stand_in(entry: str, prepare_program: str, arguments: list[str]) -> NoReturn:
    """Have this node's agent run a program as this rank, and exit with the code that the agent
    sends when the rank is done. The arguments are fields of `ZygoteProgram`."""
    die_with_parent()
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent.connect(os.environ[NODE_SOCKET])

    def notify(number: int, _: FrameType | None) -> None:
        with suppress(OSError):  # the agent has ended, or has sent the exit code
            agent.send(json.dumps({"notice": signal.Signals(number).name}).encode())

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the agent too, which handles it
    for number in handled_signals() - {signal.SIGINT}:
        signal.signal(number, notify)
    job = ZygoteProgram(entry, prepare_program, arguments, dict(os.environ), os.getcwd())
    socket.send_fds(agent, [b'{"run": true}'], [job.pack(), 0, 1, 2])
    try:
        data = agent.recv(MAX_MESSAGE)
    except ConnectionResetError:  # the agent was killed
        data = b""
    sys.stdout.flush()  # os._exit drops buffered output
    os._exit(json.loads(data)["code"] if data else 1)


PREPARED = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor")
"""Modules that torch imports on first use. The zygote imports them once, for all its forks."""


def is_stand_in() -> bool:
    """Whether torchrun has started this process in place of a rank: it has an agent, but is no fork
    of the zygote."""
    return NODE_SOCKET in os.environ and "RANK" in os.environ and RECALL not in os.environ


def this_program() -> list[str]:
    """Returns the command line of this process after `python`. Raises RuntimeError if the program
    has no file that another process could run."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec:
        return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    if not path:
        raise RuntimeError(
            "elastic.join() starts this program again in another process, but it has no file to "
            "start (as with `python -c`): put it into a file"
        )
    return [path, *sys.argv[1:]]


def stand_in_for(program: list[str]) -> NoReturn:
    """Have the agent run a user's program as this rank, and exit with the program's exit code."""
    stand_in(f"{__name__}:run_program", f"{__name__}:prepare_program", program)


def prepare_program(_: tuple[str, ...]) -> None:
    """Import modules that training loops use, see `ZygoteProgram.prepare`."""
    for module in PREPARED:
        importlib.import_module(module)


def run_program(program: list[str]) -> NoReturn:
    from elastic.world import leave_world

    unbuffer_output()  # as torchrun starts programs with `python -u`
    # Otherwise every fork would continue the zygote's random numbers.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    code = _run(program)
    atexit._run_exitfuncs()  # forks of the zygote end by os._exit, which skips exit functions
    leave_world(code)


def execute(program: list[str]) -> None:
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


def _run(program: list[str]) -> int:
    from elastic.world import is_lost_peer, read_environment

    try:
        execute(program)
        return EXIT_DONE
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or EXIT_DONE
        print(leaving.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type = type(error)  # as the interpreter does, for functions that run at exit
        line = plain_text(error).partition("\n")[0]
        # The environment is read now: a reserve process has become a rank since it began.
        Pulse.from_environment().fail(f"{type(error).__name__}: {line}")
        if isinstance(error, RuntimeError) and is_lost_peer(error):
            print(f"rank {read_environment()[0]}: a peer is gone: {line}", file=sys.stderr)
            return EXIT_PEER_GONE
        sys.excepthook(type(error), error, error.__traceback__)
    return EXIT_FAILED
