"""A job of several nodes on this machine that faults are done to, and what its output tells."""

import base64
import json
import re
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from elastic.group.store import StoreClient, StoreLostError
from elastic.process import children
from lab.local_nodes import LocalNode, LocalNodes

POLL_SECONDS = 0.005
START_LIMIT = 120.0
STRAYS = 3
"""Steps from a node whose rank 0 was replaced by now that mean that it trains on."""
_LINE = re.compile(
    r"(?:[\d:]{8} )?step +(?P<step>\d+)/"
    r"|first step after (?P<total>[\d.]+) s: (?P<parts>.*)"
    r"|.*over (?P<ranks>\d+) rank\(s\)"
)


@dataclass
class Recovery:
    """What a fault cost."""

    seconds: float | None
    """From the fault to the first step that had not been done before; None: it did not come."""
    redone: int = 0
    """Steps done a second time."""
    phases: dict[str, float] = field(default_factory=dict)
    """Where the time went, in seconds: "restart" lasts until the process of the new rank 0 is
    there, "redone steps" from its first step to the first new one; between them what that process
    says."""
    failure: str = ""
    waited: float = 0.0
    """Seconds after which the failure was known."""
    more: dict[str, float] = field(default_factory=dict)
    """Other figures of this kind of fault."""
    at: float = 0.0
    """Unix time of the fault."""


@dataclass(frozen=True)
class Mark:
    """A moment of a job."""

    at: float
    """Unix time."""
    attempts: int
    redone: int


@dataclass(frozen=True)
class _Attempt:
    """Processes that have done their first step."""

    at: float
    """When, in Unix time."""
    node: LocalNode
    total: float
    """Seconds from the start of rank 0's process to then."""
    parts: dict[str, float]
    highest: int
    """Newest step ever done before."""


class Job:
    """A job, watched through what its nodes print. A context manager.

    Args:
        nodes: the cluster, not entered yet.
        register: key in the job's store whose value names the nodes that have come.
        memory: folders in shared memory that belong to the job, as a pattern with `{pid}` for the
            process that made them; empty: it uses none.
        ledger: where the job keeps one.
    """

    def __init__(
        self, nodes: LocalNodes, *, register: str, memory: str = "", ledger: Path | None = None
    ) -> None:
        self.nodes, self._register = nodes, register
        self._memory, self._ledger = memory, ledger
        self.highest = 0
        """Newest step ever done."""
        self.ranks = 0
        """Ranks of the newest attempt."""
        self.step_times: list[float] = []
        """Unix time of every step, those done again included."""
        self._main: LocalNode | None = None
        self._store: StoreClient | None = None
        self._redone = self._strays = 0
        self._attempts: list[_Attempt] = []
        self._read: dict[int, int] = {}

    def __enter__(self) -> Self:
        self.nodes.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.nodes.__exit__(*error)
        self._forget("*")

    # --- what happens ------------------------------------------------------------------------

    @property
    def alive(self) -> list[LocalNode]:
        """Nodes whose agent runs."""
        return [node for node in self.nodes.nodes if node.process.poll() is None]

    @property
    def main(self) -> LocalNode:
        """The node of rank 0, which prints the steps."""
        if self._main is None:
            raise RuntimeError("no step was done yet")
        return self._main

    @property
    def other(self) -> LocalNode:
        """A node without rank 0."""
        return next(node for node in self.alive if node is not self.main)

    def look(self) -> None:
        """Take in what was printed since the last look."""
        for node in self.nodes.nodes:
            with open(node.log, "rb") as file:
                file.seek(self._read.get(node.number, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[node.number] = self._read.get(node.number, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self._take(node, line)

    def _take(self, node: LocalNode, line: str) -> None:
        match = _LINE.match(line)
        if match is None:
            return
        now = time.time()
        if match["ranks"]:
            self.ranks = int(match["ranks"])
        elif match["total"]:
            pairs = (part.rsplit(" ", 1) for part in match["parts"].split(", "))
            parts = {name: float(seconds) for name, seconds in pairs}
            self._attempts.append(_Attempt(now, node, float(match["total"]), parts, self.highest))
        else:
            step = int(match["step"])
            self._strays += node is not self._attempts[-1].node
            self._redone += step <= self.highest
            self.highest = max(self.highest, step)
            self.step_times.append(now)
            self._main = node

    def wait(self, condition: Callable[[], bool], limit: float, *, least_nodes: int = 1) -> str:
        """Look until a condition holds; returns what went wrong, "" if nothing.

        Args:
            condition: evaluated after every look.
            limit: seconds.
            least_nodes: the job has ended when fewer agents run.
        """
        deadline = time.monotonic() + limit
        while True:
            self.look()
            if len(self.alive) < least_nodes:
                return "the job ended"
            if condition():
                return ""
            if self._strays >= STRAYS:
                return "two worlds train at once, and write the same checkpoints"
            if time.monotonic() > deadline:
                return f"no recovery within {limit:.0f} s"
            time.sleep(POLL_SECONDS)

    # --- what is done to it ------------------------------------------------------------------

    def start(self, count: int, node_ranks: int) -> str:
        """Start the first nodes, and wait until all their ranks train; returns what went wrong."""
        self.nodes.add()
        if not self.nodes.store_outside:
            self._wait_for_store()
        for _ in range(count - 1):
            self.nodes.add()
        return self.steady(count * node_ranks, START_LIMIT)

    def steady(self, ranks: int, limit: float, after_save: int = 1, save_every: int = 10) -> str:
        """Wait until so many ranks train, have saved, and are `after_save` steps past a save;
        returns what went wrong."""
        begin = len(self.step_times)

        def condition() -> bool:
            trained = len(self.step_times) - begin > 3 and self.highest > save_every
            return trained and self.ranks == ranks and self.highest % save_every == after_save

        failure = self.wait(condition, limit)
        return failure and f"no {ranks} ranks that train: {failure}"

    def workers(self, node: LocalNode) -> list[int]:
        """Process ids of a node's ranks."""
        return node.trainers() if node.zygote() else children(node.process.pid)

    def lose(self, node: LocalNode) -> None:
        """Kill all of a node at once, and give its memory back, as when a machine loses power."""
        pids = [node.process.pid, *node.family()]
        node.kill()
        for pid in pids:
            self._forget(str(pid))

    def registered(self, node: LocalNode) -> bool:
        """Whether a node that was added has told the job that it is there."""
        if self._store is None:
            self._store = StoreClient("127.0.0.1", self.nodes.port, patience=1.0)
        try:
            value = self._store.get(self._register) or b""
        except StoreLostError:
            return False
        with suppress(ValueError):  # torchrun's own state is in base64, ours is not
            value = base64.b64decode(value, validate=True)
        return f"127.0.0.{node.number + 11}".encode() in value

    def mark(self) -> Mark:
        """Now, right before a fault."""
        self.look()
        return Mark(time.time(), len(self._attempts), self._redone)

    def recovery(self, mark: Mark, limit: float) -> Recovery:
        """Wait for the recovery from the fault that was done after `mark`: until processes that
        started since have done a step that had never been done.

        Args:
            mark: from before the fault.
            limit: seconds since then.
        """

        def recovered() -> bool:
            attempts = self._attempts[mark.attempts :]
            return bool(attempts) and self.highest > attempts[-1].highest

        failure = self.wait(recovered, mark.at + limit - time.time())
        waited = time.time() - mark.at
        if failure:
            return Recovery(None, failure=failure, waited=waited)
        last = self._attempts[-1]
        parts = self._phases() or last.parts
        begun = last.at - (sum(parts.values()) if parts is not last.parts else last.total)
        return Recovery(
            seconds=self.step_times[-1] - mark.at,
            redone=self._redone - mark.redone,
            phases={
                "restart": begun - mark.at,
                **parts,
                "redone steps": self.step_times[-1] - last.at,
            },
            waited=waited,
            at=mark.at,
        )

    def _phases(self) -> dict[str, float]:
        """Phases of the newest attempt, from the ledger, which has more digits than the console."""
        if self._ledger is None or not self._ledger.exists():
            return {}
        lines = map(json.loads, self._ledger.read_text().splitlines())
        found = [line["phases"] for line in lines if line["kind"] == "phases"]
        return found[-1] if found else {}

    def _wait_for_store(self) -> None:
        deadline = time.monotonic() + START_LIMIT
        while time.monotonic() < deadline:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.nodes.port), timeout=1).close()
                return
            time.sleep(0.05)
        raise RuntimeError(f"no store came up:\n{self.nodes.nodes[0].text()[-3000:]}")

    def _forget(self, pid: str) -> None:
        if self._memory:
            for folder in Path("/dev/shm").glob(self._memory.format(pid=pid)):
                shutil.rmtree(folder, ignore_errors=True)
