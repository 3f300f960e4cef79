"""The sizes of a decoder, by the keys of a Hugging Face config.json. Imports no torch, so that
recipes are read quickly."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


def bundled_families() -> list[str]:
    """Return the `model_type` of each bundled family."""
    files = (Path(__file__).parents[1] / "models/families").glob("[!_]*.py")
    return sorted(file.stem for file in files)


_CONTEXT = "original_max_position_embeddings"
_OF_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
ROPE_KEYS = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _CONTEXT),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", _CONTEXT, "attention_factor", *_OF_YARN),
    "longrope": ("factor", _CONTEXT, "attention_factor", "short_factor", "long_factor"),
}
"""Type of rotary scaling → its keys in config.json."""


@dataclass(frozen=True, kw_only=True)
class RopeScalingSection:
    """Scaling of the rotary wavelengths for a longer context. Keys apply only to the types of
    scaling that are named."""

    factor: float
    """Ratio of the new context length to the original."""

    low_freq_factor: float = 1.0
    """`llama3`: wavelengths longer than the original context divided by this are scaled in full."""

    high_freq_factor: float = 4.0
    """`llama3`: wavelengths shorter than the original context divided by this are not scaled."""

    original_max_position_embeddings: int = 8192
    """`llama3`, `yarn`, `longrope`: context length before scaling, in tokens."""

    rope_type: Literal["llama3", "linear", "dynamic", "yarn", "longrope"] = "llama3"
    """Which wavelengths are scaled. llama3: as in Llama 3.1. linear: all equally. dynamic: none up
    to the model's context. yarn: as in YaRN. longrope: each by its own factor."""

    attention_factor: float | None = None
    """`yarn`, `longrope`: factor of cosines and sines. Default: computed from `factor`."""

    beta_fast: float = 32.0
    """`yarn`: wavelengths with more turns than this in the original context are not scaled."""

    beta_slow: float = 1.0
    """`yarn`: wavelengths with fewer turns than this in the original context are scaled in full."""

    mscale: float | None = None
    """`yarn`: with `mscale_all_dim`, determines `attention_factor`."""

    mscale_all_dim: float | None = None
    """`yarn`: see `mscale`."""

    truncate: bool = True
    """`yarn`: whether the indices of wavelengths between which the scaling changes are rounded to
    whole numbers."""

    short_factor: tuple[float, ...] | None = None
    """`longrope`: factor of each wavelength in sequences of at most the original context."""

    long_factor: tuple[float, ...] | None = None
    """`longrope`: factor of each wavelength in longer sequences."""

    def __post_init__(self) -> None:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} is not below "
                f"high_freq_factor={self.high_freq_factor}"
            )
        if self.rope_type == "longrope" and not (self.short_factor and self.long_factor):
            raise ValueError("longrope needs short_factor and long_factor")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU, arranged by its family."""

    model_type: str
    """`model_type` of a bundled family (docs/quickstart.md has a table), or of `model.family`."""

    vocab_size: int
    """Rows of the embedding; at least the tokenizer's vocabulary."""

    hidden_size: int
    """Width of the residual stream."""

    intermediate_size: int
    """Width of the SwiGLU layer."""

    num_hidden_layers: int
    """Number of decoder blocks."""

    num_attention_heads: int
    """Number of query heads."""

    num_key_value_heads: int
    """Number of key and value heads; each serves num_attention_heads / num_key_value_heads query
    heads."""

    head_dim: int
    """Width of one head."""

    max_position_embeddings: int = 4096
    """Longest sequence that the model supports, in tokens."""

    rms_norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm."""

    rope_theta: float = 10000.0
    """Base of the rotary wavelengths."""

    rope_scaling: RopeScalingSection | None = None
    """Scaling for a longer context."""

    tie_word_embeddings: bool = False
    """Whether the output head is the embedding matrix."""

    initializer_range: float = 0.02
    """Standard deviation of the initial weights of matrices."""

    options: dict[str, Any] | None = None
    """Keys of config.json that only the family has."""

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, as RoPE rotates pairs")
        if self.rotary_size % 2 or not 0 < self.rotary_size <= self.head_dim:
            raise ValueError(
                f"partial_rotary_factor would rotate {self.rotary_size} elements of "
                f"head_dim={self.head_dim}: the number must be even, above 0 and at most head_dim"
            )
        scaling, pairs = self.rope_scaling, self.rotary_size // 2
        for key in ("short_factor", "long_factor"):
            factors = getattr(scaling, key, None)
            if factors and len(factors) != pairs:
                raise ValueError(
                    f"{key} has {len(factors)} numbers; give {pairs}, one for each rotated pair"
                )

    @property
    def rotary_size(self) -> int:
        """Number of elements of each head that are rotated."""
        share = (self.options or {}).get("partial_rotary_factor")
        # Rounded down, as in transformers.
        return int(self.head_dim * share) if isinstance(share, float | int) else self.head_dim
