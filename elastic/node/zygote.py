"""The zygote: the process of a node that has imported torch, and forks the training processes.

The zygote is a fork of the agent, or `python -m elastic.node.zygote`. It imports the modules that
ranks need, and starts nothing: no threads, no CUDA, no process group. So a training process starts
in milliseconds instead of the seconds that importing torch takes, and the ranks of a node share the
memory of the code.

The agent (agent.py) sends one JSON object per message: `{"preload": [module]}`, `{"describe":
[package, ranks, argument, …]}` (see program.py), `{"spawn": key, "env": {…}}` with the file
descriptors of the fork (program, standard streams, dumps, recall; see `ZygoteProgram`), and
`{"kill": key}`. The zygote answers "describe" by
`{"folders": {…}}` and then `{"facts": {…}}`, and "spawn" by `{"started": key, "pid": …}`. It
reports each ended fork by `{"ended": key, "code": …}`. When the agent ends, so does the zygote, and
with it every process that it has forked."""

import atexit
import gc
import importlib
import json
import os
import re
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from elastic.exits import SIGNALS, handled_signals
from elastic.node.program import read_facts, read_folders
from elastic.node.progress import NodeProgressPage
from elastic.node.vitals import register_dumps
from elastic.process import die_with_parent, search_path, set_name, tolerate_lost_output

MAX_MESSAGE = 1 << 16
RECALL = "PERDURE_RECALL"
"""Environment variable: descriptor of the socket to the agent; see recall.py."""
RESERVE = "PERDURE_RESERVE"
"""Environment variable: set in a reserve process, which waits to become a rank (recall.py)."""


@dataclass(frozen=True)
class ZygoteProgram:
    """The program of a rank, sent by its stand-in (standin.py)."""

    entry: str
    """module:function, called with `arguments`. The process ends when the function returns."""
    prepare: str
    """module:function, called in the zygote with the tuple of `arguments`, to fill caches for its
    forks. The zygote ignores an exception, as the fork raises it again, in the log of its rank."""
    arguments: list[str]
    environment: dict[str, str]
    directory: str

    def pack(self) -> int:
        """Write this program to a file in memory, because messages are limited in length; returns
        the descriptor."""
        descriptor = os.memfd_create("perdure-job")
        with open(os.dup(descriptor), "wb") as file:
            file.write(json.dumps(self.__dict__).encode())
        return descriptor

    @staticmethod
    def unpack(descriptor: int) -> "ZygoteProgram":
        size = os.fstat(descriptor).st_size
        return ZygoteProgram(**json.loads(os.pread(descriptor, size, 0)))


def new_program_arguments(descriptor: int, agent: int) -> tuple[list[str], dict[str, str]]:
    """Returns (arguments, environment) to start a zygote as a new program instead of a fork."""
    arguments = [sys.executable, "-P", "-m", "elastic.node.zygote", f"{descriptor}", f"{agent}"]
    return arguments, {**os.environ, "PYTHONPATH": os.pathsep.join(search_path())}


def fork(descriptor: int, page: int) -> int:
    """Fork this process, the agent. The child becomes the agent's zygote; returns its process id.
    If the agent has used CUDA, the child executes a new program. `descriptor`: socket to the agent.
    `page`: descriptor of the `NodeProgressPage`."""
    sys.stdout.flush()
    sys.stderr.flush()
    agent, path = os.getpid(), search_path()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)  # the agent handles Ctrl-C
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for other in map(int, os.listdir("/proc/self/fd")):
            if other > 2 and other not in (descriptor, page):
                with suppress(OSError):  # listdir() itself had the descriptor open
                    os.close(other)
        if "torch" in sys.modules and sys.modules["torch"].cuda._is_in_bad_fork():
            # torchrun has queried CUDA, so that no fork of this process could use it.
            for inherited in (descriptor, page):
                os.set_inheritable(inherited, True)
            arguments, environment = new_program_arguments(descriptor, agent)
            os.execve(sys.executable, arguments, environment)
        # Exit functions and objects of the agent must not run, or close descriptors, in the fork.
        atexit._clear()
        gc.freeze()
        sys.path[:] = path
        sys.modules["__main__"] = sys.modules[__name__]
        main(descriptor, agent)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def main(descriptor: int, parent: int) -> NoReturn:
    """Serve the agent, process `parent`, over the socket `descriptor` until the agent ends."""
    die_with_parent(parent)
    set_name("zygote")
    # Libraries look for GPUs at import; torch must not initialise CUDA, as forks could not use it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    tolerate_lost_output()
    # Ctrl-C and Slurm's signals reach every process, but only the agent handles them.
    of_ranks = handled_signals() - {signal.SIGINT}
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    agent = socket.socket(fileno=descriptor)
    selector = selectors.DefaultSelector()
    selector.register(agent, selectors.EVENT_READ, None)
    children: dict[str, int] = {}
    with suppress(ConnectionError):  # the agent is gone
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    data, descriptors, _, _ = socket.recv_fds(agent, MAX_MESSAGE, 8)
                    if not data:
                        os._exit(0)
                    _handle(json.loads(data), descriptors, agent, selector, children, of_ranks)
                    for received in descriptors:
                        os.close(received)
                else:
                    name, pid = key.data
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    _, status = os.waitpid(pid, 0)
                    del children[name]
                    _send(agent, {"ended": name, "code": os.waitstatus_to_exitcode(status)})
    os._exit(0)


def _handle(
    message: Mapping[str, Any],
    descriptors: list[int],
    agent: socket.socket,
    selector: selectors.BaseSelector,
    children: dict[str, int],
    of_ranks: Collection[signal.Signals],
) -> None:
    if "preload" in message:
        for module in message["preload"]:
            _preload(module)
    elif "describe" in message:
        package, ranks, *arguments = message["describe"]
        folders: dict[str, str] = {}
        with suppress(Exception):  # read_facts has the same error, which is reported
            folders = read_folders(package, arguments)
        _send(agent, {"folders": folders})
        try:
            facts = read_facts(package, ranks, arguments)
        except Exception as error:
            traceback.print_exc()
            facts = {"error": f"{package}: {type(error).__name__}: {error}"}
        _send(agent, {"facts": facts})
    elif "kill" in message:
        if message["kill"] in children:
            os.kill(children[message["kill"]], signal.SIGKILL)
    else:
        name = message["spawn"]
        program = ZygoteProgram.unpack(descriptors[0])
        _prepare(program)
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            selector.close()
            agent.close()
            _run_rank(program, message["env"], descriptors[1:], zygote, of_ranks)
        children[name] = pid
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (name, pid))
        _send(agent, {"started": name, "pid": pid})


def _preload(module: str) -> None:
    try:
        importlib.import_module(module)
    # The process that needs the module raises the error again, in the log of its rank.
    except Exception:
        sys.modules.pop(module, None)  # a half-imported module must not stay


def _prepare(program: ZygoteProgram) -> None:
    module, _, function = program.prepare.partition(":")
    _preload(module)
    with suppress(Exception):
        os.chdir(program.directory)
        # Appended, so that a user's module does not hide an installed module of the same name.
        sys.path.append(program.directory)
        getattr(importlib.import_module(module), function)(tuple(program.arguments))
    # A garbage collection in a fork would write to all objects, and so copy their pages.
    gc.freeze()


def _run_rank(
    program: ZygoteProgram,
    environment: Mapping[str, str],
    streams: list[int],
    parent: int,
    signals: Collection[signal.Signals],
) -> NoReturn:
    """Turn this fork of `parent` into a rank, and run the program. `streams`: descriptors of stdin,
    stdout and stderr, of the file for dumps, and of the agent's socket. `signals` get their default
    action again."""
    code = 1
    try:
        die_with_parent(parent)
        set_name("reserve" if RESERVE in environment else "rank")
        os.setsid()  # so that signals of the terminal reach only the agent
        *standard, dumps, recall = streams
        for target, stream in enumerate(standard):
            os.dup2(stream, target)
        tolerate_lost_output()
        os.environ.clear()  # the rank needs its stand-in's environment, not the agent's
        os.environ.update({**program.environment, **environment})
        os.environ[RECALL] = f"{recall}"
        os.chdir(program.directory)
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
        register_dumps(Path(f"/proc/self/fd/{dumps}"))
        _set_threads()
        sys.argv = [program.entry.partition(":")[0], *program.arguments]
        module, _, function = program.entry.partition(":")
        getattr(importlib.import_module(module), function)(program.arguments)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not sys.exit: the zygote's atexit handlers must not run here


def _set_threads() -> None:
    """Set torch's number of threads to OMP_NUM_THREADS, which torchrun sets for its ranks. torch
    itself has read this variable in the zygote's environment, where it may differ."""
    threads, torch = os.environ.get("OMP_NUM_THREADS"), sys.modules.get("torch")
    if threads and torch and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))


def _send(agent: socket.socket, message: Mapping[str, Any]) -> None:
    try:
        agent.send(json.dumps(message).encode())
    except OSError:  # the agent is gone; the kernel kills this process
        os._exit(0)


PRELOAD = "PERDURE_PRELOAD"
"""Environment variable: modules for the zygote to import, separated by commas."""
SHAREABLE_DEVICES = re.compile("/dev/(null|zero|full|u?random|tty.*|console|ptmx|pts/.*|shm/.*)")


@dataclass
class Zygote:
    """The agent's handle of the zygote."""

    page: NodeProgressPage
    pid: int
    socket: socket.socket

    @staticmethod
    def start(page: NodeProgressPage) -> "Zygote":
        """Start a zygote, which begins to import at once. If possible it is a fork of this process,
        which has imported torch already. Called in a thread that lives as long as the zygote is
        needed."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        descriptors = theirs.fileno(), page.descriptor
        pid = fork(*descriptors) if _can_fork() else _start_new(*descriptors)
        theirs.close()
        preload = os.environ.get(PRELOAD, "").split(",")
        ours.send(json.dumps({"preload": ["torch", *filter(None, preload)]}).encode())
        return Zygote(page, pid, ours)

    def end(self) -> int:
        """Kill the zygote and all its forks; returns the zygote's exit code."""
        if not self.pid:
            return 0
        os.kill(self.pid, signal.SIGKILL)  # the kernel kills its forks too, see `die_with_parent`
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        self.socket.close()
        return os.waitstatus_to_exitcode(status)


def _can_fork() -> bool:
    """Whether a fork of this process can be a zygote: torch is imported, no other Python thread
    runs, and no GPU is open, which could not be used after a fork."""
    if "torch" not in sys.modules or threading.active_count() > 1:
        return False
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # listdir() itself had the descriptor open
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return not any(file.startswith("/dev/") and not SHAREABLE_DEVICES.match(file) for file in files)


def _start_new(descriptor: int, page: int) -> int:
    return os.posix_spawn(
        sys.executable,
        *new_program_arguments(descriptor, os.getpid()),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, descriptor, descriptor),  # makes the descriptor inheritable
            (os.POSIX_SPAWN_DUP2, page, page),
        ],
        setpgroup=0,  # the agent handles Ctrl-C
    )


_early: list[Zygote] = []


def start_early() -> None:
    """Start the zygote of the agent that this process will create. Called while this process has no
    threads, so that the zygote can be a fork of it."""
    if not _early:
        _early.append(Zygote.start(NodeProgressPage.make()))


def first_zygote() -> Zygote:
    return _early.pop() if _early else Zygote.start(NodeProgressPage.make())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
