"""Experts: what transformers computes, and what counts of them."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from trainer.models import Decoder, config_json, init_parameter, read_config
from trainer.models.families.qwen3_moe import MoE, move_biases
from trainer.models.family import family_of
from trainer.models.parameter_names import apart
from trainer.recipe.architecture import Architecture
from trainer.tools.generate import empty_model, load_weights

FAMILY = family_of("qwen3_moe")
ARCHITECTURE = FAMILY.complete(
    Architecture(
        model_type="qwen3_moe",
        vocab_size=131,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
        options={
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.01,
            "router_aux_loss_per_sequence": False,
        },
    )
)


def drawn(architecture: Architecture = ARCHITECTURE) -> Decoder:
    decoder = Decoder(architecture)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(init_parameter(name, tuple(parameter.shape), ARCHITECTURE, 3))
    return decoder


def test_logits_losses_and_gradients_are_those_of_transformers(tmp_path):
    decoder = drawn()
    weights = apart(dict(decoder.named_parameters()), FAMILY.stacks)
    assert weights["model.layers.1.mlp.experts.7.down_proj.weight"].shape == (48, 24)
    whole = {name: tensor.detach().clone() for name, tensor in weights.items()}
    save_file(whole, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config_json(ARCHITECTURE)))
    assert read_config(tmp_path) == ARCHITECTURE
    reference, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    published = tmp_path / "published"
    reference.save_pretrained(published)
    again = load_file(published / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    decoder = empty_model(published)
    load_weights(decoder, published, torch.device("cpu"))
    decoder.train()

    tokens = torch.randint(0, 131, (2, 101), generator=torch.Generator().manual_seed(1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    expected = reference(inputs).logits
    # float32 rounding through two layers
    torch.testing.assert_close(decoder(inputs), expected, atol=1e-5, rtol=0, check_stride=False)

    theirs = reference(
        inputs, labels=inputs, shift_labels=labels.contiguous(), output_router_logits=True
    )
    ours = decoder(inputs, labels)
    torch.testing.assert_close(ours["loss"], theirs.loss, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours["balance_loss"], theirs.aux_loss, atol=1e-5, rtol=0)
    ours["loss"].backward()
    theirs.loss.backward()
    named = dict(reference.named_parameters())
    for name, parameter in decoder.named_parameters():
        if name.endswith(("experts.gate_proj", "experts.up_proj")):
            stacked = named[f"{name.rpartition('.')[0]}.gate_up_proj"].grad
            expected = stacked.chunk(2, dim=1)[name.endswith("up_proj")]
        else:
            expected = named[name].grad
        torch.testing.assert_close(parameter.grad, expected, atol=1e-5, rtol=1e-4)
    decoder.eval()
    held_out = decoder(inputs, labels)
    assert held_out["loss"] == held_out["cross_entropy"]


def test_a_token_costs_the_experts_it_meets():
    parameters = sum(p.numel() for p in Decoder(ARCHITECTURE).parameters())
    expert, embedding = 3 * 48 * 24, 131 * 48
    met = parameters - embedding - 2 * (8 - 2) * expert
    attention = 12 * 2 * 64 * 32
    assert FAMILY.flops_per_token(ARCHITECTURE, parameters, 32) == 6 * met + attention


def test_a_stage_of_a_pipeline_costs_the_experts_that_a_token_meets():
    """Or the head, which counts with the last block, would weigh little beside all experts."""
    decoder = Decoder(ARCHITECTURE)
    parameters = sum(p.numel() for p in decoder.parameters())
    first, last = decoder.block_costs(32)
    assert last - first == pytest.approx(2 * 131 * 48)
    expected = FAMILY.flops_per_token(ARCHITECTURE, parameters, 32) - 6 * 48  # of the last norm
    assert 3 * (first + last) == pytest.approx(expected)


def test_biases_move_by_load_and_change_the_choice_alone():
    options = {**ARCHITECTURE.options, "router_bias_update_rate": 0.5}
    moe = MoE(replace(ARCHITECTURE, options=options))
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.2, generator=draw)
    x = torch.randn(2, 50, 48, generator=draw)
    mixed, statistics = moe(x)
    (mixed.sum() * 0).backward()  # as of a pass that only keeps a rank in step
    assert not moe.load.any()
    moe(x)[0].sum().backward()
    loads = statistics[0].detach().sum(dim=0) * 50
    assert loads.sum() == 2 * 100
    assert torch.equal(moe.load, loads.round().long())
    move_biases(moe)
    bias = moe.gate.e_score_correction_bias
    assert torch.equal(bias, 0.5 * (25 - loads.round()).sign())
    assert moe.load is None

    bias.copy_(torch.tensor([0.0, 0, 0, 9, 0, 9, 0, 0]))
    mixed, statistics = moe(x)
    assert statistics[0, :, [3, 5]].eq(1).all()
    likely = (x @ moe.gate.weight.T).softmax(-1)[..., [3, 5]]
    weights = likely / likely.sum(-1, keepdim=True)
    each = []
    for number in (3, 5):
        gate, up, down = (weight[number].T for weight in moe.experts.parameters())
        each.append((F.silu(x @ gate) * (x @ up)) @ down)
    expected = (torch.stack(each, -1) * weights[..., None, :]).sum(-1)
    torch.testing.assert_close(mixed, expected, atol=1e-6, rtol=1e-5)


def test_the_balance_loss_is_the_same_however_sequences_are_batched():
    options = {**ARCHITECTURE.options, "router_aux_loss_per_sequence": True}
    decoder = drawn(replace(ARCHITECTURE, options=options))
    tokens = torch.randint(0, 131, (4, 33), generator=torch.Generator().manual_seed(1))

    def losses(rows):
        parts = [decoder(part[:, :-1], part[:, 1:]) for part in tokens.split(rows)]
        return torch.stack([part["balance_loss"] for part in parts])

    torch.testing.assert_close(losses(1).mean(), losses(4)[0], rtol=1e-6, atol=0)
    assert losses(1).std() > 1e-3
