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

from trainer.models.versions import groups_of_fsdp, sum_uses_in_reduced_dtype
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
    """Shard `model` in place over `mesh` (dp_replicate, dp_shard, or dp_shard alone), also on the
    meta device: one unit per block and one for the rest of the model. Each of `experts` is a unit
    over `expert_mesh`. Returns the blocks that are units, see `without_ties`.

    Parameters are gathered in `dtype`. Gradients are reduced in float32 (in exact mode in float64),
    and summed, not averaged, because the loss is already divided by the global number of target
    tokens.
    """
    offloading = OffloadPolicy()
    if offload.used(recipe.strategy):
        # Weights mapped from a file are not pinned: FSDP would copy them to pinned memory.
        pin = mesh.device_type == "cuda" and offload.to_host(recipe.strategy)
        offloading = CPUOffloadPolicy(pin_memory=pin)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        # Sums of exact mode's gradients, which lie on a grid, are exact in float64.
        reduce_dtype=torch.float64 if exact.used(recipe) else torch.float32,
        # Activations between blocks are in `dtype` already; float32 inputs, such as rotary tables,
        # must stay float32.
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
            # The root (embedding, head) is needed again as soon as backward begins.
            reshard_after_forward=free and unit is not model,
        )
    if gathers_ahead_on_cpu(recipe, mesh.device_type):
        # In forward FSDP gathers each block while the root or the previous block computes.
        ordered = cast("Sequence[FSDPModule]", [model, *blocks])
        for current, following in pairwise(ordered):
            current.set_modules_to_forward_prefetch([following])
        # Gathers run in the background. Set on the root, this holds for all units.
        ordered[0]._set_unshard_async_op(True)
    if exact.used(recipe):
        for unit in (*blocks, model):
            unit.register_forward_pre_hook(torch.compiler.disable(sum_uses_in_reduced_dtype))
        snap_gradients((*blocks, model), exact.addends(recipe), is_sharded)
    for module in fsdp_units(model):
        # Set per unit, since neither setting is recursive. The default factor divides by the number
        # of ranks. In a unit of one rank even a factor of 1 would copy all gradients.
        over = expert_mesh if module in experts else mesh
        if over and over.size() > 1:
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return blocks


def without_ties(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with other parts of the model, because FSDP would
    untie weights that belong to two units. A block may occur under several names."""

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
    """Return whether a parameter is an FSDP shard, not gathered. With tensor parallelism gathered
    parameters are DTensors too, but only over their tp ranks."""
    return isinstance(parameter, DTensor) and SHARD in (parameter.device_mesh.mesh_dim_names or ())


def gathers_ahead_on_cpu(recipe: Recipe, device_type: str) -> bool:
    """Return whether a forward pass must be set up to gather each block while the previous block
    computes. On a GPU FSDP does this by itself, with its own streams. On a CPU waiting for gathers
    took 4 % of the quickstart's steps. False with offload to NVMe, where offload.py reads ahead,
    and for a user's model, which may call its blocks in any order."""
    to_disk = offload.to_disk(recipe.strategy)
    return device_type == "cpu" and not to_disk and not recipe.model.factory


def prepare_backward(model: nn.Module, last: bool, recipe: Recipe) -> None:
    """Make FSDP reduce gradients in the next backward pass if that is the `last` of the step, or if
    the recipe reduces in every pass."""
    every_pass = recipe.strategy.reduce_every_pass
    for unit in fsdp_units(model):
        # Weights that forward left gathered stay gathered for the next pass. Otherwise FSDP would
        # gather them in every pass, and copy them even in a group of one rank.
        free = last or every_pass or (recipe.gathers_twice and unit is not model)
        unit.set_reshard_after_backward(free, recurse=False)
        unit.set_requires_gradient_sync(last or every_pass, recurse=False)
        unit.set_is_last_backward(last)


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """Return FSDP's units: modules that each gather and reduce their own parameters as a whole."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def fsdp_groups(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP's parameter groups. Each is gathered by one collective."""
    for unit in fsdp_units(model):
        yield from groups_of_fsdp(unit)


def gathered_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters in FSDP's gathered form, whose gradients backward computes, in
    the same order on all ranks. Empty before the first forward pass, which creates them."""
    held = [one for group in fsdp_groups(model) for one in group.fsdp_params]
    whole = [one._unsharded_param for one in held if hasattr(one, "_unsharded_param")]
    return [parameter for parameter in whole if parameter.requires_grad]
