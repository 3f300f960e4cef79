"""Three tiny models that between them use everything the decoder can do."""

import pytest
import torch

from trainer.models import Decoder, init_parameter
from trainer.recipe.architecture import Architecture, RopeScalingSection

# initializer_range is large, so that attention is far from uniform and a wrong angle shows.
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
ARCHITECTURES = {
    "qwen3-tied": Architecture(
        model_type="qwen3", head_dim=16, rope_theta=1e6, tie_word_embeddings=True, **SIZES
    ),
    "qwen3-untied": Architecture(model_type="qwen3", head_dim=16, rope_theta=1e6, **SIZES),
    "llama-stretched": Architecture(
        model_type="llama",
        head_dim=12,
        rope_theta=5e5,
        rms_norm_eps=1e-5,
        # With an original context of 64, the six wavelengths are kept, blended and divided.
        rope_scaling=RopeScalingSection(factor=8.0, original_max_position_embeddings=64),
        **SIZES,
    ),
}


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return ARCHITECTURES[request.param]


@pytest.fixture
def decoder(architecture: Architecture) -> Decoder:
    """With norm weights away from one, so that a norm that is left out shows."""
    decoder = Decoder(architecture)
    fill(decoder, architecture, seed=3)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.linspace(-0.5, 0.5, len(parameter)))
    return decoder


@torch.no_grad()
def fill(decoder: Decoder, architecture: Architecture, seed: int) -> None:
    for name, parameter in decoder.named_parameters():
        parameter.copy_(init_parameter(name, tuple(parameter.shape), architecture, seed))
