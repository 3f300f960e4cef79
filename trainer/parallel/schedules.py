"""Pipeline schedules: the order of each rank's actions, and a simulation of their times. Pure.

[Note: schedules] A model is cut into stages; stage s is on rank s % ranks. A rank executes its
actions one after the other; an action begins when the messages that it needs have arrived. The
kinds of actions are *F*, forward; *B*, backward; *I* and *W*, backward in two parts, the gradients
of the stage's input, and of its weights. No rank waits for a W, so it can fill idle time.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from trainer.recipe.sections import PipelineSchedule as Name

Kind = Literal["F", "B", "I", "W"]

COST: Mapping[Kind, float] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Relative cost of an action. For each matrix product of forward, backward has two."""


class PipelineAction(NamedTuple):
    """One computation of a pipeline rank, see [Note: schedules]."""

    kind: Kind
    stage: int
    micro_batch: int


Order = list[PipelineAction]


def schedule(name: Name, ranks: int, per_rank: int, count: int) -> list[Order]:
    """Return the order of actions of each rank.

    Args:
        name: `gpipe`, all forwards before all backwards (Huang et al. 2019); `1f1b`, alternating as
            early as possible (PipeDream-flush, Narayanan et al. 2021); `interleaved_1f1b`, with
            several stages per rank (ibid.); `zero_bubble`, ZB-H1 (Qi et al. 2023).
        per_rank: number of stages of each rank.
        count: number of micro-batches, at least 1.
    """
    eager = name == "gpipe"
    orders = [_in_turn(rank, ranks, per_rank, count, eager) for rank in range(ranks)]
    if name != "zero_bubble":
        return orders
    return [_split_backward(order, rank) for rank, order in enumerate(orders)]


def _in_turn(rank: int, ranks: int, per_rank: int, count: int, eager: bool) -> Order:
    """Return a rank's order: first forwards that fill the pipeline (with `eager`: all forwards),
    then forward and backward in turn. With several stages per rank, a rank computes a whole
    group of micro-batches in one of its stages, then the group in its next stage."""
    # Narayanan et al. need groups of `ranks` micro-batches. Here groups have at least `ranks`
    # (unless there are fewer), larger groups first. A small group after others could deadlock.
    rounds = max(1, count // ranks)
    sizes = [count // rounds + (number < count % rounds) for number in range(rounds)]
    groups = [range(*ends) for ends in pairwise(accumulate(sizes, initial=0))]
    stages = range(rank, ranks * per_rank, ranks)
    forward = deque(PipelineAction("F", s, m) for group in groups for s in stages for m in group)
    backward = deque(
        PipelineAction("B", s, m) for group in groups for s in stages[::-1] for m in group
    )
    warmup = (ranks - rank - 1) * min(2, per_rank) + (per_rank - 1) * sizes[0]
    order = [forward.popleft() for _ in range(len(forward) if eager else min(warmup, len(forward)))]
    while backward:
        if forward:
            order.append(forward.popleft())
        order.append(backward.popleft())
    return order


def _split_backward(order: Order, rank: int) -> Order:
    """Split each B into an I and a W, see [Note: schedules], and put Ws off to fill idle time. At
    most `rank` Ws are put off: rank r has r fewer forwards ahead than the first rank, so no rank
    holds more activations than the first rank under 1F1B."""
    waiting: deque[PipelineAction] = deque()
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
        elif place < len(order) - 1:  # no forward is left: the rank is idle after each I
            split.append(waiting.popleft())
    return [*split, *waiting]


class PipelineActionSequence(NamedTuple):
    """The actions of all ranks in one sequence, each after the actions that it needs."""

    steps: list[tuple[int, PipelineAction, int]]
    """(rank, action, index in `steps` of the action whose message it needs, or -1)."""
    held: list[int]
    """Per rank, the largest number of forwards whose activations it stores at once."""


class PipelineParallelSimulation(NamedTuple):
    """Simulated times of all actions, in the units of the costs."""

    arrangement: PipelineActionSequence
    began: list[float]
    """When each of `arrangement.steps` begins."""
    ended: list[float]
    busy: list[float]
    """Time that each rank spends in actions."""

    @property
    def seconds(self) -> float:
        return max(self.ended)

    @property
    def bubble(self) -> float:
        """Fraction of the ranks' time in which they are idle."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds)


def needs(action: PipelineAction, stages: int) -> list[PipelineAction]:
    """Return the actions, on any rank, that must be done before `action`."""
    kind, stage, number = action
    if kind == "F":
        return [PipelineAction("F", stage - 1, number)] if stage else []
    if kind == "W":
        return [PipelineAction("I", stage, number)]
    above = [PipelineAction(kind, stage + 1, number)] if stage + 1 < stages else []
    return [PipelineAction("F", stage, number), *above]


def arranged(orders: Sequence[Order]) -> PipelineActionSequence:
    """Merge the orders of all ranks into one sequence. Raises ValueError if they deadlock."""
    count = 1 + max(action.stage for order in orders for action in order)
    place: dict[PipelineAction, int] = {}
    steps: list[tuple[int, PipelineAction, int]] = []
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
                on_other_stages = [place[need] for need in needed if need.stage != action.stage]
                place[action] = len(steps)
                steps.append((rank, action, on_other_stages[0] if on_other_stages else -1))
                # Activations are stored until B, or until W if backward is split.
                ahead[rank] += {"F": 1, "I": 0}.get(action.kind, -1)
                held[rank] = max(held[rank], ahead[rank])
        if len(steps) == before:
            waits = [order[0] for order in waiting if order]
            raise ValueError(f"deadlock: ranks wait for each other before {waits}")
    return PipelineActionSequence(steps, held)


def simulate(
    arrangement: PipelineActionSequence,
    cost: Mapping[Kind, float] = COST,
    stages: Sequence[Mapping[Kind, float]] = (),
    message: float = 0.0,
) -> PipelineParallelSimulation:
    """Compute when each action runs if every rank follows its order. `cost`: duration of an action
    by kind; if stages differ, `stages` has it for each stage. `message`: time of a message to
    another rank, which keeps no rank busy."""
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
    return PipelineParallelSimulation(arrangement, starts, ended, busy)


def bubble_formula(name: Name, ranks: int, per_rank: int, count: int) -> float:
    """Return the bubble by its closed form for `COST`. For interleaved_1f1b and zero_bubble it
    holds only with at least as many micro-batches as ranks."""
    times = {"interleaved_1f1b": per_rank, "zero_bubble": 3}.get(name, 1)
    return (ranks - 1) / (count * times + ranks - 1)


def incoming(orders: Sequence[Order]) -> list[dict[int, Order]]:
    """Return for each rank: sender → the actions that need the sender's messages, in the order of
    sending. If receives are posted in this order, messages need no tags."""
    ranks = len(orders)
    stages = 1 + max(action.stage for order in orders for action in order)
    by_rank: list[dict[int, Order]] = [{} for _ in orders]
    for sender, order in enumerate(orders):
        for kind, stage, number in order:
            to = stage + {"F": 1, "W": stages}.get(kind, -1)
            # Two stages on the same rank exchange no messages.
            if 0 <= to < stages and to % ranks != sender:
                by_rank[to % ranks].setdefault(sender, []).append(PipelineAction(kind, to, number))
    return by_rank


@cache
def cut(costs: tuple[float, ...], stages: int) -> list[range]:
    """Cut blocks, with their costs, into `stages` ranges so that the highest cost of a range is as
    low as possible. There must be at least as many blocks as stages."""
    upto = list(accumulate(costs, initial=0.0))
    # Dynamic programming: (stages, blocks) → (highest cost, starts of the ranges).
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, 0): (0.0, ())}
    for stage in range(1, stages + 1):
        for stop in range(stage, len(costs) + 1):
            best[stage, stop] = min(
                (max(dearest, upto[stop] - upto[start]), (*starts, start))
                for start in range(stage - 1, stop)
                for dearest, starts in [best.get((stage - 1, start), (float("inf"), ()))]
            )
    return [range(*ends) for ends in pairwise((*best[stages, len(costs)][1], len(costs)))]
