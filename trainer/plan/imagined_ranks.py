"""Imagined ranks for traces: one rank runs the real code of tensor, context and expert parallelism,
and its messages are recorded instead of sent. Routers are assumed to be even: all ranks that divide
experts get equally many rows."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Placement, Shard

from trainer.models import loss
from trainer.parallel import context, expert, tensor
from trainer.plan.cuda_kernels import loss_patches

Note = Callable[..., None]
"""Called with the kind of receivers (see `Sent`), the bytes, and the rounds of the ring if not
one."""


class Ranks:
    """Replaces a one-dimensional mesh, and its group."""

    def __init__(self, count: int, rank: int = 0) -> None:
        self.count, self.rank = count, rank

    def get_group(self) -> "Ranks":
        """The group of all its ranks."""
        return self

    def get_local_rank(self) -> int:
        """Index of the traced rank."""
        return self.rank

    def size(self) -> int:
        return self.count


def tokens_of(length: int, cp: int, rank: int) -> int:
    """Number of tokens of a sequence on a rank of a ring."""
    return sum(map(len, context.chunks(length, cp, rank)))


def ring_of(rows: int, length: int, cp: int) -> context.Ring:
    """Attention of the ring's rank with the most tokens, with one document per sequence. Call it
    outside fake mode: it reads tensor values."""
    group: Any = Ranks(cp, max(range(cp), key=lambda rank: tokens_of(length, cp, rank)))
    with patch.object(context, "dist", _silent(lambda *_: None)):
        return context.Ring(group, None, (rows, length), torch.device("cpu"))


@contextmanager
def imagined_ranks(
    note: Note, ring: context.Ring | None, gpu_memory: float | None
) -> Iterator[None]:
    """While entered, parameters are the first rank's parts, and messages are passed to `note`.

    Args:
        note: see `Note`.
        ring: of every pass.
        gpu_memory: bytes of the GPU that computes; None on a CPU.
    """

    def part(whole: Tensor, mesh: Ranks, placements: list[Placement], **_: Any) -> Tensor:
        (cut,) = placements
        return whole.chunk(mesh.count, cut.dim)[0].clone() if isinstance(cut, Shard) else whole

    def gather(parts: Tensor, mine: Tensor, group: Ranks) -> None:
        note("layers", parts.nbytes - mine.nbytes)

    def reduce_scatter(mine: Tensor, parts: Tensor, group: Ranks) -> None:
        note("layers", parts.nbytes - mine.nbytes)

    def pass_on(x: Tensor, tokens: int, tag: int) -> Callable[[], Tensor]:
        note("ring", x.nbytes)
        coming = x.new_empty((2, tokens, *x.shape[2:]))
        return lambda: (x, coming)[1]  # keeps x alive, as the real message does

    def even(counts: Tensor, _arriving: Tensor, ranks: int, rows: int) -> Any:
        share = [len(part) for part in torch.arange(rows, device="cpu").tensor_split(ranks)]
        return share, share

    def to_experts(x: Tensor, _sent: Any, received: list[int], group: Ranks) -> Tensor:
        note("experts", x.nbytes * (group.count - 1) / group.count)
        return x.new_empty((sum(received), *x.shape[1:]))

    divided = patch.multiple(
        expert,
        dist=_silent(note),
        distribute_tensor=part,
        _rows=even,
        _exchange=to_experts,
    )
    cut = patch.multiple(
        tensor,
        dist=_silent(note),
        distribute_tensor=part,
        all_gather_single=gather,
        reduce_scatter_single=reduce_scatter,
        _local=lambda parameter, partial=False: parameter,
    )
    turned = patch.multiple(context, dist=_silent(lambda *_: None), Ring=lambda *_: ring)
    with ExitStack() as stack:
        stack.enter_context(cut)
        stack.enter_context(patch.object(loss, "dist", _silent(note)))
        stack.enter_context(divided)
        stack.enter_context(turned)
        if gpu_memory is not None:
            of_gpu = loss_patches(gpu_memory)
            stack.enter_context(patch.multiple(tensor, **of_gpu))
            stack.enter_context(patch.object(context, "on_gpu", of_gpu["on_gpu"]))
        if ring:
            ring.pass_on = pass_on  # type: ignore[method-assign]
        yield


def _silent(note: Note) -> SimpleNamespace:
    """A replacement for the used parts of `torch.distributed`."""

    def all_reduce(x: Tensor, _op: Any = None, group: Ranks | None = None) -> None:
        if group:
            note("layers", 2 * x.nbytes * (group.count - 1) / group.count, 2)

    return SimpleNamespace(
        ReduceOp=dist.ReduceOp,
        ProcessGroup=dist.ProcessGroup,
        all_reduce=all_reduce,
        all_to_all_single=lambda *_, group: None,
        get_rank=lambda group: group.rank,
        get_world_size=lambda group: group.count,
    )
