"""FSDP2: parameters as DTensors, gathered block by block (ZeRO-2, ZeRO-3, HSDP)."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat
from typing import Any, cast

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

from trainer.models.versions import sum_uses_in_reduced_dtype
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
    """Shard `model` in place over `mesh` (dp_replicate, dp_shard, or dp_shard alone): one unit per
    block and one for the rest; `experts` are units of their own over `expert_mesh`. A block that
    shares a parameter with other parts of the model belongs to the rest. Returns the blocks that
    are units.

    Works on the meta device. Parameters are gathered in `dtype`. Gradients are reduced in float32,
    and summed, not averaged: the loss is already divided by the global number of target tokens. In
    exact mode they are snapped to a grid and reduced in float64; with groups of one rank that is
    DDP.
    """
    offloading = OffloadPolicy()
    if offload.used(recipe.strategy):
        # FSDP would copy pages of a file to pinned memory.
        pin = mesh.device_type == "cuda" and offload.to_host(recipe.strategy)
        offloading = CPUOffloadPolicy(pin_memory=pin)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        # In exact mode sums of snapped gradients are exact in float64, in any order of ranks.
        reduce_dtype=torch.float64 if exact.used(recipe) else torch.float32,
        # Activations between blocks are in `dtype` already; float32 inputs beside them, such as
        # rotary tables, must stay float32.
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
            # The root (embedding, head) is needed as soon as backward begins.
            reshard_after_forward=free and unit is not model,
        )
    if gathers_ahead_on_cpu(recipe, mesh.device_type):
        _gather_ahead([model, *blocks])
    if exact.used(recipe):
        for unit in (*blocks, model):
            unit.register_forward_pre_hook(torch.compiler.disable(sum_uses_in_reduced_dtype))
        snap_gradients((*blocks, model), exact.addends(recipe), is_sharded)
    for module in fsdp_units(model):
        # Neither setting is recursive. The default factor divides by the world size; in a unit of
        # one rank even a factor of 1 copies all gradients.
        over = expert_mesh if module in experts else mesh
        if over and over.size() > 1:
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return blocks


def without_ties(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks that share no parameter with other parts of the model: FSDP would untie weights of
    two units. A block may have several names."""

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
    """Whether a parameter is not gathered by FSDP. One of tensor parallelism stays a DTensor when
    gathered, over its tp ranks."""
    return isinstance(parameter, DTensor) and SHARD in (parameter.device_mesh.mesh_dim_names or ())


def gathers_ahead_on_cpu(recipe: Recipe, device_type: str) -> bool:
    """Whether forward also gathers a block while the one before is computed.

    On a GPU FSDP does so by itself, as its collectives have streams of their own. On a CPU a rank
    would wait for each: 4 % of the quickstart's steps. Not with NVMe, where offload.py reads ahead,
    nor with a user's model, which may call its blocks in any order.
    """
    to_disk = offload.to_disk(recipe.strategy)
    return device_type == "cpu" and not to_disk and not recipe.model.factory


def _gather_ahead(units: Sequence[nn.Module]) -> None:
    """Prefetch each unit in forward while the one before computes. `units` are the whole model,
    then its blocks in the order of forward."""
    ordered = cast("Sequence[FSDPModule]", units)
    for unit, ahead in pairwise(ordered):
        unit.set_modules_to_forward_prefetch([ahead])
    ordered[0]._set_unshard_async_op(True)  # recursive


def prepare_backward(model: nn.Module, last: bool, recipe: Recipe) -> None:
    """Configure FSDP for a backward pass: gradients are reduced in the last pass of a step, or in
    each."""
    every_pass = recipe.strategy.reduce_every_pass
    for unit in fsdp_units(model):
        # Weights that forward left gathered stay so for the next pass. By itself FSDP would gather
        # them in every pass, and copy them even in a group of one.
        free = last or every_pass or (recipe.gathers_twice and unit is not model)
        unit.set_reshard_after_backward(free, recurse=False)
        unit.set_requires_gradient_sync(last or every_pass, recurse=False)
        unit.set_is_last_backward(last)


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """Modules that FSDP gathers and reduces as one."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def fsdp_groups(model: nn.Module) -> Iterator[Any]:
    """FSDP's parameter groups, each gathered as one."""
    for unit in fsdp_units(model):
        yield from unit._get_fsdp_state()._fsdp_param_groups


def gathered_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters as backward sees them, whole, in an order that is the same on all
    ranks. They exist once a forward pass has gathered them."""
    held = [one for group in fsdp_groups(model) for one in group.fsdp_params]
    whole = [one._unsharded_param for one in held if hasattr(one, "_unsharded_param")]
    return [parameter for parameter in whole if parameter.requires_grad]
