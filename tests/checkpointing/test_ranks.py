"""What ranks tell each other arrives whole, whatever its size."""

import pickle

import torch.distributed as dist

from checkpointing.ranks import WORD_BYTES, exchange
from tests.checkpointing.worlds import run_ranks

ROOM = WORD_BYTES - 8


def text_that_pickles_to(size):
    short = "x" * (size - len(pickle.dumps("")))
    return next(short[cut:] for cut in range(20) if len(pickle.dumps(short[cut:])) == size)


def test_values_of_any_length_are_exchanged_in_order(tmp_path):
    texts = [text_that_pickles_to(size) for size in (ROOM - 1, ROOM, ROOM + 1)]
    rounds = [[one, None, "last"] for one in (*texts, "y" * 100_000)]

    def work(rank):
        return [exchange(values[rank], 3, dist.group.WORLD) for values in rounds]

    assert run_ranks(3, work, tmp_path / "ranks") == [rounds] * 3
