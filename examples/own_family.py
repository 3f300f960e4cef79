"""AFM (Arcee AI 2025): a model family in one file. It is Llama, but for its MLP."""

import torch.nn.functional as F
from torch import Tensor, nn

from trainer import TENSOR_PLAN, Attention, Block, Family


class SquaredReLU(nn.Module):
    """An MLP without a gate (So et al. 2021, "Primer")."""

    def __init__(self, architecture):
        super().__init__()
        hidden, intermediate = architecture.hidden_size, architecture.intermediate_size
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.relu(self.up_proj(x)).square())  # x: (B, T, D)


def block(architecture):
    """One layer; `Block` calls attention and MLP, each normalised before."""
    return Block(architecture, Attention(architecture), SquaredReLU(architecture))


ARCEE = Family(
    model_type="arcee",
    model_class="ArceeForCausalLM",
    block=block,
    fixed={
        "hidden_act": "relu2",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
    },
    defaults={
        "num_key_value_heads": None,  # as many as there are query heads
        "head_dim": None,  # hidden_size / num_attention_heads
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    heads_divide_hidden=True,
    tensor_plan=TENSOR_PLAN,
)
