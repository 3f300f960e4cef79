"""The membership of thousands of nodes: what it costs the store at rest, and how long news takes.

The store is the one of `perdure store`, in a process of its own. Every node is the `Member` that a
node's agent runs, with a connection of its own. What differs from an agent:

- Nodes have no threads. A few processes each drive a share of them in one loop, which looks when
  a node's thread would. A node whose store does not answer is taken up again by the loop, at the
  times at which the client of an agent would try.
- An agent says that the store is lost after 5 s of trying; here counts when a node meets it first.
- What stands for the agent is small: a node comes, and comes again when its round has lost a node
  or has room for one more. Nothing is trained.

All nodes share the cores of one machine with the store. On a cluster each node parses the document
on cores of its own, so the seconds here are an upper bound; the table says who took them.

torch's TCPStore looks up the name of the store's address for each connection. Where name servers
are slow, run this in a network of its own, as root:
unshare -n sh -c 'ip link set lo up; exec .venv/bin/python -m benchmarks.membership_scale'
"""

import heapq
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from hashlib import sha256
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, TypeVar

import torch.distributed as dist

from benchmarks.support import arguments, heading, print_table, write_json
from benchmarks.support.processes import cpu_seconds
from elastic.group.job_secret import JobSecret
from elastic.group.member import Member
from elastic.group.membership import Membership, MembershipLimits, MembershipRequest, room
from elastic.group.store import STORE_ERRORS, StoreClient, StoreLostError
from lab.local_nodes import free_port

T = TypeVar("T")

TITLE = "Membership of many nodes"
SECRET = JobSecret(sha256(b"benchmark").digest())
RUN = "scale"
LEGEND = """\
all, half   seconds until all nodes know, or have done it; until half of them
store, nodes   seconds of a core that the store and all nodes together took for it
operations  calls of the store by all nodes together, per second"""
CONNECT_SECONDS = 1.0
"""All nodes of a process wait for one that connects."""
SETTLE_SECONDS, REST_SECONDS = 10.0, 20.0
POLL_SECONDS = 0.02
"""How long a loop is deaf to what it is told."""
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.05, 1.0
"""As the client of an agent waits between attempts: at random, up to so long."""


class DirectClient(StoreClient):
    """Has no thread, counts its calls, and tries once."""

    calls = 0
    _store: dist.TCPStore | None = None

    def call(self, action: Callable[[dist.TCPStore], T]) -> T:
        """Raises StoreLostError if it cannot be done now."""
        self.calls += 1
        try:
            if self._store is None:
                # torch would go on trying.
                socket.create_connection((self.host, self.port), timeout=CONNECT_SECONDS).close()
                self._store = dist.TCPStore(
                    self.host,
                    self.port,
                    is_master=False,
                    timeout=timedelta(seconds=CONNECT_SECONDS),
                    wait_for_workers=False,
                )
                self.connections += 1
            return action(self._store)
        except STORE_ERRORS as error:
            self._store = None
            raise StoreLostError(str(error)) from error


class Node:
    """A node, with what stands for its agent.

    Args:
        name: of the node.
        port: of the store.
        limits: of the job.
        news: called with an event that this node knows now.
    """

    def __init__(
        self, name: str, port: int, limits: MembershipLimits, news: Callable[[str], object]
    ) -> None:
        self.client = DirectClient("127.0.0.1", port, 0.0)
        self.member = Member(self.client, RUN, name, limits, self._changed, None)
        self._news = news
        self._attempts = 0
        self.member.use_secret(SECRET)
        self._come(after=0)

    def look(self) -> float:
        """Look at the store; returns in how many seconds to look again."""
        away = self.member.unreachable_since is not None
        seconds = self.member.look()
        if self.member.unreachable_since is not None:
            self._news("the store is lost")
            self._attempts += 1
            longest = min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2**self._attempts)
            return random.uniform(0, longest)
        if away:
            self._news("the store is back")
            self._attempts = 0
        return 0.0 if self.member.wake.is_set() else seconds

    def come_again(self) -> None:
        """Come to the next round, as an agent does whose round is broken."""
        self._come(after=self.member.state.round)

    def _come(self, after: int) -> None:
        self._after = after
        self.member.request(MembershipRequest(after=after))

    def _changed(self) -> None:
        state, name = self.member.state, self.member.name
        for event in events(state, self.member.limits):
            self._news(event)
        if state.round > self._after and name in state.members:
            self.member.request(None)


class Nodes:
    """The nodes of one process, and the loop that drives them.

    Args:
        port: of the store.
        limits: of the job.
    """

    def __init__(self, port: int, limits: MembershipLimits) -> None:
        self._port, self._limits = port, limits
        self._nodes: dict[str, Node] = {}
        self._due: list[tuple[float, str]] = []
        self._seen: dict[str, dict[str, float]] = {}
        """Event → node → when it was first seen there."""

    def run(self, connection: Connection) -> None:
        """Drive the nodes, and do what is told."""
        while True:
            wait = max(self._due[0][0] - time.monotonic(), 0.0) if self._due else None
            while connection.poll(wait):
                method, *rest = connection.recv()
                connection.send(getattr(self, method)(*rest))
                wait = 0.0
            until = time.monotonic() + POLL_SECONDS
            while self._due and self._due[0][0] <= time.monotonic() < until:
                _, name = heapq.heappop(self._due)
                if name in self._nodes:
                    seconds = self._nodes[name].look()
                    heapq.heappush(self._due, (time.monotonic() + seconds, name))

    def add(self, names: Iterable[str]) -> None:
        """Start nodes, which come to the job."""
        for name in names:
            self._nodes[name] = Node(name, self._port, self._limits, partial(self._note, name))
            heapq.heappush(self._due, (time.monotonic(), name))

    def lose(self, name: str) -> None:
        """Stop a node without a word."""
        self._nodes.pop(name, None)

    def come_again(self) -> None:
        """Have all nodes come to the next round."""
        now = time.monotonic()
        for node in self._nodes.values():
            node.come_again()
        self._due = [(now, name) for name in self._nodes]

    def calls(self) -> int:
        """Calls of the store so far."""
        return sum(node.client.calls for node in self._nodes.values())

    def count(self, event: str) -> int:
        """How many nodes know an event."""
        return len(self._seen.get(event, {}))

    def times(self, event: str) -> list[float]:
        """When each of them got to know it."""
        return list(self._seen.get(event, {}).values())

    def _note(self, name: str, event: str) -> None:
        self._seen.setdefault(event, {}).setdefault(name, time.monotonic())


def events(state: Membership, limits: MembershipLimits) -> list[str]:
    """What a node that has this document knows."""
    found = [f"round {state.round}"]
    if len(state.members) < state.size:
        found.append(f"lost in {state.round}")
    elif len(state.arrived) == 1 and room(state, limits):
        found.append(f"room in {state.round}")
    return found


def serve(connection: Connection, port: int, limits: MembershipLimits) -> None:
    """A process of nodes."""
    logging.disable(logging.WARNING)  # thousands say the same
    Nodes(port, limits).run(connection)


class Scale:
    """A store, and the processes of nodes."""

    def __init__(self, nodes: int, processes: int) -> None:
        self.port = free_port()
        self._store = self._start_store()
        limits = MembershipLimits(minimum=nodes - 1, maximum=nodes, first_call=0.0, settle=0.0)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        # The first in order observe; names that sort as they are numbered.
        self.names = [f"node{number:05}/10.0.0.1/1-c0ffee00" for number in range(nodes)]
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, self.port, limits), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self.tell("count", "")  # all have started

    def close(self) -> None:
        """End everything."""
        for process in self._processes:
            process.kill()
        self._store.kill()

    def come(self) -> None:
        """Have all nodes come."""
        for number, pipe in enumerate(self._pipes):
            pipe.send(("add", self.names[number :: len(self._pipes)]))
        for pipe in self._pipes:
            pipe.recv()

    def tell(self, method: str, *rest: Any) -> list[Any]:
        """Have all processes do something."""
        for pipe in self._pipes:
            pipe.send((method, *rest))
        return [pipe.recv() for pipe in self._pipes]

    def join(self, name: str) -> None:
        """Have one more node come."""
        self._pipes[0].send(("add", [name]))
        self._pipes[0].recv()

    def until(self, event: str, count: int, since: float, limit: float) -> dict[str, float]:
        """Seconds from `since` until so many nodes know an event."""
        while (known := sum(self.tell("count", event))) < count:
            if time.monotonic() > since + limit:
                sys.exit(f"{event!r} is known to {known} of {count} after {limit:.0f} s")
            time.sleep(0.2)
        times = sorted(at for some in self.tell("times", event) for at in some)
        found = {"all": times[count - 1] - since, "half": median(times) - since}
        return {key: round(value, 2) for key, value in found.items()}

    def rate(self, seconds: float) -> dict[str, float]:
        """Calls per second of all nodes, and the cores that they and the store take."""
        calls, before, at = sum(self.tell("calls")), self.cpu(), time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - at
        cores = {key: round((now - before[key]) / took, 3) for key, now in self.cpu().items()}
        return {"operations": round((sum(self.tell("calls")) - calls) / took), **cores}

    def cpu(self) -> dict[str, float]:
        """Seconds of a core so far."""
        nodes = sum(cpu_seconds(process.pid or 0) for process in self._processes)
        return {"store": cpu_seconds(self._store.pid), "nodes": nodes}

    def kill_store(self) -> None:
        """SIGKILL."""
        self._store.send_signal(signal.SIGKILL)
        self._store.wait()

    def restart_store(self) -> None:
        """At the same port, empty."""
        self._store = self._start_store()

    def _start_store(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "elastic.group.store", str(self.port), "127.0.0.1"]
        store = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert store.stdout
        store.stdout.readline()  # it listens
        return store


def main() -> None:
    options = arguments((__doc__ or "").partition("\n\n")[0], nodes=4096, processes=2, limit=300)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # of the processes that are started
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    count, limit = options.nodes, float(options.limit)
    figures: dict[str, Any] = {"nodes": count, "MAC": mac_microseconds()}
    scale = Scale(count, options.processes)

    def step(what: str, event: str, nodes: int, work: Callable[..., Any], *rest: Any) -> None:
        before, began = scale.cpu(), time.monotonic()
        work(*rest)
        found = scale.until(event, nodes, began, limit)
        # A store that has ended took what it had taken.
        took = {key: max(now - before[key], 0.0) for key, now in scale.cpu().items()}
        figures[what] = {**found, **{key: round(value, 1) for key, value in took.items()}}
        print(what, figures[what], file=sys.stderr, flush=True)

    try:
        step("all have come, and know of the first round", "round 1", count, scale.come)
        time.sleep(SETTLE_SECONDS)
        figures["at rest"] = scale.rate(REST_SECONDS)
        print("at rest", figures["at rest"], file=sys.stderr, flush=True)
        if sum(scale.tell("count", "lost in 1")):
            sys.exit("a node that lives was taken for lost")
        rest, again = count - 1, (scale.tell, "come_again")
        step("a lost node is known", "lost in 1", rest, scale.tell, "lose", scale.names[-1])
        step("the others have come again", "round 2", rest, *again)
        step("a join is known", "room in 2", rest, scale.join, "node99999/10.0.0.1/1-c0ffee00")
        step("all have come again with it", "round 3", count, *again)
        step("a lost observer is known", "lost in 3", rest, scale.tell, "lose", scale.names[0])
        step("a lost store is met", "the store is lost", rest, scale.kill_store)
        step("an empty store is found again", "the store is back", rest, scale.restart_store)
        step("the others have come again there", "round 4", rest, *again)
    finally:
        scale.close()
    heading(f"{TITLE}: {count:,}")
    print(LEGEND + "\n")
    rows = [
        {"what": what, **found}
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
        SECRET.seal("key", b"x" * 300)
    return round((time.perf_counter() - began) / 10_000 * 1e6, 2)


if __name__ == "__main__":
    main()
