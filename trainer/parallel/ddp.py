"""Replicated parameters: DDP, and ZeRO-1 on top of it.

Both sum gradients over the ranks instead of averaging them: the loss is already divided by the
global number of target tokens.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
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


class ShardedCopy:
    """ZeRO-1 (Rajbhandari et al. 2020): each rank's optimizer owns one slice of every parameter.

    [Note: sharded copy] The model keeps whole parameters, and DDP reduces whole gradients. The
    optimizer sees `parameters`: DTensors, sharded on dim 0, that hold this rank's slice of each.
    `scatter_gradients` points their gradients at this rank's slice of the reduced gradient (a
    view, no copy); after the optimizer step `gather` puts all slices back into the model.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
        """Called on all ranks of `mesh` (1-D), with whole parameters equal on all of them."""
        self._whole = parameters
        self._mesh = mesh
        self.parameters = {
            name: nn.Parameter(
                distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
                if whole.dim()
                else whole.detach().clone()
            )
            for name, whole in parameters.items()
        }

    @torch.no_grad()
    def scatter_weights(self) -> None:
        """Fill the slices from the whole parameters."""
        for name, shard in self.parameters.items():
            whole = self._whole[name].detach()
            if isinstance(shard, DTensor):
                shard.to_local().copy_(self._slice(whole))
            else:
                shard.copy_(whole)

    def scatter_gradients(self) -> None:
        """Give each sharded parameter its slice of the whole gradient."""
        for name, shard in self.parameters.items():
            gradient = self._whole[name].grad
            if gradient is None or not isinstance(shard, DTensor):
                shard.grad = gradient
                continue
            shard.grad = DTensor.from_local(
                self._slice(gradient),
                self._mesh,
                [Shard(0)],
                run_check=False,
                shape=gradient.shape,
                stride=gradient.stride(),
            )

    def _slice(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor: a view, cut as Shard(0) cuts."""
        per_rank = -(-whole.shape[0] // self._mesh.size())
        start = min(self._mesh.get_local_rank() * per_rank, whole.shape[0])
        return whole[start : start + per_rank]

    @torch.no_grad()
    def gather(self) -> None:
        """Put the updated slices of all ranks back into the whole parameters. On all ranks."""
        for name, shard in self.parameters.items():
            value = shard.full_tensor() if isinstance(shard, DTensor) else shard
            self._whole[name].copy_(value)
            shard.grad = None
