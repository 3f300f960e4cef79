"""Tiny models that transformers computes, and what it makes of documents. Of these architectures
Perdure has only GPT-OSS itself."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 257
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_HEAD = {"head_dim": 16}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 96}
_NONE = {"attention_dropout": 0.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT2, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)},
    "gemma2": {**_SIZES, **_HEAD, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "phi": {**_SIZES, "resid_pdrop": 0.0, "embd_pdrop": 0.0, **_NONE},
    "opt": {**_SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0, **_NONE},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, **_NONE},
    "gpt_oss": {
        **_SIZES, **_HEAD, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "gpt_neox": _SIZES,
    "falcon": {**_SIZES, "ffn_hidden_size": 96},
    "stablelm": _SIZES,
    "cohere": _SIZES,
    "granite": {
        **_SIZES, "logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "glm4": {**_SIZES, **_HEAD},
    "starcoder2": {**_SIZES, "sliding_window": 8, "residual_dropout": 0.0, **_NONE},
}  # fmt: skip
"""Between them: learned, rotary and linear positions; windows; caps and scales of logits; biases of
heads; sinks and experts; norms in all places; fused and transposed products."""
QUICK = ("gemma2", "phi", "opt", "bloom")
"""Of these documents, loss and head differ most from those of Perdure's decoders."""


@torch.no_grad()
def publish(model_type: str, folder: Path) -> PreTrainedModel:
    """Save such a model, with no weight at zero and attention far from uniform; returns it."""
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    config = AutoConfig.for_model(
        model_type, vocab_size=VOCABULARY, **special, **CONFIGS[model_type]
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.linspace(-0.5, 0.5, len(parameter)))
        else:
            parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model.eval()


def separate(model: PreTrainedModel, ids: Tensor, document_ids: Tensor) -> Tensor:
    """Logits (B, T, V) of passes over each document by itself."""
    rows = []
    for row, documents in zip(ids, document_ids, strict=True):
        lengths = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
        parts = [model(part[None]).logits[0] for part in row.split(lengths)]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def separate_loss(
    model: PreTrainedModel, ids: Tensor, labels: Tensor, document_ids: Tensor
) -> Tensor:
    """Mean cross-entropy of these logits."""
    logits = separate(model, ids, document_ids)
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
