"""Shares follow a lasting difference in speed, and no noise."""

import random
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.group.batch_plan import (
    GroupBatchPlanner,
    best_plan,
    fastest_shares,
    plan_batch,
    step_seconds,
)


def balance_of(ranks, each, micro_batch=4, *, fixed=False, lockstep=False):
    """A new balance, with `each` units a rank."""
    size = micro_batch if fixed else 1
    plan = plan_batch(ranks * each * size, ranks, micro_batch, fixed=fixed)
    return GroupBatchPlanner(replace(plan, lockstep=lockstep), micro_batch)


KINDS = [{}, {"fixed": True}, {"lockstep": True}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "each"), [(2, 8), (8, 16), (64, 16), (64, 2)])
def test_300_calm_windows_change_nothing(kind, ranks, each):
    draw, balance = random.Random(ranks + each), balance_of(ranks, each, **kind)
    equal = balance.plan
    assert not any(balance.window([draw.gauss(1, 0.05) for _ in range(ranks)]) for _ in range(300))
    assert balance.plan == equal


@given(
    speeds=st.lists(
        st.one_of(st.just(1.0), st.floats(1, 1.2), st.floats(1, 4)), min_size=2, max_size=5
    ),
    each=st.sampled_from([8, 20]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25)
def test_speeds_that_stay_are_followed_once(speeds, each, kind, seed):
    """And not to and fro, though noise takes a rank across the border of what counts as equal."""
    draw, balance = random.Random(seed), balance_of(len(speeds), each, **kind)
    noisy = [[pace * draw.gauss(1, 0.05) for pace in speeds] for _ in range(300)]
    assert sum(map(balance.window, noisy)) <= 1
    best = best_plan(balance.plan, speeds, balance.micro_batch)
    assert step_seconds(balance.plan, speeds) <= 1.2 * step_seconds(best, speeds)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "each"), [(2, 8), (8, 8), (8, 16), (64, 16)])
def test_a_rank_at_a_third_holds_nobody_up(kind, ranks, each):
    """It slows down at window 10, and recovers at 60."""
    draw, balance = random.Random(1), balance_of(ranks, each, **kind)
    equal, ratios, changes = balance.plan, [], []
    for window in range(100):
        true = [3.0 if rank == 0 and 10 <= window < 60 else 1.0 for rank in range(ranks)]
        if 20 <= window < 60:
            ratios.append(step_seconds(balance.plan, true) / ideal(balance.plan, true))
            assert step_seconds(equal, true) / ideal(equal, true) > 1.4
        if balance.window([pace * draw.gauss(1, 0.05) for pace in true]):
            changes.append(window)
    assert fmean(ratios) <= (1.2 if kind.get("lockstep") else 1.15)
    assert 12 <= changes[0] <= 16
    assert len(changes) <= 2, changes
    # One unit of 16 is hardly more than GAIN, and takes many windows to come back.
    assert step_seconds(balance.plan, true) <= 1.08 * step_seconds(equal, true)


def ideal(plan, paces):
    """Seconds of a step whose work could be cut at will."""
    size = plan.micro_batch if plan.fixed else 1
    passes = 0.2 * plan.passes if plan.lockstep else 0.0
    return plan.units * size / sum(1 / pace for pace in paces) + passes


@given(
    paces=st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
    units=st.integers(1, 9),
    most=st.integers(1, 9),
)
def test_no_other_shares_are_faster(paces, units, most):
    ranks = len(paces)
    if not ranks <= units <= most * ranks:
        with pytest.raises(ValueError, match="units do not fit"):
            fastest_shares(paces, units, most)
        return

    def slowest(shares):
        return max(share * pace for share, pace in zip(shares, paces, strict=True))

    def all_shares(ranks, units):
        if ranks == 1:
            return [(units,)] if 1 <= units <= most else []
        return [
            (first, *rest)
            for first in range(1, min(most, units) + 1)
            for rest in all_shares(ranks - 1, units - first)
        ]

    found = fastest_shares(paces, units, most)
    assert sum(found) == units
    assert all(1 <= share <= most for share in found)
    assert slowest(found) == min(map(slowest, all_shares(ranks, units)))


@given(
    global_batch=st.integers(1, 200),
    ranks=st.integers(1, 9),
    micro_batch=st.integers(1, 9),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32),
)
def test_every_sequence_once_and_no_pass_above_the_limit(
    global_batch, ranks, micro_batch, kind, seed
):
    fixed, lockstep = kind.get("fixed", False), kind.get("lockstep", False)
    if ranks > (-(-global_batch // micro_batch) if fixed else global_batch):
        return
    draw = random.Random(seed)
    equal = replace(plan_batch(global_batch, ranks, micro_batch, fixed=fixed), lockstep=lockstep)
    plan = best_plan(equal, [draw.uniform(0.2, 5) for _ in range(ranks)], micro_batch)
    passes = [list(plan.micro_batches(rank, 1000)) for rank in range(ranks)]
    seen = sorted(p for of in passes for micro in of if micro.real for p in micro.positions)
    assert seen == list(range(1000, 1000 + global_batch))
    assert max(len(micro.positions) for of in passes for micro in of) <= micro_batch
    assert [len(of) for of in passes] == [plan.passes_of(rank) for rank in range(ranks)]
    assert all(any(micro.real for micro in of) for of in passes)
    if equal.passes == 1:
        assert all(len(of) == 1 for of in passes)
    if lockstep:
        assert len({len(of) for of in passes}) == 1
    if fixed:  # the same micro-batches as ever
        whole = {micro.positions for micro in replace(equal, world_size=1).micro_batches(0, 1000)}
        assert {micro.positions for of in passes for micro in of} <= whole


def test_a_window_without_a_measurement_does_not_count():
    balance = balance_of(2, 8)
    slow = [1.0, 3.0]
    windows = slow, [0.0, 3.0], slow, [1.0, float("nan")], slow, slow
    assert [balance.window(one) for one in windows] == [*[False] * 5, True]
    assert balance.plan.shares == (12, 4)
    assert balance.plan.passes_of(0) == 3
