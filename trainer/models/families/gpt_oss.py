"""GPT-OSS, with the keys of transformers' `GptOssConfig`. A published checkpoint in MXFP4 has to be
converted first.

Shapes: B batch, T sequence, D hidden, N rows, E experts, I their width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.models.attention import AttentionDocuments, attend
from trainer.models.decoder import TENSOR_PLAN, Attention
from trainer.models.families import qwen3_moe
from trainer.models.families.qwen3_moe import MoE, MoEBlock, check_experts, product_by_expert
from trainer.models.family import Family, LayerKind, kinds_by_window, window_of
from trainer.recipe import ParameterGroup
from trainer.recipe.architecture import Architecture


class _SinkAttention(Attention):
    """Attention with a sink for each query head, see [Note: sinks] in attention.py."""

    def __init__(self, architecture: Architecture) -> None:
        bias = (architecture.options or {})["attention_bias"]
        super().__init__(architecture, bias=bias)
        queries = self.o_proj.in_features
        self.o_proj = nn.Linear(queries, architecture.hidden_size, bias=bias)
        self.sinks = nn.Parameter(torch.empty(architecture.num_attention_heads))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, documents: AttentionDocuments | None) -> Tensor:
        return attend(q, k, v, documents, self.sinks)


class _ClampedExperts(nn.Module):
    """Experts with biases and a clamped gate, with stacked weights."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        options = architecture.options or {}
        experts, hidden = options["num_local_experts"], architecture.hidden_size
        width = architecture.intermediate_size
        self.alpha, self.limit = options["swiglu_alpha"], options["swiglu_limit"]
        # Columns of gate and up alternate.
        self.gate_up_proj = nn.Parameter(torch.empty(experts, hidden, 2 * width))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, hidden))

    @torch.compiler.disable  # for the reason at `qwen3_moe.swiglu`
    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map rows (N, D), sorted by expert, to rows (N, D). `counts` (E): rows per expert."""
        product = product_by_expert(counts, self.down_proj)

        def affine(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            outputs = product(rows, weight)
            each = bias.to(outputs.dtype)
            # Without output_size the host would wait for the sum of `counts`.
            return outputs + each.repeat_interleave(counts, dim=0, output_size=len(rows))

        both = affine(x, self.gate_up_proj, self.gate_up_proj_bias)
        gate, up = both[:, ::2].clamp(max=self.limit), both[:, 1::2].clamp(-self.limit, self.limit)
        gated = (up + 1) * gate * torch.sigmoid(self.alpha * gate)
        return affine(gated, self.down_proj, self.down_proj_bias)


class _BiasedMoE(MoE):
    """A mixture of experts whose router has a bias. The weights of a token's experts are the
    softmax of their scores alone."""

    precise = ("router",)

    def __init__(self, architecture: Architecture) -> None:
        nn.Module.__init__(self)
        options = architecture.options or {}
        check_experts(options, "num_local_experts")
        self.top, self.normalised, self.rate = options["num_experts_per_tok"], True, 0.0
        self.router = nn.Linear(architecture.hidden_size, options["num_local_experts"])
        self.experts = _ClampedExperts(architecture)

    def logits(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.router(tokens)
        return scores


def layers(architecture: Architecture) -> list[LayerKind]:
    """Return the kind of each layer. Every second layer, beginning with the first, has a window,
    unless `layer_types` says otherwise."""
    options, count = architecture.options or {}, architecture.num_hidden_layers
    for key in ("swiglu_alpha", "swiglu_limit"):
        if options.get(key, 1) <= 0:
            raise ValueError(f"{key}: must be above 0, but it is {options[key]}")
    slides = [number % 2 == 0 for number in range(count)]
    return kinds_by_window(architecture, window_of(architecture), slides)


def idle_parameters(architecture: Architecture) -> int:
    options, hidden = architecture.options or {}, architecture.hidden_size
    idle = options["num_local_experts"] - options["num_experts_per_tok"]
    expert = architecture.intermediate_size * (3 * hidden + 2) + hidden
    return architecture.num_hidden_layers * idle * expert


def balance(
    statistics: Sequence[Tensor], architecture: Architecture
) -> dict[str, tuple[Tensor, float]]:
    """Return the scalars of `qwen3_moe.balance`, with weights 0 unless `output_router_logits`."""
    scalars = qwen3_moe.balance(statistics, architecture)
    if (architecture.options or {})["output_router_logits"]:
        return scalars
    return {name: (value, 0.0) for name, (value, _) in scalars.items()}


FAMILY = Family(
    model_type="gpt_oss",
    model_class="GptOssForCausalLM",
    block=lambda architecture: MoEBlock(
        architecture, _SinkAttention(architecture), _BiasedMoE(architecture)
    ),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    heads_divide_hidden=False,
    options={
        "sliding_window": 128,
        "layer_types": None,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "router_aux_loss_per_sequence": True,
    },
    other_names={"num_experts": "num_local_experts"},
    layers=layers,
    draw=qwen3_moe.draw,
    # Stacked biases of experts have two dimensions, as matrices have, but do not decay.
    groups=(ParameterGroup(match="*.experts.*_bias", weight_decay=0.0),),
    idle_parameters=idle_parameters,
    beside_loss=balance,
    statistics=lambda architecture, sequences: (
        3,
        sequences,
        (architecture.options or {})["num_local_experts"],
    ),
    stacks=("*.mlp.experts",),
    stacked_in_files=True,
    sinks=True,
    tensor_plan={
        "*.self_attn": "heads",
        "*.mlp": "tokens",
        "*.mlp.router": "head_norm",
        **TENSOR_PLAN,
    },
)
