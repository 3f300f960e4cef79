"""Expert parallelism: each rank holds some experts of every layer, and tokens are sent to them.
Lepikhin et al. 2020, "GShard".

[Note: expert parallelism] Of E experts each of `ep` data-parallel ranks holds E / ep. A layer sends
every token to the ranks of the experts that its router chose, and the outputs back: two all-to-alls
in forward, two in backward. The number of rows per rank is known only after the router, so counts
are sent first. The host waits for them once per layer and forward pass, because an all-to-all takes
its sizes from the host. Recomputation reuses the sizes, see [Note: decisions]. No token is dropped.

An expert computes tokens of all `ep` ranks, so its gradient is already a sum over them. FSDP shards
the expert further over the ranks that hold the same experts, and sums its gradient over only those
ranks. All other parameters are sharded over all ranks, as without expert parallelism.

Shapes: N rows, D hidden, E experts, P ranks.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer.models.decisions import decided
from trainer.parallel.passes import ParallelActivationMap
from trainer.parallel.tensor import layout_is_exact, with_local
from trainer.recipe import Recipe, RecipeError, StrategySection, strategies

Compute = Callable[[Tensor, Tensor], Tensor]
"""Maps (rows (N, D) sorted by expert, number of rows of each expert (E)) to outputs (N, D)."""


def stacked_modules(model: nn.Module) -> list[nn.Module]:
    stacks = getattr(model, "stacks", ())
    return [
        module
        for name, module in model.named_modules()
        if any(fnmatchcase(name, pattern) for pattern in stacks)
    ]


def check_model(model: nn.Module, recipe: Recipe, shards: int) -> None:
    """Raise RecipeError unless the experts divide evenly among the `ep` ranks, and FSDP can shard
    each rank's experts over the ranks that hold the same ones. `shards`: number of FSDP shards of
    each stage."""
    ep = strategies.ep.ranks(recipe.strategy)
    holders = shards * strategies.ranks(recipe.strategy, "layers")
    counts = {len(p) for module in stacked_modules(model) for p in module.parameters()}
    if not counts:
        raise RecipeError("strategy.ep: the model has no experts; set strategy.ep=1")
    for count in counts:
        if count % ep:
            raise RecipeError(
                f"strategy.ep: {count} experts do not divide among {ep} ranks; set a divisor"
            )
        if not layout_is_exact(count, ep, holders // ep):
            raise RecipeError(
                f"strategy.ep: {count} experts cannot be cut over {holders} ranks; start another "
                "number of ranks, or set strategy.shard_size"
            )


def apply(model: nn.Module, mesh: DeviceMesh, _strategy: StrategySection) -> list[nn.Module]:
    """Replace the parameters of expert modules by DTensors of this rank's experts, over `mesh`
    (1-D), before FSDP. Weights must be equal on all ranks, or on the meta device. Returns the
    expert modules."""
    experts = stacked_modules(model)
    for module in experts:
        for key, whole in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            parameter = nn.Parameter(spread, requires_grad=whole.requires_grad)
            module.register_parameter(key, parameter)
        module.forward = _with_exchange(module, module.forward, mesh)
    return experts


def _with_exchange(module: nn.Module, compute: Compute, mesh: DeviceMesh) -> Compute:
    """Return a forward for `module` that sends the rows of tokens to the ranks of their experts,
    runs `compute`, this rank's experts, on the rows received, and sends the outputs back. Rows
    (N, D) are sorted by expert, with counts (E), in and out."""
    ranks = mesh.size()

    def exchange_counts(counts: Tensor, rows: int) -> tuple[list[int], list[int], Tensor, Tensor]:
        """Return numbers of rows to each rank and from each rank; the permutation that sorts
        received rows by expert; and the number of rows of each expert on this rank."""
        group = mesh.get_group()  # at each call, because `rejoin` replaces the group
        # (E): rows from rank 0 for each expert of this rank, then from rank 1, …
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = _rows(counts, arriving, ranks, rows)
        # Rows arrive sorted by rank, then by expert; experts need them sorted by expert.
        mine = torch.arange(len(counts) // ranks, device=counts.device).repeat(ranks)
        order = mine.repeat_interleave(arriving, output_size=sum(received)).argsort(stable=True)
        return sent, received, order, arriving.view(ranks, -1).sum(dim=0)

    def forward(x: Tensor, counts: Tensor) -> Tensor:
        group = mesh.get_group()
        # `decided` stores the result, so that recomputation does not wait for the device again.
        sent, received, order, mine = decided(partial(exchange_counts, counts, len(x)))
        there = partial(_exchange, sent=sent, received=received, group=group)
        back = partial(_exchange, sent=received, received=sent, group=group)
        rows = ParallelActivationMap.apply(x, there, back)
        with with_local(module):
            outputs = compute(rows[order], mine)
        # Outputs are sent back in the order in which rows arrived.
        placed = torch.empty_like(outputs).index_copy(0, order, outputs)
        return ParallelActivationMap.apply(placed, back, there)

    return forward


def _rows(
    counts: Tensor, arriving: Tensor, ranks: int, _of_plan: int
) -> tuple[list[int], list[int]]:
    """Return the numbers of rows to each rank and from each rank. Waits for the device. `_of_plan`:
    number of rows of this rank, for the plan, which replaces this function."""
    sent, received = torch.stack([counts, arriving]).view(2, ranks, -1).sum(dim=-1).tolist()
    return sent, received


def _exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send sent[r] rows to each rank r, and return received[r] rows from each rank r."""
    output = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(output, x.contiguous(), received, sent, group=group)
    return output
