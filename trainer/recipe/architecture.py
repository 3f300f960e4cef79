"""The shape of a decoder, in the words of a Hugging Face config.json.

Stands apart from the model so that a recipe is read without importing torch.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any


def bundled_families() -> list[str]:
    """The `model_type` of each family that comes with Perdure."""
    files = (Path(__file__).parents[1] / "models/families").glob("[!_]*.py")
    return sorted(file.stem for file in files)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretching of the rotary wavelengths (`rope_type: llama3`)."""

    factor: float
    """How many times longer the context becomes."""

    low_freq_factor: float = 1.0
    """Wavelengths above original context / this are stretched in full."""

    high_freq_factor: float = 4.0
    """Wavelengths below original context / this stay as they are."""

    original_max_position_embeddings: int = 8192
    """Context length before stretching, in tokens."""

    def __post_init__(self) -> None:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} is not below "
                f"high_freq_factor={self.high_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU, arranged as its family does."""

    model_type: str
    """llama, qwen3 (which normalises queries and keys per head), qwen3_moe (the same with experts),
    or that of `model.family`."""

    vocab_size: int
    """Rows of the embedding; at least the tokenizer's vocabulary."""

    hidden_size: int
    """Width of the residual stream."""

    intermediate_size: int
    """Width of the SwiGLU layer."""

    num_hidden_layers: int
    """Decoder blocks."""

    num_attention_heads: int
    """Query heads."""

    num_key_value_heads: int
    """Key and value heads; each serves num_attention_heads / num_key_value_heads query heads."""

    head_dim: int
    """Width of one head."""

    max_position_embeddings: int = 4096
    """Longest sequence the model is meant for, in tokens."""

    rms_norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""

    rope_theta: float = 10000.0
    """Base of the rotary wavelengths."""

    rope_scaling: RopeScaling | None = None
    """Llama 3.1 context stretching."""

    tie_word_embeddings: bool = False
    """Whether the output head is the embedding matrix."""

    initializer_range: float = 0.02
    """Standard deviation of fresh matrices."""

    options: dict[str, Any] | None = None
    """Keys of config.json that only this family has."""

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd, but RoPE rotates pairs")
