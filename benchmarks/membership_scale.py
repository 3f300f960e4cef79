"""The membership of thousands of nodes: what it costs the store at rest, and how long news takes.

Every node is the `Member` that a node's agent runs, with its two threads and its connection; they
share a few processes. The store is the one of `perdure store`, in a process of its own. What stands
for the agent is small: a node comes, and comes again when its round has lost a node or has room for
one more. Nothing is trained.

All nodes of this benchmark share the cores of one machine with the store. On a cluster each node
parses the document on cores of its own, so the seconds here are an upper bound.
"""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from hmac import digest
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.support import arguments, heading, print_table, write_json
from elastic.membership import Ask, Limits, Membership, room
from elastic.rendezvous import Member
from elastic.secret import Secret
from elastic.store import StoreClient

TITLE = "Membership of many nodes"
SECRET = Secret(sha256(b"benchmark").digest())
RUN = "scale"
LEGEND = """\
seconds     until all nodes know, or all have done it; half: until half of them
operations  calls of the store by all nodes together, per second"""


class Counted(StoreClient):
    """Counts its calls."""

    calls = 0

    def _retried(self, action: Any) -> Any:
        self.calls += 1
        return super()._retried(action)


class Nodes:
    """The nodes of one process.

    Args:
        names: of the nodes.
        port: of the store.
        limits: of the job.
    """

    def __init__(self, names: list[str], port: int, limits: Limits) -> None:
        self._port, self._limits = port, limits
        self._members: dict[str, Member] = {}
        self._clients: list[Counted] = []
        self._seen: dict[str, dict[str, float]] = {}
        """Event → node → when it was first seen there."""
        self._rejoins = False
        for name in names:  # one after the other: on a cluster no two share a process
            self.add(name)
            while self._members[name].state.version == 0:
                time.sleep(0.005)

    def add(self, name: str) -> None:
        """Start a node, which comes to the job."""
        client = Counted("127.0.0.1", self._port, 5.0)
        changed = partial(self._changed, name)
        member = Member(client, RUN, name, self._limits, changed, None)
        self._clients.append(client)
        self._members[name] = member
        member.start(SECRET)
        member.ask(Ask())

    def lose(self, name: str) -> None:
        """Stop a node without a word."""
        member = self._members.pop(name)
        member._end = True

    def come_again(self) -> None:
        """Have all nodes come to the next round, as agents do whose round is broken."""
        for member in self._members.values():
            member.ask(Ask(after=member.state.round))

    def calls(self) -> int:
        """Calls of the store so far."""
        return sum(client.calls for client in self._clients)

    def seen(self, event: str) -> list[float]:
        """When each node that knows it got to know an event."""
        if event in ("store lost", "store back"):
            away = [member.unreachable_since for member in self._members.values()]
            found = [at is not None for at in away]
            return [time.monotonic() for one in found if one == (event == "store lost")]
        return list(self._seen.get(event, {}).values())

    def _changed(self, name: str) -> None:
        member = self._members.get(name)
        if member is None:
            return
        state = member.state
        for event in events(state, self._limits):
            self._seen.setdefault(event, {}).setdefault(name, time.monotonic())


def events(state: Membership, limits: Limits) -> list[str]:
    """What a node that has this document knows."""
    found = [f"round {state.round}"]
    if len(state.members) < state.size:
        found.append(f"lost in {state.round}")
    if room(state, limits):
        found.append(f"room in {state.round}")
    return found


def serve(connection: Connection, names: list[str], port: int, limits: Limits) -> None:
    """A process of nodes: does what it is told, and answers."""
    threading.stack_size(256 * 1024)
    logging.disable()  # thousands say the same
    nodes = Nodes(names, port, limits)
    while True:
        method, *rest = connection.recv()
        connection.send(getattr(nodes, method)(*rest))


class Scale:
    """A store, and the processes of nodes."""

    def __init__(self, nodes: int, processes: int) -> None:
        self.count = nodes
        self._store = self._start_store(0)
        # The first in order observe; names that sort as they are numbered.
        names = [f"node{number:05}/10.{number >> 8}.{number & 255}.1/1" for number in range(nodes)]
        limits = Limits(minimum=nodes - 1, maximum=nodes, first_call=0.0, settle=0.0)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        self.names = names
        for number in range(processes):
            ours, theirs = context.Pipe()
            share = names[number::processes]
            process = context.Process(
                target=serve, args=(theirs, share, self.port, limits), daemon=True
            )
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        """End everything."""
        for process in self._processes:
            process.kill()
        self._store.kill()

    def tell(self, method: str, *rest: Any) -> list[Any]:
        """Have all processes do something."""
        for pipe in self._pipes:
            pipe.send((method, *rest))
        return [pipe.recv() for pipe in self._pipes]

    def tell_owner(self, name: str, method: str) -> None:
        """Have the process of a node do something about it."""
        pipe = self._pipes[self.names.index(name) % len(self._pipes)]
        pipe.send((method, name))
        pipe.recv()

    def until(self, event: str, count: int, since: float, limit: float) -> dict[str, float]:
        """Seconds from `since` until so many nodes know an event."""
        while True:
            times = sorted(at for some in self.tell("seen", event) for at in some)
            if len(times) >= count:
                found = {"all": times[count - 1] - since, "median": median(times) - since}
                return {key: round(value, 2) for key, value in found.items()}
            if time.monotonic() > since + limit:
                sys.exit(f"{event!r} is known to {len(times)} of {count} after {limit:.0f} s")
            time.sleep(0.2)

    def rate(self, seconds: float) -> dict[str, float]:
        """Calls per second of all nodes, and the cores that the store takes."""
        calls, cpu, at = sum(self.tell("calls")), self._store_cpu(), time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - at
        return {
            "operations": round((sum(self.tell("calls")) - calls) / took),
            "store's cores": round((self._store_cpu() - cpu) / took, 3),
        }

    def kill_store(self) -> None:
        """SIGKILL."""
        self._store.send_signal(signal.SIGKILL)
        self._store.wait()

    def restart_store(self) -> None:
        """At the same port, empty."""
        self._store = self._start_store(self.port)

    def _start_store(self, port: int) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "elastic.store", str(port), "127.0.0.1"]
        store = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert store.stdout
        self.port = int(store.stdout.readline().split()[-1])
        return store

    def _store_cpu(self) -> float:
        stat = Path(f"/proc/{self._store.pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    options = arguments((__doc__ or "").partition("\n\n")[0], nodes=4096, processes=4, limit=600)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # of the processes that are started
    figures: dict[str, Any] = {"nodes": options.nodes, "MAC": mac_microseconds()}
    since = time.monotonic()
    scale = Scale(options.nodes, options.processes)
    count, limit = options.nodes, float(options.limit)

    def step(what: str, event: str, nodes: int, work: Callable[[], Any]) -> None:
        began = time.monotonic()
        work()
        figures[what] = scale.until(event, nodes, began, limit)
        print(what, figures[what], flush=True)

    try:
        figures["first round"] = scale.until("round 1", count, since, limit)
        print("first round", figures["first round"], flush=True)
        time.sleep(5)
        figures["at rest"] = scale.rate(20.0)
        print("at rest", figures["at rest"], flush=True)
        lost = scale.names[count // 2]
        step(
            "a lost node is known", "lost in 1", count - 1, partial(scale.tell_owner, lost, "lose")
        )
        step("all have come again", "round 2", count - 1, partial(scale.tell, "come_again"))
        step("a join is known", "room in 2", count - 1, partial(scale.tell_owner, lost, "add"))
        step("all have come again with it", "round 3", count, partial(scale.tell, "come_again"))
        first = scale.names[0]
        step(
            "a lost observer is known",
            "lost in 3",
            count - 1,
            partial(scale.tell_owner, first, "lose"),
        )
        step("a lost store is known", "store lost", count - 1, scale.kill_store)
        step("the store is back", "store back", count - 1, scale.restart_store)
    finally:
        scale.close()
    heading(f"{TITLE}: {count:,}")
    print(LEGEND + "\n")
    rows = [
        {"what": what, "all [s]": found["all"], "half [s]": found["median"]}
        for what, found in figures.items()
        if isinstance(found, dict) and "all" in found
    ]
    print_table(rows)
    print(f"\nat rest: {figures['at rest']}; a MAC of 300 bytes: {figures['MAC']} µs")
    write_json(TITLE, figures, options.json)


def mac_microseconds() -> float:
    """What a message of 300 bytes costs to seal."""
    began = time.perf_counter()
    for _ in range(10_000):
        digest(SECRET.key, b"x" * 300, "sha256")
    return round((time.perf_counter() - began) / 10_000 * 1e6, 2)


if __name__ == "__main__":
    main()
