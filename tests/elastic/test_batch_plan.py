"""The global batch is the same at every world size, and collectives match."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic import plan_batch


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


def test_uneven_batch_says_what_it_wastes():
    text = str(plan_batch(8, 3, 2))
    assert "8 = 3 rank(s) x 2 pass(es) x up to 2 sequences" in text
    assert "11% of the slots are idle" in text
