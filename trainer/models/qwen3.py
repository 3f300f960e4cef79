"""Qwen3 dense, as `Qwen3Config` of transformers writes it."""

from trainer.models.family import Family

QWEN3 = Family(
    model_class="Qwen3ForCausalLM",
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
    },
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
    heads_divide_hidden=False,
)
