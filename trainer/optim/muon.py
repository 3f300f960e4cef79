"""Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks") for sharded
matrices, with the mathematics of torch.optim.Muon.

[Note: owners] The momentum is kept and updated in shards, as AdamW's moments are. Only the
orthogonalisation needs a whole matrix. For it the shards of a matrix are sent to one rank of the
shard group, its *owner*, and the orthogonal shards are sent back. Both messages are in bfloat16,
the format of the iteration, so they lose no precision. Matrices are sorted by size and taken in
rounds of one matrix per rank, so the owners of a round have about equal work. In exact mode all
other operations are separate multiplications and additions, so the bits of an update depend only on
the gradient.

Under tensor parallelism FSDP shards the part of each tp rank again. So shards are sent in two
steps: over FSDP's dimension, then over the tp ranks.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from checkpointing.format.tensors import local_tensor
from trainer.optim.method import OptimizerMethod, State


def _update(
    parameters: Sequence[nn.Parameter],
    group: Mapping[str, Any],
    state: State,
    exact: bool,
    factor: float,
) -> None:
    lr, momentum = group["lr"], group["momentum"]

    def mix(into: torch.Tensor, other: torch.Tensor, share: float) -> None:
        if exact:
            # Not lerp_: some of its kernels fuse the multiplication and the addition.
            into.mul_(1 - share).add_(other * share)
        else:
            into.lerp_(other, share)

    def direction(parameter: nn.Parameter) -> torch.Tensor:
        """Update the momentum; return this rank's shard of the matrix to orthogonalise."""
        assert parameter.grad is not None
        gradient, mean = map(local_tensor, (parameter.grad, state[parameter]["momentum_buffer"]))
        if factor != 1.0:
            gradient.mul_(factor)
        mix(mean, gradient, 1 - momentum)
        if group["nesterov"]:
            mix(gradient, mean, momentum)
            return gradient.bfloat16()
        return mean.bfloat16()

    def apply(parameter: nn.Parameter, change: torch.Tensor) -> None:
        weight, rate = local_tensor(parameter), lr * rate_factor(group["adjust_lr"], parameter)
        weight.mul_(1 - lr * group["weight_decay"])
        if exact:
            weight.sub_(change.to(weight).mul_(rate))
        else:
            weight.add_(change, alpha=-rate)

    def work(matrix: nn.Parameter) -> tuple[int, int]:
        return -min(matrix.shape), -max(matrix.shape)

    for members, mesh, axes in _by_shard_group(parameters):
        ranks = math.prod(mesh.size(axis) for axis in axes) if mesh else 1
        # The sort is stable, so the rounds are the same on all ranks.
        ordered = sorted(members, key=work)
        for start in range(0, len(ordered), ranks):
            matrices = ordered[start : start + ranks]
            slices = [direction(matrix) for matrix in matrices]
            changes = _at_owners(matrices, slices, mesh, axes, group)
            for matrix, change in zip(matrices, changes, strict=True):
                apply(matrix, change)


def orthogonal(matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Return approximately U V^T for a matrix U S V^T (rows, columns), both bfloat16, by
    Newton-Schulz iterations of a quintic polynomial. Singular values of the result are about 0.5 to
    1.5. `group` has the settings of the iteration."""
    a, b, c = group["ns_coefficients"]
    dtype = _product_dtype(matrix.device.type)

    def rounded(product: torch.Tensor) -> torch.Tensor:
        return product.bfloat16().to(dtype)

    # Transposed if it is tall, because then the Gram matrix is smaller.
    tall = matrix.shape[0] > matrix.shape[1]
    result = matrix.T if tall else matrix
    result = (result / result.norm().clamp(min=group["ns_eps"])).to(dtype)
    for _ in range(group["ns_steps"]):
        gram = rounded(result @ result.T)
        factor = rounded(torch.addmm(gram, gram, gram, beta=b, alpha=c))
        result = rounded(torch.addmm(result, factor, result, beta=a))
    return (result.T if tall else result).bfloat16()


@cache
def _product_dtype(device: str) -> torch.dtype:
    # A CPU without bfloat16 instructions is a hundred times faster in float32. Rounded to bfloat16,
    # the results differ only by the order of sums.
    if device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32


def rate_factor(adjust: Literal["original", "match_rms_adamw"], matrix: torch.Tensor) -> float:
    """Return the factor for the learning rate of a matrix. With original, the RMS of updates is
    about 1 / sqrt(columns), whatever the number of rows. With match_rms_adamw it is about 0.2, as
    that of AdamW's updates (Liu et al. 2025, "Muon is Scalable for LLM Training")."""
    rows, columns = matrix.shape
    if adjust == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def _by_shard_group(
    parameters: Sequence[nn.Parameter],
) -> Iterator[tuple[list[nn.Parameter], DeviceMesh | None, tuple[int, ...]]]:
    """Yield (matrices, mesh, mesh dimensions over which they are sharded). The mesh dimension that
    cut the matrices last comes first. The mesh is None for matrices that are whole on each rank.
    Raises NotImplementedError for unsupported placements."""
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh: DeviceMesh | None = None
        axes: tuple[int, ...] = ()
        if isinstance(parameter, DTensor):
            mesh, cut = parameter.device_mesh, parameter.placements
            axes = tuple(a for a, placement in enumerate(cut) if not placement.is_replicate())
            # FSDP's dimension comes first in a mesh, and cuts last.
            if len(axes) > 2 or any(not hasattr(cut[axis], "dim") for axis in axes):
                raise NotImplementedError(
                    "optimizer.name: muon needs matrices that are whole, or sharded over at most "
                    f"two mesh dimensions, but the placements of one are {cut}; use "
                    "optimizer.name=adamw, or another strategy"
                )
            axes = tuple(axis for axis in axes if mesh.size(axis) > 1)
            mesh = mesh if axes else None
        groups.setdefault((mesh, axes), []).append(parameter)
    for (shared, over), members in groups.items():
        yield members, shared, over


def _at_owners(
    matrices: Sequence[nn.Parameter],
    slices: Sequence[torch.Tensor],
    mesh: DeviceMesh | None,
    axes: Sequence[int],
    group: Mapping[str, Any],
) -> list[torch.Tensor]:
    """Send shards to the owners, orthogonalise, and send the results back. Called on all ranks of
    `mesh`. Returns this rank's shard of each orthogonalised matrix.

    Args:
        matrices: the matrices of a round, sharded over the dimensions `axes` of `mesh`.
        slices: this rank's shard of each matrix. Matrix n is sent to rank n % R of the mesh
            dimension axes[0], which has R ranks.
    """
    if mesh is None or not axes:
        return [
            orthogonal(each.to(_device(matrix)), group).to(each.device)
            for matrix, each in zip(matrices, slices, strict=True)
        ]
    axis, *inner = axes
    ranks, me = mesh.size(axis), mesh.get_local_rank(axis)
    order = [n for rank in range(ranks) for n in range(rank, len(matrices), ranks)]
    sent = [sum(each.numel() for each in slices[rank::ranks]) for rank in range(ranks)]
    mine = matrices[me::ranks]
    shapes = [_slice_shapes(matrix, mesh, axis, inner) for matrix in mine]
    by_rank = [[math.prod(each[rank]) for each in shapes] for rank in range(ranks)]
    kept = [sum(sizes) for sizes in by_rank]
    outgoing = _flat((slices[n] for n in order), mesh.device_type)
    incoming = outgoing.new_empty(sum(kept))
    shards = mesh.get_group(axis)
    dist.all_to_all_single(incoming, outgoing, kept, sent, group=shards)
    pieces = [part.split(sizes) for part, sizes in zip(incoming.split(kept), by_rank, strict=True)]
    dims = [matrix.placements[axis].dim for matrix in mine]  # type: ignore[attr-defined]
    joined = [
        torch.cat([pieces[rank][n].view(each[rank]) for rank in range(ranks)], dims[n])
        for n, each in enumerate(shapes)
    ]
    orthogonalised = _at_owners(mine, joined, mesh, inner, group)
    cut = [
        whole.split([shape[dim] for shape in each], dim)
        for whole, each, dim in zip(orthogonalised, shapes, dims, strict=True)
    ]
    incoming = _flat((parts[rank] for rank in range(ranks) for parts in cut), mesh.device_type)
    dist.all_to_all_single(outgoing, incoming, sent, kept, group=shards)
    by_order = outgoing.split([slices[n].numel() for n in order])
    changes = dict(zip(order, by_order, strict=True))
    return [changes[n].view(each.shape).to(each.device) for n, each in enumerate(slices)]


def _device(matrix: nn.Parameter) -> torch.device | str:
    # With strategy.offload shards are on the host, but the GPU orthogonalises.
    return matrix.device_mesh.device_type if isinstance(matrix, DTensor) else matrix.device


def _flat(tensors: Iterable[torch.Tensor], device: str) -> torch.Tensor:
    parts = (tensor.reshape(-1).to(device) for tensor in tensors)
    return torch.cat([torch.empty(0, dtype=torch.bfloat16, device=device), *parts])


def _slice_shapes(
    matrix: nn.Parameter, mesh: DeviceMesh, axis: int, inner: Sequence[int]
) -> list[list[int]]:
    """Return the shapes of all ranks' shards of a matrix over mesh dimension `axis`, for ranks with
    this rank's coordinates in the dimensions `inner`."""
    assert isinstance(matrix, DTensor)
    shape = list(matrix.shape)
    for other in inner:
        dim = matrix.placements[other].dim  # type: ignore[attr-defined]
        shape[dim] = chunk_lengths(shape[dim], mesh.size(other))[mesh.get_local_rank(other)]
    dim = matrix.placements[axis].dim  # type: ignore[attr-defined]
    lengths = chunk_lengths(shape[dim], mesh.size(axis))
    return [[*shape[:dim], length, *shape[dim + 1 :]] for length in lengths]


def chunk_lengths(length: int, count: int) -> list[int]:
    """Return the lengths of the parts that torch.chunk returns, including empty parts."""
    most = -(-length // count)
    return [max(0, min(most, length - rank * most)) for rank in range(count)]


MUON = OptimizerMethod(
    "muon",
    ("momentum_buffer",),
    counts=False,
    update=lambda parameters, group, state, exact: partial(
        _update, parameters, group, state, exact
    ),
    whole=True,
)
