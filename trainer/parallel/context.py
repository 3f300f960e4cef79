"""Context parallelism: each rank of a group holds a part of every sequence, and attention passes
keys and values around the group.

Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context"; the cut is
that of Grattafiori et al. 2024, "The Llama 3 Herd of Models".

[Note: ring] A sequence is cut into 2 cp chunks, and rank c holds chunks c and 2 cp - 1 - c: an
early one, which sees few keys, and a late one, which sees many, so all ranks compute equally much.
The queries of a rank stay. Its keys and values go from rank to rank as one message, which is under
way while the previous ones are used. In backward the sums of their gradients follow them home.

The queries of one chunk and the keys of one chunk form a *block*. In a block of one chunk each
document sees itself, causally. If the keys are of an earlier chunk, at most one document of a row
reaches from there to here, and its queries see all of its keys. So no block needs a mask: documents
are ranges, as kernels for sequences of variable length take them.

Shapes: B batch, T sequence, t tokens of it that a rank has, N query heads, K key/value heads, H
head dim. *Packed* is (B x t, heads, H): the rows of one chunk end to end, then those of the other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.data.samples import IGNORED_LABEL
from trainer.models.attention import Documents
from trainer.models.decoder import Attention, Decoder
from trainer.models.loss import on_gpu


def problem_of(model: nn.Module, length: int) -> str | None:
    """Why the ranks of a ring cannot compute sequences of `length` tokens; None if they can."""
    if not isinstance(model, Decoder):
        return f"{type(model).__name__} is not one of Perdure's decoders"
    name = model.family.model_type
    if model.family.beside_loss and not model.family.statistics:
        return f"what {name} records beside the loss is not that of a part of a sequence"
    if not all(any(isinstance(m, Attention) for m in block.modules()) for block in model.blocks):
        return f"blocks of {name} do not use trainer.Attention"
    if model.family.sinks:
        return f"{name} has attention sinks, which the ring does not know yet"
    if windows := model.model.windows(length):
        return (
            f"layers of this {name} have a sliding window of {min(windows)} tokens, which is "
            "shorter than data.seq_len and which the ring does not know yet"
        )
    scaling = model.model.architecture.rope_scaling
    if scaling and scaling.rope_type in ("dynamic", "longrope"):
        return f"rope_type {scaling.rope_type} depends on the length, of which a rank sees a part"
    return None


def chunks(length: int, cp: int, rank: int) -> tuple[range, range]:
    """The positions of a sequence that a rank holds: two chunks of nearly equal length."""
    part, more = divmod(length, 2 * cp)
    ends = list(accumulate([part + (n < more) for n in range(2 * cp)], initial=0))
    first, second = rank, 2 * cp - 1 - rank
    return range(ends[first], ends[first + 1]), range(ends[second], ends[second + 1])


@dataclass(frozen=True)
class PackedBlock:
    """Packed queries and the packed keys that they see: queries of range n see keys of range n.
    Ranges lie between neighbouring ends."""

    queries: slice
    keys: slice
    query_ends: Tensor
    """(ranges + 1,) int32, ascending, relative to the first of `queries`."""
    key_ends: Tensor
    causal: bool
    """Whether each query sees only keys up to its own position; the ranges of queries and keys are
    then equal."""
    longest: tuple[int, int]
    """Upper bounds of the queries and of the keys in a range."""
    pairs: Sequence[tuple[slice, slice]]
    """On the CPU, the non-empty ranges; empty on a GPU."""


def attention_blocks(
    cu_seqlens: Tensor | None,
    rows: int,
    own: tuple[range, range],
    others: tuple[range, range],
    length: int,
    device: torch.device,
) -> Iterator[PackedBlock]:
    """Yield the blocks between the queries of a rank with chunks `own` and the keys of a rank with
    chunks `others`; blocks of equal chunks come first. Does not synchronise with a GPU.

    Args:
        cu_seqlens: of the whole sequences, see `trainer.data.documents`; None without documents.
        rows: B.
        own, others: see `chunks`.
        length: T.
        device: of `cu_seqlens`.
    """
    row = torch.arange(rows, device=device)
    if cu_seqlens is None:
        cu_seqlens = torch.arange(rows + 1, device=device) * length
    seen = [
        (i, j)
        for i, query in enumerate(own)
        for j, key in enumerate(others)
        if len(query) and len(key) and key.start <= query.start
    ]
    # Equal chunks first: a query then sees itself before all others.
    for i, j in sorted(seen, key=lambda pair: own[pair[0]] != others[pair[1]]):
        query, key = own[i], others[j]
        causal = query == key
        if causal:
            number, position = cu_seqlens // length, cu_seqlens % length
            query_ends = number * len(query) + (position - query.start).clamp(0, len(query))
            key_ends = query_ends
        else:
            # Three ranges per row: hidden keys, the document's queries and keys, queries that see
            # none.
            first = row * length + query.start
            document = torch.searchsorted(cu_seqlens, first, right=True)
            begin, end = cu_seqlens[document - 1] - row * length, cu_seqlens[document] - first
            hidden, seeing = (begin - key.start).clamp(0, len(key)), end.clamp(max=len(query))
            starts = row * len(query), row * len(key)
            query_ends = torch.stack([starts[0], starts[0], starts[0] + seeing], 1).flatten()
            key_ends = torch.stack([starts[1], starts[1] + hidden, starts[1] + len(key)], 1)
            query_ends = F.pad(query_ends, (0, 1), value=rows * len(query))
            key_ends = F.pad(key_ends.flatten(), (0, 1), value=rows * len(key))
        pairs = []
        if device.type == "cpu":
            ranges = (pairwise(ends.tolist()) for ends in (query_ends, key_ends))
            pairs = [
                (slice(*a), slice(*b))
                for a, b in zip(*ranges, strict=True)
                if a[0] < a[1] and b[0] < b[1]
            ]
            if not pairs:
                continue
        yield PackedBlock(
            _packed(rows, own, i), _packed(rows, others, j), query_ends.int(), key_ends.int(),
            causal, (len(query), len(key)), pairs,
        )  # fmt: skip


def _packed(rows: int, two: tuple[range, range], which: int) -> slice:
    """The range of a chunk in packed tokens."""
    start = rows * len(two[0]) * which
    return slice(start, start + rows * len(two[which]))


class Ring:
    """Attention of one forward pass over the sequences of a micro-batch, shared by all layers."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        cu_seqlens: Tensor | None,
        shape: tuple[int, int],
        device: Any,
        attend: Callable[..., Tensor] | None = None,
    ) -> None:
        """Args:
        group: the ranks that hold parts of each sequence.
        cu_seqlens: of the whole sequences; None without documents.
        shape: (B, T).
        device: that computes.
        attend: (q, k, v, ring) → attention; None: `_RingAttention`."""
        rows, length = shape
        self._attend = attend or _RingAttention.apply
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        every = [chunks(length, self.size, rank) for rank in range(self.size)]
        self.own = every[self.rank]
        """Positions of this rank."""
        # In turn t the keys have moved on by t ranks.
        sources = [(self.rank - turn) % self.size for turn in range(self.size)]
        self.turns = [
            list(attention_blocks(cu_seqlens, rows, self.own, every[source], length, device))
            for source in sources
        ]
        """Blocks of attention computed in each ring step."""
        self.tokens = [rows * sum(map(len, every[source])) for source in sources]
        """Number of keys in each ring step."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, t, N, H), k and v (B, t, K, H) → (B, t, N, H)."""
        return self._attend(q, k, v, self)

    def pack(self, x: Tensor) -> Tensor:
        """(B, t, heads, H) → packed."""
        if len(x) == 1:
            return x[0].contiguous()
        first = len(self.own[0])
        return torch.cat([x[:, :first].flatten(0, 1), x[:, first:].flatten(0, 1)])

    def unpack(self, x: Tensor, rows: int) -> Tensor:
        """Packed → (B, t, heads, H)."""
        cut = rows * len(self.own[0])
        return torch.cat([part.unflatten(0, (rows, -1)) for part in (x[:cut], x[cut:])], 1)

    def pass_on(self, x: Tensor, tokens: int, tag: int) -> Callable[[], Tensor]:
        """Send (2, n, K, H) to the next rank, and receive (2, tokens, K, H) from the one before.

        Returns a function that waits for both, and returns the received tensor.
        """
        coming = x.new_empty((2, tokens, *x.shape[2:]))
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=self.group, tag=tag, group_peer=after),
                dist.P2POp(dist.irecv, coming, group=self.group, tag=tag, group_peer=before),
            ]
        )

        def wait() -> Tensor:
            for work in works:
                work.wait()
            _ = x  # keeps the sent memory alive until here
            return coming

        return wait


_KEYS, _GRADIENTS = 0, 1
"""Tags of messages: both kinds are under way at once."""


class _RingAttention(torch.autograd.Function):
    """Attention over a ring, see [Note: ring]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        rows, queries = len(q), ring.pack(q)
        # One message for keys and values.
        own = held = torch.stack([ring.pack(k), ring.pack(v)])
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(queries, dtype=wide)
        sums = queries.new_full((q.shape[2], len(queries)), -torch.inf, dtype=wide)
        for turn, blocks in enumerate(ring.turns):
            last = turn == ring.size - 1
            coming = None if last else ring.pass_on(held, ring.tokens[turn + 1], _KEYS)
            for block in blocks:
                here, there = block.queries, block.keys
                part, logs = block_attention(queries[here], held[0, there], held[1, there], block)
                # Rescale the result so far and add this block's, each weighted by its share of the
                # softmax sum. The first block holds each query's own key, so no sum is empty.
                both = torch.logaddexp(sums[:, here], logs)
                out[here] *= (sums[:, here] - both).exp().T[..., None]
                out[here] += part * (logs - both).exp().T[..., None]
                sums[:, here] = both
            held = coming() if coming else held
        out = out.to(q.dtype)
        # Only this rank's keys are kept: those of others pass by again in backward.
        ctx.save_for_backward(queries, own, out, sums)
        ctx.ring, ctx.rows = ring, rows
        return ring.unpack(out, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, held, out, sums = ctx.saved_tensors
        ring, gradient = ctx.ring, ctx.ring.pack(gradients[0])
        to_queries = torch.zeros_like(queries, dtype=sums.dtype)
        arriving = None
        for turn, blocks in enumerate(ring.turns):
            last = turn == ring.size - 1
            coming = None if last else ring.pass_on(held, ring.tokens[turn + 1], _KEYS)
            to_held = torch.zeros_like(held, dtype=sums.dtype)
            for block in blocks:
                here, there = block.queries, block.keys
                block_grads = block_gradients(
                    gradient[here], queries[here], held[0, there], held[1, there], out[here],
                    sums[:, here], block,
                )  # fmt: skip
                to_queries[here] += block_grads[0]
                to_held[0, there] += block_grads[1]
                to_held[1, there] += block_grads[2]
            if arriving:  # gradients from the ranks that held these keys before
                to_held += arriving()
            # These follow their keys, and are back at their rank after the last turn.
            arriving = ring.pass_on(to_held, ring.tokens[(turn + 1) % ring.size], _GRADIENTS)
            held = coming() if coming else held
        assert arriving
        to_keys, to_values = arriving().to(queries.dtype)
        whole = (
            ring.unpack(x, ctx.rows) for x in (to_queries.to(queries.dtype), to_keys, to_values)
        )
        return *whole, None


def block_attention(q: Tensor, k: Tensor, v: Tensor, block: PackedBlock) -> tuple[Tensor, Tensor]:
    """Attention within a block: (out (n, N, H), logarithms of the softmax sums (N, n)); 0 and -inf
    for queries that see no key. q (n, N, H), k and v (m, K, H)."""
    if on_gpu(q):
        out, sums, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, block.query_ends, block.key_ends, *block.longest, 0.0, block.causal, False
        )
        return out, sums.masked_fill(
            sums.isposinf(), -torch.inf
        )  # the kernel returns +inf for an empty sum
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out = torch.zeros_like(q)
    wide = torch.promote_types(q.dtype, torch.float32)
    sums = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=wide)
    for here, there in block.pairs:
        mixed, logs = kernel(*_by_head(q[here], k[there], v[there]), 0.0, block.causal)
        out[here], sums[:, here] = mixed[0].transpose(0, 1), logs[0]
    return out, sums


def block_gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, block: PackedBlock
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from one block, in their shapes.

    Args:
        gradient: of `out`, (n, N, H).
        q: (n, N, H); k and v: (m, K, H).
        out: (n, N, H), and `sums` (N, n), over all blocks.
    """
    if on_gpu(q):
        # state of the dropout generator, unused
        drawn = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            gradient, q, k, v, out, sums.contiguous(), block.query_ends, block.key_ends,
            *block.longest, 0.0, block.causal, drawn, drawn,
        )  # fmt: skip
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    made = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for here, there in block.pairs:
        given = _by_head(gradient[here], q[here], k[there], v[there], out[here])
        results = kernel(*given, sums[None, :, here].contiguous(), 0.0, block.causal)
        for room, where, some in zip(made, (here, there, there), results, strict=True):
            room[where] = some[0].transpose(0, 1)
    return made


def _by_head(*tensors: Tensor) -> list[Tensor]:
    """(n, heads, H) → (1, heads, n, H)."""
    return [x.transpose(0, 1)[None] for x in tensors]


class Context:
    """Computes a model with this rank's part of the sequences of each micro-batch."""

    def __init__(self, group: dist.ProcessGroup, compiled: bool = False) -> None:
        """`compiled`: whether blocks are compiled. Messages, and the `Ring` of each pass, stay
        outside the graph."""
        self.group = group
        """The present group: a rank that outlives others creates its groups anew (rejoin.py)."""
        self._attend = torch.compiler.disable(_RingAttention.apply) if compiled else None

    def tokens(self, length: int) -> int:
        """Number of tokens of a sequence on this rank."""
        cp, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        return sum(map(len, chunks(length, cp, rank)))

    def __call__(
        self, module: Callable[..., Any], inputs: Mapping[str, Tensor], **beside: Tensor
    ) -> Any:
        """Return the model's result for a micro-batch. It is equal on the ranks of the group, each
        of which has its part of the gradient. From a stage without a head: hidden states (B, t, D).
        On all ranks.

        Args:
            module: a `Decoder`, or its wrapper.
            inputs: of `Decoder.forward`: the whole sequences, with all labels.
            beside: further arguments of the module.
        """
        ids, labels = inputs["input_ids"], inputs["labels"]
        shape = (ids.shape[0], ids.shape[1])
        ring = Ring(self.group, inputs.get("cu_seqlens"), shape, ids.device, self._attend)
        parts = [
            (ids[:, part.start : part.stop], labels[:, part.start : part.stop]) for part in ring.own
        ]
        some, mine = (torch.cat(both, 1) for both in zip(*parts, strict=True))
        # RoPE needs positions within the whole sequence.
        positions = torch.cat(
            [torch.arange(part.start, part.stop, device=ids.device) for part in ring.own]
        )
        whole = Share(
            self.group,
            _label_count(mine) / _label_count(labels).clamp(min=1),
            some.shape[1] / ids.shape[1],
        )
        return module(
            input_ids=some, labels=mine, positions=positions, documents=Documents("ring", ring),
            whole=whole, **beside,
        )  # fmt: skip


def _label_count(labels: Tensor) -> Tensor:
    return (labels != IGNORED_LABEL).sum()


@dataclass(frozen=True)
class Share:
    """This rank's share of sequences that a group divides, see `trainer.models.decoder.Whole`."""

    group: dist.ProcessGroup
    of_labels: Tensor | float
    of_tokens: float

    def over_labels(self, mean: Tensor) -> Tensor:
        """Mean over the labels of all ranks from this rank's `mean`. On all ranks."""
        return _Sum.apply(mean * self.of_labels, self.group)

    def over_tokens(self, mean: Tensor) -> Tensor:
        """Mean over the tokens of all ranks from this rank's `mean`. On all ranks."""
        return _Sum.apply(mean * self.of_tokens, self.group)


class _Sum(torch.autograd.Function):
    """Sum over the ranks; each rank differentiates only its own term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
