"""Every step takes the same samples, each once in an epoch, whatever the worlds it passes."""

import json
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import elastic
from elastic.group.sampler import Sampler
from trainer import Order


def test_it_has_the_order_of_the_trainer():
    mine = Sampler(70, 7, None, 3, 0, 1)
    _, _, samples = Order([70], [1.0], seed=3).locate(np.arange(21 * 7))
    assert [one for step in range(1, 22) for (rows,) in [mine.step(step)] for one in rows] == [
        *samples
    ]
    in_order = Sampler(70, 7, None, None, 0, 1)
    assert in_order.step(11) == [[*range(7)]]


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 60),
    batch=st.integers(1, 40),
    micro=st.none() | st.integers(1, 9),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=4),
    ahead=st.integers(0, 3),
)
def test_each_sample_is_taken_once_through_any_worlds(size, batch, micro, worlds, ahead):
    """Each world does some steps, its loader being ahead of them, and the state goes on to the
    next through JSON; then all is lost back to the state before."""
    batch = min(batch, size)
    steps, state = {}, None
    for ranks, count in worlds:
        if ranks > batch:
            with pytest.raises(ValueError, match="at least one sample for each rank"):
                Sampler(size, batch, micro, 5, 0, ranks)
            continue
        members = [Sampler(size, batch, micro, 5, rank, ranks) for rank in range(ranks)]
        assert len({one.passes for one in members}) == 1, "collectives match"
        even = len({len(rows) for one in members for rows in one.step(1)}) == 1
        for one in members:
            assert one.even == even
            if state:
                one.load_state_dict(json.loads(json.dumps(state)))
        loaders = [iter(one) for one in members]
        for _ in range(count):
            taken = []
            for one, loader in zip(members, loaders, strict=True):
                passes = list(islice(loader, one.passes))
                one.done += 1
                assert all(passes), "no pass is empty"
                assert passes == one.step(one.done)
                most = micro and max(micro, 1 if batch % ranks == 0 else 2)
                assert not micro or max(map(len, passes)) <= most
                taken += [row for rows in passes for row in rows]
                for rows, weight in zip(passes, one.weights, strict=True):
                    assert weight == pytest.approx(len(rows) * ranks / batch)
            assert {one.done for one in members} == {len(steps) + 1}, "none twice, none left out"
            steps[len(steps) + 1] = taken
        for loader in loaders:  # workers fetch ahead
            list(islice(loader, ahead))
        states = [one.state_dict() for one in members]
        assert all(one == states[0] for one in states)
        state = states[0]
    order = [row for step in sorted(steps) for row in sorted(steps[step])]
    whole = Sampler(size, batch, None, 5, 0, 1)
    assert order == [row for step in range(1, len(steps) + 1) for row in sorted(*whole.step(step))]
    two_epochs = range(1, -(-2 * size // batch) + 1)
    stream = [row for step in two_epochs for row in whole.step(step)[0]]
    for epoch in (stream[:size], stream[size : 2 * size]):
        assert sorted(epoch) == [*range(size)]


def test_a_loader_with_workers_begins_where_the_steps_are():
    mine = elastic.sampler(range(100), 8, micro_batch=4)
    mine.done = 3
    loader = DataLoader(range(100), batch_sampler=mine, num_workers=1, collate_fn=list)
    batches = iter(loader)
    mine.done = 4
    assert [next(batches), next(batches)] == mine.step(4)
    assert mine.state_dict()["done"] == 4, "not what workers have fetched"


def test_another_data_set_or_batch_is_refused():
    saved = elastic.sampler(range(100), 8).state_dict()
    with pytest.raises(ValueError, match=r"once: size was 100, and is 101; restore"):
        elastic.sampler(range(101), 8).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"global_batch was 8, and is 10; seed was 0, and is 1;"):
        elastic.sampler(range(100), 10, seed=1).load_state_dict(saved)
    with pytest.raises(ValueError, match="at most all samples of the data set"):
        elastic.sampler(range(7), 8)
    for done in (-3, "4", None):
        with pytest.raises(ValueError, match=f"says done={done!r}, which is no number of steps;"):
            elastic.sampler(range(100), 8).load_state_dict(saved | {"done": done})
