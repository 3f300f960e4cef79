"""A slow rank is named once, and again when it is no longer slow; noise names nobody."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.group.batch_plan import plan_batch
from trainer.run.speed import RunStragglerState, compare_ranks


def said(*windows, sequences=None):
    """What is said after each window."""
    pace, sentences = RunStragglerState(), []
    for seconds in windows:
        pace, new = compare_ranks(pace, seconds, sequences)
        sentences.append(new)
    return sentences


@pytest.mark.parametrize("ranks", [2, 3, 4, 64])
def test_a_straggler_is_named_once_in_the_third_window(ranks):
    usual = [1 + 0.01 * (rank % 5) for rank in range(ranks - 1)]
    sentences = said(*[[*usual, 1.6]] * 10)
    assert [len(window) for window in sentences] == [0, 0, 1] + [0] * 7
    assert sentences[2][0].startswith(
        f"rank {ranks - 1} is slow, and all others wait for it: 1.6 times the median for 3 log "
        "intervals in a row (1.6 s"
    )


def test_it_is_named_again_when_it_has_recovered():
    slow, good = [1.0, 1.0, 2.0], [1.0, 1.0, 1.0]
    sentences = said(*[slow] * 3, *[good] * 6, *[slow] * 8)
    numbers = [number for number, window in enumerate(sentences) if window]
    assert numbers[:2] == [2, 5]
    assert "rank 2 is no longer slow" in sentences[5][0]
    assert "rank 2 is slow" in sentences[numbers[2]][0]
    assert len(numbers) == 3


def test_one_bad_window_names_nobody():
    good = [1.0, 1.0, 1.0, 1.0]
    assert not any(said(*[good] * 5, [1.0, 1.0, 1.0, 50.0], *[good] * 9))


def test_ranks_that_differ_widely_have_no_outlier():
    assert not any(said(*[[1.0, 1.3, 1.6, 1.9, 2.2]] * 9))


def test_another_number_of_ranks_begins_anew():
    slow = [1.0, 1.0, 2.0]
    assert not any(said(slow, slow, [1.0, 2.0], slow, slow))


def test_one_rank_and_times_of_nothing_are_no_news():
    assert not any(said(*[[3.0]] * 5))
    assert not any(said(*[[0.0, 0.0, 1.0]] * 5))
    assert not any(said([], []))


@given(st.integers(2, 12), st.integers(0, 2**32), st.floats(0.0, 0.1))
def test_noise_names_nobody(ranks, seed, noise):
    draw = random.Random(seed)
    windows = [[1 + draw.uniform(-noise, noise) for _ in range(ranks)] for _ in range(20)]
    assert not any(said(*windows))


@given(
    batch=st.integers(2, 40),
    ranks=st.integers(2, 8),
    micro_batch=st.integers(1, 8),
    fixed=st.booleans(),
    per_pass=st.floats(0, 1),
    per_sequence=st.floats(0.01, 1),
)
def test_uneven_shares_name_nobody(batch, ranks, micro_batch, fixed, per_pass, per_sequence):
    """Whether a pass costs much in itself or each of its sequences does."""
    batch = max(batch, ranks * micro_batch)
    plan = plan_batch(batch, ranks, micro_batch, fixed=fixed)
    sequences = [
        sum(len(one.positions) for one in plan.micro_batches(rank, 0)) / plan.passes
        for rank in range(ranks)
    ]
    seconds = [per_pass + per_sequence * size for size in sequences]
    assert not any(said(*[seconds] * 9, sequences=sequences))


@pytest.mark.parametrize("heavy", [0, 1])
def test_a_straggler_is_named_among_uneven_shares(heavy):
    seconds, sequences = [1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]
    seconds[2 * heavy] = 5.0
    sentences = said(*[seconds] * 5, sequences=sequences)
    assert [len(window) for window in sentences] == [0, 0, 1, 0, 0]
    assert f"rank {2 * heavy} is slow" in sentences[2][0]
