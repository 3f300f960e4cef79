"""OLMo 2, with the keys of transformers' `Olmo2Config`."""

from torch import Tensor, nn

from trainer.models.attention import AttentionDocuments, Rope
from trainer.models.decoder import MLP, TENSOR_PLAN, Attention, RMSNorm
from trainer.models.family import Family
from trainer.recipe.architecture import Architecture


class _WideNorm(RMSNorm):
    """An RMSNorm over all heads of a token together."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(2)).view(x.shape)


class Olmo2Block(nn.Module):
    """A block that normalises the outputs of attention and MLP."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, eps = architecture.hidden_size, architecture.rms_norm_eps
        heads, key_heads = architecture.num_attention_heads, architecture.num_key_value_heads
        q_norm, k_norm = (_WideNorm(n * architecture.head_dim, eps) for n in (heads, key_heads))
        self.self_attn = Attention(architecture, q_norm, k_norm)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(architecture)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)

    def forward(self, x: Tensor, rope: Rope | None, documents: AttentionDocuments | None) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, rope, documents))
        return x + self.post_feedforward_layernorm(self.mlp(x))


FAMILY = Family(
    model_type="olmo2",
    model_class="Olmo2ForCausalLM",
    block=Olmo2Block,
    fixed={"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0},
    defaults={
        "num_key_value_heads": None,  # as many as there are query heads
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    },
    heads_divide_hidden=False,
    unread={"pad_token_id": None},
    tensor_plan={**TENSOR_PLAN, "*.self_attn.[qk]_norm": "wide_norm"},
)
