"""OLMo 2 (OLMo et al. 2024, "2 OLMo 2 Furious"): a model family in one file."""

from torch import Tensor, nn

from trainer import MLP, Attention, Family, RMSNorm


class NormOfAllHeads(RMSNorm):
    """One norm over the heads of a token together."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(2)).view(x.shape)  # x: (B, T, heads, H)


class Block(nn.Module):
    """What attention and MLP give is normalised, and not what they get."""

    def __init__(self, architecture):
        super().__init__()
        hidden, eps = architecture.hidden_size, architecture.rms_norm_eps
        heads, key_heads = architecture.num_attention_heads, architecture.num_key_value_heads
        self.self_attn = Attention(
            architecture,
            q_norm=NormOfAllHeads(heads * architecture.head_dim, eps),
            k_norm=NormOfAllHeads(key_heads * architecture.head_dim, eps),
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MLP(architecture)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)

    def forward(self, x, rope, documents):
        x = x + self.post_attention_layernorm(self.self_attn(x, rope, documents))
        return x + self.post_feedforward_layernorm(self.mlp(x))


OLMO2 = Family(
    model_type="olmo2",
    model_class="Olmo2ForCausalLM",
    block=Block,
    fixed={"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0},
    defaults={
        "num_key_value_heads": None,  # as many as there are query heads
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    },
    heads_divide_hidden=True,
)
