"""What ranks tell each other arrives whole, whatever its size; what no rank sends is refused."""

import pickle

import pytest
import torch
import torch.distributed as dist

from checkpointing.ranks import WORD_BYTES, exchange
from checkpointing.wire import MAX_BYTES, pack
from tests.checkpointing.worlds import run_ranks

ROOM = WORD_BYTES - 8


def test_values_of_any_length_are_exchanged_in_order(tmp_path):
    texts = ["x" * (size - len(pack(""))) for size in (ROOM - 1, ROOM, ROOM + 1)]
    assert [len(pack(text)) for text in texts] == [ROOM - 1, ROOM, ROOM + 1]
    rounds = [[one, None, "last"] for one in (*texts, "y" * 100_000)]

    def work(rank):
        return [exchange(values[rank], 3, dist.group.WORLD) for values in rounds]

    assert run_ranks(3, work, tmp_path / "ranks") == [rounds] * 3


class Trap:
    """Whoever unpickles it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        import os

        return os.mkdir, (self.path,)


def test_who_speaks_for_a_rank_runs_nothing_and_has_no_memory_taken(tmp_path):
    """Rank 1 is a stranger who has put himself in its place, and sends what he likes."""
    trap = tmp_path / "trap"

    def said(length, data):
        word = torch.zeros(WORD_BYTES, dtype=torch.uint8)
        word[:8].view(torch.int64).fill_(length)
        word[8 : 8 + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.all_gather([torch.empty_like(word) for _ in range(2)], word)

    pickled = pickle.dumps(Trap(trap))
    words = [(len(pickled), pickled), *((length, b" ") for length in (MAX_BYTES + 1, 1 << 62, -1))]

    def work(rank):
        answers = []
        for length, data in words:
            if rank:
                said(length, data)
                continue
            with pytest.raises(RuntimeError, match="somebody else does") as refused:
                exchange("hello", 2, dist.group.WORLD)
            answers.append(str(refused.value).partition(":")[0])
        return answers

    answers, _ = run_ranks(2, work, tmp_path / "ranks")
    assert answers[0] == "from another rank of a group"
    assert answers[1:] == [
        f"{n} bytes are announced in the name of rank 1 of a group" for n, _ in words[1:]
    ]
    assert not trap.exists()
