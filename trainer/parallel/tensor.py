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
- *norm*: a module on the residual stream. With sequence parallelism a rank has only its part of the
  sequence there, otherwise the whole sequence.
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
from trainer.data.samples import IGNORED_LABEL
from trainer.models.adapter import LoraLinear
from trainer.models.decoder import Decoder, RMSNorm
from trainer.models.loss import (
    HeadLoss,
    add_product,
    label_log_probs,
    most_logits,
    on_gpu,
    scaled_once,
)
from trainer.models.versions import all_gather_single, reduce_scatter_single
from trainer.optim.formats import BLOCK as STATE_BLOCK
from trainer.parallel.context import MeansAcrossRanks
from trainer.recipe import Recipe, RecipeError, Strategy
from trainer.recipe.strategies import ep, tp

_CUT: dict[str, Placement] = {
    "column": Shard(0),
    "fused": Shard(0),
    "row": Shard(1),
    "norm": Replicate(),
    "head_norm": Replicate(),
    "heads": Shard(0),
    "wide_norm": Shard(0),
    "vocabulary": Shard(0),
    "tokens": Replicate(),
}
_CUT_APART: dict[tuple[str, str], Placement] = {
    ("row", "bias"): Replicate(),
    ("column", "lora_A"): Replicate(),
    ("fused", "lora_A"): Replicate(),
    ("row", "lora_B"): Replicate(),
}
"""(kind, parameter) → placement, for parameters that are placed otherwise than _CUT says."""


def kinds_of(model: nn.Module, tp: int, shards: int = 1) -> dict[str, str]:
    """Return the kind of each module that has parameters, by FQN.

    Raises:
        RecipeError: the model has no `tensor_plan`; or the plan leaves out a module, or cannot be
            applied for `tp` ranks with `shards` FSDP shards each.
    """
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
        if kind not in _CUT:
            what = f"is to be {kind!r}" if kind else "has no pattern"
            named = name or f"{type(model).__name__} itself, which has parameters,"
            raise RecipeError(
                f"strategy.tp: {named} {what} in the tensor_plan; use one of {', '.join(_CUT)}"
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
    """Return why a module cannot be of a kind; None if it can."""
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
    by_rank = [_chunks(part, shards) for part in _chunks(length, tp)]
    return all(_chunks(sum(rows), tp) == list(rows) for rows in zip(*by_rank, strict=True))


def _chunks(length: int, count: int) -> list[int]:
    """Return the lengths of the parts that torch.chunk returns, including empty parts."""
    most = -(-length // count)
    return [max(0, min(most, length - most * place)) for place in range(count)]


def check_model(model: nn.Module, recipe: Recipe, shards: int) -> None:
    """Raise RecipeError for a model that the recipe's tensor-parallel ranks cannot compute, with
    `shards` FSDP shards each."""
    ranks = tp.ranks(recipe.strategy)
    kinds = kinds_of(model, ranks, shards)
    if recipe.optimizer.state_dtype == "int8":
        _check_blocks(model, kinds, ranks)
    if getattr(model, "stacks", ()) and ep.ranks(recipe.strategy) == 1:
        raise RecipeError(
            "strategy.tp: it divides no experts, but strategy.ep does; set strategy.ep to 2 or "
            "more, too, or strategy.tp=1"
        )


def _check_blocks(model: nn.Module, kinds: Mapping[str, str], ranks: int) -> None:
    """Raise RecipeError if tensor parallelism would cut rows inside blocks of 8-bit optimizer
    state."""
    for name, kind in kinds.items():
        columns = getattr(model.get_submodule(name), "in_features", 0)
        if kind == "row" and columns % STATE_BLOCK == 0 and columns // ranks % STATE_BLOCK:
            raise RecipeError(
                f"optimizer.state_dtype: int8 has blocks of {STATE_BLOCK} elements, but "
                f"tp={ranks} cuts the {columns} columns of {name} into parts of "
                f"{columns // ranks}; use bf16, or another strategy.tp"
            )


def apply(model: nn.Module, mesh: DeviceMesh, strategy: Strategy) -> list[nn.Module]:
    """Cut `model` in place over `mesh` (1-D), before FSDP. Works on the meta device. Returns [],
    because it adds no FSDP units.

    Args:
        model: has a `tensor_plan`. On a device other than meta, weights must be equal on all ranks.
        mesh: the tensor-parallel ranks.
    """
    ranks = TensorGroup(mesh, tp.stream_parts(strategy) > 1)
    placed: dict[nn.Parameter, Any] = {}  # by parameter, so that tied weights stay tied
    kinds = kinds_of(model, mesh.size())
    modules = dict(model.named_modules())
    for name, kind in kinds.items():
        module = modules[name]
        for key, whole in list(module.named_parameters(recurse=False)):
            cut = _CUT_APART.get((kind, key), _CUT[kind])
            if whole not in placed:
                # src_data_rank=None avoids a broadcast: weights are equal on all ranks, or on the
                # meta device.
                spread = distribute_tensor(whole.detach(), mesh, [cut], src_data_rank=None)
                placed[whole] = nn.Parameter(spread, requires_grad=whole.requires_grad)
            elif placed[whole].placements != (cut,):
                raise RecipeError(
                    f"strategy.tp: {name}.{key} is tied to a weight that is cut otherwise; give "
                    "both modules one kind in the tensor_plan"
                )
            module.register_parameter(key, placed[whole])
        module.forward = _FORWARDS[kind](module, ranks)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, HeadLoss):
                setattr(module, name, VocabularyLoss(ranks))
    return []


class TensorGroup:
    """The collectives of a tensor-parallel group on activations."""

    def __init__(self, mesh: DeviceMesh, sequence: bool) -> None:
        self._mesh, self.rank, self.size = mesh, mesh.get_local_rank(), mesh.size()
        self.sequence = sequence
        self._entered: tuple[Any, Tensor] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, looked up at each call because rejoin.py may replace it."""
        return self._mesh.get_group()

    def enter(self, x: Tensor) -> Tensor:
        """Return the residual stream (B, T or T / tp, D) whole (B, T, D), as input of column
        layers. Its gradient is summed over the ranks. Successive layers with the same input, such
        as query, key and value, share one gather and one reduction of the gradient."""
        # The version changes if x is changed in place, which would make the gathered copy stale.
        version = 0 if x.is_inference() else x._version
        key = (version, torch.is_grad_enabled())
        if self._entered is None or self._entered[0][0] is not x or self._entered[0][1:] != key:
            self._entered = ((x, *key), _EnterLayers.apply(x, self))
        return self._entered[1]

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x (B, T, D): the residual stream (B, T or T / tp, D)."""
        self._entered = None  # frees the gathered tensor
        if self.sequence and x.shape[1] % self.size:
            raise ValueError(
                f"a sequence of {x.shape[1]} tokens does not divide among tp={self.size} ranks; "
                "set strategy.sequence_parallel=false"
            )
        return _LeaveLayers.apply(x, self)

    def gather(self, x: Tensor) -> Tensor:
        """All-gather (B, T / tp, D) to (B, T, D)."""
        rows, length, *rest = x.shape
        parts = x.new_empty((self.size * rows, length, *rest))
        all_gather_single(parts, x.contiguous(), group=self.group)
        parts = parts.view(self.size, rows, length, *rest)
        return parts.transpose(0, 1).reshape(rows, self.size * length, *rest)

    def sum_and_cut(self, x: Tensor) -> Tensor:
        """Reduce-scatter (B, T, D) to (B, T / tp, D)."""
        rows, length, *rest = x.shape
        parts = x.view(rows, self.size, length // self.size, *rest).transpose(0, 1).contiguous()
        mine = torch.empty_like(parts[0])
        reduce_scatter_single(mine, parts.flatten(0, 1), group=self.group)
        return mine

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks of the group."""
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total


class _EnterLayers(torch.autograd.Function):
    """Autograd function of `TensorGroup.enter`. Each rank computes a term of the gradient, so
    backward sums the terms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather(x) if ranks.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ranks = ctx.ranks
        return (ranks.sum_and_cut if ranks.sequence else ranks.sum)(gradients[0].contiguous()), None


class _LeaveLayers(torch.autograd.Function):
    """Autograd function of `TensorGroup.leave`. Each term of the sum has the gradient of the
    sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup) -> Tensor:
        ctx.ranks = ranks
        return (ranks.sum_and_cut if ranks.sequence else ranks.sum)(x.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.gather(gradients[0]) if ctx.ranks.sequence else gradients[0], None


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


def _column(module: nn.Module, ranks: TensorGroup) -> Forward:
    compute = module.forward

    def forward(x: Tensor) -> Tensor:
        # Each rank has the whole lora_A, but computes only a term of its gradient.
        with with_local(module, ("lora_A",)):
            return compute(ranks.enter(x))

    return forward


def _fused(module: Any, ranks: TensorGroup) -> Forward:
    compute, sections = _column(module, ranks), tuple(module.sections)

    def forward(x: Tensor) -> Tensor:
        return _ExchangeSections.apply(compute(x), ranks, sections)

    return forward


class _ExchangeSections(torch.autograd.Function):
    """Exchanges outputs of a fused layer: consecutive outputs on each rank (B, T, n / tp) become
    this rank's part of every section, in the same shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup, sections: tuple[int, ...]) -> Tensor:
        ctx.ranks, ctx.sections = ranks, sections
        # `gather` works along dim 1.
        whole = ranks.gather(x.transpose(1, 2)).split(sections, 1)  # (B, n, T)
        mine = [section.chunk(ranks.size, 1)[ranks.rank] for section in whole]
        return torch.cat(mine, 1).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ranks, gradient = ctx.ranks, gradients[0].transpose(1, 2)
        parts = gradient.split([size // ranks.size for size in ctx.sections], 1)
        whole = gradient.new_zeros((len(gradient), sum(ctx.sections), gradient.shape[2]))
        for section, part in zip(whole.split(ctx.sections, 1), parts, strict=True):
            section.chunk(ranks.size, 1)[ranks.rank].copy_(part)
        return ranks.sum_and_cut(whole).transpose(1, 2).contiguous(), None, None


def _row(module: Any, ranks: TensorGroup) -> Forward:
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


def _norm(module: nn.Module, ranks: TensorGroup) -> Forward:
    return _replicated(module, ranks.sequence)


def _head_norm(module: nn.Module, ranks: TensorGroup) -> Forward:
    return _replicated(module, True)  # each rank normalises only its heads


def _heads(module: nn.Module, ranks: TensorGroup) -> Forward:
    return _replicated(module, False)  # a rank computes the whole gradient of its heads' rows


def _wide_norm(module: Any, ranks: TensorGroup) -> Forward:
    def forward(x: Tensor) -> Tensor:
        weight = _local(module.weight)
        # In float32, because sums of squares in bf16 would be inaccurate.
        wide = x.flatten(2).to(torch.promote_types(x.dtype, torch.float32))
        squares = _SumOverRanks.apply(wide.square().sum(-1, keepdim=True), ranks)
        scale = torch.rsqrt(squares / (ranks.size * len(weight)) + module.eps)
        return (wide * scale * weight).type_as(x).view(x.shape)

    return forward


class _SumOverRanks(torch.autograd.Function):
    """Sum over the ranks. All ranks use the result, so its gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(gradients[0]), None


def _replicated(module: nn.Module, partial: bool) -> Forward:
    compute = module.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        with with_local(module, partial):
            return compute(*args, **kwargs)

    return forward


def _tokens(module: nn.Module, ranks: TensorGroup) -> Forward:
    compute = module.forward

    def forward(x: Tensor) -> Any:
        means = MeansAcrossRanks(ranks.group, 1 / ranks.size, 1 / ranks.size)
        output = compute(x if ranks.sequence else _CutSequence.apply(x, ranks))
        mixed, *statistics = output if isinstance(output, tuple) else (output,)
        mixed = mixed if ranks.sequence else _JoinSequence.apply(mixed, ranks)
        return (mixed, *map(means.over_tokens, statistics)) if statistics else mixed

    return forward


class _CutSequence(torch.autograd.Function):
    """Cuts this rank's part (B, T / tp, D) out of activations (B, T, D) that are equal on all
    ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup) -> Tensor:
        ctx.ranks = ranks
        return x.chunk(ranks.size, 1)[ranks.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.gather(gradients[0]), None


class _JoinSequence(torch.autograd.Function):
    """Gathers the ranks' parts (B, T / tp, D) to activations (B, T, D), equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorGroup) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].chunk(ctx.ranks.size, 1)[ctx.ranks.rank].contiguous(), None


def _vocabulary(module: Any, ranks: TensorGroup) -> Forward:
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


_FORWARDS: dict[str, Callable[[nn.Module, TensorGroup], Forward]] = {
    "column": _column,
    "fused": _fused,
    "row": _row,
    "norm": _norm,
    "head_norm": _head_norm,
    "heads": _heads,
    "wide_norm": _wide_norm,
    "vocabulary": _vocabulary,
    "tokens": _tokens,
}


def first_row(weight: Tensor, ranks: TensorGroup) -> int:
    """Return the index in the whole weight (V, D) of this rank's first row."""
    return -(-weight.shape[0] // ranks.size) * ranks.rank


class VocabularyLoss(nn.Module):
    """Replaces `HeadLoss` where the rows of the head are divided among ranks."""

    def __init__(self, ranks: TensorGroup) -> None:
        super().__init__()
        self._ranks = ranks

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Does nothing, because the loss has collectives, which are not compiled."""

    def forward(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy over the labels that are not -100, in nats, a float32
        scalar.

        Args:
            hidden: the residual stream, (B, T or T / tp, D).
            weight: the weight of the head, a DTensor (V, D).
            labels: (B, T).
        """
        hidden, local = _EnterLayers.apply(hidden, self._ranks), _local(weight)
        chunks = -(-labels.numel() // max(1, most_logits(hidden) // len(local)))
        total = _ShardedHeadLoss.apply(
            hidden.flatten(0, -2).to(local.dtype),
            local,
            labels.flatten(),
            first_row(weight, self._ranks),
            -(-labels.numel() // chunks),
            torch.is_grad_enabled(),
            self._ranks.group,
        )
        return total / (labels != IGNORED_LABEL).sum().clamp(min=1)

    def log_probs(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the log-probability of each label, see `label_log_probs`. Arguments as for
        `forward`."""
        ranks = self._ranks
        whole, first = _EnterLayers.apply(hidden, ranks), first_row(weight, ranks)
        return label_log_probs(whole, _local(weight), labels, first, ranks.group)


class _ShardedHeadLoss(torch.autograd.Function):
    """Sum of the cross-entropies of labels (N) for hidden (N, D). Each rank has some rows of the
    head (V / tp, D), from row `start` on. Computed in chunks of tokens, as in
    `trainer.models.loss._ChunkedLoss`, with two small all-reduces per chunk: of the largest logits,
    and of the sums for softmax and loss. The gradient of hidden is this rank's term of a sum over
    the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        start: int,
        rows: int,
        with_gradients: bool,
        group: dist.ProcessGroup,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        to_hidden = torch.empty_like(hidden) if with_gradients else None
        trained = with_gradients and ctx.needs_input_grad[1]
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if trained else None
        wide: dict[str, Any] = {"out_dtype": torch.float32} if on_gpu(hidden) else {}
        for begin in range(0, len(labels), rows):
            part = slice(begin, begin + rows)
            label, counts = labels[part] - start, labels[part] != IGNORED_LABEL
            mine = counts & (label >= 0) & (label < len(weight))
            index = label.clamp(0, len(weight) - 1)[:, None]
            logits = torch.mm(hidden[part], weight.T, **wide).float()
            largest = logits.amax(1)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            # Subtracted so that exp does not overflow.
            logits -= largest[:, None]
            target = logits.gather(1, index)[:, 0] * mine
            likely = logits.exp_()
            sums = torch.stack([likely.sum(1), target])
            dist.all_reduce(sums, group=group)
            total += ((sums[0].log() - sums[1]) * counts).sum()
            if to_hidden is None:
                continue
            likely.div_(sums[0][:, None]).scatter_add_(1, index, -mine.float()[:, None])
            # Rows whose label is masked have no gradient.
            gradient = likely.mul_(counts[:, None]).to(hidden.dtype)
            torch.mm(gradient, weight, out=to_hidden[part])
            if to_weight is not None:
                add_product(to_weight, gradient.T, hidden[part])
            del logits, likely, gradient  # frees memory before the next chunk's logits
        ctx.save_for_backward(to_hidden, to_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *scaled_once(ctx, gradients[0]), *(None,) * 5
