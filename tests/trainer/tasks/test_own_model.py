"""A model of the user's that cannot do a pass is refused before anything is started, in one line
with the place in the user's code; one that only cannot do it there and then is not."""

import re
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from elastic import Pulse
from elastic.node.progress import NodeProgressPage
from tests.distributed.jobs import RECIPE
from trainer.data.sample_stream import count_of
from trainer.parallel.parallel_model import ParallelModel
from trainer.recipe import RecipeError, load_recipe
from trainer.recipe.factory import RecipeFactoryError
from trainer.recipe.sections import PrecisionSection
from trainer.tasks.own_model import (
    check_forward,
    check_signature,
    give_next_tokens,
    keep_in_float32,
    refusing_misfits,
    shifts_labels,
)

BATCH = {"input_ids": torch.zeros(1, 8, dtype=torch.int64), "labels": torch.zeros(1, 8).long()}


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    overrides = ["model.architecture=null", "model.factory=misfit:build"]
    return load_recipe(str(tmp_path / "recipe.yaml"), overrides)


class Of(nn.Module):
    """A model of one function."""

    def __init__(self, function):
        super().__init__()
        self.embed, self.function = nn.Embedding(257, 16), function
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, input_ids, labels, document_ids=None):
        self.passes += 1
        return self.function(self.embed(input_ids))


def wrong_shapes(hidden):
    return hidden @ torch.ones(17, 1)


def wrong_key(hidden):
    return {"loss": hidden.mean()}["los"]


@pytest.mark.parametrize("function", [wrong_shapes, wrong_key])
def test_a_pass_that_fails_is_told_with_the_line_of_the_user(recipe, function):
    line = function.__code__.co_firstlineno + 1
    place = re.escape(f"misfit:build fails at {__file__}:{line}: ")
    with pytest.raises(RecipeError, match=place):
        check_forward(recipe, Of(function), BATCH)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda hidden: hidden, r"returns a tensor of shape \(1, 8, 16\)"),
        (
            lambda hidden: {"logits": hidden},
            r"returns a dict without a scalar 'loss' \(of 'logits'\);",
        ),
        (lambda hidden: {"loss": hidden.mean(1)}, r"returns a tensor of shape \(1, 16\)"),
        (lambda hidden: hidden.mean().detach(), "returns a loss that has no gradient: it is det"),
        (lambda hidden: {"loss": 0.5}, "returns the loss as a float, which has no gradient"),
        (
            lambda hidden: {"loss": hidden.mean(), "count": hidden[0, :, 0]},
            r"returns a 'count' of shape \(8,\); it should be one number",
        ),
    ],
)
def test_a_pass_without_a_loss_is_told(recipe, function, what):
    with pytest.raises(RecipeError, match=what):
        check_forward(recipe, Of(function), BATCH)


def test_parameters_without_a_part_in_the_loss_are_named(recipe):
    model = Of(lambda hidden: hidden.mean())
    model.idle = nn.Linear(2, 3)
    assert check_forward(recipe, model, BATCH) == ["idle.weight", "idle.bias"]


def branches(hidden):
    return hidden.mean() if hidden.sum() > 0 else hidden.sum()


def counts(hidden):
    return hidden.mean() * len(set(hidden.detach().numpy().flatten().tolist()))


def asks_for_its_rank(hidden):
    return hidden.mean() * torch.distributed.get_rank()


def has_a_gpu_alone(hidden):
    raise RuntimeError("this kernel takes tensors on a GPU")


def leaves(hidden):
    sys.exit(0)


@pytest.mark.parametrize("function", [branches, counts, asks_for_its_rank, has_a_gpu_alone])
def test_what_fails_for_reasons_of_its_own_is_let_pass(recipe, function):
    check_forward(recipe, Of(function), BATCH)


def test_a_forward_that_is_called_with_something_else_is_told(recipe):
    class Names(nn.Module):
        def forward(self, tokens, labels):
            return tokens

    with pytest.raises(RecipeError, match=r"forward\(tokens, labels\) is called with input_ids=,"):
        check_signature(recipe, Names(), [*BATCH, "document_ids"])
    check_signature(recipe, Of(branches), BATCH)


class Halves(nn.Module):
    """A model in bf16 with a tied weight, a frozen one, and a batch norm."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.bfloat16()
        self.wide = nn.Parameter(torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("low", [True, False])
def test_half_precision_becomes_float32(recipe, low):
    recipe = replace(recipe, precision=PrecisionSection(dtype="bf16" if low else "fp32"))
    model = Halves()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    notes = keep_in_float32(recipe, model, "own:make")
    assert notes[0].startswith(f"own:make made {3 if low else 4} parameters in bfloat16; they are")
    assert "own:make made 1 parameter in float64, which stays so" in notes
    assert ("own:make made 1 parameter in bfloat16, which stays so" in notes) == low
    assert model.head.weight is model.embed.weight
    found = {name: one.dtype for name, one in model.state_dict().items()}
    kept = {"frozen.weight"} if low else set()
    assert {name for name, dtype in found.items() if dtype == torch.bfloat16} == kept
    assert found["norm.running_var"] == torch.float32
    assert found["norm.num_batches_tracked"] == torch.int64
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name].to(one.dtype))
    assert keep_in_float32(recipe, nn.Linear(2, 2), "own:make") == []


def test_a_default_dtype_that_a_factory_leaves_behind_is_put_back(recipe):
    torch.set_default_dtype(torch.bfloat16)
    try:
        keep_in_float32(recipe, nn.Linear(2, 2), "own:make")
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_model_that_shifts_labels_takes_those_of_prepared_data_as_they_are(recipe):
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.Qwen2Config(**sizes, num_attention_heads=1, num_key_value_heads=1)
    model = transformers.Qwen2ForCausalLM(config)
    ids = torch.randint(0, 9, (2, 7), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=ids, labels=ids).loss.item()
    notes = give_next_tokens(recipe, model)
    assert "does not use document_ids" in notes[0]
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    assert check_forward(recipe, model, batch) == []
    assert model(**batch).loss.item() == pytest.approx(expected, rel=1e-6)
    assert model(ids).loss is None
    assert give_next_tokens(recipe, Of(branches)) == []

    class Older(transformers.Qwen2ForCausalLM):
        def forward(self, input_ids, labels):
            return self.loss_function(logits=input_ids, labels=labels)

    with pytest.raises(RecipeError, match="its forward takes no shift_labels"):
        give_next_tokens(recipe, Older(config))


def test_models_that_shift_labels_themselves_are_known():
    """What is counted of each is what its mean is over."""
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    llama = transformers.LlamaConfig(**sizes, num_attention_heads=1)
    gpt2 = transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)
    bart = transformers.BartConfig(
        vocab_size=9, d_model=8, decoder_layers=1, decoder_ffn_dim=8, decoder_attention_heads=1
    )
    ids = torch.arange(12).reshape(2, 6) % 9
    labels = torch.where(torch.arange(6) < torch.tensor([[6], [2]]), ids, -100)
    for model, shifts in (
        (transformers.LlamaForCausalLM(llama), True),
        (transformers.GPT2LMHeadModel(gpt2), True),
        (transformers.BartForCausalLM(bart), False),
    ):
        assert shifts_labels(model) == shifts
        losses, counts = [], []
        for rows in (slice(2), slice(1), slice(1, 2)):
            losses.append(model.eval()(input_ids=ids[rows], labels=labels[rows]).loss.item())
            counts.append(count_of({"labels": labels[rows]}, 2, shifted=shifts))
        whole, *parts = (loss * count for loss, count in zip(losses, counts, strict=True))
        assert sum(parts) == pytest.approx(whole, rel=1e-6)
    assert not shifts_labels(Of(branches))


def test_in_the_first_step_of_a_run_it_is_wrong_input_and_later_an_error(recipe):
    page = NodeProgressPage.make()
    pulse = Pulse(page, 0)

    def step(function, first):
        pulse.report(1, "step")
        model = ParallelModel(
            Of(function), {}, {}, {}, None, None, False, nullcontext, lambda: None, lambda: None
        )
        with refusing_misfits(recipe, pulse, lambda: first):
            model(BATCH)

    with pytest.raises(RecipeError, match=f"at {__file__}:"):
        step(wrong_shapes, True)
    assert page.read(0).step == 0, "the agent ends the job: no step has begun"
    for function, first, error in (
        (wrong_shapes, False, RecipeFactoryError),
        (leaves, False, RecipeFactoryError),
        (has_a_gpu_alone, True, RuntimeError),
    ):
        with pytest.raises(error):
            step(function, first)
        assert page.read(0).step == 1
