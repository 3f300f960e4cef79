"""A mixture that changes: whatever the table, each sample once an epoch, and none is skipped."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from elastic.record.attempt import LedgerStepLine, RecordedAttempt
from elastic.record.ledger import StartLine
from elastic.record.proof import problems_of
from tests.distributed.jobs import SOAK
from trainer.data import order
from trainer.data.loader import TokenStream, later_stages
from trainer.data.order import BLOCK, DataMixture, Order, StagedDataOrder
from trainer.data.prepare.prepare import prepare
from trainer.data.shards import DataError
from trainer.recipe import RecipeError, resolved
from trainer.recipe.stages import RecipeStageRow
from trainer.run.provenance import check_resume

GOLDEN = [
    [0, 2, 2, 2, 1, 0, 1, 0, 1],
    [1, 31, 5, 122, 25, 1, 26, 1, 8333330],
    [849, 0, 0, 0, 38, 519, 45, 399, 18],
]
ROWS = [
    RecipeStageRow(0, {0: 3.0, 1: 1.0}, {0: 0, 1: 1}),
    RecipeStageRow(100, {1: 1.0, 2: 1.0}, {2: 2}),
    RecipeStageRow(250, {0: 1.0, 1: 1.0}, {3: 1}),
]
"""Mixtures of four data sets, of which the last extends the second."""
WEIGHTS = [0.02, 0.1, 0.3, 1.0, 2.0, 5.0]


def draw_table(random, block):
    """(table, its end): up to 7 mixtures of up to 5 sources that come, rest, come back and grow."""
    table, begin, sizes = [], 0, {}
    for number in range(random.integers(1, 8)):
        changed = {}
        for _ in range(random.integers(0 if sizes else 1, 3)):
            if len(sizes) < 5:
                changed[len(sizes)] = sizes[len(sizes)] = draw_size(random, block)
        for source, size in sizes.items():
            if number and source not in changed and random.random() < 0.25:
                changed[source] = size + draw_size(random, block)
        sizes |= changed
        some = random.permutation(len(sizes))[: random.integers(1, len(sizes) + 1)]
        few = {int(source): random.choice(WEIGHTS if block > 99 else [1.0, 2.0]) for source in some}
        table.append(DataMixture(begin, few, changed))
        lengths = [random.integers(1, 40), random.integers(1, 3 * block), block]
        begin += int(random.choice(lengths))
    return table, begin, sizes


def draw_size(random, block):
    return int(random.integers(1, random.choice([10, 5 * block])))


def assert_exactly_once(seed, block):
    random = np.random.default_rng(seed)
    table, end, sizes = draw_table(random, block)
    staged = StagedDataOrder(table, seed)
    positions = np.arange(end)
    found = staged.locate(positions)
    sources, turns = staged.turns(positions)

    # Each source hands out its turns once, without a gap but for a carry of less than a block.
    alone = [DataMixture(end, {0: 1.0}, {})]
    closed = StagedDataOrder([*table, *alone], seed)
    for source in sizes:
        base, carry = closed.assigned_turns(source)
        mine = np.sort(turns[sources == source])
        assert mine.tolist() == np.setdiff1d(np.arange(base), carry).tolist()
        assert len(set(carry.tolist())) == len(carry) < block

    # Drained: each source alone until an epoch of its newest size is over. Then no epoch lacks a
    # sample, and none has one twice.
    tail, at = [], end
    for source, size in sizes.items():
        tail.append(DataMixture(at, {source: 1.0}, {}))
        at += len(closed.assigned_turns(source)[1]) + 2 * size
    s, e, x = StagedDataOrder([*table, *tail], seed).locate(np.arange(at))
    for source, size in sizes.items():
        epoch, sample = e[s == source], x[s == source]
        counts, most = np.bincount(epoch), np.zeros(epoch.max() + 1, np.int64)
        np.maximum.at(most, epoch, sample)
        assert len(np.unique(epoch * 2**32 + sample)) == len(epoch)
        assert (counts[:-1] == most[:-1] + 1).all()
        assert (np.diff(counts[:-1]) >= 0).all()
        assert counts[-2] == size

    # The past does not depend on rows that come later, nor on where a process begins.
    for number in range(1, len(table)):
        past = StagedDataOrder(table[:number], seed).locate(positions[: table[number].begin])
        assert all((a == b[: len(a)]).all() for a, b in zip(past, found, strict=True))
    shuffled = random.permutation(end)[:20]
    other = pickle.loads(pickle.dumps(staged)).locate(shuffled)
    assert all((a == b[shuffled]).all() for a, b in zip(other, found, strict=True))

    # The first mixture is version 1.
    first = sorted(table[0].weights)
    if first == [*range(len(first))]:
        weights = [table[0].weights[source] for source in first]
        one = Order([table[0].sizes[source] for source in first], weights, seed)
        begun = np.arange(table[1].begin if len(table) > 1 else end)
        then = one.locate(begun)
        assert all((a == b[: len(a)]).all() for a, b in zip(then, found, strict=True))


@pytest.mark.timeout(1800)
def test_each_sample_once_an_epoch(monkeypatch):
    """Blocks of 16 positions make many tables cheap; blocks of 1,024 are those of a run."""
    for seed in range(40 if SOAK else 1):
        assert_exactly_once(seed, BLOCK)
    monkeypatch.setattr(order, "BLOCK", 16)
    for seed in range(1000 if SOAK else 20):
        assert_exactly_once(seed, 16)


def test_frozen():
    """STAGED_ORDER_VERSION 2: three mixtures, of which the last two begin inside a block."""
    table = [
        DataMixture(0, {0: 0.7, 1: 0.3}, {0: 1000, 1: 50}),
        DataMixture(1500, {1: 1.0, 2: 1.0}, {2: 7}),
        DataMixture(2600, {0: 0.5, 1: 0.5}, {0: 1200, 1: 60}),
    ]
    positions = np.array([1499, 1500, 1600, 2599, 2600, 2601, 3000, 4000, 10**9])
    assert np.stack(StagedDataOrder(table, 42).locate(positions)).tolist() == GOLDEN


def test_a_source_may_grow_a_thousand_times_in_one_epoch():
    table = [DataMixture(at, {0: 1.0}, {0: 2000 + at}) for at in range(1100)]
    _, epochs, samples = StagedDataOrder(table, 1).locate(np.arange(1099, 1199))
    assert not epochs.any()
    assert len(set(samples)) == 100
    assert max(samples) < 3099


@pytest.mark.parametrize(
    ("second", "what"),
    [
        (DataMixture(0, {0: 1.0}, {}), "mixture 1 begins at 0; it must begin after 0"),
        (DataMixture(9, {0: 1.0}, {0: 5}), "source 0 has 5 samples, after 5 before; a source"),
        (DataMixture(9, {0: 1.0, 1: 1.0}, {}), "mixture 1: source 1 has no size"),
        (DataMixture(9, {0: 1.0, 1: 1e-9}, {1: 9}), "source 1 has none of the 1024 places"),
        (DataMixture(9, {0: 0.0}, {}), "must be positive numbers"),
        (DataMixture(9, {0: 1e308, 1: 1e308}, {1: 9}), "with a finite sum"),
        (DataMixture(9, {}, {}), "mixture 1 has no source"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(second, what):
    with pytest.raises(ValueError, match=what):
        StagedDataOrder([DataMixture(0, {0: 1.0}, {0: 5}), second], 0)
    with pytest.raises(ValueError, match="mixture 0 begins at 9; it must begin at 0"):
        StagedDataOrder([second._replace(begin=9)], 0)


# --- data sets -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def opened(tmp_path_factory, documents, write_jsonl):
    """opened(rows, weights) → a stream of the training data of as many data sets as weights."""
    folder = tmp_path_factory.mktemp("staged")
    for number in range(4):
        texts = write_jsonl(folder / f"{number}.jsonl", documents[50 * number : 50 * number + 50])
        prepare([str(texts)], folder / f"{number}", tokenizer="bytes", validation_fraction=0.0)

    def opened(rows, weights=(1.0,) * 4):
        sources = [(str(folder / f"{number}"), weight) for number, weight in enumerate(weights)]
        return TokenStream.open(
            sources, split="train", seq_len=64, seed=3, shuffle=True, stages=rows
        )

    return opened


def test_a_stream_reads_what_its_stages_name_and_its_past_stays(opened):
    whole, positions = opened(ROWS), np.arange(2000)
    sets, samples = whole.locate(positions)
    named = [set(part.tolist()) for part in np.split(sets, [100, 250])]
    assert named == [{0, 1}, {1, 2}, {0, 1, 3}]
    sizes = [opened([], (1.0,) * few).sequences for few in range(1, 5)]
    assert samples[sets == 1].max() == sizes[1] - sizes[0] - 1
    assert samples[sets == 3].max() == sizes[3] - sizes[2] - 1

    assert [begin for begin, _ in whole.stages] == [100, 250]
    for rows, end in ((1, 100), (2, 250)):
        part, past = opened(ROWS[:rows], (1.0,) * (rows + 1)), positions[:end]
        assert (part.fingerprint, part.stages) == (whole.fingerprint, whole.stages[: rows - 1])
        assert part.fetch_with_digest(past)[1] == whole.fetch_with_digest(past)[1]
        assert part.labels_per_sequence == whole.labels_per_sequence
        assert (part.locate(positions)[1] != samples).any()

    plain = opened([], (3.0, 1.0))  # version 1
    assert (plain.fingerprint, plain.stages) == (whole.fingerprint, [])
    assert (
        plain.fetch_with_digest(positions[:100])[1] == whole.fetch_with_digest(positions[:100])[1]
    )
    tiny = [ROWS[0], ROWS[1]._replace(weights={1: 1.0, 2: 1e-9})]
    with pytest.raises(DataError, match=r"data\.stages\.1\.weights: .*2 would have none of 1024"):
        opened(tiny, (1.0,) * 3)


def test_only_stages_that_have_not_begun_may_change(opened, recipe):
    """On a resume, and in the proof of a ledger."""
    whole, one = opened(ROWS), recipe()
    other = opened([*ROWS[:2], ROWS[2]._replace(weights={0: 1.0, 1: 2.0})])
    assert other.stages[:1] == whole.stages[:1]
    data = {"seq_len": 32, "fingerprint": whole.fingerprint, "stages": later_stages(whole)}
    state = {"recipe": resolved(one), "data": data, "seed": 7, "init_from": ""}
    for done, good in ((250, True), (251, False)):
        task, state["sequences"] = SimpleNamespace(stream=other), done
        begins = [
            StartLine(step=0, sequences=0, global_batch=1, world_size=1, data="d", attempt="a"),
            StartLine(
                step=done, sequences=done, global_batch=1, world_size=1, data="d", parent="a"
            ),
        ]
        attempts = [
            RecordedAttempt(number, replace(begin, stages=later_stages(stream)), number)
            for number, (begin, stream) in enumerate(zip(begins, (whole, other), strict=True), 1)
        ]
        for step in range(1, done + 1):
            attempts[0].steps.append(LedgerStepLine(step, step - 1, step, 1.0, 1.0, "", step))
        problems = [*problems_of(attempts)]
        if good:
            check_resume(state, one, task, "it")
            assert problems == []
            continue
        with pytest.raises(RecipeError, match=r"on the first 251 seq.* at sequence 251 or later"):
            check_resume(state, one, task, "it")
        (problem,) = problems
        assert "at sequence 251, but the stages of their data up to that sequence differ" in problem
