"""Expert parallelism: each rank has some experts of every layer, and tokens go to theirs.

Lepikhin et al. 2020, "GShard". [Note: expert parallelism] Ranks that share the data share the
experts, too: of E experts each of `ep` ranks has E / ep. A layer sends every token to the ranks of
the experts that its router chose, and what these make of it back: two all-to-alls forward, two
backward. How many rows go where is known after the router only, so the counts are sent first, and
the host waits for them, as an all-to-all takes its sizes from the host. That is one wait for each
layer and forward pass: the router of a layer sees what the layer below made. Recomputation reuses
the sizes, see [Note: decisions]. No expert has a limit, and no token is dropped.

The experts of a rank are those of all tokens of its `ep` ranks, so their gradients are sums over
these already. FSDP cuts them further over the ranks that have the same experts, and sums over
these alone. Everything else is cut over all ranks, as without experts.

The modules are those of `Family.stacks`. They are called with rows by expert (N, D) and the count
of each (E).

Shapes: N rows, D hidden, E experts, P ranks.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer.models.decisions import decided
from trainer.parallel.tensor import told_by_sums, with_local
from trainer.recipe import RecipeError

Compute = Callable[[Tensor, Tensor], Tensor]
"""(rows (N, D) by expert, how many each expert has (E)) → rows (N, D)."""


def stacked_modules(model: nn.Module) -> list[nn.Module]:
    """The experts of each layer."""
    stacks = getattr(model, "stacks", ())
    return [
        module
        for name, module in model.named_modules()
        if any(fnmatchcase(name, pattern) for pattern in stacks)
    ]


def check_experts(model: nn.Module, ep: int, shards: int) -> None:
    """Refuse what `ep` ranks cannot divide, and FSDP then cut further: over `shards` ranks in all.

    Raises:
        RecipeError: there are no experts, or their number does not fit.
    """
    counts = {len(p) for module in stacked_modules(model) for p in module.parameters()}
    if not counts:
        raise RecipeError("strategy.ep: the model has no experts; set strategy.ep=1")
    for count in counts:
        if count % ep:
            raise RecipeError(
                f"strategy.ep: {count} experts do not divide among {ep} ranks; set a divisor"
            )
        if not told_by_sums(count, ep, shards // ep):
            raise RecipeError(
                f"strategy.ep: {count} experts cannot be cut over {shards} ranks; start another "
                "number of them, or set strategy.shard_size"
            )


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of `mesh` (1-D) its experts in place, before FSDP. Works on the meta device;
    else weights are equal on all ranks."""
    for module in stacked_modules(model):
        for key, whole in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            parameter = nn.Parameter(spread, requires_grad=whole.requires_grad)
            module.register_parameter(key, parameter)
        module.forward = _sent(module, module.forward, mesh)


def _sent(module: nn.Module, compute: Compute, mesh: DeviceMesh) -> Compute:
    """`compute` of all experts, where this rank of `mesh` has some."""
    ranks = mesh.size()

    def meet(counts: Tensor, rows: int) -> tuple[list[int], list[int], Tensor, Tensor]:
        """(rows to each rank, rows from each, their order by expert, rows of each expert)."""
        group = mesh.get_group()  # of now: see kept.py
        arriving = torch.empty_like(counts)  # (E): from each rank, for each expert of this one
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = _rows(counts, arriving, ranks, rows)
        # They come rank by rank, and of each by expert.
        mine = torch.arange(len(counts) // ranks, device=counts.device).repeat(ranks)
        order = mine.repeat_interleave(arriving, output_size=sum(received)).argsort(stable=True)
        return sent, received, order, arriving.view(ranks, -1).sum(dim=0)

    def forward(x: Tensor, counts: Tensor) -> Tensor:
        group = mesh.get_group()
        sent, received, order, mine = decided(partial(meet, counts, len(x)))
        rows = _Exchange.apply(x, sent, received, group)
        with with_local(module):
            found = compute(rows[order], mine)
        placed = torch.empty_like(found).index_copy(0, order, found)
        return _Exchange.apply(placed, received, sent, group)

    return forward


def _rows(
    counts: Tensor, arriving: Tensor, ranks: int, _of_plan: int
) -> tuple[list[int], list[int]]:
    """How many go to each rank, and come from each: the host waits for both."""
    sent, received = torch.stack([counts, arriving]).view(2, ranks, -1).sum(dim=-1).tolist()
    return sent, received


class _Exchange(torch.autograd.Function):
    """Rows to other ranks, `sent` to each in their order, `received` from each."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    found = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(found, x.contiguous(), received, sent, group=group)
    return found
