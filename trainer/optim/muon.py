"""Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks") of sharded
matrices, with the mathematics of torch.optim.Muon.

[Note: owners] The momentum is kept and moved in slices, as AdamW's moments are: memory is balanced
and a checkpoint is cut anywhere. Only the orthogonalisation needs a whole matrix. So its slices go
to one rank of the shard group, the owner, and come back orthogonal, in bfloat16 both ways, which is
what the iteration computes in: nothing is lost by it. A round has one matrix for each rank; as they
are sorted by size, all owners of a round have about the same work. Owners keep nothing from one
step to the next, so none of this shows after a change of the world.

A matrix is orthogonalised by one rank alone. In exact mode all else is one multiplication or
addition per operation, so the bits of an update depend on the gradient, and on no number of ranks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from checkpointing.format.tensors import local_tensor
from trainer.optim.method import Method, State


def update_muon(
    parameters: Sequence[nn.Parameter],
    group: Mapping[str, Any],
    state: State,
    factor: float,
    exact: bool,
) -> None:
    """See `Method.update`."""
    lr, momentum = group["lr"], group["momentum"]

    def mix(into: torch.Tensor, other: torch.Tensor, share: float) -> None:
        if exact:
            into.mul_(1 - share).add_(other * share)
        else:
            into.lerp_(other, share)

    def direction(parameter: nn.Parameter) -> torch.Tensor:
        """This rank's slice of what is to be orthogonal."""
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

    for members, mesh, axis in _by_shard_group(parameters):
        for matrices in _rounds(members, mesh.size(axis) if mesh else 1):
            slices = [direction(matrix) for matrix in matrices]
            if mesh:
                slices = _at_owners(matrices, slices, mesh, axis, group)
            else:
                slices = [orthogonal(each, group) for each in slices]
            for matrix, change in zip(matrices, slices, strict=True):
                apply(matrix, change)


def orthogonal(matrix: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """U V^T of a bfloat16 matrix U S V^T, up to singular values of about 0.5 to 1.5, by
    Newton-Schulz iterations of a quintic polynomial."""
    a, b, c = group["ns_coefficients"]
    dtype = _product_dtype(matrix.device.type)

    def rounded(product: torch.Tensor) -> torch.Tensor:
        return product.bfloat16().to(dtype)

    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if tall else matrix
    found = (found / found.norm().clamp(min=group["ns_eps"])).to(dtype)
    for _ in range(group["ns_steps"]):
        gram = rounded(found @ found.T)
        factor = rounded(torch.addmm(gram, gram, gram, beta=b, alpha=c))
        found = rounded(torch.addmm(found, factor, found, beta=a))
    return (found.T if tall else found).bfloat16()


@cache
def _product_dtype(device: str) -> torch.dtype:
    """What bfloat16 matrices are multiplied in. A CPU without arithmetic for them takes a hundred
    times as long as for float32; with results rounded to bfloat16, that gives the same but for the
    order of sums."""
    if device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32


def rate_factor(adjust: Literal["original", "match_rms_adamw"], matrix: torch.Tensor) -> float:
    """By what the learning rate of a matrix is multiplied, so that updates of all have about the
    same size; match_rms_adamw: that of AdamW's (Liu et al. 2025, "Muon is Scalable for LLM
    Training")."""
    rows, columns = matrix.shape
    if adjust == "original":
        return math.sqrt(max(1, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def _by_shard_group(
    parameters: Sequence[nn.Parameter],
) -> Iterator[tuple[list[nn.Parameter], DeviceMesh | None, int]]:
    """(matrices, mesh, its dimension over which all of them are sharded); no mesh for whole ones.

    Raises:
        NotImplementedError: a matrix is sharded over several dimensions of its mesh.
    """
    found: dict[tuple[DeviceMesh | None, int], list[nn.Parameter]] = {}
    for parameter in parameters:
        place: tuple[DeviceMesh | None, int] = (None, 0)
        if isinstance(parameter, DTensor):
            mesh, cut = parameter.device_mesh, parameter.placements
            axes = [axis for axis, placement in enumerate(cut) if not placement.is_replicate()]
            if len(axes) > 1 or any(type(cut[axis]) is not Shard for axis in axes):
                raise NotImplementedError(
                    f"optimizer.name: muon needs matrices that are sharded over one dimension of "
                    f"the mesh, but one is {cut}; use optimizer.name=adamw, or another strategy"
                )
            if axes and mesh.size(axes[0]) > 1:
                place = (mesh, axes[0])
        found.setdefault(place, []).append(parameter)
    for (shared, axis), members in found.items():
        yield members, shared, axis


def _rounds(matrices: Sequence[nn.Parameter], ranks: int) -> Iterator[list[nn.Parameter]]:
    """One matrix for each rank at a time, the largest first: the n-th belongs to rank n."""

    def work(matrix: nn.Parameter) -> tuple[int, int]:
        return -min(matrix.shape), -max(matrix.shape)

    ordered = sorted(matrices, key=work)  # stable, so the same on all ranks
    for start in range(0, len(ordered), ranks):
        yield ordered[start : start + ranks]


def _at_owners(
    matrices: Sequence[nn.Parameter],
    slices: Sequence[torch.Tensor],
    mesh: DeviceMesh,
    axis: int,
    group: Mapping[str, Any],
) -> list[torch.Tensor]:
    """This rank's slices of the orthogonal matrices, from its slices of the given ones."""
    ranks, me = mesh.size(axis), mesh.get_local_rank(axis)
    idle = [0] * (ranks - len(matrices))
    sent = [each.numel() for each in slices] + idle
    mine = matrices[me] if me < len(matrices) else None
    parts = _slice_shapes(mine, axis, ranks) if mine is not None else []
    kept = [math.prod(part) for part in parts] or [0] * ranks
    # With strategy.offload slices are on the host.
    outgoing = torch.cat([each.reshape(-1) for each in slices]).to(mesh.device_type)
    incoming = outgoing.new_empty(sum(kept))
    shards = mesh.get_group(axis)
    dist.all_to_all_single(incoming, outgoing, kept, sent, group=shards)
    if mine is not None:
        dim = mine.placements[axis].dim  # type: ignore[attr-defined]
        pieces = [
            piece.view(shape) for piece, shape in zip(incoming.split(kept), parts, strict=True)
        ]
        whole = orthogonal(torch.cat(pieces, dim), group)
        lengths = [shape[dim] for shape in parts]
        incoming = torch.cat([piece.reshape(-1) for piece in whole.split(lengths, dim)])
    dist.all_to_all_single(outgoing, incoming, sent, kept, group=shards)
    back = outgoing.to(slices[0].device).split(sent[: len(slices)])
    return [flat.view(each.shape) for flat, each in zip(back, slices, strict=True)]


def _slice_shapes(matrix: nn.Parameter, axis: int, ranks: int) -> list[list[int]]:
    """Shape of each rank's slice, as `Shard` cuts."""
    assert isinstance(matrix, DTensor)
    dim = matrix.placements[axis].dim  # type: ignore[attr-defined]
    size = matrix.shape[dim]
    most = -(-size // ranks)
    shapes = [list(matrix.shape) for _ in range(ranks)]
    for rank, shape in enumerate(shapes):
        shape[dim] = max(0, min(most, size - rank * most))
    return shapes


MUON = Method("muon", ("momentum_buffer",), counts=False, elementwise=False, update=update_muon)
