"""Which groups the ranks of a pipeline make with each other, where each has a communicator."""

import pytest

from trainer.parallel.pipeline import turns_of


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("ranks", range(2, 10))
def test_neighbours_make_groups_at_the_same_time(ranks, around):
    turns = list(zip(*(turns_of(rank, ranks, around) for rank in range(ranks)), strict=True))
    for turn in turns:
        assert sorted(rank for group in set(turn) for rank in group) == list(range(ranks))
        assert all(rank in turn[rank] for rank in range(ranks))
    pairs = {frozenset(group) for turn in turns for group in turn if len(group) == 2}
    last = ranks if around else ranks - 1
    assert pairs == {frozenset((rank, (rank + 1) % ranks)) for rank in range(last)}
    assert len(turns) <= 3
