"""Qwen3 with experts in every layer, with the keys of transformers' `Qwen3MoeConfig`.

[Note: experts] Each token goes through the `num_experts_per_tok` experts with the highest router
probability. No token is dropped. Two mechanisms balance the experts.

- The balance loss is added to the cross-entropy with `router_aux_loss_coef`. It is computed over
  the tokens of each sequence, as in DeepSeek-V3, so it depends neither on ranks nor on
  micro-batches. With `router_aux_loss_per_sequence: false` it is computed over the tokens of a
  micro-batch, as in transformers, and then depends on batch.micro_batch and the number of ranks.
- With `router_bias_update_rate` each expert has a bias that is added to its probability for the
  choice only. After a step the bias rises by that rate if the expert got fewer tokens of the global
  batch than the mean of all experts, and falls if it got more.

Shapes: B batch, T sequence, D hidden, N tokens or rows, E experts, I their width.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.attention import AttentionDocuments, Rope
from trainer.models.decisions import decided
from trainer.models.decoder import TENSOR_PLAN, Block
from trainer.models.families import qwen3
from trainer.models.family import Family, init_parameter
from trainer.recipe import RecipeError
from trainer.recipe.architecture import Architecture

BIAS = "e_score_correction_bias"
"""Name of a router's bias in DeepSeek-V3's checkpoints."""


class Experts(nn.Module):
    """Parallel SwiGLU layers with stacked weights."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map rows (N, D) to rows (N, D), see `swiglu`."""
        return swiglu(x, counts, self.gate_proj, self.up_proj, self.down_proj)


@torch.compiler.disable  # the compiler takes only bf16 here, and there is nothing to fuse
def swiglu(x: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Map rows (N, D), sorted by expert, to rows (N, D). `counts` (E): rows per expert; weights are
    (E, I, D) and (E, D, I)."""
    product = product_by_expert(counts, down)
    gated = F.silu(product(x, gate.mT)) * product(x, up.mT)
    return product(gated, down.mT)


def product_by_expert(counts: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that maps rows (N, D), sorted by expert, and matrices (E, D, I) to each row
    times its expert's matrix, (N, I). `counts` (E): rows per expert. Results have the dtype of
    `weight`, or that of autocast."""
    # Cast explicitly: autocast has no rule for grouped products, which need one dtype.
    autocast = torch.is_autocast_enabled(weight.device.type)
    dtype = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
    ends = counts.cumsum(0, dtype=torch.int32)
    return lambda rows, matrices: F.grouped_mm(rows.to(dtype), matrices.to(dtype), offs=ends)


class MoE(nn.Module):
    """A mixture of experts (Shazeer et al. 2017), see [Note: experts]."""

    precise = ("gate",)
    """Layers that never compute in 8 bits."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        options, hidden = architecture.options or {}, architecture.hidden_size
        check_experts(options, "num_experts")
        self.top, self.normalised = options["num_experts_per_tok"], options["norm_topk_prob"]
        self.gate = nn.Linear(hidden, options["num_experts"], bias=False)
        self.rate = options["router_bias_update_rate"]
        if self.rate:
            self.gate.register_buffer(BIAS, torch.zeros(options["num_experts"]))
        self.experts: nn.Module = Experts(
            options["num_experts"], hidden, options["moe_intermediate_size"]
        )
        self.layers = architecture.num_hidden_layers
        self.load: Tensor | None = None
        """Number of this rank's tokens per expert (E) since the last change of the bias."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the experts' outputs (B, T, D), and statistics (3, B, E): for
        each sequence and expert the share of tokens, the mean probability, and the expert's term of
        the router's entropy."""
        tokens = x.flatten(0, 1)  # (N, D)
        likely = self.logits(tokens).softmax(dim=-1, dtype=torch.float32)  # (N, E)
        chosen, order, of_rows = decided(partial(self._route, likely.detach(), len(x)))
        weights = likely.gather(-1, chosen)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        counts = of_rows.sum(dim=0)
        if self.rate and weights.requires_grad:
            weights.register_hook(partial(self._count, counts))
        outputs = self.experts(tokens[order // self.top], counts)
        # back to the order of tokens, (N · top, D)
        placed = torch.empty_like(outputs).index_copy(0, order, outputs)
        mixed = (placed.view(*chosen.shape, -1) * weights.type_as(x)[..., None]).sum(dim=1)
        likely = likely.view(*x.shape[:2], -1)
        entropy = torch.special.entr(likely.detach()).mean(dim=1)
        statistics = torch.stack([of_rows / x.shape[1], likely.mean(dim=1), entropy])
        return mixed.type_as(x).view_as(x), statistics

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the scores of the experts (N, E) for tokens (N, D)."""
        scores: Tensor = self.gate(tokens)
        return scores

    def _route(self, likely: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (experts of each token (N, top), permutation that sorts these by expert (N · top),
        number of tokens of each sequence per expert (B, E))."""
        if self.rate:
            likely = likely + getattr(self.gate, BIAS)
        chosen = likely.topk(self.top, dim=-1).indices
        by_row = chosen.view(rows, -1)  # (B, T · top)
        of_rows = by_row.new_zeros(rows, likely.shape[1])
        of_rows = of_rows.scatter_add(1, by_row, torch.ones_like(by_row))
        return chosen, chosen.flatten().argsort(stable=True), of_rows

    def _count(self, counts: Tensor, gradient: Tensor) -> None:
        """Add `counts` to the load."""
        # In backward, because recomputation runs forward twice. A pass whose gradients are all zero
        # only takes part in collectives, so its tokens do not count.
        counts = counts * gradient.any()
        self.load = counts if self.load is None else self.load + counts

    def forget_step(self) -> None:
        """Drop the counts of a failed step. `rejoin` calls this before the step is repeated."""
        self.load = None


class MoEBlock(Block):
    """A block that also returns its router's statistics."""

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Rope | None, documents: AttentionDocuments | None
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream (B, T, D), and the statistics (3, B, E) of `MoE.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), rope, documents)
        mixed, statistics = self.mlp(self.post_attention_layernorm(x))
        return x + mixed, statistics


def check_experts(options: Mapping[str, Any], count: str) -> None:
    """Raise RecipeError for impossible `options`. `count`: key of the number of experts."""
    key = "model.architecture.options"
    for name in (count, "num_experts_per_tok", "moe_intermediate_size"):
        if options.get(name, 1) < 1:
            raise RecipeError(f"{key}.{name}: must be at least 1, but it is {options[name]}")
    for name in ("router_aux_loss_coef", "router_bias_update_rate"):
        if options.get(name, 0) < 0:
            raise RecipeError(f"{key}.{name}: must not be negative, but it is {options[name]}")
    top, experts = options["num_experts_per_tok"], options[count]
    if top > experts:
        raise RecipeError(
            f"{key}.num_experts_per_tok: a token cannot go through {top} of {experts} experts; "
            f"lower it, or raise {count}"
        )


def idle_parameters(architecture: Architecture) -> int:
    options = architecture.options or {}
    idle = options["num_experts"] - options["num_experts_per_tok"]
    expert = 3 * architecture.hidden_size * options["moe_intermediate_size"]
    return architecture.num_hidden_layers * idle * expert


def balance(
    statistics: Sequence[Tensor], architecture: Architecture
) -> dict[str, tuple[Tensor, float]]:
    """Return the scalars of a micro-batch, each with its weight in the loss:

    - `balance_loss`: of Fedus et al. 2021, "Switch Transformers", over all layers; see [Note:
      experts]. Equal loads give num_experts_per_tok.
    - `load_imbalance`: tokens of the busiest expert, divided by the mean over all experts.
    - `router_entropy`: entropy of a token's router probabilities in nats.

    The last two are averaged over layers.
    """
    options, layers = architecture.options or {}, torch.stack(list(statistics))  # (layers, 3, B, E)
    experts, shares = layers.shape[-1], layers[:, 0]
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
    """Move the biases of routers after a step, by the sign of the mean load minus each expert's
    (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts"). Called
    on all ranks."""
    routers = {
        int(name.partition("layers.")[2].partition(".")[0] or 0): module
        for name, module in model.named_modules()
        if isinstance(module, MoE) and module.rate
    }
    if not routers:
        return
    first = next(iter(routers.values()))
    # Rows for all layers: pipeline ranks have different layers, but share one all-reduce.
    loads = torch.zeros(
        first.layers, first.gate.out_features, dtype=torch.int64, device=first.gate.weight.device
    )
    for number, router in routers.items():
        if router.load is not None:
            loads[number] = router.load
    if dist.is_initialized():
        dist.all_reduce(loads)  # integers: the sum is equal for any number of ranks
    # float32 would round large counts
    moves = (loads.double().mean(dim=-1, keepdim=True) - loads).sign()
    for number, router in routers.items():
        bias = getattr(router.gate, BIAS)
        bias.add_(moves[number].to(bias.dtype), alpha=router.rate)
        router.load = None


def draw(name: str, shape: tuple[int, ...], architecture: Architecture, seed: int) -> Tensor:
    """Draw a parameter as `init_parameter` does, but biases of routers and experts as zeros."""
    if name.endswith("_bias"):
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
