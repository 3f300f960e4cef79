"""Qwen3 with experts, as `Qwen3MoeConfig` of transformers writes it: every layer has them.

[Note: experts] Each token goes through the `num_experts_per_tok` experts that the router likes
best, however many tokens an expert gets by that: none is dropped. Two things keep loads even.

- The balance loss is added to the cross-entropy with `router_aux_loss_coef`. It is over the tokens
  of each sequence, as in DeepSeek-V3, so it depends neither on ranks nor on micro-batches. With
  `router_aux_loss_per_sequence: false` it is over those of a micro-batch, as transformers has it;
  which sequences are in one follows from batch.micro_batch and the number of ranks.
- With `router_bias_update_rate` each expert has a bias that is added to what the router likes, for
  the choice alone. After a step it moves by that much: up where an expert got fewer tokens of the
  global batch than the mean, down where it got more.

Shapes: B batch, T sequence, D hidden, N tokens or rows, E experts, I their width.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.attention import Documents
from trainer.models.decisions import decided
from trainer.models.decoder import TENSOR_PLAN, Block
from trainer.models.families import qwen3
from trainer.models.family import Family, init_parameter
from trainer.models.rotary import Rope
from trainer.recipe import RecipeError
from trainer.recipe.architecture import Architecture

BIAS = "e_score_correction_bias"
"""What DeepSeek-V3's checkpoints call the bias of the choice."""


class Experts(nn.Module):
    """SwiGLU layers beside each other, their weights stacked."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Rows (N, D), those of the first expert first; `counts` (E) says how many each has."""
        return swiglu(x, counts, self.gate_proj, self.up_proj, self.down_proj)


@torch.compiler.disable  # which takes grouped products in bf16 only, and leaves nothing to fuse
def swiglu(x: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Rows (N, D) by expert, `counts` (E) of each → (N, D); weights (E, I, D) and (E, D, I)."""
    # Not under autocast, which knows no grouped products: they want one dtype.
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else down.dtype
    ends = counts.cumsum(0, dtype=torch.int32)

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        return F.grouped_mm(rows.to(dtype), weight.to(dtype).transpose(1, 2), offs=ends)

    return product(F.silu(product(x, gate)) * product(x, up), down)


class MoE(nn.Module):
    """Each token goes through the experts that the router likes best (Shazeer et al. 2017)."""

    precise = ("gate",)
    """Never multiplied in 8 bits."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        options, hidden = architecture.options or {}, architecture.hidden_size
        _check(options)
        self.top, self.normalised = options["num_experts_per_tok"], options["norm_topk_prob"]
        self.gate = nn.Linear(hidden, options["num_experts"], bias=False)
        self.rate = options["router_bias_update_rate"]
        if self.rate:
            self.gate.register_buffer(BIAS, torch.zeros(options["num_experts"]))
        self.experts = Experts(options["num_experts"], hidden, options["moe_intermediate_size"])
        self.layers = architecture.num_hidden_layers
        self.load: Tensor | None = None
        """Tokens of each expert (E) since the bias was moved, on this rank."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(the weighted sum of what the experts give (B, T, D), statistics (3, B, E): of each
        sequence the share of tokens that each expert got, the mean of its probability, and its part
        of the entropy)."""
        tokens = x.flatten(0, 1)  # (N, D)
        likely = self.gate(tokens).softmax(dim=-1, dtype=torch.float32)  # (N, E)
        chosen, order, of_rows = decided(partial(self._route, likely.detach(), len(x)))
        weights = likely.gather(-1, chosen)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        counts = of_rows.sum(dim=0)
        if self.rate and weights.requires_grad:
            weights.register_hook(partial(self._count, counts))
        found = self.experts(tokens[order // self.top], counts)
        placed = torch.empty_like(found).index_copy(0, order, found)  # as (N, top) again
        mixed = (placed.view(*chosen.shape, -1) * weights.type_as(x)[..., None]).sum(dim=1)
        likely = likely.view(*x.shape[:2], -1)
        entropy = torch.special.entr(likely.detach()).mean(dim=1)
        statistics = torch.stack([of_rows / x.shape[1], likely.mean(dim=1), entropy])
        return mixed.type_as(x).view_as(x), statistics

    def _route(self, likely: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """The experts of each token (N, top), the order of these by expert (N * top), and how often
        each sequence chose each expert (B, E)."""
        if self.rate:
            likely = likely + getattr(self.gate, BIAS)
        chosen = likely.topk(self.top, dim=-1).indices
        by_row = chosen.view(rows, -1)  # (B, T * top)
        of_rows = by_row.new_zeros(rows, likely.shape[1])
        of_rows = of_rows.scatter_add(1, by_row, torch.ones_like(by_row))
        return chosen, chosen.flatten().argsort(stable=True), of_rows

    def _count(self, counts: Tensor, gradient: Tensor) -> None:
        """In backward, which a recomputed pass has once, and where one that only keeps a rank in
        step with the others has a gradient of zeros."""
        counts = counts * gradient.any()
        self.load = counts if self.load is None else self.load + counts

    def forget_step(self) -> None:
        """Drop what a step has counted that is done again."""
        self.load = None


class MoEBlock(Block):
    """A block that also returns the statistics of its router."""

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Rope | None, documents: Documents | None
    ) -> tuple[Tensor, Tensor]:
        """(the residual stream (B, T, D), statistics (3, B, E) of `MoE.forward`)."""
        x = x + self.self_attn(self.input_layernorm(x), rope, documents)
        found, statistics = self.mlp(self.post_attention_layernorm(x))
        return x + found, statistics


def _check(options: Mapping[str, Any]) -> None:
    """Raises RecipeError for numbers that no mixture has."""
    key = "model.architecture.options"
    for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        if options[name] < 1:
            raise RecipeError(f"{key}.{name}: must be at least 1, but it is {options[name]}")
    for name in ("router_aux_loss_coef", "router_bias_update_rate"):
        if options[name] < 0:
            raise RecipeError(f"{key}.{name}: must not be negative, but it is {options[name]}")
    top, experts = options["num_experts_per_tok"], options["num_experts"]
    if top > experts:
        raise RecipeError(
            f"{key}.num_experts_per_tok: a token cannot go through {top} of {experts} experts; "
            "lower it, or raise num_experts"
        )


def idle_parameters(architecture: Architecture) -> int:
    """Those of the experts that a token does not go through."""
    options = architecture.options or {}
    idle = options["num_experts"] - options["num_experts_per_tok"]
    expert = 3 * architecture.hidden_size * options["moe_intermediate_size"]
    return architecture.num_hidden_layers * idle * expert


def balance(
    statistics: Sequence[Tensor], architecture: Architecture
) -> dict[str, tuple[Tensor, float]]:
    """Scalars of a micro-batch:

    - `balance_loss`: of Fedus et al. 2021, "Switch Transformers", over all layers; see [Note:
      experts]. It is num_experts_per_tok where all are equal.
    - `load_imbalance`: tokens of the busiest expert over the mean of all, mean of the layers.
    - `router_entropy`: of what the router likes for a token, in nats, mean of the layers.
    """
    options, layers = architecture.options or {}, torch.stack(list(statistics))  # (layers, 3, B, E)
    experts, shares = options["num_experts"], layers[:, 0]
    both = layers[:, :2].mean(dim=0)  # (2, B, E)
    if not options["router_aux_loss_per_sequence"]:
        both = both.mean(dim=1, keepdim=True)
    loss = experts * both.prod(dim=0).sum(dim=-1).mean()
    busiest = shares.mean(dim=1).amax(dim=-1).mean() * (experts / options["num_experts_per_tok"])
    return {
        "balance_loss": (loss, options["router_aux_loss_coef"]),
        "load_imbalance": (busiest, 0.0),
        "router_entropy": (layers[:, 2].sum(dim=-1).mean(), 0.0),
    }


@torch.no_grad()
def move_biases(model: nn.Module) -> None:
    """After a step: by the sign of the load of each expert (Wang et al. 2024, "Auxiliary-Loss-Free
    Load Balancing Strategy for Mixture-of-Experts"). On all ranks."""
    routers = {
        _number(name): module
        for name, module in model.named_modules()
        if isinstance(module, MoE) and module.rate
    }
    if not routers:
        return
    first = next(iter(routers.values()))
    # Of all layers: a rank of a pipeline has some of them.
    loads = torch.zeros(
        first.layers, first.gate.out_features, dtype=torch.int64, device=first.gate.weight.device
    )
    for number, router in routers.items():
        if router.load is not None:
            loads[number] = router.load
    if dist.is_initialized():
        dist.all_reduce(loads)  # of integers: the same sum on any number of ranks
    moves = (loads.double().mean(dim=-1, keepdim=True) - loads).sign()
    for number, router in routers.items():
        bias = getattr(router.gate, BIAS)
        bias.add_(moves[number].to(bias.dtype), alpha=router.rate)
        router.load = None


def _number(name: str) -> int:
    """Which layer has a module, by its FQN; of a module by itself 0."""
    return int(name.partition("layers.")[2].partition(".")[0] or 0)


def draw(name: str, shape: tuple[int, ...], architecture: Architecture, seed: int) -> Tensor:
    """See `Draw`: as others, but biases of the choice are zeros."""
    if name.endswith(BIAS):
        return torch.zeros(shape)
    return init_parameter(name, shape, architecture, seed)


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
        "router_aux_loss_per_sequence": True,
        "router_bias_update_rate": 0.0,
    },
    other_names={"num_local_experts": "num_experts"},  # as transformers 5 writes it
    draw=draw,
    idle_parameters=idle_parameters,
    beside_loss=balance,
    statistics=lambda architecture, sequences: (
        3,
        sequences,
        (architecture.options or {})["num_experts"],
    ),
    after_step=move_biases,
    stacks=("*.mlp.experts",),
    tensor_plan={"*.mlp": "tokens", "*.mlp.gate": "head_norm", **TENSOR_PLAN},
)
