"""Reuses the model of a rank after a failure of other ranks, with new process groups.

[Note: kept] A rank that survives keeps parameters, wrappers and compiled code. It creates its
process groups again in their original order, so they get their old names, by which meshes and
compiled code find them. This module replaces references to group objects, and drops the state of
the failed step. New processes build the same model by `parallelize`, with the same collectives.
"""

from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from trainer.models.versions import drop_unreduced_gradient
from trainer.parallel.ddp import apply_ddp_again
from trainer.parallel.fsdp import fsdp_groups, fsdp_units
from trainer.parallel.mesh import Mesh
from trainer.parallel.parallel_model import ParallelModel

CAN_RESET = hasattr(FSDPModule, "reset_iter_state")
"""Whether FSDP can drop the state of a failed step, as from torch 2.13 on."""


def rejoin(model: ParallelModel, mesh: Mesh, new: Mesh) -> tuple[ParallelModel, Mesh]:
    """Return the kept model and mesh with the process groups of `new`, a mesh for the same rank and
    world size. Called on all ranks that keep a model, while new processes call `parallelize`.
    Raises RuntimeError if a group has another name than before."""
    for ours, theirs in ((mesh.device_mesh, new.device_mesh), (mesh.experts, new.experts)):
        if ours and theirs:
            _take_groups(ours, theirs)
    mesh = replace(mesh, group=new.group, ring=new.ring)
    module = model.module
    for group in fsdp_groups(module):
        _take_groups_of_fsdp(group)
    _drop_step_of_fsdp(module)
    for part in module.modules():
        if forget := getattr(part, "forget_step", None):  # routers count tokens
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
    """Put the groups of `new` into the registry of `mesh`, which later compilations use."""
    if mesh._dim_group_names != new._dim_group_names:
        raise RuntimeError(
            f"the process groups of a mesh were called {mesh._dim_group_names}, and are now called "
            f"{new._dim_group_names}; this rank cannot keep its model, and has to be restarted"
        )
    for name, old in mesh._pg_registry.items():
        mesh._pg_registry[name] = _resolve_process_group(old.group_name)


def _take_groups_of_fsdp(group: Any) -> None:
    for info in (group.mesh_info, group.post_forward_mesh_info):
        if info and info.shard_mesh_dim is not None:
            info.shard_process_group = info.mesh.get_group(info.shard_mesh_dim)
        if info and info.replicate_mesh_dim is not None:
            info.replicate_process_group = info.mesh.get_group(info.replicate_mesh_dim)


def _drop_step_of_fsdp(model: nn.Module) -> None:
    for group in fsdp_groups(model):
        # `reset_iter_state` would wait for an unfinished gather, and raise its error again.
        group._all_gather_result = None
        group.comm_ctx.all_gather_state = None
    for unit in fsdp_units(model):
        if unit._get_fsdp_state()._is_root:
            unit.reset_iter_state()
    for parameter in (p for group in fsdp_groups(model) for p in group.fsdp_params):
        # `reset_iter_state` keeps unreduced gradients, to which the next backward would add.
        drop_unreduced_gradient(parameter)
