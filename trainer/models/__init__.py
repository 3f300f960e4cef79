"""Models that Perdure builds itself, and their Hugging Face files."""

from trainer.models.attention import choose_attention
from trainer.models.decoder import MLP, Attention, Block, Decoder, RMSNorm
from trainer.models.family import Family, init_parameter
from trainer.models.hf import (
    ModelConfigError,
    config_json,
    generation_config_json,
    read_config,
    tokenizer_files,
)

__all__ = [
    "Family",
    "Decoder",
    "Block",
    "Attention",
    "MLP",
    "RMSNorm",
    "choose_attention",
    "init_parameter",
    "ModelConfigError",
    "read_config",
    "config_json",
    "generation_config_json",
    "tokenizer_files",
]
