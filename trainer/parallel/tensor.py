"""Tensor and sequence parallelism: groups of ranks compute each layer of a model together.

Shoeybi et al. 2019, "Megatron-LM"; Korthikanti et al. 2022, "Reducing Activation Recomputation in
Large Transformer Models".
[Note: tensor parallelism] A model's `tensor_plan` gives each module that has parameters a kind,
which says how the module is cut:

- *column*: a product whose outputs are cut (query, key and value by heads; the first of an MLP).
- *row*: a product whose inputs are cut, as the outputs of a column are. Its outputs are summed
  over the ranks.
- *fused*: several columns in one `nn.Linear`, whose attribute `sections` has their numbers of
  outputs. A rank computes consecutive outputs of the whole layer, and an exchange gives it its part
  of each column.
- *head_norm*: a module between a column and a row that treats each head separately.
- *heads*: a module whose own parameters have a row for each query head, such as attention sinks.
- *wide_norm*: an RMSNorm between a column and a row, over all heads together. It sums over ranks.
- *norm*: a module on the residual stream, of which a rank has only its part of the sequence under
  sequence parallelism.
- *tokens*: a module that treats each token separately, as a layer of experts does. Each rank
  computes some of the tokens, and holds all weights of the module except `Family.stacks`.
- *vocabulary*: an embedding or output head whose rows are cut. The head is never called: a
  `HeadLoss` uses its weight, and no rank holds a whole row of logits.

In an adapted layer of kind column or fused, A is whole and B is cut by rows; in a row, A is cut by
columns and B is whole.

Parameters become DTensors, from which FSDP, checkpoints and the gradient norm learn their layout.
Modules compute on local tensors, with plain collectives between them. If each rank computes a term
of a gradient, the gradient is marked as `Partial`, and FSDP, which is always applied too, sums it.

Shapes: B batch, T sequence, D hidden, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from checkpointing.format.nf4 import BLOCK
from trainer.models.adapter import LoraLinear
from trainer.models.decoder import Decoder, RMSNorm
from trainer.models.loss import HeadLoss, label_log_probs, sharded_cross_entropy
from trainer.models.versions import all_gather_single, reduce_scatter_single
from trainer.optim.formats import BLOCK as STATE_BLOCK
from trainer.optim.muon import chunk_lengths
from trainer.parallel.context import ContextParallelMeans
from trainer.parallel.passes import ParallelActivationMap
from trainer.recipe import Recipe, RecipeError, StrategySection
from trainer.recipe.strategies import ep, tp

_CUT_APART: dict[tuple[str, str], Placement] = {
    ("row", "bias"): Replicate(),
    ("column", "lora_A"): Replicate(),
    ("fused", "lora_A"): Replicate(),
    ("row", "lora_B"): Replicate(),
}
"""(kind, parameter) → placement, for parameters that are placed otherwise than _KINDS says."""


def kinds_of(model: nn.Module, tp: int, shards: int = 1) -> dict[str, str]:
    """Return the kind of each module that has parameters, by FQN. Raises RecipeError if the model
    has no `tensor_plan`; or if the plan leaves out a module, or cannot be applied for `tp` ranks
    with `shards` FSDP shards each."""
    plan = getattr(model, "tensor_plan", None)
    if not plan:
        name = model.family.model_type if isinstance(model, Decoder) else type(model).__name__
        raise RecipeError(
            f"strategy.tp: {name} has no tensor_plan; write one (docs/parallelism.md), or set "
            "strategy.tp=1"
        )
    kinds = {}
    stacks = getattr(model, "stacks", ())
    for name, module in model.named_modules():
        kind = next((plan[pattern] for pattern in plan if fnmatchcase(name, pattern)), None)
        # Stacks of experts are cut by expert parallelism instead.
        stacked = any(fnmatchcase(name, pattern) for pattern in stacks)
        if stacked or not (module._parameters or kind == "tokens"):
            continue
        if kind not in _KINDS:
            what = f"is to be {kind!r}" if kind else "has no pattern"
            named = name or f"{type(model).__name__} itself, which has parameters,"
            raise RecipeError(
                f"strategy.tp: {named} {what} in the tensor_plan; use one of {', '.join(_KINDS)}"
            )
        if problem := _problem(kind, module, tp, shards):
            raise RecipeError(f"strategy.tp: {name} cannot be {kind}: {problem}")
        kinds[name] = kind
    if isinstance(model, Decoder):
        shape = model.model.architecture
        for key in ("num_attention_heads", "num_key_value_heads"):
            if getattr(shape, key) % tp:
                raise RecipeError(
                    f"strategy.tp: {key}={getattr(shape, key)} is not a multiple of tp={tp}; set "
                    "a divisor of it"
                )
    return kinds


def _problem(kind: str, module: Any, tp: int, shards: int) -> str | None:
    forward = nn.Linear.forward if isinstance(module, LoraLinear) else type(module).forward
    if kind in ("column", "fused", "row") and forward is not nn.Linear.forward:
        return f"that needs an nn.Linear, but it is a {type(module).__name__}"
    if kind == "fused":
        sections = getattr(module, "sections", ())
        if sum(sections) != len(module.weight):
            return f"that needs sections that add up to {len(module.weight)} outputs"
        if odd := [size for size in sections if size % tp]:
            return f"its section of {odd[0]} outputs does not divide among tp={tp} ranks"
    if kind == "heads":
        rows = {key: len(p) for key, p in module.named_parameters(recurse=False)}
        if uneven := [key for key, number in rows.items() if number % tp]:
            return f"{rows[uneven[0]]} rows of {uneven[0]} do not divide among tp={tp} ranks"
    if kind == "wide_norm" and not isinstance(module, RMSNorm):
        return f"that needs a trainer.RMSNorm, but it is a {type(module).__name__}"
    if kind == "vocabulary":
        if forward not in (nn.Linear.forward, nn.Embedding.forward):
            return f"that needs an nn.Embedding or nn.Linear, not {type(module).__name__}"
        options = ("bias", "padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
        odd = [key for key in options if getattr(module, key, None) not in (None, False)]
        if odd:
            return f"{odd[0]} is not supported"
    lengths = {"column": 0, "row": 1, "vocabulary": 0, "wide_norm": 0}
    if kind == "row" and isinstance(module, LoraLinear) and module.in_nf4:
        if module.in_features % (BLOCK * tp):
            return (
                f"its {module.in_features} columns are no multiple of {BLOCK} · tp={BLOCK * tp}, "
                "as blocks of nf4 must be; set model.adapter.base=bf16, or another strategy.tp"
            )
    elif kind in lengths:
        length = module.weight.shape[lengths[kind]]
        if kind == "vocabulary" and (tp - 1) * -(-length // tp) >= length:
            return f"its {length} rows leave one of tp={tp} ranks without any"
        if kind == "vocabulary" and not layout_is_exact(length, tp, shards):
            return (
                f"its {length} rows are not even on tp={tp} ranks with {shards} shards each; take "
                "a vocab_size that both divide, or another strategy.shard_size"
            )
        if kind != "vocabulary" and length % tp:
            parts = "elements" if kind == "wide_norm" else f"{kind}s"
            return f"its {length} {parts} do not divide among tp={tp} ranks"
    return None


def layout_is_exact(length: int, tp: int, shards: int) -> bool:
    """Return whether a DTensor can describe which of `length` rows a rank holds, if `tp` ranks
    divide them and FSDP cuts each part into `shards`. A DTensor (`_StridedShard`) assumes that one
    shard of all tp ranks together is divided among them as torch.chunk divides it."""
    by_rank = [chunk_lengths(part, shards) for part in chunk_lengths(length, tp)]
    return all(chunk_lengths(sum(rows), tp) == list(rows) for rows in zip(*by_rank, strict=True))


def check_model(model: nn.Module, recipe: Recipe, shards: int) -> None:
    """Raise RecipeError for a model that the recipe's tensor-parallel ranks cannot compute, with
    `shards` FSDP shards each."""
    ranks = tp.ranks(recipe.strategy)
    kinds = kinds_of(model, ranks, shards)
    if recipe.optimizer.state_dtype == "int8":
        _check_blocks(model, kinds, ranks)
    if getattr(model, "stacks", ()) and ep.ranks(recipe.strategy) == 1:
        raise RecipeError(
            "strategy.tp: tensor parallelism does not divide a model's experts; also set "
            "strategy.ep to 2 or more, or set strategy.tp=1"
        )


def _check_blocks(model: nn.Module, kinds: Mapping[str, str], ranks: int) -> None:
    """Raise RecipeError if blocks of 8-bit optimizer state would be cut."""
    for name, kind in kinds.items():
        columns = getattr(model.get_submodule(name), "in_features", 0)
        if kind == "row" and columns % STATE_BLOCK == 0 and columns // ranks % STATE_BLOCK:
            raise RecipeError(
                f"optimizer.state_dtype: int8 has blocks of {STATE_BLOCK} elements, but "
                f"tp={ranks} cuts the {columns} columns of {name} into parts of "
                f"{columns // ranks}; use bf16, or another strategy.tp"
            )


def apply(model: nn.Module, mesh: DeviceMesh, strategy: StrategySection) -> list[nn.Module]:
    """Cut `model`, which has a `tensor_plan`, in place over `mesh` (1-D), before FSDP. Weights must
    be equal on all ranks, or on the meta device. Returns [], because it adds no FSDP units."""
    ranks = TensorParallelGroup(mesh, tp.stream_parts(strategy) > 1)
    placed: dict[nn.Parameter, Any] = {}  # by parameter, so that tied weights stay tied
    modules = dict(model.named_modules())
    for name, kind in kinds_of(model, mesh.size()).items():
        module = modules[name]
        usual, forward = _KINDS[kind]
        for key, whole in list(module.named_parameters(recurse=False)):
            cut = _CUT_APART.get((kind, key), usual)
            if whole not in placed:
                # None, because no rank needs to send its weights: they are equal.
                spread = distribute_tensor(whole.detach(), mesh, [cut], src_data_rank=None)
                placed[whole] = nn.Parameter(spread, requires_grad=whole.requires_grad)
            elif placed[whole].placements != (cut,):
                raise RecipeError(
                    f"strategy.tp: {name}.{key} is tied to a weight that is cut otherwise; give "
                    "both modules one kind in the tensor_plan"
                )
            module.register_parameter(key, placed[whole])
        module.forward = forward(module, ranks)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, HeadLoss):
                setattr(module, name, TensorParallelLoss(ranks))
    return []


class TensorParallelGroup:
    """The collectives of a tensor-parallel group on activations. `sequence`: whether each rank has
    only its part of the residual stream (sequence parallelism)."""

    def __init__(self, mesh: DeviceMesh, sequence: bool) -> None:
        self._mesh, self.rank, self.size = mesh, mesh.get_local_rank(), mesh.size()
        self.sequence = sequence
        self._entered: tuple[Any, Tensor] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        # Looked up at each call, because `rejoin` may replace it.
        return self._mesh.get_group()

    def enter(self, x: Tensor) -> Tensor:
        """Return `whole` of the residual stream, as input of column layers. Successive layers with
        the same input, such as query, key and value, share one gather and one reduction of the
        gradient."""
        # The version changes if x is changed in place, which would make the gathered copy stale.
        version = 0 if x.is_inference() else x._version
        key = (version, torch.is_grad_enabled())
        if self._entered is None or self._entered[0][0] is not x or self._entered[0][1:] != key:
            self._entered = ((x, *key), self.whole(x))
        return self._entered[1]

    def whole(self, x: Tensor) -> Tensor:
        """Return the residual stream x (B, T or T / tp, D) whole, (B, T, D). Each rank computes a
        term of its gradient, and backward sums the terms."""
        if self.sequence:
            return ParallelActivationMap.apply(x, self.gather, self.sum_and_cut)
        return ParallelActivationMap.apply(x, _same, self.sum)

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x (B, T, D): the residual stream (B, T or T / tp, D)."""
        self._entered = None  # frees the gathered tensor
        if self.sequence and x.shape[1] % self.size:
            raise ValueError(
                f"a sequence of {x.shape[1]} tokens does not divide among tp={self.size} ranks; "
                "set strategy.sequence_parallel=false"
            )
        # Each term of the sum has the gradient of the sum.
        if self.sequence:
            return ParallelActivationMap.apply(x, self.sum_and_cut, self.gather)
        return ParallelActivationMap.apply(x, self.sum, _same)

    def gather(self, x: Tensor) -> Tensor:
        rows, length, *rest = x.shape
        parts = x.new_empty((self.size * rows, length, *rest))
        all_gather_single(parts, x.contiguous(), group=self.group)
        parts = parts.view(self.size, rows, length, *rest)
        return parts.transpose(0, 1).reshape(rows, self.size * length, *rest)

    def sum_and_cut(self, x: Tensor) -> Tensor:
        """Reduce-scatter (B, T, D) to parts (B, T / tp, D)."""
        rows, length, *rest = x.shape
        parts = x.contiguous().view(rows, self.size, length // self.size, *rest)
        parts = parts.transpose(0, 1).contiguous()
        mine = torch.empty_like(parts[0])
        reduce_scatter_single(mine, parts.flatten(0, 1), group=self.group)
        return mine

    def sum(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def cut(self, x: Tensor) -> Tensor:
        """Return this rank's part (B, T / tp, D) of x (B, T, D), which is equal on all ranks."""
        return x.chunk(self.size, 1)[self.rank].contiguous()


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _local(parameter: Tensor, partial: bool = False) -> Tensor:
    """Return this rank's part of a parameter, differentiable. `partial`: its gradient is one term
    of a sum over the ranks."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=[Partial()] if partial else None)


@contextmanager
def with_local(module: nn.Module, partial: bool | Collection[str] = False) -> Iterator[None]:
    """Context in which a module's parameters are this rank's local tensors. `partial`: whether, or
    for which names, gradients are terms of a sum over the ranks."""
    gathered = dict(module._parameters)  # DTensors, gathered by FSDP
    some = gathered if partial is True else partial or ()
    local: dict[str, Any] = {
        name: p if p is None else _local(p, name in some) for name, p in gathered.items()
    }
    module._parameters.update(local)
    try:
        yield
    finally:
        module._parameters.update(gathered)


Forward = Callable[..., Tensor]


def _column(module: nn.Module, ranks: TensorParallelGroup) -> Forward:
    compute = module.forward

    def forward(x: Tensor) -> Tensor:
        # Each rank has the whole lora_A, but computes only a term of its gradient.
        with with_local(module, ("lora_A",)):
            return compute(ranks.enter(x))

    return forward


def _fused(module: Any, ranks: TensorParallelGroup) -> Forward:
    compute, sections = _column(module, ranks), tuple(module.sections)

    def exchange(x: Tensor) -> Tensor:
        """Return this rank's part of every section (B, T, n / tp). x: consecutive outputs of the
        layer on each rank, in the same shape."""
        # `gather` works along dim 1.
        whole = ranks.gather(x.transpose(1, 2)).split(sections, 1)  # (B, n, T)
        mine = [section.chunk(ranks.size, 1)[ranks.rank] for section in whole]
        return torch.cat(mine, 1).transpose(1, 2).contiguous()

    def exchange_back(gradient: Tensor) -> Tensor:
        gradient = gradient.transpose(1, 2)
        parts = gradient.split([size // ranks.size for size in sections], 1)
        whole = gradient.new_zeros((len(gradient), sum(sections), gradient.shape[2]))
        for section, part in zip(whole.split(sections, 1), parts, strict=True):
            section.chunk(ranks.size, 1)[ranks.rank].copy_(part)
        return ranks.sum_and_cut(whole).transpose(1, 2).contiguous()

    return lambda x: ParallelActivationMap.apply(compute(x), exchange, exchange_back)


def _row(module: Any, ranks: TensorParallelGroup) -> Forward:
    # With sequence parallelism a rank adds the bias to its part of the sequence only, so its
    # gradient of the bias is a term of a sum.
    partial = ("lora_B", "bias") if ranks.sequence else ("lora_B",)

    def forward(x: Tensor) -> Tensor:
        with with_local(module, partial):
            if isinstance(module, LoraLinear):  # both terms are added before the one reduction
                part = module.frozen(x) + module.low_rank(x)
            else:
                part = nn.functional.linear(x, module.weight)
            # The bias is added after the sum over ranks, so that it counts once.
            summed, bias = ranks.leave(part), module.bias
        return summed if bias is None else summed + bias

    return forward


def _wide_norm(module: Any, ranks: TensorParallelGroup) -> Forward:
    def forward(x: Tensor) -> Tensor:
        weight = _local(module.weight)
        # In float32, because sums of squares in bf16 would be inaccurate.
        wide = x.flatten(2).to(torch.promote_types(x.dtype, torch.float32))
        # All ranks use the sum, so its gradients are summed as well.
        squares = ParallelActivationMap.apply(
            wide.square().sum(-1, keepdim=True), ranks.sum, ranks.sum
        )
        scale = torch.rsqrt(squares / (ranks.size * len(weight)) + module.eps)
        return (wide * scale * weight).type_as(x).view(x.shape)

    return forward


def _replicated(module: nn.Module, partial: bool) -> Forward:
    compute = module.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        with with_local(module, partial):
            return compute(*args, **kwargs)

    return forward


def _tokens(module: nn.Module, ranks: TensorParallelGroup) -> Forward:
    compute = module.forward

    def forward(x: Tensor) -> Any:
        means = ContextParallelMeans(ranks.group, 1 / ranks.size, 1 / ranks.size)
        output = compute(
            x if ranks.sequence else ParallelActivationMap.apply(x, ranks.cut, ranks.gather)
        )
        mixed, *statistics = output if isinstance(output, tuple) else (output,)
        mixed = (
            mixed if ranks.sequence else ParallelActivationMap.apply(mixed, ranks.gather, ranks.cut)
        )
        return (mixed, *map(means.over_tokens, statistics)) if statistics else mixed

    return forward


def _vocabulary(module: Any, ranks: TensorParallelGroup) -> Forward:
    def look_up(ids: Tensor) -> Tensor:
        weight = _local(module.weight)
        index = ids - first_row(module.weight, ranks)
        mine = (index >= 0) & (index < len(weight))
        rows = nn.functional.embedding(index.clamp(0, len(weight) - 1), weight)
        # Each row is 0 on all ranks but the one that holds it, so the sum over ranks is the row.
        rows = rows.masked_fill(~mine[..., None], 0)
        # Position ids have shape (T), and their embeddings are cut along the sequence too.
        return ranks.leave(rows) if ids.dim() > 1 else ranks.leave(rows[None])[0]

    def refuse(*args: Any) -> Tensor:
        raise RecipeError(
            "strategy.tp: the model calls its output head, which would give whole rows of logits; "
            "pass the weight of the head to a trainer.HeadLoss"
        )

    return look_up if isinstance(module, nn.Embedding) else refuse


_KINDS: dict[str, tuple[Placement, Callable[[nn.Module, TensorParallelGroup], Forward]]] = {
    "column": (Shard(0), _column),
    "fused": (Shard(0), _fused),
    "row": (Shard(1), _row),
    "norm": (Replicate(), lambda module, ranks: _replicated(module, ranks.sequence)),
    # Each rank normalises only its heads.
    "head_norm": (Replicate(), lambda module, _: _replicated(module, True)),
    # A rank computes the whole gradient of its heads' rows.
    "heads": (Shard(0), lambda module, _: _replicated(module, False)),
    "wide_norm": (Shard(0), _wide_norm),
    "vocabulary": (Shard(0), _vocabulary),
    "tokens": (Replicate(), _tokens),
}
"""Kind → placement of a module's parameters, and the function that makes its new `forward`."""


def first_row(weight: Tensor, ranks: TensorParallelGroup) -> int:
    """Return the index in the whole weight (V, D) of this rank's first row."""
    return -(-weight.shape[0] // ranks.size) * ranks.rank


class TensorParallelLoss(nn.Module):
    """Replaces `HeadLoss` where the rows of the head are divided among ranks."""

    def __init__(self, ranks: TensorParallelGroup) -> None:
        super().__init__()
        self._ranks = ranks

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Does nothing, because the loss has collectives, which are not compiled."""

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return `mean_cross_entropy` of the residual stream `hidden` (B, T or T / tp, D), the
        head's weight, a DTensor (V, D), and labels (B, T) int64."""
        ranks = self._ranks
        whole, first = ranks.whole(hidden), first_row(weight, ranks)
        return sharded_cross_entropy(whole, _local(weight), labels, first, ranks.group)

    def log_probs(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return `label_log_probs` of the arguments of `forward`."""
        ranks = self._ranks
        whole, first = ranks.whole(hidden), first_row(weight, ranks)
        return label_log_probs(whole, _local(weight), labels, first, ranks.group)
