"""Messages between the ranks of a pipeline where each group has a communicator of NCCL, which does
one thing after the other."""

from types import SimpleNamespace

import pytest
import torch

from trainer.parallel import pipeline
from trainer.parallel.pipeline import neighbour_turns
from trainer.parallel.schedules import COST, PipelineAction, arranged, schedule, simulate


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("ranks", range(2, 10))
def test_neighbours_make_groups_at_the_same_time(ranks, around):
    turns = list(zip(*(neighbour_turns(rank, ranks, around) for rank in range(ranks)), strict=True))
    for turn in turns:
        assert sorted(rank for group in set(turn) for rank in group) == list(range(ranks))
        assert all(rank in turn[rank] for rank in range(ranks))
    pairs = {frozenset(group) for turn in turns for group in turn if len(group) == 2}
    last = ranks if around else ranks - 1
    assert pairs == {frozenset((rank, (rank + 1) % ranks)) for rank in range(last)}
    assert len(turns) <= 3


@pytest.mark.parametrize("count", [1, 2, 5, 16])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("name", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)])
def test_a_receive_that_is_posted_ahead_holds_up_nothing(monkeypatch, name, ranks, per_rank, count):
    orders = schedule(name, ranks, per_rank, count)
    queues = [queue_of(monkeypatch, rank, orders, per_rank > 1) for rank in range(ranks)]
    assert seconds(queues) == simulate(arranged(orders)).seconds


def queue_of(monkeypatch, rank, orders, around):
    """What a rank asks of its GPU, in order: numbers are seconds of computing, operations begin
    what has a group, and an operation in a list is waited for."""
    asked = []

    def begin(sends):
        def begin(tensor, peer, group):
            asked.append(SimpleNamespace(sends=sends, group=group, issued=None, ended=None))
            return SimpleNamespace(wait=lambda made=asked[-1]: asked.append([made]))

        return begin

    ranks = len(orders)
    links = object.__new__(pipeline._Links)
    links.rank, links.ranks, links.device = rank, ranks, torch.device("cpu")
    links.group, links._members = "all", range(ranks)
    turns = neighbour_turns(rank, ranks, around)
    links._ways = {way: way for turn in turns for way in (turn, turn[::-1])}
    monkeypatch.setattr(pipeline.dist, "isend", begin(True))
    monkeypatch.setattr(pipeline.dist, "irecv", begin(False))
    messages = pipeline._Messages(links, orders, lambda action: (torch.empty(1),))
    top = max(action.stage for order in orders for action in order)
    for kind, stage, number in orders[rank]:
        after = stage + (1 if kind == "F" else -1)
        if (stage if kind == "F" else top - stage) > 0:
            messages.receive(PipelineAction(kind, stage, number))
        asked.append(COST[kind])
        if 0 <= after <= top:
            messages.send(PipelineAction(kind, after, number), [torch.empty(1)])
    messages.finish()
    return asked


def seconds(queues):
    """How long the ranks take: an operation ends when both sides have come to it, which they do in
    the order in which each was asked for those of a group."""
    times, places, groups = [0.0] * len(queues), [0] * len(queues), {}
    for rank, queue in enumerate(queues):
        for operation in queue:
            if isinstance(operation, SimpleNamespace):
                groups.setdefault(operation.group, {}).setdefault(rank, []).append(operation)
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while places[rank] < len(queue):
                item = queue[places[rank]]
                if isinstance(item, list):
                    if item[0].ended is None:
                        break
                    times[rank] = max(times[rank], item[0].ended)
                elif isinstance(item, SimpleNamespace):
                    item.issued = times[rank]
                else:
                    times[rank] += item
                places[rank], moved = places[rank] + 1, True
        for members in groups.values():
            while len(members) == 2 and all(members.values()):
                both = [of_rank[0] for of_rank in members.values()]
                if None in [one.issued for one in both] or both[0].sends == both[1].sends:
                    break
                ended = max(one.issued for one in both)
                for of_rank in members.values():
                    of_rank.pop(0).ended = ended
                moved = True
    assert places == [len(queue) for queue in queues], "they wait for each other"
    return max(times)
