"""Which faults come when: a plan, read from plain values or drawn from a seed. Pure.

    nodes: 2                # at the start
    faults:
      - {what: kill_worker, at: 20}
      - {what: kill_agent, at: 20, during: init}
      - {what: join, at: 40}
      - {what: stop_node, at: 60, node: 1, seconds: 3}
      - {what: kill_stand_in, at: 80}
      - {what: kill_zygote, node: 1, at: 80, delay: 0.02}
    random: {faults: 20, every: 30, max_nodes: 4}     # more, drawn from the seed

[Note: order of faults] Faults come one after another. One `during` step waits until the run has
done a new step since the fault before. One during any other phase comes as soon as its node is in
that phase; after a fault that makes processes start anew this is amid the recovery from it. One
with a `delay` comes so many seconds after the fault before, whatever its node is doing.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from trainer.recipe.bounds import Amount, Count, Positive
from trainer.recipe.checking import checked
from trainer.recipe.yaml_tree import Key, Origins, Problem, RecipeError, listed, origin_of

What = Literal[
    "kill_worker",
    "kill_stand_in",
    "kill_zygote",
    "kill_writer",
    "kill_agent",
    "kill_node",
    "stop_worker",
    "stop_node",
    "slow_worker",
    "partition",
    "storage",
    "nan",
    "notice",
    "store",
    "join",
]
Way = Literal["both", "in", "out"]
Phase = Literal["init", "load", "step", "save", "rendezvous"]

OF_NODES: tuple[What, ...] = ("kill_stand_in", "kill_zygote", "kill_writer")
"""Processes of a node that are killed, besides its training processes and its agent."""
OF_WORKERS: tuple[What, ...] = ("kill_worker", "stop_worker", "slow_worker", "nan")
LASTING: tuple[What, ...] = (
    *("stop_worker", "stop_node", "slow_worker"),
    *("partition", "storage", "store"),
)
OF_PAIRS: tuple[What, ...] = (
    *("kill_worker", "kill_stand_in", "kill_zygote"),
    *("kill_writer", "kill_agent", "store"),
)
PAIR_SECONDS, STORE_SECONDS = 0.05, 0.5
"""Most between the two faults of a pair; for which a store that was killed stays away."""
RESTARTING: tuple[What, ...] = ("kill_worker", "kill_agent", "kill_node", "notice", "join")
"""After these, training processes start anew."""
NODES: dict[What, int] = {"kill_agent": -1, "kill_node": -1, "notice": -1, "join": 1}
"""By how many nodes a fault changes the job."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    what: What
    """kill_worker: SIGKILL to a training process. kill_stand_in: to what torchrun started for a
    rank. kill_zygote: to what a node's training processes are forked from, with which they go.
    kill_writer: to a node's writer of checkpoints. kill_agent: to a node's agent, with which its
    processes go; the machine's memory stays. kill_node: the machine is gone, with its memory.
    stop_worker, stop_node: SIGSTOP to the one, or to all processes of the node; SIGCONT `seconds`
    later. slow_worker: stopped for half of the time, in turns of 50 ms. partition: no packet
    reaches the node, or leaves it, for `seconds`; takes root, and ip and nft. storage: every write
    of the node's checkpoint writer fails for `seconds`. nan: a gradient of a rank is NaN once, as
    after a fault of its hardware. notice: SIGTERM to the agent. store: SIGKILL to the store, which
    comes back empty `seconds` later. join: a node more, on a machine whose agent was killed if
    there is one."""

    at: Count = 0
    """Not before this step is done."""

    during: Phase = "step"
    """What the node is doing; save: while a checkpoint is being written."""

    node: Count = 0
    """Which of the nodes that are up, from the oldest on; counted round."""

    rank: Count = 0
    """Which of its ranks; counted round."""

    seconds: Amount = 2.0
    """How long what lasts does."""

    delay: Amount | None = None
    """Seconds after the fault before, instead of `during`."""

    way: Way = "both"
    """Which packets a partition loses."""

    def __str__(self) -> str:
        way = f" ({self.way})" if self.what == "partition" else ""
        lasting = f" for {self.seconds:g} s" if self.what in LASTING else ""
        if self.delay is not None:
            return f"{self.what}{way}{lasting}, {1000 * self.delay:.0f} ms later"
        during = "" if self.during == "step" else f" during {self.during}"
        return f"{self.what}{way}{lasting}{during}"


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Faults that are drawn from a seed."""

    faults: Count
    """How many."""

    every: Positive = 30
    """Steps between two, on average."""

    min_nodes: int = 1
    """Fewer are never left."""

    max_nodes: int = 4
    """More never are up."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What happens to a run."""

    nodes: Positive = 1
    """At the start."""

    faults: tuple[Fault, ...] = ()
    """In this order."""

    random: Draw | None = None
    """More faults, after these."""

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid"}

    @property
    def counts(self) -> list[int]:
        """How many nodes are up at the start, and after each fault."""
        counts = [self.nodes]
        for fault in self.faults:
            counts.append(counts[-1] + NODES.get(fault.what, 0))
        return counts

    @property
    def last_step(self) -> int:
        """A run that is shorter ends before its last fault."""
        return max((fault.at for fault in self.faults), default=0)


def read_plan(
    tree: Any, seed: int, origins: Origins, file: str, *, partitions: bool = False
) -> Plan:
    """Plain values → a plan, its random faults drawn.

    Args:
        tree: as a YAML file holds it.
        seed: of what is drawn.
        origins: where each key was written.
        file: where the others were.
        partitions: whether nodes can be cut off here.

    Raises:
        RecipeError: a line for each problem, with place, key and remedy.
    """
    problems: list[Problem] = []
    plan = checked(Plan, tree, origins, file, problems, set())
    if plan and not problems:
        for key, what in _problems(plan, partitions):
            problems.append(Problem(origin_of(key, origins, file), key, what))
    if problems or not plan:
        raise RecipeError(listed(problems, origins))
    if plan.random is None:
        return plan
    draw = plan.random
    drawn = random_plan(
        seed,
        draw.faults,
        draw.min_nodes,
        draw.max_nodes,
        nodes=plan.counts[-1],
        every=draw.every,
        after=plan.last_step,
        partitions=partitions,
    )
    return replace(plan, faults=(*plan.faults, *drawn.faults), random=None)


def random_plan(
    seed: int,
    faults: int,
    min_nodes: int,
    max_nodes: int,
    *,
    nodes: int | None = None,
    every: int = 30,
    after: int = 0,
    partitions: bool = False,
) -> Plan:
    """A mixed schedule, the same for the same arguments.

    Args:
        seed: of all choices.
        faults: how many.
        min_nodes, max_nodes: the number of nodes stays within them.
        nodes: at the start; any unless given.
        every: steps between two faults, on average.
        after: the first fault comes after this step.
        partitions: among others.
    """
    draw = random.Random(seed)
    up = nodes if nodes is not None else draw.randint(min_nodes, max_nodes)
    plan, at, amid = Plan(nodes=up), after, False
    for _ in range(faults):
        before = plan.faults[-1] if plan.faults else None
        # Two faults at once, but not three, or the run would be kept from ever recovering.
        amid = not amid and before is not None and before.what in RESTARTING and draw.random() < 0.4
        phase: Phase = "step"
        if amid:
            phase = draw.choice(("init", "load", "rendezvous"))
        elif draw.random() < 0.2:
            phase = "save"
        at += 0 if amid else draw.randint(max(1, every // 2), max(1, every * 3 // 2))
        possible = [
            (what, weight)
            for what, weight in WEIGHTS.items()
            if min_nodes <= up + NODES.get(what, 0) <= max_nodes
            and not (phase == "rendezvous" and what in OF_WORKERS)
            and (partitions or what != "partition")
        ]
        (what,) = draw.choices([w for w, _ in possible], [weight for _, weight in possible])
        fault = Fault(
            what=what,
            at=at,
            during=phase,
            node=draw.randrange(max_nodes),
            rank=draw.randrange(8),
            seconds=round(draw.uniform(0.5, 3.0), 1),
            way=draw.choice(("both", "in", "out")),
        )
        up += NODES.get(what, 0)
        plan = replace(plan, faults=(*plan.faults, fault))
    return plan


def random_pairs(seed: int, pairs: int, nodes: int, every: int = 20) -> Plan:
    """Pairs of faults within PAIR_SECONDS of each other, each kind of pair equally often.

    Args:
        seed: of nodes, ranks, delays and order.
        pairs: how many; killed agents are started again after each, as faults of their own.
        nodes: at the start, 2 at least.
        every: steps between two pairs, on average.
    """
    draw = random.Random(seed)
    kinds = [
        (one, other)
        for place, one in enumerate(OF_PAIRS)
        for other in OF_PAIRS[place:]
        if (one, other) != ("store", "store") and (nodes > 2 or (one, other) != ("kill_agent",) * 2)
    ]
    drawn: list[tuple[What, What]] = []
    while len(drawn) < pairs:
        drawn += draw.sample(kinds, min(len(kinds), pairs - len(drawn)))
    faults: list[Fault] = []
    at = 0
    for kind in drawn:
        at += draw.randint(max(1, every // 2), max(1, every * 3 // 2))
        first, second = draw.sample(kind, 2)
        node, delay = draw.randrange(nodes), round(draw.uniform(0.0, PAIR_SECONDS), 3)
        ranks, other = (draw.randrange(8), draw.randrange(8)), draw.randrange(nodes)
        if first == second:  # a process dies once
            other = node + 1
        faults.append(Fault(what=first, at=at, node=node, rank=ranks[0], seconds=STORE_SECONDS))
        faults.append(
            Fault(
                what=second,
                at=at,
                node=other,
                rank=ranks[1],
                seconds=STORE_SECONDS,
                delay=delay,
            )
        )
        faults += [Fault(what="join", at=at)] * kind.count("kill_agent")
    return Plan(nodes=nodes, faults=tuple(faults))


WEIGHTS: dict[What, float] = {
    "kill_worker": 3,
    "kill_agent": 2,
    "kill_node": 3,
    "stop_worker": 1,
    "stop_node": 1,
    "slow_worker": 0.5,
    "partition": 1.5,
    "storage": 1,
    "nan": 1,
    "notice": 2,
    "store": 1.5,
    "join": 6,  # what else was taken must come back
}


def _problems(plan: Plan, partitions: bool) -> Iterator[tuple[Key, str]]:
    """Pairs of (key, what is wrong and what to do)."""
    at = 0
    for number, (fault, left) in enumerate(zip(plan.faults, plan.counts[1:], strict=True)):
        key = ("faults", number)
        if fault.at < at:
            problem = f"comes after the fault at step {at}; faults come in the order of the file"
            yield (*key, "at"), problem
        at = fault.at
        if left < 1:
            yield key, "leaves no node to go on; put `what: join` before it, or start with more"
        if fault.delay is not None and not number:
            yield (*key, "delay"), "there is no fault before; take `at`"
        if fault.during == "rendezvous" and fault.what in OF_WORKERS:
            yield (*key, "during"), "there is no worker during a rendezvous; take kill_agent"
        if fault.what == "partition" and not partitions:
            problem = (
                "a partition takes root, and the commands ip, nft and nsenter; take stop_node "
                "instead, or run as root with iproute2 and nftables installed"
            )
            yield key, problem
    draw, up = plan.random, plan.counts[-1]
    if draw and not 1 <= draw.min_nodes <= up <= draw.max_nodes:
        problem = (
            f"min_nodes {draw.min_nodes} and max_nodes {draw.max_nodes} do not fit the {up} "
            "node(s) that are up before; need 1 <= min_nodes <= nodes <= max_nodes"
        )
        yield ("random",), problem
