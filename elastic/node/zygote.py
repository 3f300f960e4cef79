"""The warm process of a node that training processes are forked from.

A fork of the agent (`fork`), or `python -m elastic.node.zygote`. It has imported what they need and
started nothing: no threads, no CUDA, no process group. So a training process is there in
milliseconds instead of the seconds that importing torch takes, at the start and after every
failure, and the ranks of a node share the memory of the code.

It is told what to do by the node's agent (agent.py) over a socket, one JSON object a message:
`{"preload": [module]}`, `{"describe": [package, ranks, argument, …]}` (see facts.py),
`{"spawn": key, "env": {…}}` with the file descriptors of a job (see `RankProgram`), and
`{"kill": key}`; it answers `{"folders": {…}}` and then `{"facts": {…}}`, `{"started": key, "pid":
…}` and `{"ended": key, "code": …}`. When the agent goes, so does it, and with it every process it
forked.
"""

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
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from elastic.exits import SIGNALS, heeded
from elastic.node.program import ask, ask_folders
from elastic.node.progress import ProgressPage
from elastic.node.vitals import register_dumps
from elastic.process import die_with_parent, outlive, search_path, set_name

MAX_MESSAGE = 1 << 16
RECALL = "PERDURE_RECALL"
"""Environment variable: descriptor of a socket to its agent; see recall.py."""
RESERVE = "PERDURE_RESERVE"
"""Environment variable: this process is no rank yet, and is told by its agent when it is one."""


@dataclass(frozen=True)
class RankProgram:
    """What a rank runs, as its stand-in (standin.py) describes it."""

    entry: str
    """module:function, called with `arguments`; its process ends when it returns."""
    prepare: str
    """module:function, called with the tuple of `arguments` in the zygote, so that its forks find
    what it has cached; if it fails, it will again in the fork, where people see it."""
    arguments: list[str]
    environment: dict[str, str]
    directory: str

    def pack(self) -> int:
        """As a file in memory, whose descriptor is returned: no message is large enough."""
        descriptor = os.memfd_create("perdure-job")
        with open(os.dup(descriptor), "wb") as file:
            file.write(json.dumps(self.__dict__).encode())
        return descriptor

    @staticmethod
    def unpack(descriptor: int) -> "RankProgram":
        """What `pack` packed."""
        size = os.fstat(descriptor).st_size
        return RankProgram(**json.loads(os.pread(descriptor, size, 0)))


def command(descriptor: int, agent: int) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a zygote that is a new program, not a fork."""
    arguments = [sys.executable, "-P", "-m", "elastic.node.zygote", f"{descriptor}", f"{agent}"]
    return arguments, {**os.environ, "PYTHONPATH": os.pathsep.join(search_path())}


def fork(descriptor: int, page: int) -> int:
    """Fork this process into its zygote; returns the process id. Where this process has used CUDA,
    the fork becomes a new program.

    Args:
        descriptor: socket to the agent.
        page: memory that it shares with the agent (progress.py).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    agent, path = os.getpid(), search_path()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)  # Ctrl-C is for the agent
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for other in map(int, os.listdir("/proc/self/fd")):
            if other > 2 and other not in (descriptor, page):
                with suppress(OSError):  # the one of this listing
                    os.close(other)
        if "torch" in sys.modules and sys.modules["torch"].cuda._is_in_bad_fork():
            # torchrun has asked CUDA for GPUs: neither this process nor its forks could use it.
            for inherited in (descriptor, page):
                os.set_inheritable(inherited, True)
            arguments, environment = command(descriptor, agent)
            os.execve(sys.executable, arguments, environment)
        # What the agent would do at its end, and what would close descriptors that are others' now.
        atexit._clear()
        gc.freeze()
        sys.path[:] = path
        sys.modules["__main__"] = sys.modules[__name__]
        main(descriptor, agent)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def main(descriptor: int, parent: int) -> NoReturn:
    """Serve the agent, process `parent`, at the other end of the socket `descriptor` until it
    goes."""
    die_with_parent(parent)
    set_name("zygote")
    # Libraries ask for GPUs when they are imported. torch is to answer without starting CUDA, which
    # the forks could not use then.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    outlive()
    # Ctrl-C reaches every process of the terminal, Slurm's signals every one of the job step; here
    # the agent decides.
    of_ranks = heeded() - {signal.SIGINT}  # Ctrl-C is for the agent
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
                    message, descriptors = _receive(agent)
                    if message is None:
                        os._exit(0)
                    _obey(message, descriptors, agent, selector, children, of_ranks)
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


def _obey(
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
        _send(agent, {"folders": _folders(package, arguments)})
        _send(agent, {"facts": _describe(package, ranks, arguments)})
    elif "kill" in message:
        if message["kill"] in children:
            os.kill(children[message["kill"]], signal.SIGKILL)
    else:
        name = message["spawn"]
        job = RankProgram.unpack(descriptors[0])
        _prepare(job)
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            selector.close()
            agent.close()
            _become(job, message["env"], descriptors[1:], zygote, of_ranks)
        children[name] = pid
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (name, pid))
        _send(agent, {"started": name, "pid": pid})


def _preload(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception:  # the process that needs it will say so, where people see it
        sys.modules.pop(module, None)


def _folders(package: str, arguments: Sequence[str]) -> dict[str, str]:
    """What the program of the ranks says of the paths that it needs."""
    try:
        return ask_folders(package, arguments)
    except Exception:  # `_describe` tells
        return {}


def _describe(package: str, ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
    """What the program of the ranks says of its job."""
    try:
        return ask(package, ranks, arguments)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{package}: {type(error).__name__}: {error}"}


def _prepare(job: RankProgram) -> None:
    """Do once what every fork would do again."""
    module, _, function = job.prepare.partition(":")
    _preload(module)
    with suppress(Exception):
        os.chdir(job.directory)
        sys.path.append(job.directory)  # last: a program of the user's own may lie there
        getattr(importlib.import_module(module), function)(tuple(job.arguments))
    # A collection would look at all of it in every fork, and so copy its pages.
    gc.freeze()


def _become(
    job: RankProgram,
    environment: Mapping[str, str],
    streams: list[int],
    parent: int,
    signals: Collection[signal.Signals],
) -> NoReturn:
    """Turn this fork of `parent` into the process that runs a job; its streams become those of the
    stand-in. `signals` are no longer ignored."""
    code = 1
    try:
        die_with_parent(parent)
        set_name("reserve" if RESERVE in environment else "rank")
        os.setsid()
        *standard, dumps, recall = streams
        for target, stream in enumerate(standard):
            os.dup2(stream, target)
        outlive()
        os.environ.clear()
        os.environ.update({**job.environment, **environment})
        os.environ[RECALL] = f"{recall}"
        os.chdir(job.directory)
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
        register_dumps(Path(f"/proc/self/fd/{dumps}"))
        _set_threads()
        sys.argv = [job.entry.partition(":")[0], *job.arguments]
        module, _, function = job.entry.partition(":")
        getattr(importlib.import_module(module), function)(job.arguments)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _set_threads() -> None:
    """Those that torchrun gives a rank: torch read the environment before that was known."""
    threads, torch = os.environ.get("OMP_NUM_THREADS"), sys.modules.get("torch")
    if threads and torch and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))


def _receive(agent: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    data, descriptors, _, _ = socket.recv_fds(agent, MAX_MESSAGE, 8)
    return (json.loads(data) if data else None), descriptors


def _send(agent: socket.socket, message: Mapping[str, Any]) -> None:
    try:
        agent.send(json.dumps(message).encode())
    except OSError:  # the agent is gone; the kernel ends us
        os._exit(0)


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


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
