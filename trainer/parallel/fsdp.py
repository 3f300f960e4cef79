"""FSDP2: parameters as DTensors, gathered block by block (ZeRO-2, ZeRO-3, HSDP)."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, repeat
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from trainer.optim.exact import snap_gradients
from trainer.parallel.mesh import SHARD
from trainer.recipe import Recipe
from trainer.recipe.strategies import exact, offload


def apply_fsdp(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    recipe: Recipe,
    dtype: torch.dtype,
    experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
) -> list[nn.Module]:
    """Shard `model` in place over `mesh` (dp_replicate, dp_shard, or dp_shard alone), one unit per
    block and one for the rest; `experts` are units of their own, over `expert_mesh`. A block that
    has a parameter in common with other parts of the model belongs to the rest. Returns the blocks
    that are units.

    Works on the meta device. `dtype` is that of gathered parameters; gradients are reduced in
    float32, summed rather than averaged: the loss is already divided by the global number of
    target tokens. In exact mode they are snapped to a grid and reduced in float64; groups of one
    rank then make this DDP.
    """
    offloading = OffloadPolicy()
    if offload.used(recipe.strategy):
        # Pages of a file cannot be pinned: FSDP would copy them to memory that is.
        pin = mesh.device_type == "cuda" and offload.to_host(recipe.strategy)
        offloading = CPUOffloadPolicy(pin_memory=pin)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float64 if exact.used(recipe) else torch.float32,
        # Blocks pass on activations that are in `dtype` already; what they get in float32 beside
        # them (rotary tables) is meant to stay so.
        cast_forward_inputs=False,
    )
    blocks = without_ties(model, blocks)
    free = recipe.gathers_twice
    inner, outer = zip(experts, repeat(expert_mesh)), zip((*blocks, model), repeat(mesh))
    for unit, over in (*inner, *outer):
        fully_shard(
            unit,
            mesh=over,
            mp_policy=policy,
            offload_policy=offloading,
            # What is in no block (embedding, head) is needed as soon as backward begins.
            reshard_after_forward=free and unit is not model,
        )
    if gathers_ahead_on_cpu(recipe, mesh.device_type):
        _gather_ahead([model, *blocks])
    if exact.used(recipe):
        snap_gradients((*blocks, model), exact.addends(recipe), is_sharded)
    for module in fsdp_units(model):
        # Neither setting is recursive: each unit would divide by the world size on its own; of one
        # rank it does not, but by a factor it would, of 1 too, with a copy of all gradients.
        over = expert_mesh if module in experts else mesh
        if over and over.size() > 1:
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return blocks


def without_ties(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks of a model whose parameters are in no other part of it: FSDP would untie weights
    that lie in two of its units. A block may have several names itself."""

    def uses(part: nn.Module) -> Counter[nn.Parameter]:
        return Counter(parameter for _, parameter in part.named_parameters(remove_duplicate=False))

    everywhere = uses(model)
    names = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    return [
        block
        for block in blocks
        if all(everywhere[key] == count * names[block] for key, count in uses(block).items())
    ]


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether FSDP has not gathered one of its parameters: of tensor parallelism it stays a DTensor
    then, of the ranks that compute together."""
    return isinstance(parameter, DTensor) and SHARD in (parameter.device_mesh.mesh_dim_names or ())


def gathers_ahead_on_cpu(recipe: Recipe, device_type: str) -> bool:
    """Whether forward, too, gathers a block while the one before is computed.

    On a GPU FSDP does that by itself, as its collectives have streams of their own. On a CPU a rank
    would wait for each: 4 % of the quickstart's steps. With NVMe it is the disk that is asked ahead
    (offload.py), and a model of the user's may call its blocks in an order of its own.
    """
    to_disk = offload.to_disk(recipe.strategy)
    return device_type == "cpu" and not to_disk and not recipe.model.factory


def _gather_ahead(units: Sequence[nn.Module]) -> None:
    """From now on; `units` are the whole model, then its blocks in the order of forward."""
    ordered = cast("Sequence[FSDPModule]", units)
    for unit, ahead in pairwise(ordered):
        unit.set_modules_to_forward_prefetch([ahead])
    ordered[0]._set_unshard_async_op(True)  # of all below, too


def prepare_backward(model: nn.Module, last: bool, recipe: Recipe) -> None:
    """Before a backward pass of a step: gradients are reduced in the last one, or in each. What is
    still gathered when it begins stays so for the next pass, which needs it beside as many whole
    gradients: by itself FSDP would gather all of it in every pass, and copy it in a group of one.
    """
    every_pass = recipe.strategy.reduce_every_pass
    for unit in fsdp_units(model):
        free = last or every_pass or (recipe.gathers_twice and unit is not model)
        unit.set_reshard_after_backward(free, recurse=False)
        unit.set_requires_gradient_sync(last or every_pass, recurse=False)
        unit.set_is_last_backward(last)


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """Every module that FSDP gathers and reduces as one."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
