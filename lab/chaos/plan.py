"""Plans of faults for a run: which fault comes when, read from YAML or drawn from a seed. Pure.

    nodes: 2                # at the start
    faults:
      - {what: kill_worker, at: 20}
      - {what: kill_agent, at: 20, during: init}
      - {what: join, at: 40}
      - {what: stop_node, at: 60, node: 1, seconds: 3}
      - {what: kill_stand_in, at: 80}
      - {what: kill_zygote, node: 1, at: 80, delay: 0.02}
    random: {faults: 20, every: 30, max_nodes: 4}     # more, drawn from the seed

[Note: order of faults] Faults come one after another. A fault `during` step waits until the run has
completed a new step since the previous fault. A fault during another phase comes as soon as its
node is in that phase; if the previous fault restarts processes, that is amid the recovery. A fault
with a `delay` comes that many seconds after the previous one, whatever its node is doing.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from trainer.recipe.checking import checked
from trainer.recipe.value_types import Amount, Count, Positive
from trainer.recipe.yaml_tree import Key, Origins, RecipeError, RecipeProblem, listed, origin_of

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
"""Faults that kill a helper process of a node: neither a training process nor the agent."""
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
"""Longest time between the faults of a pair; time until a killed store of a pair starts again."""
RESTARTING: tuple[What, ...] = ("kill_worker", "kill_agent", "kill_node", "notice", "join")
"""Faults that restart training processes, and after which the next random fault may come amid the
recovery."""
NODES: dict[What, int] = {"kill_agent": -1, "kill_node": -1, "notice": -1, "join": 1}
"""Change of the number of nodes by each fault; 0 for faults that are not listed."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a plan."""

    what: What
    """kill_worker: SIGKILL to a training process. kill_stand_in: SIGKILL to the process that
    torchrun started for a rank. kill_zygote: SIGKILL to the process that forks a node's training
    processes; they end with it. kill_writer: SIGKILL to a node's checkpoint writer. kill_agent:
    SIGKILL to a node's agent; its processes end, the machine's memory stays. kill_node: the whole
    machine is lost, with its memory. stop_worker, stop_node: SIGSTOP to a training process or to
    all processes of a node, and SIGCONT `seconds` later. slow_worker: a training process is stopped
    for half of the time, in turns of 50 ms. partition: the network drops all packets to or from the
    node for `seconds`; needs root, ip and nft. storage: every write of the node's checkpoint writer
    fails for `seconds`. nan: a gradient of a rank is NaN once, as after a hardware fault. notice:
    SIGTERM to the agent. store: SIGKILL to the store, which starts again, empty, after `seconds`.
    join: another node joins, on the machine of a killed agent if there is one."""

    at: Count = 0
    """Step that must be completed before the fault."""

    during: Phase = "step"
    """Phase of the node in which the fault comes; `save` lasts while a checkpoint is being
    written."""

    node: Count = 0
    """Number of the target among the running nodes, oldest first, modulo their count."""

    rank: Count = 0
    """Local rank of the target, modulo the ranks of its node."""

    seconds: Amount = 2.0
    """Duration of stop_worker, stop_node, slow_worker, partition, storage and store."""

    delay: Amount | None = None
    """Seconds after the previous fault; replaces `during`."""

    way: Way = "both"
    """Direction of the packets that a partition drops, seen from the node."""

    def __str__(self) -> str:
        way = f" ({self.way})" if self.what == "partition" else ""
        lasting = f" for {self.seconds:g} s" if self.what in LASTING else ""
        if self.delay is not None:
            return f"{self.what}{way}{lasting}, {1000 * self.delay:.0f} ms later"
        during = "" if self.during == "step" else f" during {self.during}"
        return f"{self.what}{way}{lasting}{during}"


@dataclass(frozen=True, kw_only=True)
class RandomFaults:
    """Parameters of faults that are drawn from a seed."""

    faults: Count
    """Number of faults."""

    every: Positive = 30
    """Mean number of steps between two faults."""

    min_nodes: int = 1
    """Smallest number of nodes that a fault may leave."""

    max_nodes: int = 4
    """Largest number of running nodes."""


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """Faults for a run, in order."""

    nodes: Positive = 1
    """Nodes at the start."""

    faults: tuple[Fault, ...] = ()
    """Faults in the order in which they come."""

    random: RandomFaults | None = None
    """Further faults, drawn from the seed, after `faults`."""

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid"}

    @property
    def counts(self) -> list[int]:
        """Number of running nodes at the start, and after each fault."""
        counts = [self.nodes]
        for fault in self.faults:
            counts.append(counts[-1] + NODES.get(fault.what, 0))
        return counts

    @property
    def last_step(self) -> int:
        """Step of the last fault; the run must be longer."""
        return max((fault.at for fault in self.faults), default=0)


def read_plan(
    tree: Any, seed: int, origins: Origins, file: str, *, partitions: bool = False
) -> FaultPlan:
    """Build a plan from plain values, and draw its random faults.

    Args:
        tree: parsed YAML.
        seed: seed of the random faults.
        origins: file and line of each key.
        file: shown in messages for keys without an origin.
        partitions: whether this machine can partition nodes.

    Raises:
        RecipeError: a line for each problem, with file, line, key and remedy.
    """
    problems: list[RecipeProblem] = []
    plan = checked(FaultPlan, tree, origins, file, problems, set())
    if plan and not problems:
        for key, what in _problems(plan, partitions):
            problems.append(RecipeProblem(origin_of(key, origins, file), key, what))
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
) -> FaultPlan:
    """Draw a plan of mixed faults; a function of its arguments.

    Args:
        seed: seed of all choices.
        faults: number of faults.
        min_nodes, max_nodes: bounds of the number of nodes.
        nodes: nodes at the start; drawn if None.
        every: mean number of steps between two faults.
        after: step after which the first fault comes.
        partitions: whether partitions may be drawn.
    """
    draw = random.Random(seed)
    up = nodes if nodes is not None else draw.randint(min_nodes, max_nodes)
    plan, at, amid = FaultPlan(nodes=up), after, False
    for _ in range(faults):
        before = plan.faults[-1] if plan.faults else None
        # At most two faults in a row without recovery between, or the run might never advance.
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


def random_pairs(seed: int, pairs: int, nodes: int, every: int = 20) -> FaultPlan:
    """Draw a plan of pairs of faults within PAIR_SECONDS, each kind of pair equally often.

    Args:
        seed: seed of nodes, ranks, delays and order.
        pairs: number of pairs. A `join` after each pair starts its killed agents again.
        nodes: nodes at the start, at least 2.
        every: mean number of steps between two pairs.
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
        if first == second:  # a dead process cannot be killed again
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
    return FaultPlan(nodes=nodes, faults=tuple(faults))


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
    "join": 6,  # makes up for the kinds that remove nodes
}


def _problems(plan: FaultPlan, partitions: bool) -> Iterator[tuple[Key, str]]:
    """Yield (key, what is wrong and what to do) for each problem of a plan."""
    at = 0
    for number, (fault, left) in enumerate(zip(plan.faults, plan.counts[1:], strict=True)):
        key = ("faults", number)
        if fault.at < at:
            problem = f"is below step {at} of the previous fault; sort the faults by `at`"
            yield (*key, "at"), problem
        at = fault.at
        if left < 1:
            yield key, "leaves no node; put `what: join` before it, or raise `nodes`"
        if fault.delay is not None and not number:
            yield (*key, "delay"), "there is no previous fault; set `at` instead"
        if fault.during == "rendezvous" and fault.what in OF_WORKERS:
            yield (*key, "during"), "there is no worker during a rendezvous; use kill_agent"
        if fault.what == "partition" and not partitions:
            problem = (
                "a partition needs root, and the commands ip, nft and nsenter; use stop_node "
                "instead, or run as root with iproute2 and nftables installed"
            )
            yield key, problem
    draw, up = plan.random, plan.counts[-1]
    if draw and not 1 <= draw.min_nodes <= up <= draw.max_nodes:
        problem = (
            f"min_nodes {draw.min_nodes} and max_nodes {draw.max_nodes} do not include the {up} "
            "node(s) before the random faults; need 1 <= min_nodes <= nodes <= max_nodes"
        )
        yield ("random",), problem
