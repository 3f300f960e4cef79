"""Which faults come when: a plan, read from plain values or drawn from a seed. Pure.

    nodes: 2                # at the start
    faults:
      - {what: kill_worker, at: 20}
      - {what: kill_agent, at: 20, during: init}
      - {what: join, at: 40}
      - {what: stop_node, at: 60, node: 1, seconds: 3}
    random: {faults: 20, every: 30, max_nodes: 4}     # more, drawn from the seed

[Note: order of faults] Faults come one after another. One `during` step waits until the run has
done a new step since the fault before. One during any other phase comes as soon as its node is in
that phase; after a fault that makes processes start anew this is amid the recovery from it.
"""

import difflib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

What = Literal[
    "kill_worker",
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
Key = tuple[str | int, ...]

OF_WORKERS: tuple[What, ...] = ("kill_worker", "stop_worker", "slow_worker", "nan")
LASTING: tuple[What, ...] = (
    *("stop_worker", "stop_node", "slow_worker"),
    *("partition", "storage", "store"),
)
RESTARTING: tuple[What, ...] = ("kill_worker", "kill_agent", "kill_node", "notice", "join")
"""After these, training processes start anew."""
NODES: dict[What, int] = {"kill_agent": -1, "kill_node": -1, "notice": -1, "join": 1}
"""By how many nodes a fault changes the job."""


class PlanError(Exception):
    """The plan is wrong; one line."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong."""

    what: What
    """kill_worker: SIGKILL to a training process. kill_agent: to a node's agent, with which its
    processes go; the machine's memory stays. kill_node: the machine is gone, with its memory.
    stop_worker, stop_node: SIGSTOP to the one, or to all processes of the node; SIGCONT `seconds`
    later. slow_worker: stopped for half of the time, in turns of 50 ms. partition: no packet
    reaches the node, or leaves it, for `seconds`; takes root, and ip and nft. storage: every write
    of the node's checkpoint writer fails for `seconds`. nan: a gradient of a rank is NaN once, as
    after a fault of its hardware. notice: SIGTERM to the agent. store: SIGKILL to the store, which
    comes back empty `seconds` later. join: a node more, on a machine whose agent was killed if
    there is one."""

    at: int = 0
    """Not before this step is done."""

    during: Phase = "step"
    """What the node is doing; save: while a checkpoint is being written."""

    node: int = 0
    """Which of the nodes that are up, from the oldest on; counted round."""

    rank: int = 0
    """Which of its ranks; counted round."""

    seconds: float = 2.0
    """How long what lasts does."""

    way: Way = "both"
    """Of a partition: which packets are lost."""

    def __str__(self) -> str:
        way = f" ({self.way})" if self.what == "partition" else ""
        lasting = f" for {self.seconds:g} s" if self.what in LASTING else ""
        return f"{self.what}{way}{lasting}" + (
            "" if self.during == "step" else f" during {self.during}"
        )


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Faults that are drawn from a seed."""

    faults: int
    """How many."""

    every: int = 30
    """Steps between two, on average."""

    min_nodes: int = 1
    """Fewer are never left."""

    max_nodes: int = 4
    """More never are up."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What happens to a run."""

    nodes: int = 1
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
    tree: Any, seed: int, where: Callable[[Key], str], *, partitions: bool = False
) -> Plan:
    """Plain values → a plan, its random faults drawn.

    Args:
        tree: as a YAML file holds it.
        seed: of what is drawn.
        where: tells where a key was written, for messages.
        partitions: whether nodes can be cut off here.

    Raises:
        PlanError: one line that names place, key and remedy.
    """
    try:
        plan = TypeAdapter(Plan).validate_python(tree)
    except ValidationError as error:
        raise PlanError(_explain(error, where)) from None
    for key, problem in _problems(plan):
        raise PlanError(f"{where(key)}: {'.'.join(map(str, key))}: {problem}")
    for number, fault in enumerate(plan.faults):
        if fault.what == "partition" and not partitions:
            key = ("faults", number)
            raise PlanError(
                f"{where(key)}: a partition takes root, and the commands ip, nft and nsenter; take "
                "stop_node instead, or run as root with iproute2 and nftables installed"
            )
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


def _problems(plan: Plan) -> Iterator[tuple[Key, str]]:
    """Pairs of (key, what is wrong and what to do)."""
    if plan.nodes < 1:
        yield ("nodes",), f"a run needs at least one node, not {plan.nodes}"
    at = 0
    for number, (fault, left) in enumerate(zip(plan.faults, plan.counts[1:], strict=True)):
        key = ("faults", number)
        if fault.at < at:
            problem = f"comes after the fault at step {at}; faults come in the order of the file"
            yield (*key, "at"), problem
        at = fault.at
        if left < 1:
            yield key, "leaves no node to go on; put `what: join` before it, or start with more"
        if fault.during == "rendezvous" and fault.what in OF_WORKERS:
            yield (*key, "during"), "there is no worker during a rendezvous; take kill_agent"
        for name in ("at", "node", "rank", "seconds"):
            if getattr(fault, name) < 0:
                yield (*key, name), "must not be negative"
    draw, up = plan.random, plan.counts[-1]
    if draw and not 1 <= draw.min_nodes <= up <= draw.max_nodes:
        problem = (
            f"min_nodes {draw.min_nodes} and max_nodes {draw.max_nodes} do not fit the {up} "
            "node(s) that are up before; need 1 <= min_nodes <= nodes <= max_nodes"
        )
        yield ("random",), problem
    if draw and (draw.faults < 0 or draw.every < 1):
        yield ("random",), "takes `faults` of at least 0 and `every` of at least 1"


def _explain(error: ValidationError, where: Callable[[Key], str]) -> str:
    """The first problem as one line; a key that is unknown comes before one that is missing."""
    problems = error.errors(include_url=False)
    unknown = [item for item in problems if item["type"] == "unexpected_keyword_argument"]
    problem = (unknown or problems)[0]
    path = problem["loc"]
    key = ".".join(map(str, path)) or "plan"
    if unknown:
        return f"{where(path)}: {key}: unknown key; {_hint(str(path[-1]), _keys_beside(path))}"
    if problem["type"] == "literal_error":
        choices = [
            word.strip("'") for word in problem["ctx"]["expected"].replace(" or ", ", ").split(", ")
        ]
        return (
            f"{where(path)}: {key}: there is no {problem['input']!r}; "
            f"{_hint(str(problem['input']), choices)}"
        )
    if problem["type"].startswith("missing"):
        return f"{where(path)}: {key}: required, but not set"
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{where(path)}: {key}: {message}, but it is {problem.get('input')!r}"


def _hint(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def _keys_beside(path: Key) -> list[str]:
    home: Mapping[Any, type] = {"faults": Fault, "random": Draw}
    kind = home.get(path[0], Plan) if len(path) > 1 else Plan
    return [item.name for item in fields(kind)]
