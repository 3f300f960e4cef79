"""Phi-3, 3.5 and 4, with the keys of transformers' `Phi3Config`."""

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.decoder import TENSOR_PLAN, Attention, Block
from trainer.models.family import Family, LayerKind, window_of
from trainer.recipe.architecture import Architecture


def fused(inputs: int, *sections: int) -> nn.Linear:
    """Return a linear layer whose output consists of several sections, one after another."""
    product = nn.Linear(inputs, sum(sections), bias=False)
    product.sections = sections  # type: ignore[assignment]  # for tensor parallelism
    return product


class _FusedAttention(Attention):
    """Attention with one product for queries, keys and values."""

    def __init__(self, architecture: Architecture) -> None:
        nn.Module.__init__(self)
        self.head_dim = architecture.head_dim
        self.groups = architecture.num_attention_heads // architecture.num_key_value_heads
        queries, keys = (
            heads * architecture.head_dim
            for heads in (architecture.num_attention_heads, architecture.num_key_value_heads)
        )
        self.qkv_proj = fused(architecture.hidden_size, queries, keys, keys)
        self.o_proj = nn.Linear(queries, architecture.hidden_size, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        every = self.qkv_proj(x)
        every = every.view(*every.shape[:2], -1, self.head_dim)
        # under tensor parallelism a rank has some of the heads
        keys = every.shape[2] // (self.groups + 2)
        q, k, v = every.split([self.groups * keys, keys, keys], dim=2)
        return q, k, v


class _FusedMLP(nn.Module):
    """SwiGLU with one product for gate and up."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        hidden, intermediate = architecture.hidden_size, architecture.intermediate_size
        self.gate_up_proj = fused(hidden, intermediate, intermediate)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


def layers(architecture: Architecture) -> list[LayerKind]:
    """Return the kind of each layer. Raises ValueError for unsupported rotary scaling."""
    scaling, key = architecture.rope_scaling, "original_max_position_embeddings"
    original = (architecture.options or {}).get(key)
    # transformers supports only longrope for phi3, and reads its original length from this key
    if scaling and scaling.rope_type != "longrope":
        raise ValueError(
            f"{key}: in phi3 transformers scales by it only with longrope, but "
            f"rope_scaling.rope_type is {scaling.rope_type}; use longrope, or remove rope_scaling"
        )
    if scaling and original not in (None, scaling.original_max_position_embeddings):
        raise ValueError(
            f"{key}: is {original}, but in rope_scaling it is "
            f"{scaling.original_max_position_embeddings}; write the same in both"
        )
    return [LayerKind(window_of(architecture))] * architecture.num_hidden_layers


FAMILY = Family(
    model_type="phi3",
    model_class="Phi3ForCausalLM",
    block=lambda architecture: Block(
        architecture, _FusedAttention(architecture), _FusedMLP(architecture)
    ),
    fixed={"hidden_act": "silu", "attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    defaults={
        "num_key_value_heads": None,  # as many as there are query heads
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    heads_divide_hidden=False,
    options={
        "sliding_window": None,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 4096,
    },
    rope_types={"su": "longrope", "yarn": "longrope"},  # older names of longrope
    unread={"pad_token_id": None},
    layers=layers,
    tensor_plan={"*.self_attn.qkv_proj": "fused", "*.mlp.gate_up_proj": "fused", **TENSOR_PLAN},
)
