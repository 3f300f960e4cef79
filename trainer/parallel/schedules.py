"""Pipeline schedules: which rank computes what in which order, and what that costs. Pure.

[Note: schedules] A model is cut into stages, and stage s lives on rank s % ranks. A rank does its
actions one after the other; one begins when what it needs has come. An action is a kind, a stage
and the number of a micro-batch:

- *F*: forward.
- *B*: backward.
- *I* and *W*: backward in two parts, the gradient of the stage's input, and those of its weights.
  Nobody waits for a W, so it fills a gap.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from trainer.recipe.sections import PipelineSchedule as Name

Kind = Literal["F", "B", "I", "W"]

COST: Mapping[Kind, float] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Each product of forward makes two of backward: for the gradients of its input, and its weight."""


class Action(NamedTuple):
    """What a rank does at a time, see [Note: schedules]."""

    kind: Kind
    stage: int
    micro_batch: int


Order = list[Action]


def schedule(name: Name, ranks: int, per_rank: int, count: int) -> list[Order]:
    """The order of each rank.

    Args:
        name: `gpipe`, all forward before all backward (Huang et al. 2019); `1f1b`, in turn, as soon
            as can be (PipeDream-flush, Narayanan et al. 2021); `interleaved_1f1b`, with several
            stages a rank (ibid.); `zero_bubble`, ZB-H1 (Qi et al. 2023).
        ranks: of the pipeline.
        per_rank: stages of each.
        count: micro-batches, any number.
    """
    eager = name == "gpipe"
    orders = [_in_turn(rank, ranks, per_rank, count, eager) for rank in range(ranks)]
    if name != "zero_bubble":
        return orders
    return [_split_backward(order, rank) for rank, order in enumerate(orders)]


def _in_turn(rank: int, ranks: int, per_rank: int, count: int, eager: bool) -> Order:
    """Some forwards to fill the pipeline (all, if `eager`), then forward and backward in turn.

    A group of micro-batches goes through one stage of a rank after the other. Narayanan et al.
    want groups of exactly `ranks`; these have at least so many, and the larger ones come first,
    which never deadlocks. A smaller last group can.
    """
    rounds = max(1, count // ranks)
    sizes = [count // rounds + (number < count % rounds) for number in range(rounds)]
    groups = [range(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
    stages = range(rank, ranks * per_rank, ranks)
    forward = deque(Action("F", s, m) for group in groups for s in stages for m in group)
    backward = deque(Action("B", s, m) for group in groups for s in stages[::-1] for m in group)
    warmup = (ranks - rank - 1) * min(2, per_rank) + (per_rank - 1) * sizes[0]
    order = [forward.popleft() for _ in range(len(forward) if eager else min(warmup, len(forward)))]
    while backward:
        if forward:
            order.append(forward.popleft())
        order.append(backward.popleft())
    return order


def _split_backward(order: Order, rank: int) -> Order:
    """Each B becomes an I, whose W waits for a gap. At most `rank` of them wait, by as many fewer
    forwards this rank is ahead than the first; so none holds more than the first rank of 1F1B."""
    waiting: deque[Action] = deque()
    split: Order = []
    last_forward = max(place for place, action in enumerate(order) if action.kind == "F")
    for place, action in enumerate(order):
        if action.kind == "F":
            split.append(action)
            continue
        split.append(action._replace(kind="I"))
        waiting.append(action._replace(kind="W"))
        if place < last_forward:
            while len(waiting) > rank:
                split.append(waiting.popleft())
        elif place < len(order) - 1:  # the pipeline runs dry: there is a gap after each
            split.append(waiting.popleft())
    return [*split, *waiting]


class Span(NamedTuple):
    """When an action is done."""

    action: Action
    began: float
    ended: float


class Arrangement(NamedTuple):
    """What orders come to: all actions, each after what it needs."""

    steps: list[tuple[int, Action, int]]
    """The rank, the action, and the place of that of another stage whose message it needs, or -1:
    what it needs of its own stage its rank has done."""
    held: list[int]
    """Most forwards of which a rank holds the activations at once, over all its stages."""


class Simulation(NamedTuple):
    """What orders cost, see `simulate`."""

    arrangement: Arrangement
    began: list[float]
    """When each of its steps begins."""
    ended: list[float]
    """When it is done."""
    busy: list[float]
    """How long each rank has something to do."""

    @property
    def spans(self) -> list[list[Span]]:
        """What each rank does, and when."""
        spans: list[list[Span]] = [[] for _ in self.busy]
        for (rank, action, _), began, ended in zip(
            self.arrangement.steps, self.began, self.ended, strict=True
        ):
            spans[rank].append(Span(action, began, ended))
        return spans

    @property
    def held(self) -> list[int]:
        """Most forwards that each rank holds, as the arrangement says."""
        return self.arrangement.held

    @property
    def seconds(self) -> float:
        """Until the last rank is done."""
        return max(self.ended)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they have nothing to do."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds)


def needs(action: Action, stages: int) -> list[Action]:
    """What is to be done before an action can be, by whichever rank."""
    kind, stage, number = action
    if kind == "F":
        return [Action("F", stage - 1, number)] if stage else []
    if kind == "W":
        return [Action("I", stage, number)]
    above = [Action(kind, stage + 1, number)] if stage + 1 < stages else []
    return [Action("F", stage, number), *above]


def arranged(orders: Sequence[Order]) -> Arrangement:
    """Let each rank follow its order.

    Raises:
        ValueError: ranks would wait for each other for ever.
    """
    count = 1 + max(action.stage for order in orders for action in order)
    place: dict[Action, int] = {}
    steps: list[tuple[int, Action, int]] = []
    ahead, held = [0] * len(orders), [0] * len(orders)
    waiting = [deque(order) for order in orders]
    while any(waiting):
        before = len(steps)
        for rank, order in enumerate(waiting):
            while order:
                needed = needs(order[0], count)
                if not all(need in place for need in needed):
                    break
                action = order.popleft()
                apart = [place[need] for need in needed if need.stage != action.stage]
                place[action] = len(steps)
                steps.append((rank, action, apart[0] if apart else -1))
                ahead[rank] += {"F": 1, "I": 0}.get(action.kind, -1)
                held[rank] = max(held[rank], ahead[rank])
        if len(steps) == before:
            raise ValueError(f"ranks wait for each other before {[o[0] for o in waiting if o]}")
    return Arrangement(steps, held)


def simulate(
    arrangement: Arrangement,
    cost: Mapping[Kind, float] = COST,
    stages: Sequence[Mapping[Kind, float]] = (),
    message: float = 0.0,
) -> Simulation:
    """What happens when each rank follows its order.

    Args:
        arrangement: of all ranks.
        cost: of an action.
        stages: by stage, if they do not cost the same.
        message: from one rank to another; nobody computes less for it.
    """
    free, busy = [0.0] * len(arrangement.held), [0.0] * len(arrangement.held)
    starts: list[float] = []
    ended: list[float] = []
    for rank, (kind, stage, _), needed in arrangement.steps:
        began = free[rank]
        if needed >= 0 and ended[needed] + message > began:
            began = ended[needed] + message
        seconds = (stages[stage] if stages else cost)[kind]
        free[rank] = began + seconds
        busy[rank] += seconds
        starts.append(began)
        ended.append(free[rank])
    return Simulation(arrangement, starts, ended, busy)


def bubble_formula(name: Name, ranks: int, per_rank: int, count: int) -> float:
    """The bubble of `COST`; of the last two for as many micro-batches as ranks, or more."""
    times = {"interleaved_1f1b": per_rank, "zero_bubble": 3}.get(name, 1)
    return (ranks - 1) / (count * times + ranks - 1)


def incoming(orders: Sequence[Order]) -> list[dict[int, Order]]:
    """For each rank and sender, the actions that need a message from there, in the order in which
    the messages are sent. Who posts receives in this order needs neither tags nor a handshake."""
    ranks = len(orders)
    stages = 1 + max(action.stage for order in orders for action in order)
    found: list[dict[int, Order]] = [{} for _ in orders]
    for sender, order in enumerate(orders):
        for kind, stage, number in order:
            to = stage + {"F": 1, "W": stages}.get(kind, -1)
            if 0 <= to < stages and to % ranks != sender:
                found[to % ranks].setdefault(sender, []).append(Action(kind, to, number))
    return found


@cache
def cut(costs: tuple[float, ...], stages: int) -> list[range]:
    """Cut blocks into so many runs, the dearest of which is as cheap as can be.

    Args:
        costs: of each block, with what lies below the first and above the last.
        stages: at most as many as there are blocks.
    """
    upto = list(accumulate(costs, initial=0.0))
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, 0): (0.0, ())}
    for stage in range(1, stages + 1):
        for stop in range(stage, len(costs) + 1):
            best[stage, stop] = min(
                (max(dearest, upto[stop] - upto[start]), (*starts, start))
                for start in range(stage - 1, stop)
                for dearest, starts in [best.get((stage - 1, start), (float("inf"), ()))]
            )
    return [range(*ends) for ends in pairwise((*best[stages, len(costs)][1], len(costs)))]
