"""Which tokens the ranks of a ring have, what they see in each turn, and that it adds up."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpointing.worlds import run_ranks
from tests.distributed.jobs import soak
from tests.trainer.parallel.ring import compare_all
from tests.trainer.parallel.test_tensor import architecture
from trainer.data.packing import cu_seqlens_of
from trainer.models import Decoder
from trainer.models.families.qwen3_moe import FAMILY
from trainer.parallel.context import attention_blocks, chunks, problem_of
from trainer.recipe.architecture import RopeScalingSection


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=soak)])
def test_a_ring_computes_what_whole_attention_does(tmp_path: Path, ranks: int) -> None:
    """Forward and backward, with grouped heads and documents, in lengths that do not divide."""
    assert run_ranks(ranks, compare_all, tmp_path) == [*range(ranks)]


@settings(max_examples=15)
@given(
    st.integers(2, 4), st.integers(1, 40), st.lists(st.integers(0, 3), min_size=1), st.booleans()
)
def test_each_pair_of_tokens_is_computed_once(
    cp: int, length: int, drawn: list[int], documents: bool
) -> None:
    """Those, and only those, of which one sees the other; by ranges without a mask."""
    rows = 2
    ids = torch.tensor((drawn * rows * length)[: rows * length]).view(rows, length)
    ends = cu_seqlens_of(ids) if documents else None
    every = [chunks(length, cp, rank) for rank in range(cp)]
    tokens = torch.arange(rows * length).view(rows, length)
    packed = [torch.cat([tokens[:, c.start : c.stop].flatten() for c in own]) for own in every]
    computed = torch.zeros(rows * length, rows * length, dtype=torch.int64)
    for rank, source in ((rank, source) for rank in range(cp) for source in range(cp)):
        blocks = attention_blocks(ends, rows, every[rank], every[source], length, tokens.device)
        for block in blocks:
            queries, keys = packed[rank][block.queries], packed[source][block.keys]
            assert block.query_ends[-1] == len(queries)
            assert block.key_ends[-1] == len(keys)
            for here, there in block.pairs:
                seen = torch.ones(len(queries[here]), len(keys[there]), dtype=torch.int64)
                at = queries[here][:, None], keys[there][None]
                computed[at] += seen.tril() if block.causal else seen
    run = ids if not documents else ids.diff(prepend=ids[:, :1] - 1).ne(0).cumsum(1)
    row = torch.arange(rows).repeat_interleave(length)
    place, number = torch.arange(length).repeat(rows), run.flatten()
    wanted = (row[:, None] == row[None]) & (place[:, None] >= place[None])
    if documents:
        wanted &= number[:, None] == number[None]
    assert torch.equal(computed, wanted.long())


def test_all_ranks_compute_as_much() -> None:
    for cp in (2, 4):
        sums = [sum(sum(part) for part in chunks(64, cp, rank)) for rank in range(cp)]
        assert len(set(sums)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [({}, None), ({"statistics": None}, "qwen3_moe has scalars beside the loss")],
)
def test_what_a_ring_cannot_compute(changes: Any, message: str | None) -> None:
    """Statistics of which nothing is known."""
    family = replace(FAMILY, **changes)
    with torch.device("meta"):
        shape = family.complete(architecture(model_type="qwen3_moe"))
        problem = problem_of(Decoder(shape, family=family), 64)
    assert (message in (problem or "")) if message else problem is None


def test_a_users_model_cannot_join() -> None:
    assert "Linear is not one of" in (problem_of(torch.nn.Linear(1, 1), 64) or "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"sliding_window": 64}}, None),
        ({"options": {"sliding_window": 63}}, "a sliding window of 63 tokens, and ring"),
        (
            {"rope_scaling": RopeScalingSection(rope_type="dynamic", factor=2.0)},
            "dynamic depends on the",
        ),
    ],
)
def test_a_ring_does_not_know_windows(changes: Any, message: str | None) -> None:
    with torch.device("meta"):
        problem = problem_of(Decoder(architecture(model_type="mistral", **changes)), 64)
    assert (message in (problem or "")) if message else problem is None
