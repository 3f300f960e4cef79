"""The model of a rank that outlives a failure of others, in the groups of the world that follows.

[Note: kept] Such a rank keeps its model where it is: parameters, what wraps them, and compiled
code. It makes its process groups anew, in the order in which it made them first, so they get their
old names. Meshes, and code that was compiled, find groups by name. What holds groups themselves is
given the new ones here, and what the step that failed has left behind is dropped. A process that is
new builds the same model beside it (`parallelize`), by the same collectives.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from trainer.parallel.ddp import apply_ddp_again
from trainer.parallel.fsdp import fsdp_units
from trainer.parallel.mesh import Mesh
from trainer.parallel.parallelize import ParallelModel

CAN_RESET = hasattr(FSDPModule, "reset_iter_state")
"""Whether FSDP can drop a step that failed: from torch 2.13 on."""


def rejoin(model: ParallelModel, mesh: Mesh, new: Mesh) -> tuple[ParallelModel, Mesh]:
    """The model and the mesh of a rank that keeps them, with the groups of the mesh that was just
    built for the same rank of a world of the same size. On all ranks: on others `parallelize`.

    Raises:
        RuntimeError: a group has another name than before.
    """
    for ours, theirs in ((mesh.device_mesh, new.device_mesh), (mesh.experts, new.experts)):
        if ours and theirs:
            _take_groups(ours, theirs)
    mesh = replace(mesh, group=new.group, ring=new.ring)
    module = model.module
    for group in _fsdp_groups(module):
        _take_groups_of_fsdp(group)
    _drop_step_of_fsdp(module)
    for part in module.modules():  # such as a router, which counts tokens
        if forget := getattr(part, "forget_step", None):
            forget()
    if model.context and mesh.ring:
        model.context.group = mesh.ring
    if model.pipeline:
        model.pipeline.join(mesh)
    model.zero_gradients()
    if isinstance(module, DistributedDataParallel):
        model = replace(model, module=apply_ddp_again(module, mesh.data_mesh))
    return model, mesh


def _take_groups(mesh: DeviceMesh, new: DeviceMesh) -> None:
    """Have code that is compiled from now on find the groups of `new` in `mesh`."""
    if mesh._dim_group_names != new._dim_group_names:
        raise RuntimeError(
            f"the groups of a mesh were called {mesh._dim_group_names}, and now "
            f"{new._dim_group_names}: this rank cannot keep its model"
        )
    for name, old in mesh._pg_registry.items():
        mesh._pg_registry[name] = _resolve_process_group(old.group_name)


def _fsdp_groups(model: nn.Module) -> Iterator[Any]:
    """FSDP's groups of parameters, each of which is gathered as one."""
    for unit in fsdp_units(model):
        yield from unit._get_fsdp_state()._fsdp_param_groups


def _take_groups_of_fsdp(group: Any) -> None:
    """Have FSDP use the groups that its meshes find by name."""
    for info in (group.mesh_info, group.post_forward_mesh_info):
        if info and info.shard_mesh_dim is not None:
            info.shard_process_group = info.mesh.get_group(info.shard_mesh_dim)
        if info and info.replicate_mesh_dim is not None:
            info.replicate_process_group = info.mesh.get_group(info.replicate_mesh_dim)


def _drop_step_of_fsdp(model: nn.Module) -> None:
    """Drop what a step has left in FSDP's units that ended anywhere in forward or backward.

    `reset_iter_state` waits for a gather that was under way: one that has failed raises again. And
    it leaves gradients of whole parameters, which the next backward would add to its own.
    """
    for group in _fsdp_groups(model):
        group._all_gather_result = None
        group.comm_ctx.all_gather_state = None
    for unit in fsdp_units(model):
        if unit._get_fsdp_state()._is_root:
            unit.reset_iter_state()
    for parameter in (one for group in _fsdp_groups(model) for one in group.fsdp_params):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
