"""Llama 3.x, with the keys of transformers' `LlamaConfig`."""

from trainer.models.decoder import MLP, TENSOR_PLAN, Attention, Block
from trainer.models.family import Family

FAMILY = Family(
    model_type="llama",
    model_class="LlamaForCausalLM",
    block=lambda architecture: Block(architecture, Attention(architecture), MLP(architecture)),
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
    },
    defaults={
        "num_key_value_heads": None,  # as many as there are query heads
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 2048,
    },
    heads_divide_hidden=True,
    tensor_plan=TENSOR_PLAN,
)
