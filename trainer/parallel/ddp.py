"""Replicated parameters: DDP, and ZeRO-1 on top of it. Gradients are summed over the ranks, not
averaged, because the loss is already divided by the global number of target tokens."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from checkpointing.format.tensors import local_tensor
from trainer.models.versions import all_gather_single, ddp_options

BUCKET_BYTES = 25 * 2**20
"""Largest number of bytes of a bucket: what one collective reduces or gathers."""


def apply_ddp(model: nn.Module, mesh: DeviceMesh, *, sync: bool = False) -> nn.Module:
    """Wrap a model on its device in DDP, so that backward sums gradients over `mesh` (1-D). `sync`:
    whether the first rank's weights are broadcast. Called on all ranks of `mesh`."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # At least two buckets: a single one would be reduced after backward, without overlap.
    half = sum(parameter.nbytes for parameter in trained) / 2
    # A model with this attribute may leave parameters without a gradient.
    some_unused = getattr(model, "some_unused", False)
    wrapped = DistributedDataParallel(
        model,
        device_ids=[torch.cuda.current_device()] if mesh.device_type == "cuda" else None,
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,  # otherwise gradients take memory twice
        bucket_cap_mb=min(BUCKET_BYTES, half) / 2**20,
        find_unused_parameters=some_unused,
        init_sync=sync,
        **ddp_options,  # see ParallelModel.share_buffers
    )
    # Without this hook DDP averages.
    wrapped.register_comm_hook(mesh.get_group(), _sum_gradients)
    if not some_unused:
        _settle_buckets(wrapped, trained)
    return wrapped


def apply_ddp_again(wrapped: DistributedDataParallel, mesh: DeviceMesh) -> nn.Module:
    """Wrap the model of `wrapped`, whose process group was destroyed, for the new group of `mesh`.
    Called on all ranks of `mesh`."""
    # Nothing else refers to the reducer. When it is freed, its hooks leave the parameters.
    del wrapped.reducer, wrapped.logger
    return apply_ddp(wrapped.module, mesh)


def _settle_buckets(wrapped: DistributedDataParallel, trained: Sequence[nn.Parameter]) -> None:
    """Make DDP assign parameters to their final buckets, by a backward pass with zero gradients."""

    # DDP reassigns buckets after the first backward pass, in the order in which gradients arrived.
    # A gradient's place in a bucket determines the order in which ranks are summed. So on three or
    # more ranks the first step after a restart would round differently from an uninterrupted run.
    def zero_loss(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        return torch.stack([(parameter * 0).sum() for parameter in parameters]).sum()

    wrapped.module.forward = zero_loss
    wrapped(trained).backward()  # on a GPU, DDP fails without an argument
    del wrapped.module.forward
    for parameter in trained:
        parameter.grad = None


def _sum_gradients(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class DdpShardedView:
    """ZeRO-1 (Rajbhandari et al. 2020): each rank's optimizer updates one slice of every parameter.
    Created on all ranks of `mesh` (1-D), from whole parameters on their final device.

    [Note: sharded view] The model keeps whole parameters, and DDP reduces whole gradients. The
    optimizer gets `parameters`: DTensors sharded on dim 0, whose local part is a view of this
    rank's slice, so slices take no memory. `scatter_gradients` sets their gradients to this rank's
    slice of the reduced gradient, also a view. After the optimizer step `gather` copies the other
    ranks' slices into the whole parameters, a bucket per collective: one collective per parameter
    took longer to start than to run.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
        self._whole, self._mesh = parameters, mesh
        self.parameters = {
            name: nn.Parameter(self._shard(whole.detach()), requires_grad=whole.requires_grad)
            for name, whole in parameters.items()
        }
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, whole in parameters.items():
            if whole.dim():
                by_dtype.setdefault(whole.dtype, []).append(name)
        self._buckets = [
            [names[place] for place in bucket]
            for names in by_dtype.values()
            for bucket in buckets([parameters[name].nbytes for name in names])
        ]

    def scatter_gradients(self) -> None:
        """Set the gradient of each sharded parameter to its slice of the whole gradient."""
        for name, shard in self.parameters.items():
            gradient = self._whole[name].grad
            shard.grad = None if gradient is None else self._shard(gradient)

    def _shard(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a view of this rank's rows of a tensor, as a DTensor; a 0-d tensor whole."""
        if not whole.dim():
            return whole
        per_rank = -(-whole.shape[0] // self._mesh.size())
        start = min(self._mesh.get_local_rank() * per_rank, whole.shape[0])
        return DTensor.from_local(
            whole[start : start + per_rank],
            self._mesh,
            [Shard(0)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    @torch.no_grad()
    def gather(self) -> None:
        """Copy the ranks' updated slices into the whole parameters, and drop the slices' gradients.
        Called on all ranks."""
        for names in self._buckets:
            whole = [self._whole[name] for name in names]
            mine = [local_tensor(self.parameters[name]) for name in names]
            _gather(whole, mine, self._mesh)
        for shard in self.parameters.values():
            shard.grad = None


def buckets(sizes: Sequence[int]) -> list[list[int]]:
    """Return the indices of successive tensors of `sizes` bytes in buckets of BUCKET_BYTES. A
    larger tensor has its own bucket."""
    result: list[list[int]] = []
    room = 0
    for place, size in enumerate(sizes):
        if size > room:
            result.append([])
            room = BUCKET_BYTES
        result[-1].append(place)
        room -= size
    return result


def _gather(whole: list[nn.Parameter], mine: list[torch.Tensor], mesh: DeviceMesh) -> None:
    """Fill whole tensors of one dtype with the slices of all ranks, in one collective."""
    ranks = mesh.size()
    # Slices of the last ranks may be shorter; their padding is sent, but not read.
    sizes = [-(-len(tensor) // ranks) * tensor[:1].numel() for tensor in whole]
    sent = mine[0].new_empty(sum(sizes))
    for target, part in zip(sent.split(sizes), mine, strict=True):
        target[: part.numel()] = part.flatten()
    received = sent.new_empty(ranks * len(sent))
    all_gather_single(received, sent, group=mesh.get_group())
    for slices, tensor in zip(received.view(ranks, -1).split(sizes, dim=1), whole, strict=True):
        if len(tensor) % ranks == 0 and tensor.is_contiguous():
            tensor.view(ranks, -1).copy_(slices)
        else:
            tensor.copy_(slices.reshape(-1)[: tensor.numel()].view(tensor.shape))
