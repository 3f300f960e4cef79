"""How models are cut among tensor-parallel ranks: the plan, the loss, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpointing.worlds import run_ranks
from tests.trainer.parallel.cut import Own, compare_all
from trainer.models import Decoder
from trainer.parallel.tensor import kinds_of
from trainer.recipe import OptimizerSection, RecipeError, StrategySection
from trainer.recipe.architecture import Architecture
from trainer.run.preflight import check_growth


def architecture(**changes: Any) -> Architecture:
    sizes: dict[str, Any] = {
        **{"model_type": "qwen3", "vocab_size": 131, "hidden_size": 24, "intermediate_size": 32},
        **{"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
        "head_dim": 8,
    }
    return Architecture(**{**sizes, **changes})


def test_a_cut_model_computes_what_the_whole_one_does(tmp_path: Path) -> None:
    """A head, a model of the user's that joins by its plan, and families that differ from others in
    their products and norms."""
    assert run_ranks(2, compare_all, tmp_path) == [0, 1]


def refusal(model: nn.Module, tp: int, shards: int = 1) -> str:
    with pytest.raises(RecipeError) as error:
        kinds_of(model, tp, shards)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 4, "num_key_value_heads=2 is not a multiple of tp=4"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, 2, "num_attention_heads=3 is not"),
        ({"intermediate_size": 33}, 2, "layers.0.mlp.gate_proj cannot be column: its 33 columns"),
        ({"model_type": "phi3", "intermediate_size": 33}, 2, "section of 33 outputs does not"),
        ({"vocab_size": 1}, 2, "embed_tokens cannot be vocabulary: its 1 rows leave one of tp=2"),
    ],
)
def test_what_does_not_divide_is_refused(changes: Any, tp: int, message: str) -> None:
    with torch.device("meta"):
        assert message in refusal(Decoder(architecture(**changes)), tp)


def test_rows_that_a_dtensor_would_tell_wrongly_are_refused() -> None:
    """Of 257 rows two ranks have 129 and 128. In four shards that is 33, 33, 33, 30 and 4 x 32; but
    by their sums the last shard, of 62, would be 31 and 31."""
    with torch.device("meta"):
        model = Decoder(architecture(vocab_size=257))
        assert "its 257 rows are not even on tp=2 ranks with 4 shards" in refusal(model, 2, 4)
        for vocab_size, shards in ((257, 1), (257, 2), (257, 3), (264, 4)):
            assert kinds_of(Decoder(architecture(vocab_size=vocab_size)), 2, shards)


def test_a_plan_leaves_nothing_out() -> None:
    model = Own()
    model.tensor_plan = {**Own.tensor_plan, "layers.1.norm": "column", "*norm": "nrom"}
    assert "layers.0.norm is to be 'nrom' in the tensor_plan; use one of" in refusal(model, 2)
    model.tensor_plan = {"*.norm": "column", **Own.tensor_plan}
    assert "layers.0.norm cannot be column: that needs an nn.Linear" in refusal(model, 2)
    del model.tensor_plan["*.down"], model.tensor_plan["*.norm"]
    assert "layers.0.down has no pattern in the tensor_plan" in refusal(model, 2)
    model = Own()
    model.scale = nn.Parameter(torch.ones(1))
    assert "Own itself, which has parameters, has no pattern" in refusal(model, 2)
    assert "Linear has no tensor_plan" in refusal(nn.Linear(2, 2), 2)


def test_a_vocabulary_that_a_larger_world_could_not_cut_is_refused_at_the_start() -> None:
    """Three nodes of two ranks can, and a fourth would end the job."""
    recipe = SimpleNamespace(
        strategy=StrategySection(tp=2), sharding="FULL_SHARD", optimizer=OptimizerSection(lr=1e-3)
    )
    with torch.device("meta"):
        odd, even = (Decoder(architecture(vocab_size=size)) for size in (257, 258))
    check_growth(recipe, odd, range(2, 7, 2))  # type: ignore[arg-type]
    check_growth(recipe, even, range(2, 9, 2))  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="257 rows are not even on tp=2 ranks with 4 shards each"):
        check_growth(recipe, odd, range(2, 9, 2))  # type: ignore[arg-type]
