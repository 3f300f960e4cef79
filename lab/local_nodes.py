"""Several nodes on one machine: agents with their own loopback addresses, and functions that kill
them. All started processes end with this process."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self

from elastic.node.progress import RANKS, NodeProgressPage, NodeRankProgress
from elastic.process import children, descendants, signal_family
from lab.container import Container

LOOPBACK = "127.0.0.1"
NETWORK = "10.77.0"
"""First three octets of addresses in the containers' private network."""


class LocalProcess(Protocol):
    """A running process; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


Launch = Callable[[Sequence[str], Path, Mapping[str, str], Path], LocalProcess]
"""Maps (module and its arguments, working directory, environment, log) to a process that runs the
module as `python -m` does, appends its output to the log, and ends with this process."""


def start_python(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path
) -> LocalProcess:
    """Start a process in a new interpreter; a `Launch`."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "elastic.process", *command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


@dataclass
class LocalNode:
    """An agent with its processes, which stands for a machine."""

    number: int
    process: LocalProcess
    log: Path
    container: Container | None = None
    """Namespaces of the node; None: it shares the memory of this machine."""
    _page: tuple[int, NodeProgressPage] | None = None

    def running(self, module: str) -> list[int]:
        """Process ids of the node's processes that run `module` by `python -m`."""
        found = []
        for pid in self.family():
            with suppress(OSError):
                if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    found.append(pid)
        return found

    def zygote(self) -> int | None:
        """Process id of the parent of the training processes; None: it does not run."""
        for child in children(self.process.pid):
            with suppress(OSError):
                if Path(f"/proc/{child}/comm").read_text() == "perdure-zygote\n":
                    return child
        return None

    def stand_ins(self) -> list[int]:
        """Process ids of the processes that torchrun started for ranks, oldest first."""
        started = children(self.process.pid)
        return [pid for pid in self.running("trainer") if pid in started]

    def trainers(self) -> list[int]:
        """Process ids of the training processes, by local rank."""
        zygote = self.zygote()
        found = children(zygote) if zygote else []
        progress = map(self.progress, range(RANKS))
        # A child without progress is in reserve, or has not yet reported its rank.
        return [rank.pid for rank in progress if rank and rank.pid in found]

    def progress(self, local_rank: int) -> NodeRankProgress | None:
        """Progress of a rank; None if the agent does not run, or has no progress page yet."""
        pid = self.process.pid
        try:
            if self._page is None or self._page[0] != pid:
                self._page = pid, _open_page(pid)
            return self._page[1].read(local_rank)
        except OSError:
            return None

    def kill_agent(self) -> None:
        """Kill the agent; its processes end with it, but the machine's memory stays."""
        self.process.kill()
        self.process.wait()

    def kill(self) -> None:
        """Kill all processes of the node at once, as a power failure does."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        if self.container:
            self.container.kill()

    def signal(self, number: int) -> None:
        """Send a signal to the agent and all its descendants."""
        if self.process.poll() is None:
            signal_family(self.process.pid, number)

    def family(self) -> list[int]:
        """Process ids of all descendants of the agent."""
        return descendants(self.process.pid)

    def text(self) -> str:
        """Output of the node so far."""
        return self.log.read_text(errors="replace")


@dataclass
class LocalNodes:
    """Local nodes that come and go, with a store outside of them.

    Args:
        worker: command that each rank runs, such as `["-m", "trainer", "recipe.yaml"]`.
        folder: working directory of the nodes.
        nnodes: `--nnodes` of torchrun.
        logs: folder of the output, `node-N.log` for each node.
        ranks: training processes per node.
        environment: added to this process's environment.
        options: more options of torchrun.
        backend: `--rdzv-backend` of torchrun.
        store_outside: start a store outside of the nodes; else the first node hosts it.
        launcher: a module, with first arguments of its own, that takes torchrun's options; empty:
            torchrun.
        own_memory: give each node its own shared memory, which is lost with it (needs root).
        own_network: also give each node a network interface, which `node.container` can cut off
            (needs root, ip and nft).
        start: starts the store and the agents.
    """

    worker: Sequence[str]
    folder: Path
    nnodes: str
    logs: Path
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()
    backend: str = "perdure"
    store_outside: bool = True
    launcher: Sequence[str] = ()
    own_memory: bool = False
    own_network: bool = False
    start: Launch = start_python
    nodes: list[LocalNode] = field(default_factory=list)
    port: int = 0
    _store: LocalProcess | None = None
    _network: Container | None = None

    def __enter__(self) -> Self:
        if self.own_network:
            self._network = Container.start_network(f"{NETWORK}.1")
        self.port = self.port or free_port()
        if self.store_outside:
            self.start_store()
            try:
                self.wait_for_store()
            except RuntimeError:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.kill()
        self.kill_store()
        if self._network:
            self._network.kill()

    @property
    def prefix(self) -> str:
        """First three octets of the addresses of the store (.1) and of the nodes (from .11)."""
        return NETWORK if self.own_network else "127.0.0"

    @property
    def _store_log(self) -> Path:
        return self.logs / f"store-{self.port}.log"

    def start_store(self) -> None:
        """Start the store, unless it is running."""
        if not self._store:
            inside, address = (self._network.inside, []) if self._network else ([], [LOOPBACK])
            self._store_log.write_bytes(b"")  # remove the port that the previous store printed
            command = [*inside, "elastic.group.store", str(self.port), *address]
            self._store = self.start(command, self.folder, self._environment(), self._store_log)

    def wait_for_store(self) -> None:
        """Wait until the store accepts connections. Raises RuntimeError if the store cannot
        start."""
        while f"port {self.port}\n" not in (output := self._store_log.read_text()):
            if self._store is None or self._store.poll() is not None:
                raise RuntimeError(f"the store did not start: {output!r}")
            time.sleep(0.01)

    def kill_store(self) -> None:
        """Kill the store."""
        if self._store:
            self._store.kill()
            self._store.wait()
            self._store = None

    def add(self) -> LocalNode:
        """Start another node, with its own address."""
        number = len(self.nodes)
        log = self.logs / f"node-{number}.log"
        container = None
        if self._network:
            container = Container.start(self._network, self._address(number))
        elif self.own_memory:
            container = Container.start()
        self.nodes.append(
            LocalNode(number, self._start_agent(number, log, container), log, container)
        )
        return self.nodes[-1]

    def restart(self, node: LocalNode) -> None:
        """Start the agent of a node again, on the same machine, after it was killed."""
        node.process = self._start_agent(node.number, node.log, node.container)

    def _start_agent(self, number: int, log: Path, container: Container | None) -> LocalProcess:
        torchrun = ["torch.distributed.run", "--rdzv-backend", self.backend]
        address = self._address(number)
        command = [
            *(container.inside if container else []),
            *(self.launcher or torchrun),
            *("--rdzv-endpoint", f"{self.prefix}.1:{self.port}"),
            *("--rdzv-id", "local", "--nnodes", self.nnodes),
            *("--nproc-per-node", str(self.ranks), "--local-addr", address),
            *("--max-restarts", "1000000", *self._conf(), *self.options, *self.worker),
        ]
        return self.start(command, self.folder, self._environment(), log)

    def wait(self, seconds: float) -> list[int]:
        """Wait until all nodes have ended, and return their exit codes. Raises TimeoutError if a
        node still runs after `seconds`."""
        deadline = time.monotonic() + seconds
        for node in self.nodes:
            try:
                node.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"node {node.number} runs:\n{node.text()[-3000:]}") from None
        return [node.process.wait() for node in self.nodes]

    def _conf(self) -> list[str]:
        # Otherwise a node that starts while the store is down would host one, and keep its port.
        return ["--rdzv-conf", "is_host=0"] if self.store_outside else []

    def _address(self, number: int) -> str:
        return f"{self.prefix}.{number + 11}"

    def _environment(self) -> dict[str, str]:
        network = {"GLOO_SOCKET_IFNAME": "eth0"} if self.own_network else {}
        return {**os.environ, "OMP_NUM_THREADS": "1", **network, **self.environment}


def free_port() -> int:
    """Return a free port below the range of ephemeral ports. While the store is down, an outgoing
    connection could take an ephemeral port."""
    while True:
        port = random.randrange(10_000, 30_000)
        with suppress(OSError), socket.create_server(("", port)):
            return port


def _open_page(agent: int) -> NodeProgressPage:
    """Open the progress page that an agent shares with its ranks."""
    for path in Path(f"/proc/{agent}/fd").iterdir():
        with suppress(OSError):
            if os.readlink(path).startswith("/memfd:perdure-progress"):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    return NodeProgressPage(descriptor)
                except ValueError:  # the agent has not sized the page yet
                    continue
                finally:
                    os.close(descriptor)  # the memory stays mapped
    raise FileNotFoundError(f"agent {agent} has no progress page yet")
