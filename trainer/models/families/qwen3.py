"""Qwen3 dense, with the keys of transformers' `Qwen3Config`."""

from trainer.models.decoder import MLP, TENSOR_PLAN, Attention, Block, RMSNorm
from trainer.models.family import Family
from trainer.recipe.architecture import Architecture


def attention(architecture: Architecture) -> Attention:
    """Return attention that normalises queries and keys per head."""
    q_norm, k_norm = (RMSNorm(architecture.head_dim, architecture.rms_norm_eps) for _ in range(2))
    return Attention(architecture, q_norm, k_norm)


FAMILY = Family(
    model_type="qwen3",
    model_class="Qwen3ForCausalLM",
    block=lambda architecture: Block(architecture, attention(architecture), MLP(architecture)),
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
    },
    defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
    heads_divide_hidden=False,
    tensor_plan=TENSOR_PLAN,
)
