"""Every order of a pipeline is complete, never waits for ever, and costs what theory says."""

from collections import Counter
from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.parallel.schedules import (
    PipelineAction,
    arranged,
    bubble_formula,
    cut,
    incoming,
    schedule,
    simulate,
)
from trainer.recipe import StrategySection
from trainer.recipe.strategies import pp
from trainer.run.build import idle_share
from trainer.run.speed import bubble


@st.composite
def pipelines(draw):
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"]))
    per_rank = draw(st.integers(2, 3)) if name == "interleaved_1f1b" else 1
    return name, draw(st.integers(2, 8)), per_rank, draw(st.integers(1, 33))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(pipelines())
def test_orders(pipeline):
    name, ranks, per_rank, count = pipeline
    orders = schedule(*pipeline)
    kinds = "FIW" if name == "zero_bubble" else "FB"
    every = {
        PipelineAction(kind, stage, number)
        for kind in kinds
        for stage in range(ranks * per_rank)
        for number in range(count)
    }
    assert Counter(chain(*orders)) == Counter(every)
    assert all(action.stage % ranks == rank for rank, o in enumerate(orders) for action in o)

    found = simulate(arranged(orders))  # raises if they wait for ever
    formula = bubble_formula(*pipeline)
    if name in ("gpipe", "1f1b") or count >= ranks:
        assert found.bubble == pytest.approx(formula, abs=5e-4)
    ran = [0.0] * ranks
    for (rank, _, _), ended in zip(found.arrangement.steps, found.ended, strict=True):
        ran[rank] = max(ran[rank], ended)
    waited = [one - busy for one, busy in zip(ran, found.busy, strict=True)]
    assert bubble(ran, waited) == pytest.approx(found.bubble), "what a run measures"
    if name in ("interleaved_1f1b", "zero_bubble") and count >= ranks:
        assert found.bubble < bubble_formula("1f1b", ranks, 1, count)
    ahead = [min(count, ranks - rank) for rank in range(ranks)]
    held = found.arrangement.held
    if name in ("gpipe", "1f1b"):
        assert held == ([count] * ranks if name == "gpipe" else ahead)
    elif name == "zero_bubble":  # as much as the first rank of 1F1B, whose order it starts from
        assert max(held) == ahead[0]
    elif count % ranks == 0:
        assert max(held) <= ranks * per_rank + ranks - 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(pipelines())
def test_each_message_is_received_in_the_order_of_sending(pipeline):
    name, ranks, per_rank, count = pipeline
    orders = schedule(*pipeline)
    received = Counter(chain(*(chain(*senders.values()) for senders in incoming(orders))))
    kinds = "FI" if name == "zero_bubble" else "FB"
    stages = range(ranks * per_rank)
    assert received == Counter(
        PipelineAction(kind, stage, number)
        for kind in kinds
        for stage in (stages[1:] if kind == "F" else stages[:-1])
        for number in range(count)
    )
    found = simulate(arranged(orders))
    steps = zip(found.arrangement.steps, found.ended, strict=True)
    done = {action: ended for (_, action, _), ended in steps}
    for rank in range(ranks):
        for messages in incoming(orders)[rank].values():
            sent = [
                done[a._replace(stage=a.stage + (-1 if a.kind == "F" else 1))] for a in messages
            ]
            assert sent == sorted(sent)


def test_ranks_that_wait_for_each_other_are_found():
    first, second = schedule("1f1b", 2, 1, 2)
    with pytest.raises(ValueError, match="wait for each other before"):
        arranged([first, second[::-1]])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.data())
def test_stages_are_cut_by_cost(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    runs = cut(tuple(costs), stages)
    assert list(chain(*runs)) == list(range(len(costs)))
    assert len(runs) == stages
    assert all(runs)
    ways = ([0, *between, len(costs)] for between in combinations(range(1, len(costs)), stages - 1))
    best = min(max(sum(costs[a:b]) for a, b in pairwise(ends)) for ends in ways)
    assert max(sum(costs[i] for i in run) for run in runs) == best


def test_what_a_run_says_first_goes_by_the_cost_of_its_stages():
    """The head of a small model is much of it: the other ranks wait for the last one."""
    strategy = StrategySection(pp=2)
    said = [pp.describe(strategy, idle_share(strategy, 8, [1.0, last])) for last in (1.0, 3.0)]
    assert said[0] == "pp=2 1f1b (ranks idle for 11% of a step)"
    # The last takes 3 x 3 for each of 8, and waits for the first forward; the first works for 24.
    assert f"ranks idle for {1 - 96 / (2 * 75):.0%}" in said[1]
