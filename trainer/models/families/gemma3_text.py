"""Gemma 3's text model, with the keys of transformers' `Gemma3TextConfig`."""

from dataclasses import replace
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.attention import AttentionDocuments, Rope
from trainer.models.decoder import MLP, TENSOR_PLAN, Attention, RMSNorm
from trainer.models.family import Family, LayerKind, init_parameter, kinds_by_window, window_of
from trainer.recipe.architecture import Architecture


class _CentredNorm(RMSNorm):
    """An RMSNorm that multiplies by 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        # in float32: bf16 would round 1 + a small weight to 1
        weight = 1 + self.weight.float()
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).type_as(x)


class _ScaledAttention(Attention):
    """Attention whose scores are divided by √query_pre_attn_scalar instead of √head_dim."""

    def __init__(self, architecture: Architecture) -> None:
        size, eps = architecture.head_dim, architecture.rms_norm_eps
        super().__init__(architecture, _CentredNorm(size, eps), _CentredNorm(size, eps))
        scalar = (architecture.options or {}).get("query_pre_attn_scalar", 256)
        self.scale = (size / scalar) ** 0.5

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return q if self.scale == 1 else q * self.scale, k, v


class Gemma3Block(nn.Module):
    """Attention and MLP, each normalised before and after, and added to the residual stream."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        norm = partial(_CentredNorm, architecture.hidden_size, architecture.rms_norm_eps)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.self_attn = _ScaledAttention(architecture)
        self.mlp = MLP(architecture, partial(F.gelu, approximate="tanh"))

    def forward(self, x: Tensor, rope: Rope | None, documents: AttentionDocuments | None) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(x), rope, documents)
        x = x + self.post_attention_layernorm(mixed)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


def layers(architecture: Architecture) -> list[LayerKind]:
    """Return the kind of each layer. Every `sliding_window_pattern`th has no window by default."""
    options, count = architecture.options or {}, architecture.num_hidden_layers
    for key in ("sliding_window_pattern", "rope_local_base_freq", "query_pre_attn_scalar"):
        if options.get(key, 1) <= 0:
            raise ValueError(f"{key}: must be above 0, but it is {options[key]}")
    pattern = options.get("sliding_window_pattern", 6)
    slides = [(number + 1) % pattern != 0 for number in range(count)]
    kinds = kinds_by_window(architecture, window_of(architecture), slides)
    theta = float(options.get("rope_local_base_freq", 1e4))
    return [replace(kind, theta=theta) if kind.window else kind for kind in kinds]


def draw(name: str, shape: tuple[int, ...], architecture: Architecture, seed: int) -> Tensor:
    """Draw a parameter. Weights of norms are zeros, because `_CentredNorm` adds 1 to them."""
    drawn = init_parameter(name, shape, architecture, seed)
    return drawn.zero_() if name.endswith("norm.weight") else drawn


FAMILY = Family(
    model_type="gemma3_text",
    model_class="Gemma3ForCausalLM",
    block=Gemma3Block,
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "rope_local_base_freq": 1e4,
    },
    heads_divide_hidden=True,
    options={
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "layer_types": None,
        "rope_local_base_freq": 1e4,
    },
    layers=layers,
    draw=draw,
    norm=_CentredNorm,
    embedding_scale=lambda architecture: architecture.hidden_size**0.5,
    tensor_plan=TENSOR_PLAN,
)
