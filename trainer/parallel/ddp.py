"""Replicated parameters: DDP, and ZeRO-1 on top of it.

Both sum gradients over the ranks instead of averaging them: the loss is already divided by the
global number of target tokens.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel


def apply_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wrap a model that stands on its device so that backward sums gradients over `mesh` (1-D)."""
    wrapped = DistributedDataParallel(
        model,
        device_ids=[torch.cuda.current_device()] if mesh.device_type == "cuda" else None,
        process_group=mesh.get_group(),
        gradient_as_bucket_view=True,
        # A model says of itself that a pass may leave some of its parameters without a gradient.
        find_unused_parameters=getattr(model, "some_unused", False),
    )
    wrapped.register_comm_hook(mesh.get_group(), _sum_gradients)
    return wrapped


def _sum_gradients(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class ShardedView:
    """ZeRO-1 (Rajbhandari et al. 2020): each rank's optimizer owns one slice of every parameter.

    [Note: sharded view] The model keeps whole parameters, and DDP reduces whole gradients. The
    optimizer sees `parameters`: DTensors, sharded on dim 0, whose local part is a view of this
    rank's slice of each, so that slices take no memory of their own. `scatter_gradients` points
    their gradients at this rank's slice of the reduced gradient (a view too); after the optimizer
    step `gather` brings the slices of the other ranks into the whole parameters.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
        """Called on all ranks of `mesh` (1-D), with whole parameters on the device they stay on."""
        self._whole = parameters
        self._mesh = mesh
        self.parameters = {
            name: nn.Parameter(self._shard(whole.detach()), requires_grad=whole.requires_grad)
            for name, whole in parameters.items()
        }

    def scatter_gradients(self) -> None:
        """Give each sharded parameter its slice of the whole gradient."""
        for name, shard in self.parameters.items():
            gradient = self._whole[name].grad
            shard.grad = None if gradient is None else self._shard(gradient)

    def _shard(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor, cut as Shard(0) cuts: a view. A scalar stays whole."""
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
        """Bring the updated slices of all ranks into the whole parameters. On all ranks."""
        for name, shard in self.parameters.items():
            if isinstance(shard, DTensor):
                self._whole[name].copy_(shard.full_tensor())
            shard.grad = None
