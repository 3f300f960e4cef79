"""The faults that benchmarks/recovery.py does to a job, and what each cost."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.support.elastic_job import Job, Recovery
from lab.local_nodes import LocalNode

GOLDEN = 0.618
"""Golden ratio: the fractional parts of its multiples spread evenly from 0 to 1."""


def kill_worker(job: Job, number: int, limit: float) -> Recovery:
    """kill -9 of one rank, of rank 0 every other time."""
    ranks = job.workers((job.main, job.other)[number % 2])
    mark = job.mark()
    if not ranks:
        return Recovery(None, failure="the job ended")
    os.kill(ranks[0], signal.SIGKILL)
    return job.recovery(mark, limit)


def kill_one_of_four(job: Job, number: int, limit: float) -> Recovery:
    """kill -9 of one of a node's four ranks: first of rank 1, then of rank 0, 3, 2, 1, …; at
    moments spread evenly over a step."""
    step = median(after - before for before, after in pairwise(job.step_times[-4:]))
    victim = job.workers(job.main)[(1 - number) % 4]
    time.sleep(step * (number * GOLDEN % 1))
    mark = job.mark()
    os.kill(victim, signal.SIGKILL)
    recovery = job.recovery(mark, limit)
    recovery.more["a step before the fault"] = step
    return recovery


def lose_node(job: Job, number: int, limit: float) -> Recovery:
    """Power loss of a node without rank 0."""
    return _lose(job, job.other, limit)


def lose_first(job: Job, number: int, limit: float) -> Recovery:
    """Power loss of the node with rank 0."""
    return _lose(job, job.main, limit)


def _lose(job: Job, node: LocalNode, limit: float) -> Recovery:
    mark = job.mark()
    job.lose(node)
    return job.recovery(mark, limit)


def notice(job: Job, number: int, limit: float) -> Recovery:
    """SIGTERM to the agent of a node without rank 0."""
    leaving, mark = job.other, job.mark()
    leaving.process.send_signal(signal.SIGTERM)
    recovery = job.recovery(mark, limit)
    job.wait(lambda: leaving.process.poll() is not None, limit)
    recovery.more["seconds until the agent is gone, at most"] = time.time() - mark.at
    return recovery


def join(job: Job, number: int, limit: float) -> Recovery:
    """A node joins."""
    mark = job.mark()
    node = job.nodes.add()
    failure = job.wait(lambda: job.registered(node) or node.process.poll() is not None, limit)
    registered = time.time() - mark.at
    if failure or node.process.poll() is not None:
        last = node.text().strip().rpartition("\n")[2]
        failure = f"did not register, {failure or f'but ended: {last}'}"
        return Recovery(None, failure=failure, waited=registered)
    recovery = job.recovery(mark, limit)
    if recovery.seconds is not None:
        recovery.more["since launch"] = recovery.seconds
        recovery.seconds -= registered
        recovery.phases["restart"] -= registered
    return recovery


def kill_store(job: Job, number: int, limit: float) -> Recovery:
    """kill -9 of the store's host, and its return; then a rank is killed."""
    mark = job.mark()
    if not job.nodes.store_outside:
        job.lose(job.nodes.nodes[0])
        return job.recovery(mark, limit)
    job.nodes.kill_store()
    time.sleep(1)
    job.nodes.start_store()
    failure = job.wait(lambda: time.time() > mark.at + 2, limit, least_nodes=2)
    times = [at for at in job.step_times if at > mark.at - 1]
    pauses = [after - before for before, after in pairwise(times)]
    if failure or job.mark().attempts != mark.attempts:
        return Recovery(
            None, failure=failure or "the store's loss restarted it", waited=time.time() - mark.at
        )
    recovery = kill_worker(job, number, limit)
    recovery.more["longest time between steps while the store was away"] = max(pauses, default=0.0)
    return recovery


def hang(job: Job, number: int, limit: float) -> Recovery:
    """SIGSTOP of a rank that is not rank 0."""
    rank, mark = job.workers(job.other)[0], job.mark()
    os.kill(rank, signal.SIGSTOP)
    return job.recovery(mark, limit)


Fault = Callable[[Job, int, float], Recovery]


@dataclass(frozen=True)
class Scenario:
    """A kind of fault."""

    nodes: int
    fault: Fault
    rejoin: str = ""
    """The kind of the join that makes up for the node that the fault took; "": it took none."""
    node_ranks: int = 1
    """Ranks of each node."""
    taken: int = 0
    """Ranks that the fault takes out of the job, the spares among them; 0: those of its node."""
    strategy: Mapping[str, Any] = field(default_factory=dict)
    """`strategy` of the recipe; only Perdure has it."""


SCENARIOS = {
    "worker": Scenario(2, kill_worker),
    "four": Scenario(1, kill_one_of_four, node_ranks=4),
    "node": Scenario(2, lose_node, rejoin="join"),
    "notice": Scenario(2, notice, rejoin="join"),
    "first": Scenario(3, lose_first, rejoin="join 3"),
    "store": Scenario(2, kill_store),
    "hang": Scenario(2, hang),
    "tp": Scenario(2, lose_node, "join tp", node_ranks=2, strategy={"name": "ddp", "tp": 2}),
    "pp": Scenario(4, lose_node, "join pp", taken=2, strategy={"name": "ddp", "pp": 2}),
}
