"""Qwen3 with experts, as `Qwen3MoeConfig` of transformers writes it: every layer has them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.attention import Documents
from trainer.models.decoder import Block
from trainer.models.families import qwen3
from trainer.models.family import Family
from trainer.recipe.architecture import Architecture


class Experts(nn.Module):
    """SwiGLU layers beside each other, their weights stacked: E experts, hidden D, width I."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Rows (N, D), those of the first expert first; `counts` (E) says how many each has."""
        # Not under autocast, which knows no grouped products: they want one dtype.
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else self.down_proj.dtype
        ends = counts.cumsum(0, dtype=torch.int32)

        def product(rows: Tensor, weight: Tensor) -> Tensor:
            return F.grouped_mm(rows.to(dtype), weight.to(dtype).transpose(1, 2), offs=ends)

        gate, up = product(x, self.gate_up_proj).chunk(2, dim=-1)
        return product(F.silu(gate) * up, self.down_proj)


class MoE(nn.Module):
    """Each token goes through the experts that the router likes best (Shazeer et al. 2017)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        options, hidden = architecture.options or {}, architecture.hidden_size
        self.top, self.normalised = options["num_experts_per_tok"], options["norm_topk_prob"]
        self.gate = nn.Linear(hidden, options["num_experts"], bias=False)
        self.experts = Experts(options["num_experts"], hidden, options["moe_intermediate_size"])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(the weighted sum of what the experts give (B, T, D), statistics (2, E): the share of
        tokens that each expert got, and the mean of its probability)."""
        tokens = x.flatten(0, 1)  # (N, D)
        likely = self.gate(tokens).softmax(dim=-1, dtype=torch.float32)  # (N, E)
        weights, chosen = likely.topk(self.top, dim=-1)  # (N, top)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)  # by expert
        counts = F.one_hot(chosen.flatten(), likely.shape[1]).sum(dim=0)
        found = self.experts(tokens[order // self.top], counts)
        placed = torch.empty_like(found).index_copy(0, order, found)  # as (N, top) again
        mixed = (placed.view(*chosen.shape, -1) * weights.type_as(x)[..., None]).sum(dim=1)
        statistics = torch.stack([counts / len(tokens), likely.mean(dim=0)])
        return mixed.type_as(x).view_as(x), statistics


class MoEBlock(Block):
    """A block that also returns the statistics of its router."""

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: tuple[Tensor, Tensor], documents: Documents | None
    ) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), rope, documents)
        found, statistics = self.mlp(self.post_attention_layernorm(x))
        return x + found, statistics


def idle_parameters(architecture: Architecture) -> int:
    """Those of the experts that a token does not go through."""
    options = architecture.options or {}
    idle = options["num_experts"] - options["num_experts_per_tok"]
    expert = 3 * architecture.hidden_size * options["moe_intermediate_size"]
    return architecture.num_hidden_layers * idle * expert


def balance(
    statistics: Sequence[Tensor], architecture: Architecture
) -> dict[str, tuple[Tensor, float]]:
    """The load balancing loss (Fedus et al. 2021, "Switch Transformers"), over all layers and the
    tokens of a micro-batch, as transformers has it; num_experts_per_tok where all are equal."""
    options = architecture.options or {}
    shares, likely = torch.stack(list(statistics)).mean(dim=0)
    loss = options["num_experts"] * (shares * likely).sum()
    return {"balance_loss": (loss, options["router_aux_loss_coef"])}


FAMILY = Family(
    model_type="qwen3_moe",
    model_class="Qwen3MoeForCausalLM",
    block=lambda architecture: MoEBlock(
        architecture, qwen3.attention(architecture), MoE(architecture)
    ),
    fixed={**qwen3.FAMILY.fixed, "decoder_sparse_step": 1, "mlp_only_layers": []},
    defaults={"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 32768},
    heads_divide_hidden=False,
    options={
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    idle_parameters=idle_parameters,
    beside_loss=balance,
)
