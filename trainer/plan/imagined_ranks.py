"""Lets one rank of tensor, context and expert parallelism be traced without other ranks. The real
code runs, and messages are recorded instead of sent. Routers are assumed to send equally many rows
to all ranks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Placement, Shard

from trainer.models import loss
from trainer.parallel import context, expert, tensor
from trainer.recipe.strategies import dividing

Note = Callable[..., None]
"""Records a message. Arguments: "layers", "ring" or "experts", see `PlannedPassTraffic`; bytes that
this rank sends; number of calls, by default 1."""


class PlannedRanks:
    """Replaces a 1-D device mesh and its process group in a trace."""

    def __init__(self, count: int, rank: int = 0) -> None:
        self.count, self.rank = count, rank

    def get_group(self) -> "PlannedRanks":
        return self

    def get_local_rank(self) -> int:
        return self.rank

    def size(self) -> int:
        return self.count


def ring_of(rows: int, length: int, cp: int) -> context.ContextParallelRing:
    """Create the ring attention of the rank with the most tokens, for one document per sequence.
    Called outside fake mode, because it reads tensor values."""
    tokens = [sum(map(len, context.chunks(length, cp, rank))) for rank in range(cp)]
    group: Any = PlannedRanks(cp, tokens.index(max(tokens)))
    with patch.object(context, "dist", _distributed(lambda *_: None)):
        return context.ContextParallelRing(group, None, (rows, length), torch.device("cpu"))


@contextmanager
def imagined_ranks(
    note: Note, ring: context.ContextParallelRing | None, on_gpu: bool = False
) -> Iterator[None]:
    """Context in which parameters are cut to the first rank's parts, and messages are passed to
    `note` instead of sent. `ring`: ring attention for all passes; None without context parallelism.
    `on_gpu`: whether the traced rank has a GPU."""

    def part(whole: Tensor, mesh: PlannedRanks, placements: list[Placement], **_: Any) -> Tensor:
        (cut,) = placements
        return whole.chunk(mesh.count, cut.dim)[0].clone() if isinstance(cut, Shard) else whole

    def collect(result: Tensor, x: Tensor, group: PlannedRanks) -> None:
        note("layers", abs(result.nbytes - x.nbytes))

    def pass_on(x: Tensor, tokens: int, tag: int) -> Callable[[], Tensor]:
        note("ring", x.nbytes)
        coming = x.new_empty((2, tokens, *x.shape[2:]))
        return lambda: (x, coming)[1]  # keeps x alive until the wait, as a real message does

    def even(counts: Tensor, _arriving: Tensor, ranks: int, rows: int) -> Any:
        share = [len(part) for part in torch.arange(rows, device="cpu").tensor_split(ranks)]
        return share, share

    def to_experts(x: Tensor, sent: Any, received: list[int], group: PlannedRanks) -> Tensor:
        note("experts", x.nbytes * (group.count - 1) / group.count)
        return x.new_empty((sum(received), *x.shape[1:]))

    imagined: dict[str, Any] = {
        "dist": _distributed(note),
        "distribute_tensor": part,
        "all_gather_single": collect,
        "reduce_scatter_single": collect,
    }
    # Not recorded: a few bytes of counts, and of means over parts of sequences.
    silent = _distributed(lambda *_: None)
    turned = patch.multiple(context, dist=silent, ContextParallelRing=lambda *_: ring)
    with ExitStack() as stack:
        modules = [import_module(module.APPLIED_BY) for module in dividing("layers", "experts")]
        for module in (*modules, loss):
            used = {name: other for name, other in imagined.items() if hasattr(module, name)}
            stack.enter_context(patch.multiple(module, **used))
        whole = patch.object(tensor, "_local", lambda parameter, partial=False: parameter)
        stack.enter_context(whole)
        exchanged = patch.multiple(expert, dist=silent, _rows=even, _exchange=to_experts)
        stack.enter_context(exchanged)
        stack.enter_context(turned)
        if on_gpu:
            stack.enter_context(patch.object(context, "on_gpu", lambda _: True))
        if ring:
            ring.pass_on = pass_on  # type: ignore[method-assign]
        yield


def _distributed(note: Note) -> SimpleNamespace:
    """Return a replacement for `torch.distributed` whose collectives pass messages to `note`."""

    def all_reduce(x: Tensor, _op: Any = None, group: Any = None) -> None:
        note("layers", 2 * x.nbytes * (group.count - 1) / group.count, 2)

    def all_to_all_single(_received: Tensor, x: Tensor, *_: Any, group: PlannedRanks) -> None:
        note("layers", x.nbytes * (group.count - 1) / group.count)

    return SimpleNamespace(
        ReduceOp=dist.ReduceOp,
        ProcessGroup=dist.ProcessGroup,
        all_reduce=all_reduce,
        all_to_all_single=all_to_all_single,
        get_rank=lambda group: group.rank,
        get_world_size=lambda group: group.count,
    )
