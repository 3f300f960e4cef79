"""Decoder models whose blocks come from a family, with modules named as in Hugging Face
transformers.

All buffers are persistent and get initial values as parameters do. So a model built on the meta
device is complete once its `state_dict` is filled.

Shapes: B batch, T sequence, D hidden, N query heads, K key/value heads, H head dim, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpointing.format.nf4 import weights_in
from trainer.data.packing import cu_seqlens_of
from trainer.models.attention import (
    AttentionDocuments,
    Requested,
    Rope,
    attend,
    locate,
    rope_table,
    rotate,
)
from trainer.models.family import Family, family_of
from trainer.models.loss import HeadLoss, preference_loss
from trainer.recipe.architecture import Architecture
from trainer.recipe.sections import ObjectiveSection

TENSOR_PLAN = {
    "model.embed_tokens": "vocabulary",
    "lm_head": "vocabulary",
    "*.self_attn.[qkv]_proj": "column",
    "*.self_attn.o_proj": "row",
    "*.mlp.gate_proj": "column",
    "*.mlp.up_proj": "column",
    "*.mlp.down_proj": "row",
    "*.self_attn.[qk]_norm": "head_norm",
    "*norm": "norm",
}
"""`TensorPlan` of models whose blocks consist of `MLP`, of norms, and of `Attention` whose own
norms treat each head separately."""


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019). Sums are float32 for any dtype; returns the
    input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Under autocast x may be bf16 and the weight float32, but the fused kernel needs one dtype.
        weight = self.weight
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self.eps).type_as(x)


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023) with rotary positions. `q_norm` gets the
    queries (B, T, N, H), and `k_norm` the keys (B, T, K, H), before they rotate. `bias`: whether
    the projections of queries, keys and values have a bias."""

    def __init__(
        self,
        architecture: Architecture,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        hidden, self.head_dim = architecture.hidden_size, architecture.head_dim
        query_size = architecture.num_attention_heads * self.head_dim
        key_size = architecture.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, query_size, bias=bias)
        self.k_proj = nn.Linear(hidden, key_size, bias=bias)
        self.v_proj = nn.Linear(hidden, key_size, bias=bias)
        self.o_proj = nn.Linear(query_size, hidden, bias=False)
        self.q_norm = q_norm or nn.Identity()
        self.k_norm = k_norm or nn.Identity()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map x (B, T, D) to queries (B, T, N, H), keys and values (B, T, K, H)."""
        q = self.q_proj(x)
        # under sequence parallelism q has more tokens than x
        heads = (*q.shape[:2], -1, self.head_dim)
        q = self.q_norm(q.view(heads))
        k = self.k_norm(self.k_proj(x).view(heads))
        return q, k, self.v_proj(x).view(heads)

    def forward(self, x: Tensor, rope: Rope | None, documents: AttentionDocuments | None) -> Tensor:
        """Map x (B, T, D) to (B, T, D). Under sequence parallelism x is a part of the sequence.
        `rope`: see `rope_table`; None: no rotation. `documents`: see `locate`; None: each sequence
        is one document."""
        q, k, v = self.project(x)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        return self.o_proj(self.mix(q, k, v, documents).flatten(2))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, documents: AttentionDocuments | None) -> Tensor:
        """Return the output of attention (B, T, N, H), see `attend`. Families may override it."""
        return attend(q, k, v, documents)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020), optionally with another activation."""

    def __init__(
        self, architecture: Architecture, activation: Callable[[Tensor], Tensor] = F.silu
    ) -> None:
        super().__init__()
        self.activation = activation
        hidden, intermediate = architecture.hidden_size, architecture.intermediate_size
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A transformer block that normalises the inputs of attention and MLP."""

    def __init__(self, architecture: Architecture, attention: Attention, mlp: nn.Module) -> None:
        super().__init__()
        hidden, eps = architecture.hidden_size, architecture.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = mlp

    def forward(self, x: Tensor, rope: Rope | None, documents: AttentionDocuments | None) -> Tensor:
        """Map the residual stream x (B, T, D) to (B, T, D), see `Attention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), rope, documents)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """A decoder without its output head."""

    def __init__(self, architecture: Architecture, family: Family, attention: Requested) -> None:
        super().__init__()
        self.architecture, self.attention = architecture, attention
        self.kinds = family.kinds_of_layers(architecture)
        self.sinks = family.sinks
        self.embed_tokens = _embedding(architecture.vocab_size, architecture.hidden_size)
        self.layers = nn.ModuleList(
            family.block(architecture) for _ in range(architecture.num_hidden_layers)
        )
        norm = family.norm or RMSNorm
        self.norm: nn.Module = norm(architecture.hidden_size, architecture.rms_norm_eps)
        self.scale = family.embedding_scale(architecture) if family.embedding_scale else None

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor | None = None,
        hidden: Tensor | None = None,
        positions: Tensor | None = None,
        documents: AttentionDocuments | None = None,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return hidden states (B, T, D), and the statistics of each block that returns some.
        Arguments: see `Decoder.forward`."""
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        bases = {kind.theta for kind in self.kinds}
        ropes = {theta: rope_table(self.architecture, positions, theta) for theta in bases}
        x = self.embed_tokens(input_ids) if hidden is None else hidden  # (B, T, D)
        if self.scale and hidden is None:
            x = x * x.new_full((), self.scale)  # rounded to the dtype, as in transformers
        # Even under autocast the embedding returns float32, which all blocks would keep.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        # The shape of input_ids: under sequence parallelism x has only a part of the tokens.
        where = input_ids.shape, x.dtype, self.architecture.head_dim, self.attention
        if cu_seqlens is None and self.sinks:
            # Without documents `attend` supports no sinks.
            cu_seqlens = _one_document_each(input_ids)
        if cu_seqlens is not None:
            documents = locate(cu_seqlens, *where, sinks=self.sinks)
        seen: dict[int | None, AttentionDocuments | None] = {None: documents}
        for window in self.windows(input_ids.shape[1]):
            ends = _one_document_each(input_ids) if cu_seqlens is None else cu_seqlens
            seen[window] = locate(ends, *where, window, self.sinks)
        statistics = []
        for number, layer in self.layers._modules.items():
            kind = self.kinds[int(number)]  # a part of the model keeps its layers' numbers
            assert layer is not None
            rope = ropes[kind.theta] if kind.rotary else None
            x = layer(x, rope, seen.get(kind.window, documents))
            if isinstance(x, tuple):
                x, layer_statistics = x
                statistics.append(layer_statistics)
        return self.norm(x), statistics

    def windows(self, length: int) -> set[int]:
        """Sliding windows that are shorter than sequences of `length` tokens."""
        return {kind.window for kind in self.kinds if kind.window and kind.window < length}


def _one_document_each(input_ids: Tensor) -> Tensor:
    """Return `cu_seqlens` for sequences (B, T) each of which is one document."""
    rows, length = input_ids.shape
    return torch.arange(rows + 1, dtype=torch.int32, device=input_ids.device) * length


def _embedding(rows: int, columns: int) -> nn.Embedding:
    if torch.get_default_device().type == "meta":
        # Drawing values on the meta device would import torch._dynamo, which takes a second.
        return nn.Embedding.from_pretrained(torch.empty(rows, columns), freeze=False)
    return nn.Embedding(rows, columns)


class DecoderMeans(Protocol):
    """Converts means over this rank's part of the sequences to means over whole sequences, and
    passes gradients back to the part."""

    def over_labels(self, mean: Tensor) -> Tensor:
        """Convert a mean over the labels that count."""

    def over_tokens(self, mean: Tensor) -> Tensor:
        """Convert a mean over all tokens of each sequence."""


class Decoder(nn.Module):
    """A causal language model. Parameters have Hugging Face's names: `model.embed_tokens.weight`,
    `model.layers.{i}.…`, `model.norm.weight` and `lm_head.weight`. With tied embeddings there is no
    `lm_head`; the embedding matrix is used twice, so `to_empty` and sharding cannot untie it."""

    def __init__(
        self,
        architecture: Architecture,
        attention: Requested = "auto",
        family: Family | None = None,
    ) -> None:
        """
        Args:
            architecture: sizes of the model, including all `options` of its family.
            attention: way of separating documents, see `choose_attention`.
            family: family of the model; None: the bundled family of its `model_type`.
        """
        super().__init__()
        self.family = family = family or family_of(architecture.model_type)
        self.name = f"{family.model_type} decoder"
        self.vocab_size = architecture.vocab_size
        self.most_positions = architecture.max_position_embeddings
        self.tensor_plan, self.stacks = family.tensor_plan, family.stacks
        self.stacks_apart: Sequence[str] = () if family.stacked_in_files else family.stacks
        """Patterns of `stacks` whose parameters checkpoints store row by row."""
        self.experts = bool(family.stacks)
        """Whether a token uses only some of the weights."""
        self.model = Backbone(architecture, family, attention)
        self.lm_head: nn.Linear | None = None
        if not architecture.tie_word_embeddings:
            self.lm_head = nn.Linear(architecture.hidden_size, architecture.vocab_size, bias=False)
        self.head_loss = HeadLoss()
        self.has_head = True
        self.preference: ObjectiveSection | None = None
        """Objective for pairs of answers; None: cross-entropy."""

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """Repeated parts of the model, which are sharded, recomputed and compiled separately."""
        return self.model.layers

    @property
    def tied_copies(self) -> Mapping[str, str]:
        """Second name of a tied weight in published checkpoints → its name in the model."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.lm_head is None else {}

    @property
    def compiled_beside_blocks(self) -> Iterable[nn.Module]:
        """Modules that `strategy.compile` compiles, besides the blocks."""
        return [self.head_loss]

    def part(self, run: range) -> "Decoder":
        """Return a copy with only the blocks whose indices are in `run`. The embedding stays with
        the first block, norm and head with the last; a tied embedding stays with both. FQNs are
        unchanged."""
        part = copy.deepcopy(self)
        backbone = part.model
        for number in set(range(len(backbone.layers))) - set(run):
            # ModuleList's own `del` would renumber the other layers.
            del backbone.layers._modules[str(number)]
        part.has_head = run.stop == len(self.model.layers)
        if run.start > 0 and not (part.has_head and part.lm_head is None):
            del backbone.embed_tokens
        if not part.has_head:
            backbone.norm = nn.Identity()
            part.lm_head = None
        return part

    def block_costs(self, seq_len: int) -> list[float]:
        """Return the floating-point operations of forward per token, by block. The last block
        includes the head. Experts that a token does not use are subtracted from all blocks, in
        proportion to the blocks' sizes."""
        architecture = self.model.architecture
        heads = architecture.num_attention_heads * architecture.head_dim
        sizes = [sum(map(weights_in, block.parameters())) for block in self.blocks]
        met = 1 - self.family.idle_parameters(architecture) / sum(sizes)
        seen = [kind.reach(seq_len) for kind in self.model.kinds]
        costs = [
            2 * met * size + 4 * heads * reach for size, reach in zip(sizes, seen, strict=True)
        ]
        costs[-1] += 2 * architecture.vocab_size * architecture.hidden_size
        return costs

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        document_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        hidden: Tensor | None = None,
        positions: Tensor | None = None,
        documents: AttentionDocuments | None = None,
        statistics: Tensor | None = None,
        whole: DecoderMeans | None = None,
        segments: Tensor | None = None,
        answer_labels: Tensor | None = None,
        reference: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor] | tuple[Tensor, Tensor]:
        """Return logits or, with labels, the loss. A part without a head returns hidden states (B,
        T, D); if the family has `beside_loss`, also the statistics of the blocks so far.

        Args:
            input_ids: (B, T) int64.
            labels: (B, T) int64, the next token at each position; -100 does not count.
            document_ids: (B, T) integers; attention stays inside runs of equal ids. Positions count
                over the whole sequence: RoPE depends only on their differences. Synchronises with a
                GPU.
            cu_seqlens: `trainer.data.packing.cu_seqlens_of` documents; does not synchronise.
            hidden: (B, T, D), output of the previous part of the model.
            positions: (T,) integers, positions in the sequence; None: 0 to T - 1.
            documents: boundaries of documents for attention in a ring, which sees more tokens than
                `input_ids`; replaces `document_ids` and `cu_seqlens`.
            statistics: (blocks, …), statistics of the previous parts.
            whole: converts means, on a rank that has a part of each sequence (`strategy.cp`).
            segments: (B, T) int64, for P pairs: index of the answer of each label, in the order
                chosen, rejected, chosen, rejected ….
            answer_labels: (2 P,), number of labels of each answer.
            reference: (2 P,), log-probabilities of the answers by the reference model.

        Returns:
            Logits (B, T, V) in the dtype of the computation. With labels, the mean cross-entropy in
            nats over the labels that count, a float32 scalar (0 if none does). If the family has
            `beside_loss`, a dict of its scalars, of `cross_entropy`, and of `loss`, to which
            training adds the weighted scalars. For pairs, the dict of `preference`; if it needs a
            missing reference, the log-probabilities of the answers (2 P,) float64.
        """
        if document_ids is not None:
            cu_seqlens = cu_seqlens_of(document_ids)
        hidden, of_blocks = self.model(input_ids, cu_seqlens, hidden, positions, documents)
        if not self.has_head and not self.family.beside_loss:
            return hidden
        if self.has_head and labels is None:
            return self.head(hidden)
        if self.family.beside_loss and self.family.statistics:
            so_far = torch.stack(list(of_blocks))
            so_far = whole.over_tokens(so_far) if whole else so_far
            so_far = so_far if statistics is None else torch.cat([statistics, so_far])
            if not self.has_head:
                return hidden, so_far
            of_blocks = so_far.unbind()
        assert labels is not None
        if segments is None or answer_labels is None:
            loss = self.loss(hidden, labels)
            if whole:
                loss = whole.over_labels(loss)
            if not self.family.beside_loss:
                return loss
            scalars = {"cross_entropy": loss}
        else:
            assert self.preference
            by_label = self.head_loss.log_probs(hidden, self._head_weight, labels)
            found = preference_loss(self.preference, by_label, segments, answer_labels, reference)
            if isinstance(found, Tensor):
                return found
            scalars, loss = found, found.pop("loss")
            if not self.family.beside_loss:
                return {"loss": loss, **scalars}
        beside = self.family.beside_loss(of_blocks, self.model.architecture)
        if self.training:
            loss = loss + sum(value * weight for value, weight in beside.values() if weight)
        return {"loss": loss, **scalars, **{name: value for name, (value, _) in beside.items()}}

    def hidden(self, input_ids: Tensor) -> Tensor:
        """Return the inputs of the head (B, T, D) for token ids (B, T)."""
        states: Tensor = self.model(input_ids)[0]
        return states

    def flops_per_token(self, seq_len: int) -> float:
        architecture, named = self.model.architecture, dict(self.named_parameters())
        frozen = {name for name, p in named.items() if not p.requires_grad}
        if not architecture.tie_word_embeddings:
            # looking up an embedding needs no matrix product
            frozen -= {"model.embed_tokens.weight"}
        return self.family.flops_per_token(
            architecture,
            sum(map(weights_in, named.values())),
            seq_len,
            sum(weights_in(named[name]) for name in frozen),
        )

    def head(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._head_weight)

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy from hidden states (B, T, D) and labels (B, T)."""
        return self.head_loss(hidden, self._head_weight, labels)

    @property
    def _head_weight(self) -> Tensor:
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
