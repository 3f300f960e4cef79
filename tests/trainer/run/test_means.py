"""Ranks add up the means of a model by place: so all have the same, in one order."""

import pytest
import torch
import torch.distributed as dist

from tests.checkpointing.worlds import run_ranks
from trainer.recipe import RecipeError
from trainer.run.state import RunScalarNames

ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


def test_ranks_agree_once_and_sort(tmp_path):
    def work(rank):
        names = RunScalarNames()
        means = [("b", TWO), ("a", ONE)]
        first = names.in_order(dict(means if rank else reversed(means)))
        agreed = [names.agree([], dist.group.WORLD)]
        if rank:  # alone: nobody is asked any more
            agreed.append(names.agree([], dist.group.WORLD))
            with pytest.raises(RecipeError, match="'c' in some micro-batches, and in others not"):
                names.in_order({"a": ONE, "b": TWO, "c": ONE})
        of_pipeline = RunScalarNames()
        if rank:
            of_pipeline.in_order({"loss": ONE, "balance": TWO})
        agreed.append(of_pipeline.agree(["loss", "balance"], dist.group.WORLD))
        return first, agreed

    for first, (agreed, *_, staged) in run_ranks(2, work, tmp_path):
        assert first == [ONE, TWO]
        assert agreed == ["a", "b"]
        assert staged == ["balance", "loss"]


def test_what_one_rank_alone_returns_is_told_on_all(tmp_path):
    def work(rank):
        names = RunScalarNames()
        names.in_order({"a": ONE, "b": TWO} if rank else {"a": ONE})
        names.agree([], dist.group.WORLD)

    for error in run_ranks(2, work, tmp_path):
        assert isinstance(error, RecipeError)
        assert "forward returns 'b' in some micro-batches" in str(error)
