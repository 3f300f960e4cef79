"""Mistral, with the keys of transformers' `MistralConfig`: either all layers have a window, or none
has."""

from trainer.models.decoder import MLP, TENSOR_PLAN, Attention, Block
from trainer.models.family import Family, LayerKind, window_of

FAMILY = Family(
    model_type="mistral",
    model_class="MistralForCausalLM",
    block=lambda architecture: Block(architecture, Attention(architecture), MLP(architecture)),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    heads_divide_hidden=False,
    options={"sliding_window": None},
    layers=lambda architecture: (
        [LayerKind(window_of(architecture))] * architecture.num_hidden_layers
    ),
    tensor_plan=TENSOR_PLAN,
)
