"""Cross-entropy of next tokens, without the logits of a whole micro-batch in memory.

With a vocabulary of 151,936 the logits of 2,048 tokens take 0.6 GB in bf16, and their float32 copy,
softmax and gradient 1.2 GB each: more than all other activations of a 0.6 B model.

Shapes: N tokens, D hidden, V vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.data.stream import IGNORED_LABEL
from trainer.recipe.sections import ObjectiveSection

LOGITS_ON_CPU = 1 << 27
"""Largest number of logits in a chunk on a CPU: 0.5 GB in float32. Smaller chunks would be slower,
because each reads and writes the head's gradient."""
CHUNK_SHARE = 1 / 16
"""Share of a GPU's memory for a chunk of logits: 4,400 rows of 151,936 on an H100."""
BYTES_PER_LOGIT = 8
"""Bytes per logit on a GPU: its float32 value, and the logarithm of its softmax."""
ROWS_ON_CPU = 128
"""Rows of logits in one loss call on a CPU. They stay in its cache, which saves a fifth of the time
of head and loss in the quickstart."""

USUAL_BETA = {"dpo": 0.1, "ipo": 0.1, "simpo": 2.0, "orpo": 0.1}
USUAL_GAMMA = 1.0

Fused: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, bool, float | None], tuple[Tensor, Tensor | None]
]


class HeadLoss(nn.Module):
    """Product with the output head and mean cross-entropy, in chunks of rows, so that not all
    logits exist at once. A module, because its elementwise part can be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self._fused: Fused | None = None

    def compile(self, *arguments: Any, **options: Any) -> None:
        self._fused = torch.compile(_pointwise, *arguments, **options)

    def forward(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, cap: float | None = None
    ) -> Tensor:
        """Return the mean cross-entropy, a float32 scalar, of hidden (..., D), weight (V, D) and
        labels (...) int64. `cap`: see `capped`."""
        return head_cross_entropy(hidden, weight, labels, fused=self._fused, cap=cap)

    def log_probs(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, cap: float | None = None
    ) -> Tensor:
        return label_log_probs(hidden, weight, labels, cap=cap)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap · tanh(logits / cap), as in Gemma 2; unchanged logits if `cap` is None."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of logits (..., V) over the labels (...) int64 that are
    not -100; 0, with zero gradients, if there are none. The softmax is float32."""
    rows = labels.numel() if on_gpu(logits) else ROWS_ON_CPU
    total = logits.new_zeros((), dtype=torch.float32)
    for part, label in zip(
        logits.flatten(0, -2).split(rows), labels.flatten().split(rows), strict=True
    ):
        total = total + F.cross_entropy(
            part.float(), label, ignore_index=IGNORED_LABEL, reduction="sum"
        )
    return total / label_count(labels)


def head_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk: int | None = None,
    fused: Fused | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return `mean_cross_entropy` of the output head's logits, a float32 scalar. On a GPU, and on a
    CPU above `chunk` logits, rows are processed in chunks.

    Args:
        hidden: (..., D).
        weight: weight of the head, (V, D).
        labels: (...) int64.
        chunk: largest number of logits in a chunk; a chunk has at least one row. None: from the
            device's memory.
        fused: `_pointwise`, compiled.
        cap: cap of the logits, see `capped`.
    """
    chunk = max_chunk_logits(hidden) if chunk is None else chunk
    if not on_gpu(hidden) and labels.numel() * weight.shape[0] <= chunk:
        return mean_cross_entropy(capped(F.linear(hidden, weight), cap), labels)
    flat = _flattened(hidden, weight, labels, chunk)
    total = _ChunkedLoss.apply(*flat, torch.is_grad_enabled(), fused, cap)
    return total / label_count(labels)


def sharded_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, start: int, group: dist.ProcessGroup
) -> Tensor:
    """Return `head_cross_entropy` where the rows of the head are divided among the ranks of
    `group`; collective. `hidden` (..., D) and `labels` (...) are equal on all ranks; `weight`
    (rows, D) holds this rank's rows of the head, from row `start`. The gradient of `hidden` is this
    rank's term of a sum over the ranks, which the caller computes."""
    flat = _flattened(hidden, weight, labels, None)
    return _ShardedLoss.apply(*flat, start, torch.is_grad_enabled(), group) / label_count(labels)


def label_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    start: int = 0,
    group: dist.ProcessGroup | None = None,
    chunk: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return the log-probability of each label, (N,) float32; 0 for labels that do not count.
    Logits are computed in chunks of rows. Backward computes them again, because a row's weight in
    the loss is not known before. Arguments: see `head_cross_entropy` and `sharded_cross_entropy`;
    `group` None: this rank has the whole head."""
    return _LabelLogProbs.apply(*_flattened(hidden, weight, labels, chunk), start, group, cap)


def _flattened(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int | None
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return hidden (N, D) and weight (V, D) in the dtype of the computation, labels (N,), and the
    number of rows in a chunk of at most `chunk` logits; None: of `max_chunk_logits`."""
    device, dtype = hidden.device.type, weight.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    most = max_chunk_logits(hidden) if chunk is None else chunk
    chunks = -(-labels.numel() // max(1, most // weight.shape[0]))
    rows = -(-labels.numel() // chunks)
    return hidden.flatten(0, -2).to(dtype), weight.to(dtype), labels.flatten(), rows


def on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a GPU. The plan of a GPU's run replaces this function, as its
    tensors are on no device."""
    return tensor.is_cuda


def max_chunk_logits(tensor: Tensor) -> int:
    """Return the largest allowed number of logits in a chunk, on the device of `tensor`."""
    if not on_gpu(tensor):
        return LOGITS_ON_CPU
    return logits_in(torch.cuda.get_device_properties(tensor.device).total_memory)


def logits_in(memory: float) -> int:
    """Return the largest allowed number of logits in a chunk, on a GPU of `memory` bytes."""
    return int(CHUNK_SHARE * memory) // BYTES_PER_LOGIT


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left (R, S) @ right (S, C) to `total` (R, C) float32, in place. On a GPU the product is
    not rounded to the dtype of its factors."""
    if on_gpu(left):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


def label_count(labels: Tensor) -> Tensor:
    """Return the number of labels that count. At least 1, so that a mean over none is 0, not
    NaN."""
    return (labels != IGNORED_LABEL).sum().clamp(min=1)


def _pointwise(
    logits: Tensor, label: Tensor, counts: Tensor, with_gradient: bool, cap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of the losses of a chunk, and the gradient of its logits, which is not zero in
    rows whose label does not count. The compiler can fuse all of this into one kernel."""
    dtype = logits.dtype
    if cap is not None:
        logits = capped(logits.float(), cap)
    log_softmax = F.log_softmax(logits, 1, dtype=torch.float32)
    loss = -(log_softmax.gather(1, label) * counts).sum()
    if not with_gradient:
        return loss, None
    columns = torch.arange(logits.shape[1], device=logits.device)
    gradient = log_softmax.exp() - (columns == label) * counts.float()
    if cap is not None:
        gradient = gradient * _slope(logits, cap)
    return loss, gradient.to(dtype)


def _slope(logits: Tensor, cap: float) -> Tensor:
    return 1 - (logits / cap) ** 2


def _in_place(
    log_softmax: Tensor,
    label: Tensor,
    counts: Tensor,
    dtype: torch.dtype | None,
    slope: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the results of `_pointwise`, and overwrite `log_softmax` with the gradient if one is
    wanted, to save memory.

    Args:
        log_softmax: (rows, V), float32.
        label: (rows, 1), int64.
        counts: (rows, 1), bool: whether the label counts.
        dtype: dtype of the gradient; None: no gradient.
        slope: (rows, V), derivative of `capped`; None: no cap.
    """
    loss = -(log_softmax.gather(1, label) * counts).sum()
    if dtype is None:
        return loss, None
    gradient = log_softmax.exp_().scatter_add_(1, label, -counts.float())
    if slope is not None:
        gradient.mul_(slope)
    return loss, gradient.to(dtype)


class _ScaledGradients(torch.autograd.Function):
    """Base of losses whose forward also computes and saves the gradients of hidden and weight."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scaled: list[Tensor | None] = []
        for gradient in ctx.saved_tensors:
            if gradient is None:
                scaled.append(None)
                continue
            if gradient.dtype != torch.float32:
                scaled.append(gradient.float().mul_(gradients[0]).to(ctx.dtype))
                continue
            # float32 gradients are scaled in place: nothing else uses them, and the head's is
            # large. A two-part backward (zero bubble) calls this twice with the same factor.
            # `.data` bypasses the version counter, by which autograd would report the change as an
            # error.
            if not hasattr(ctx, "scaled"):
                gradient.data.mul_(gradients[0])
            scaled.append(gradient.to(ctx.dtype))
        ctx.scaled = True
        return *scaled, *(None,) * 5


class _ChunkedLoss(_ScaledGradients):
    """Sum of the cross-entropies of hidden (N, D), weight (V, D) and labels (N). Forward also
    computes the gradients, while the logits exist. So there are as many matrix products as without
    chunks: three, or two with a frozen head (FusedLinearCrossEntropy of Hsu et al. 2024, "Liger
    Kernel")."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: int,
        with_gradients: bool,
        fused: Fused | None,
        cap: float | None,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        to_hidden = torch.empty_like(hidden) if with_gradients else None
        # float32 for any dtype, because it sums over chunks; a frozen head needs none.
        trained = with_gradients and ctx.needs_input_grad[1]
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if trained else None
        # An uncompiled softmax would first copy bf16 logits to float32; a compiled one does not.
        wide: dict[str, Any] = {"out_dtype": torch.float32} if on_gpu(hidden) and not fused else {}
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(labels), rows):
                part = slice(start, start + rows)
                label, counts = labels[part, None], labels[part, None] != IGNORED_LABEL
                # The label -100 is no column; `counts` masks the rows that have it.
                label = label.clamp(min=0)
                if fused:
                    logits = hidden[part] @ weight.T
                    loss, gradient = fused(logits, label, counts, with_gradients, cap)
                    del logits
                else:
                    logits, slope = torch.mm(hidden[part], weight.T, **wide), None
                    if cap is not None:
                        logits = capped(logits.float(), cap)
                        slope = _slope(logits, cap) if with_gradients else None
                    log_softmax = F.log_softmax(logits, 1, dtype=torch.float32)
                    del logits
                    dtype = hidden.dtype if with_gradients else None
                    loss, gradient = _in_place(log_softmax, label, counts, dtype, slope)
                    del log_softmax, slope
                total += loss
                if gradient is None or to_hidden is None:
                    continue
                torch.mm(gradient, weight, out=to_hidden[part]).mul_(counts)
                if to_weight is not None:
                    add_product(to_weight, gradient.T, hidden[part] * counts)
                del gradient  # frees memory before the next chunk's logits
        ctx.save_for_backward(to_hidden, to_weight)
        ctx.dtype = weight.dtype
        return total


class _ShardedLoss(_ScaledGradients):
    """`_ChunkedLoss` where each rank has some rows of the head. There are two small all-reduces per
    chunk: of the largest logits, and of the sums for softmax and loss."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: int,
        start: int,
        with_gradients: bool,
        group: dist.ProcessGroup,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        to_hidden = torch.empty_like(hidden) if with_gradients else None
        trained = with_gradients and ctx.needs_input_grad[1]
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if trained else None
        chunks = _chunks_of_logits(hidden, weight, labels, rows, start, None)
        with torch.autocast(hidden.device.type, enabled=False):
            for part, logits, index, mine in chunks:
                counts = labels[part] != IGNORED_LABEL
                largest = logits.amax(1)
                dist.all_reduce(largest, dist.ReduceOp.MAX, group)
                logits.sub_(largest[:, None])  # so that exp does not overflow
                target = logits.gather(1, index)[:, 0] * mine
                likely = logits.exp_()
                sums = torch.stack([likely.sum(1), target])
                dist.all_reduce(sums, group=group)
                total += ((sums[0].log() - sums[1]) * counts).sum()
                if to_hidden is not None:
                    likely.div_(sums[0][:, None]).scatter_add_(1, index, -mine.float()[:, None])
                    # Rows whose label does not count have no gradient.
                    gradient = likely.mul_(counts[:, None]).to(hidden.dtype)
                    torch.mm(gradient, weight, out=to_hidden[part])
                    if to_weight is not None:
                        add_product(to_weight, gradient.T, hidden[part])
                    del gradient
                del logits, likely  # frees memory before the next chunk's logits
        ctx.save_for_backward(to_hidden, to_weight)
        ctx.dtype = weight.dtype
        return total


class _LabelLogProbs(torch.autograd.Function):
    """Implements `label_log_probs` for hidden (N, D), weight (V, D), labels (N,)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        rows: int,
        start: int,
        group: dist.ProcessGroup | None,
        cap: float | None,
    ) -> Tensor:
        log_probs = torch.zeros(len(labels), dtype=torch.float32, device=hidden.device)
        sums = torch.zeros_like(log_probs)  # logarithms of the softmax sums
        chunks = _chunks_of_logits(hidden, weight, labels, rows, start, cap)
        with torch.autocast(hidden.device.type, enabled=False):
            for part, logits, index, mine in chunks:
                target = logits.gather(1, index)[:, 0] * mine
                if group is None:
                    total = logits.logsumexp(1)
                else:
                    largest = logits.amax(1)
                    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
                    both = torch.stack([logits.sub_(largest[:, None]).exp_().sum(1), target])
                    dist.all_reduce(both, group=group)
                    total, target = both[0].log() + largest, both[1]
                sums[part] = total
                log_probs[part] = (target - total) * (labels[part] != IGNORED_LABEL)
                del logits  # frees memory before the next chunk's logits
        ctx.save_for_backward(hidden, weight, labels, sums)
        ctx.rows, ctx.start, ctx.cap = rows, start, cap
        return log_probs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, sums = ctx.saved_tensors
        weights = gradients[0] * (labels != IGNORED_LABEL)
        to_hidden = torch.empty_like(hidden)
        # float32 for any dtype, because it sums over chunks; a frozen head needs none.
        trained = ctx.needs_input_grad[1]
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if trained else None
        chunks = _chunks_of_logits(hidden, weight, labels, ctx.rows, ctx.start, ctx.cap)
        with torch.autocast(hidden.device.type, enabled=False):
            for part, logits, index, mine in chunks:
                factor = weights[part, None]
                slope = None if ctx.cap is None else _slope(logits, ctx.cap)
                likely = logits.sub_(sums[part, None]).exp_().mul_(-factor)
                wide = likely.scatter_add_(1, index, factor * mine[:, None])
                gradient = (wide if slope is None else wide.mul_(slope)).to(hidden.dtype)
                torch.mm(gradient, weight, out=to_hidden[part])
                if to_weight is not None:
                    add_product(to_weight, gradient.T, hidden[part])
                # frees memory before the next chunk's logits
                del logits, slope, likely, wide, gradient
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), *(None,) * 5


def _chunks_of_logits(
    hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, start: int, cap: float | None
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield (rows of `hidden`, their float32 logits, column of each label in them (R, 1), whether
    the label counts and this rank has its column) in chunks of rows. Autocast must be off."""
    wide: dict[str, Any] = {"out_dtype": torch.float32} if on_gpu(hidden) else {}
    for begin in range(0, len(labels), rows):
        part = slice(begin, begin + rows)
        label = labels[part] - start
        mine = (labels[part] != IGNORED_LABEL) & (label >= 0) & (label < len(weight))
        index = label.clamp(0, len(weight) - 1)[:, None]
        # No variable here refers to the logits, so that the caller can free them.
        yield part, capped(torch.mm(hidden[part], weight.T, **wide).float(), cap), index, mine


def preference_loss(
    objective: ObjectiveSection,
    by_label: Tensor,
    segments: Tensor,
    counts: Tensor,
    reference: Tensor | None,
) -> Tensor | dict[str, Tensor]:
    """Compare the answers of P pairs by `objective.name`: DPO (Rafailov et al. 2023), IPO (Azar et
    al. 2023), SimPO (Meng et al. 2024) or ORPO (Hong et al. 2024). docs/fine_tuning.md has the
    formulas. Returns means, float64 scalars by name: `loss`; `reward_margin`, β times the score of
    the chosen answer minus that of the rejected; `reward_accuracy`, how often that is positive;
    with `sft_weight` also `cross_entropy`, of the chosen answers per token. If a reference is
    needed and missing, returns the log-probabilities of the answers (2 P,).

    Args:
        by_label: (N,), log-probabilities of labels.
        segments: N int64, index of each label's answer: chosen, rejected, chosen, rejected ….
        counts: (2 P,), numbers of tokens of the answers.
        reference: (2 P,) float64, log-probabilities of the answers under the reference model; None
            if they are not computed yet, or the objective needs none.
    """
    name, gamma, sft_weight = objective.name, objective.gamma, objective.sft_weight
    beta = objective.beta or USUAL_BETA[name]
    sums = by_label.new_zeros(len(counts), dtype=torch.float64)
    log_probs = sums.index_add(0, segments.flatten(), by_label.double())
    scores = means = log_probs / counts
    if objective.referenced:
        if reference is None:
            return log_probs
        gained = log_probs - reference
        # IPO's paper writes sums; its authors advise means, which trl uses, too.
        scores = gained / counts if name == "ipo" else gained
    elif name == "orpo":  # log(1 - p) would lose its digits for p near 1
        scores = means - torch.log(-torch.expm1(means))
    chosen, rejected = scores.view(-1, 2).unbind(1)
    ahead = chosen - rejected
    match name:
        case "ipo":
            loss = (ahead - 1 / (2 * beta)) ** 2
        case "orpo":
            loss = -beta * F.logsigmoid(ahead)
        case "simpo":
            loss = -F.logsigmoid(beta * ahead - (USUAL_GAMMA if gamma is None else gamma))
        case _:
            loss = -F.logsigmoid(beta * ahead)
    recorded = {
        "reward_margin": (beta * ahead).mean(),
        "reward_accuracy": (ahead > 0).double().mean(),
    }
    if weight := float(name == "orpo") if sft_weight is None else sft_weight:
        cross_entropy = -means.view(-1, 2)[:, 0]
        recorded["cross_entropy"] = cross_entropy.mean()
        loss = loss + weight * cross_entropy
    return {"loss": loss.mean(), **recorded}
