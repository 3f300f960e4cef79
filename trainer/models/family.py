"""What one model family of Hugging Face transformers means by its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a `model_type` is read and written."""

    model_class: str
    """Name of the transformers class, for `architectures`."""

    fixed: Mapping[str, Any]
    """Keys of which this decoder computes one value only; written, and refused when different."""

    defaults: Mapping[str, Any]
    """What transformers takes for a key that is absent."""

    heads_divide_hidden: bool
    """Whether transformers insists on hidden_size being a multiple of num_attention_heads."""
