"""The order is a permutation, looks random, and is frozen."""

import itertools

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import trainer
from elastic.group.sampler import SamplerPermutation
from tests.distributed.jobs import SOAK, soak
from trainer.data.order import BLOCK, Order
from trainer.data.sample_stream import SampleStream

SIZES = [2**10, 10_007, 2**17, *(pytest.param(size, marks=soak) for size in (10**6, 2**20))]
seeds = st.integers(-(2**63), 2**63)

GOLDEN_10 = [8, 0, 9, 1, 7, 3, 2, 4, 5, 6]
GOLDEN_MILLION = [471135, 60616, 150069, 674781, 307825, 807558]
GOLDEN_BILLIONS = [1035032794, 5656622070, 1922646880, 54935819]
GOLDEN_ONE = [2, 4, 0, 5, 1, 3, 1, 5, 2, 0, 4, 3]
GOLDEN_SEVERAL = [
    [0, 0, 0, 0, 1, 2, 0],
    [0, 0, 0, 0, 7, 14229911, 700195312500],
    [654, 573, 826, 726, 19, 6, 102],
]


@given(size=st.one_of(st.integers(1, 300), st.integers(4000, 5000)), key=seeds, epoch=seeds)
def test_a_bijection(size, key, epoch):
    permutation = SamplerPermutation(size, key, epoch)
    values = permutation(np.arange(size))
    assert sorted(values.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [2**32, 2**33 + 5, 2**62 - 1])
def test_sizes_beyond_32_bits(size):
    """A round that lost bits would take many positions to one place."""
    positions = np.unique(np.random.default_rng(0).integers(0, size, 100_000))
    permutation = SamplerPermutation(size, 1)
    values = permutation(positions)
    assert values.min() >= 0
    assert values.max() < size
    assert values.max() > size // 2
    assert len(np.unique(values)) == len(positions)


def chi_square(counts, expected):
    """Normal score of Pearson's statistic of a table with fixed margins."""
    freedom = np.prod([side - 1 for side in counts.shape])
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


def scores(values):
    """Normal scores of a permutation's first values against those of a random permutation."""
    size, count = len(values), len(values) - 1
    places = np.arange(size)
    steps = np.diff(values) % size * 64 // size
    table = np.zeros((16, 16))
    np.add.at(table, (places * 16 // size, values * 16 // size), 1)
    return {
        "serial correlation": np.corrcoef(values[:-1], values[1:])[0, 1] * np.sqrt(count),
        "serial correlation, lag 2": np.corrcoef(values[:-2], values[2:])[0, 1] * np.sqrt(count),
        "parity": 2 * ((places % 2 == values % 2).sum() - size / 2) / np.sqrt(size),
        "steps": chi_square(np.bincount(steps, minlength=64), count / 64),
        "places": chi_square(table, size / 256),
    }


@pytest.mark.parametrize("size", SIZES)
def test_looks_random(size):
    for seed in range(8):
        random = np.random.default_rng(seed).permutation(size)
        assert max(map(abs, scores(random).values())) < 5, "the scores themselves are wrong"
        ours = scores(SamplerPermutation(size, seed)(np.arange(size)))
        assert max(map(abs, ours.values())) < 5, ours


@pytest.mark.parametrize("size", SIZES)
def test_the_scores_see_a_weak_permutation(size):
    worst = [
        max(map(abs, scores(SamplerPermutation(size, seed, rounds=2)(np.arange(size))).values()))
        for seed in range(8)
    ]
    assert max(worst) > 8


def test_every_order_of_few_samples_is_as_likely():
    """24 permutations of 4 samples, and 12 places of 12 samples, each `often` on average."""
    often = 200 if SOAK else 50
    every = {order: number for number, order in enumerate(itertools.permutations(range(4)))}
    counts = np.zeros(24)
    for key in range(24 * often):
        counts[every[tuple(SamplerPermutation(4, key)(np.arange(4)).tolist())]] += 1
    assert chi_square(counts, often) < 5
    table = np.zeros((12, 12))
    for key in range(12 * often):
        table[np.arange(12), SamplerPermutation(12, key)(np.arange(12))] += 1
    assert abs(chi_square(table, often)) < 5


def test_frozen():
    """ORDER_VERSION 1: a checkpoint's position has a meaning only as long as these hold."""
    assert SamplerPermutation(10, 0)(np.arange(10)).tolist() == GOLDEN_10
    assert SamplerPermutation(10**6, 7, 1)(np.arange(6)).tolist() == GOLDEN_MILLION
    assert SamplerPermutation(2**33 + 5, -1)(np.arange(4)).tolist() == GOLDEN_BILLIONS
    one = Order([6], [1.0], seed=4)
    assert one.locate(np.arange(12))[2].tolist() == GOLDEN_ONE
    several = Order([1000, 50, 7], [0.7, 0.2, 0.1], seed=42)
    positions = np.array([0, 1, 2, 1023, 1024, 10**9, 10**15])
    assert np.stack(several.locate(positions)).tolist() == GOLDEN_SEVERAL


def test_seeds_and_epochs_are_no_sum():
    """Seed 1, epoch 2 is not seed 2, epoch 1."""
    n = 1000
    orders = {
        tuple(Order([n], [1.0], seed).locate(np.arange(epoch * n, epoch * n + n))[2].tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


# Not shrunk: sources of one sample, towards which it goes, make thousands of permutations each.
@settings(max_examples=20, deadline=None, phases=set(Phase) - {Phase.shrink, Phase.explain})
@given(
    sources=st.lists(st.tuples(st.integers(1, 700), st.floats(0.01, 1)), min_size=1, max_size=5),
    seed=seeds,
)
def test_mixture(sources, seed):
    sizes, weights = zip(*sources, strict=True)
    order = Order(sizes, weights, seed)
    n = 2 * BLOCK
    source, epoch, sample = order.locate(np.arange(n))

    shuffled = np.random.default_rng(0).permutation(n)  # random access is the sequence
    for a, b in zip(order.locate(shuffled), (source, epoch, sample), strict=True):
        assert (a == b[shuffled]).all()

    blocks = [np.bincount(block, minlength=len(sizes)) for block in np.split(source, 2)]
    assert (np.array(blocks) == blocks[0]).all()  # exact counts in every block
    shares = np.array(weights) / sum(weights) * BLOCK
    assert (abs(blocks[0] - shares) < 1).all()

    for number, size in enumerate(sizes):  # each epoch of a source shows each sample once
        mine = source == number
        assert len(np.unique(epoch[mine] * size + sample[mine])) == mine.sum()
        assert (np.bincount(epoch[mine])[:-1] == size).all()


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [([0], [1.0]), ([5, 5], [1.0, 1e-9]), ([5], [-1.0]), ([5], [float("nan")])],
)
def test_refuses_what_cannot_be_mixed(sizes, weights):
    with pytest.raises(ValueError, match=r"source|positive"):
        Order(sizes, weights, 0)


def test_a_loop_of_one_s_own_has_the_order_of_the_trainer():
    numbers = [{"number": number} for number in range(50)]
    stream = SampleStream("it", numbers, None, seed=7, shuffle=True)
    _, epochs, samples = trainer.Order([50], [1.0], seed=7).locate(range(80, 120))
    assert stream.fetch(range(80, 120))["number"].tolist() == samples.tolist()
    assert epochs.tolist() == [1] * 20 + [2] * 20


@pytest.mark.parametrize("positions", [[-1], [0.5], [[0]], 3, ["a"]])
def test_what_is_no_position_is_refused(positions):
    with pytest.raises(ValueError, match="must be a 1-D array of integers, 0 or more"):
        Order([10], [1.0], 0).locate(positions)
