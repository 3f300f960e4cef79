"""GPT-OSS: gradients and balance loss of transformers, the names and bits of its files, and what a
recipe cannot have."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel

from tests.their_models import separate_loss
from trainer.models import Decoder, read_config
from trainer.models.family import family_of
from trainer.models.parameter_names import apart
from trainer.optim.optimizer import method_of, named_groups
from trainer.parallel.context import problem_of
from trainer.parallel.tensor import kinds_of
from trainer.recipe import OptimizerSection, RecipeError
from trainer.tools.generate import empty_model, load_weights

CONFIG = GptOssConfig(
    vocab_size=131,
    hidden_size=48,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    swiglu_limit=1.0,  # some gates are clamped
    initializer_range=0.2,
    router_aux_loss_coef=0.01,
    output_router_logits=True,
)
FAMILY = family_of("gpt_oss")
EXPERT = 3 * 48 * 24 + 2 * 24 + 48


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """A model of transformers, none of whose weights is 0, and its directory."""
    torch.manual_seed(3)
    model, folder = AutoModelForCausalLM.from_config(CONFIG), tmp_path_factory.mktemp("gpt-oss")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter.add_(torch.linspace(-0.5, 0.5, parameter.shape[-1]))
    model.save_pretrained(folder)
    return model.eval(), folder


def opened(folder: Path) -> Decoder:
    decoder = empty_model(folder)
    assert isinstance(decoder, Decoder)
    load_weights(decoder, folder, torch.device("cpu"))
    return decoder


def test_names_and_bits_are_those_of_the_file(published: tuple[PreTrainedModel, Path]) -> None:
    decoder = opened(published[1])
    held = load_file(published[1] / "model.safetensors")
    ours = apart(dict(decoder.named_parameters()), decoder.stacks_apart)
    assert ours.keys() == held.keys()
    assert ours["model.layers.1.mlp.experts.gate_up_proj_bias"].shape == (8, 48)
    assert all(torch.equal(ours[name], held[name]) for name in held)


def test_gradients_are_those_of_transformers(published: tuple[PreTrainedModel, Path]) -> None:
    """Documents that are longer than the window share sequences."""
    reference, folder = published
    decoder = opened(folder).train()
    tokens = torch.randint(0, 131, (2, 41), generator=torch.Generator().manual_seed(1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    documents = (torch.arange(40) >= 13).long().expand(2, 40)
    ours = decoder(inputs, labels, document_ids=documents)
    theirs = separate_loss(reference, inputs, labels, documents)
    torch.testing.assert_close(ours["cross_entropy"], theirs, atol=1e-5, rtol=0)
    ours["cross_entropy"].backward()
    reference.zero_grad()
    theirs.backward()
    expected = dict(reference.named_parameters())
    for name, parameter in decoder.named_parameters():
        wanted = expected[name].grad
        assert wanted.abs().max() > 1e-4 or name.endswith("k_proj.bias"), name
        # float32 rounding through two layers
        torch.testing.assert_close(parameter.grad, wanted, atol=1e-6, rtol=1e-4, msg=name)


@torch.no_grad()
def test_the_balance_loss_counts_where_transformers_counts_it(
    published: tuple[PreTrainedModel, Path],
) -> None:
    reference, folder = published
    tokens = torch.randint(0, 131, (2, 41), generator=torch.Generator().manual_seed(2))
    inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
    theirs = reference(inputs, labels=inputs, shift_labels=labels)
    assert theirs.aux_loss > 2
    found = {}
    for counts in (True, False):
        options = {"router_aux_loss_per_sequence": False, "output_router_logits": counts}
        architecture = read_config(folder)
        architecture = replace(architecture, options={**(architecture.options or {}), **options})
        decoder = Decoder(architecture)
        decoder.load_state_dict(opened(folder).state_dict())
        found[counts] = decoder.train()(inputs, labels)
        torch.testing.assert_close(
            found[counts]["balance_loss"], theirs.aux_loss, atol=1e-5, rtol=0
        )
    torch.testing.assert_close(found[True]["loss"], theirs.loss, atol=1e-5, rtol=0)
    assert found[False]["loss"] == found[False]["cross_entropy"] < theirs.loss


def test_a_token_costs_the_experts_it_meets(published: tuple[PreTrainedModel, Path]) -> None:
    architecture = read_config(published[1])
    parameters = sum(p.numel() for p in published[0].parameters())
    met = parameters - 131 * 48 - 2 * (8 - 2) * EXPERT
    attention = 12 * 64 * (8 + 32)  # of a window, and of all
    assert FAMILY.flops_per_token(architecture, parameters, 32) == 6 * met + attention


def test_biases_of_experts_are_updated_as_other_biases(
    published: tuple[PreTrainedModel, Path],
) -> None:
    named = dict(opened(published[1]).named_parameters())
    options = OptimizerSection(name="muon", lr=1e-3, groups=FAMILY.groups)
    groups = named_groups(named, options)
    for group in groups:
        for name, parameter in group["params"]:
            bias = name.endswith(("bias", "sinks", "norm.weight"))
            assert (group["weight_decay"] == 0) == bias, name
            if bias:
                assert method_of(name, parameter, options).name == "adamw", name


def test_impossible_experts_are_refused(published: tuple[PreTrainedModel, Path]) -> None:
    architecture = read_config(published[1])
    options = {**(architecture.options or {}), "num_experts_per_tok": 9}
    with pytest.raises(RecipeError, match="through 9 of 8 experts; lower it, or raise num_local"):
        Decoder(replace(architecture, options=options))


def test_what_ranks_do_not_compute_together(published: tuple[PreTrainedModel, Path]) -> None:
    decoder = opened(published[1])
    problem = "gpt_oss has attention sinks, which ring attention does not support yet"
    assert problem_of(decoder, 8) == problem
    assert kinds_of(decoder, 2)["model.layers.0.self_attn"] == "heads"
    message = "layers.0.self_attn cannot be heads: 4 rows of sinks do not divide among tp=8 ranks"
    with pytest.raises(RecipeError, match=message):
        kinds_of(decoder, 8)
