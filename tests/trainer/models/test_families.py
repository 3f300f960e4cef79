"""Families built anew: transformers opens what is written, and packed documents do not see each
other, sliding windows and layers without positions included."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.trainer.models.conftest import SIZES
from trainer.models import Decoder, config_json, read_config
from trainer.models.family import family_of
from trainer.recipe import RecipeError
from trainer.recipe.architecture import Architecture, RopeScalingSection

WINDOW = {"use_sliding_window": True, "sliding_window": 7}
YARN = RopeScalingSection(rope_type="yarn", factor=8.0, original_max_position_embeddings=32)
LONGROPE = RopeScalingSection(
    rope_type="longrope",
    factor=8.0,
    original_max_position_embeddings=32,
    short_factor=(1.0, 1.2, 1.5),
    long_factor=(1.0, 2.0, 3.0),
)
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"rope_scaling": YARN},
    "qwen2-windows": {"options": {**WINDOW, "max_window_layers": 1}},
    "mistral": {
        "options": {"sliding_window": 7},
        "rope_scaling": RopeScalingSection(rope_type="linear", factor=2.0),
    },
    "olmo2": {},
    "olmo3": {
        "options": {
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_local_base_freq": 1e4,
        },
        "rope_scaling": YARN,
    },
    "gemma3_text": {
        "options": {"sliding_window": 7, "sliding_window_pattern": 2, "query_pre_attn_scalar": 10},
        "rope_scaling": RopeScalingSection(rope_type="linear", factor=8.0),
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "smollm3": {"options": {**WINDOW, "no_rope_layer_interval": 2}, "tie_word_embeddings": True},
    "gpt_oss": {
        "options": {"sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2},
        "rope_scaling": replace(YARN, truncate=False),
    },
    "phi3": {
        "options": {"partial_rotary_factor": 0.5, "original_max_position_embeddings": 32},
        "rope_scaling": LONGROPE,
    },
}


def architecture_of(name: str) -> Architecture:
    model_type = name.partition("-")[0]
    given = {"head_dim": 12, **SIZES, **MODELS[name]}
    return family_of(model_type).complete(Architecture(model_type=model_type, **given))


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_a_family_built_anew(name: str, tmp_path: Path) -> None:
    architecture = architecture_of(name)
    family = family_of(architecture.model_type)
    decoder = Decoder(architecture)
    for number, (fqn, parameter) in enumerate(decoder.named_parameters()):
        parameter.copy_(family.draw(fqn, tuple(parameter.shape), architecture, number))
        if fqn.endswith(".bias"):
            assert not parameter.any()
        if parameter.dim() == 1 or fqn.endswith("_bias"):
            parameter.add_(torch.linspace(-0.5, 0.5, parameter.shape[-1]))
    weights = dict(decoder.named_parameters())
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config_json(architecture)))
    assert read_config(tmp_path) == architecture

    reference, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = torch.randint(0, 131, (2, 48), generator=torch.Generator().manual_seed(1))
    expected = reference(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(decoder(tokens), expected, atol=1e-5, rtol=0)

    if architecture.rope_scaling == LONGROPE:  # else the parts would have other wavelengths
        tokens = tokens[:, :30]
    parts = tokens.split([20, tokens.shape[1] - 20], 1)
    ids = torch.cat([torch.full_like(part, n) for n, part in enumerate(parts)], 1)
    alone = torch.cat([decoder(part) for part in parts], 1)
    # Of other lengths, products round otherwise on some CPUs. What another document's tokens would
    # change is thousands of times more.
    torch.testing.assert_close(decoder(tokens, document_ids=ids), alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mistral", {"sliding_window": "8"}, "sliding_window: '8' is no whole number above 0"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "layer_types: has sliding_attention"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window: 1 is no bool"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers: needs a 0 or 1 for each"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window: None is no int"),
        ("gemma3_text", {"rope_local_base_freq": -1.0}, "rope_local_base_freq: must be above"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval: must be above 0"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit: must be above 0"),
        ("gpt_oss", {"layer_types": ["full"]}, "layer_types: ['full'] does not name"),
        ("phi3", {"partial_rotary_factor": "half"}, "partial_rotary_factor: 'half' is no float"),
    ],
)
def test_options_that_make_no_sense(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        family_of(name).complete(
            Architecture(model_type=name, head_dim=12, options=options, **SIZES)
        )
    assert str(refusal.value).startswith(f"model.architecture.options.{message}")


def test_scalings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="longrope needs short_factor and long_factor"):
        RopeScalingSection(rope_type="longrope", factor=2.0)
    with pytest.raises(ValueError, match="would rotate 3 elements of head_dim=12"):
        Architecture(
            model_type="phi3", head_dim=12, options={"partial_rotary_factor": 0.25}, **SIZES
        )
    dynamic = RopeScalingSection(rope_type="dynamic", factor=2.0)
    architecture = Architecture(model_type="llama", head_dim=12, rope_scaling=dynamic, **SIZES)
    with pytest.raises(ValueError, match="257 tokens is longer than max_position_embeddings=256"):
        Decoder(architecture)(torch.zeros(1, 257, dtype=torch.int64))
