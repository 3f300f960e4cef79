"""The global batch is the same at every world size, and collectives match."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.group.batch_plan import plan_batch


@given(
    global_batch=st.integers(1, 300),
    world_size=st.integers(1, 17),
    micro_batch=st.integers(1, 20),
    start=st.integers(0, 10**12),
)
def test_every_sequence_once_and_equal_passes(global_batch, world_size, micro_batch, start):
    if global_batch < world_size:
        with pytest.raises(ValueError, match="without work"):
            plan_batch(global_batch, world_size, micro_batch)
        return
    plan = plan_batch(global_batch, world_size, micro_batch)
    seen = []
    for rank in range(world_size):
        passes = list(plan.micro_batches(rank, start))
        assert len(passes) == plan.passes
        for micro in passes:
            assert 1 <= len(micro.positions) <= plan.micro_batch <= micro_batch
            seen += micro.positions if micro.real else []
    assert sorted(seen) == list(range(start, start + global_batch))
    assert 0 < plan.efficiency <= 1
    if global_batch % world_size == 0:
        assert plan.efficiency == 1


@given(
    global_batch=st.integers(1, 300),
    world_size=st.integers(1, 17),
    micro_batch=st.integers(1, 20),
    start=st.integers(0, 10**12),
)
def test_fixed_micro_batches_are_the_same_at_every_world_size(
    global_batch, world_size, micro_batch, start
):
    if -(-global_batch // micro_batch) < world_size:
        with pytest.raises(ValueError, match="without work"):
            plan_batch(global_batch, world_size, micro_batch, fixed=True)
        return
    alone = plan_batch(global_batch, 1, micro_batch, fixed=True)
    expected = list(alone.micro_batches(0, start))
    assert [p for m in expected for p in m.positions] == list(range(start, start + global_batch))
    assert {len(m.positions) for m in expected[:-1]} <= {micro_batch}
    plan = plan_batch(global_batch, world_size, micro_batch, fixed=True)
    ranks = [list(plan.micro_batches(rank, start)) for rank in range(world_size)]
    assert {len(passes) for passes in ranks} == {plan.passes}
    real = sorted((m for passes in ranks for m in passes if m.real), key=lambda m: m.positions)
    assert real == expected
    busiest = max(sum(len(m.positions) for m in passes if m.real) for passes in ranks)
    assert plan.efficiency == global_batch / (world_size * busiest)


def test_uneven_batch_says_what_it_wastes():
    text = str(plan_batch(8, 3, 2))
    assert "8 = 3 rank(s) x 2 pass(es) x up to 2 sequences" in text
    assert "11% of the slots are idle" in text
