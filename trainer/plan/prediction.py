"""What one recipe needs on one machine: the numbers behind `perdure plan` and `perdure compare`."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch

from elastic.group.batch_plan import plan_batch
from trainer.parallel.fsdp import gathers_ahead_on_cpu
from trainer.parallel.mesh import is_sharded_by_fsdp, mesh_shape
from trainer.parallel.parallelize import DTYPES
from trainer.plan.costs import Machine, collectives_of, times_of
from trainer.plan.memory import Layout, Memory, memory_of
from trainer.plan.trace import USUAL_GPU, Blueprint, read_blueprint, trace
from trainer.recipe import Recipe, RecipeError

HOW = {
    "shapes": (
        "parameters gradients optimizer_state buffers host disk node_memory node_disk slot_bytes "
        "communication_bytes checkpoint_bytes"
    ),
    "trace": "activations",
    "both": "transient peak",
    "roofline": "seconds_per_step communication_seconds transfer_seconds exposed_seconds mfu "
    "checkpoint_seconds",
}
"""Where figures come from. shapes: sums over those of the parameters. trace: one pass of the model
on fake tensors. both: what a pass works with is traced, the rest computed. roofline: work that was
traced and bytes that were computed, over the assumed speeds of the machine."""


@dataclass(frozen=True)
class Prediction(Memory):
    """Memory, time and the rest, of the rank with the most; bytes and seconds. None: not known
    without a machine."""

    world_size: int
    passes: int
    """Forward and backward passes per step."""
    micro_batch: int
    """Sequences of the largest pass; `batch.micro_batch` is their limit (1, if that is auto)."""
    communication_bytes: float
    """Sent by this rank per step, and as many received."""
    checkpoint_bytes: int
    """Size of one checkpoint, all ranks together."""
    node_memory: int
    """Host memory of a node: `host` of its ranks (`peak`, if they run on CPUs), and one slot that
    checkpoints are copied to; with `checkpoint.peer_copy` another node's as well. Further slots
    are made only where there is room. The processes themselves, and loaders of data, come on
    top."""
    node_disk: int
    """What a node's local disk holds: `disk` of its ranks, and one slot, where slots are files."""
    slot_bytes: int
    """Size of one slot, on one node."""
    checkpoint_seconds: float | None
    seconds_per_step: float | None
    communication_seconds: float | None
    """Per step, as if nothing overlapped."""
    transfer_seconds: float | None
    """Per step, between host and device, as if nothing overlapped."""
    exposed_seconds: float | None
    """What of communication and transfers no computation hides."""
    mfu: float | None
    """Share of the peak FLOP/s, as `perdure train` reports it."""


def predict(
    recipe: Recipe,
    world_size: int,
    local_world_size: int,
    *,
    machine: Machine | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    gpu_memory: float | None = None,
    blueprint: Blueprint | None = None,
) -> Prediction:
    """Predict a run of `recipe`. Needs neither its data nor a GPU, and starts no process group.

    Args:
        recipe: to run.
        world_size: ranks.
        local_world_size: ranks on each node.
        machine: what they run on, for seconds.
        device: whose kernels; unless said, that of `run.device`, and for `auto` what is here.
        gpu_memory: bytes of a GPU; unless said, those of `machine`, or of a usual one.
        blueprint: of the recipe's model, to build it once for several predictions.

    Raises:
        RecipeError: the recipe cannot run on so many ranks, or its model cannot be traced.
    """
    blueprint = blueprint or read_blueprint(recipe)
    if device is None:
        auto: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
        device = auto if recipe.run.device == "auto" else recipe.run.device
    batch = recipe.batch
    try:
        plan = plan_batch(batch.global_batch, world_size, recipe.micro_batch, fixed=recipe.exact)
    except ValueError as error:
        raise RecipeError(f"batch.global_batch: {error}") from error
    replicas, shards = mesh_shape(recipe, world_size, local_world_size)
    by_fsdp = is_sharded_by_fsdp(recipe, world_size)
    reductions = plan.passes if recipe.strategy.reduce_every_pass else 1
    layout = Layout(
        replicas,
        shards,
        by_fsdp,
        gathers_ahead_on_cpu(recipe, device),
        plan.passes,
        reductions,
        plan.micro_batch,
    )
    dtype, recompute = DTYPES[recipe.precision.dtype], recipe.strategy.activation_checkpointing
    flash = machine is None or machine.gpu.flash_attention
    if gpu_memory is None:
        gpu_memory = machine.gpu.memory if machine else USUAL_GPU
    keep = by_fsdp or (world_size == plan.passes == 1)  # no bucket, nothing to be added to
    traced = trace(
        blueprint, plan.micro_batch, recompute, dtype, not by_fsdp, device, flash, gpu_memory, keep
    )
    memory = memory_of(blueprint, recipe, layout, traced, device)
    saved = sum(shape.saved_bytes for unit in blueprint.units for shape in unit)
    checkpoint = saved + blueprint.buffers
    slot = checkpoint * local_world_size // world_size
    on_host = memory.host + (memory.peak if device == "cpu" else 0)
    node_memory, node_disk = local_world_size * on_host, local_world_size * memory.disk
    if recipe.checkpoint.slot_directory is not None:
        node_disk += slot
    else:
        peer = recipe.checkpoint.peer_copy and world_size > local_world_size
        node_memory += 2 * slot if peer else slot
    seconds = communication = transfer = exposed = mfu = writing = None
    if machine:
        times = times_of(blueprint, recipe, layout, traced, machine)
        seconds, exposed = times.step, times.exposed
        communication, transfer = times.communication, times.transfers
        tokens = batch.global_batch * recipe.data.seq_len
        arithmetic = blueprint.flops_per_token * tokens
        mfu = arithmetic / (seconds * machine.peak_flops * world_size)
        writing = checkpoint / machine.storage if machine.storage else None
    return Prediction(
        world_size=world_size,
        passes=plan.passes,
        micro_batch=plan.micro_batch,
        **dataclasses.asdict(memory),
        communication_bytes=sum(c.sent for c in collectives_of(blueprint, recipe, layout)),
        checkpoint_bytes=checkpoint,
        node_memory=node_memory,
        node_disk=node_disk,
        slot_bytes=slot,
        checkpoint_seconds=writing,
        seconds_per_step=seconds,
        communication_seconds=communication,
        transfer_seconds=transfer,
        exposed_seconds=exposed,
        mfu=mfu,
    )
