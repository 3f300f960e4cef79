"""What one recipe needs on one machine: the numbers behind `perdure plan` and `perdure compare`."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from elastic.group.batch_plan import plan_batch
from trainer.parallel.fsdp import gathers_ahead_on_cpu
from trainer.parallel.mesh import is_sharded_by_fsdp, mesh_shape
from trainer.parallel.parallelize import DTYPES, check_parallel
from trainer.parallel.schedules import Order, bubble_formula, schedule
from trainer.plan.costs import (
    Machine,
    Pieces,
    collectives_of,
    messages_of,
    simulated,
    tied_gradients_of,
    times_of,
)
from trainer.plan.memory import Layout, Memory, memory_of
from trainer.plan.trace import (
    USUAL_GPU,
    Blueprint,
    Cut,
    Stage,
    Trace,
    read_blueprint,
    stage_of,
    trace,
)
from trainer.recipe import Recipe, RecipeError

HOW = {
    "shapes": (
        "parameters gradients optimizer_state buffers host disk node_memory node_disk slot_bytes "
        "communication_bytes checkpoint_bytes"
    ),
    "trace": "activations",
    "both": "transient peak",
    "simulation": "bubble",
    "roofline": "seconds_per_step communication_seconds network_seconds transfer_seconds "
    "exposed_seconds tokens_per_second mfu checkpoint_seconds",
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
    bubble: float
    """Share of the time in which a pipeline's ranks wait for each other, by its schedule and what
    its stages cost; messages take none."""
    bubble_formula: float
    """The same if all stages cost as much, and backward twice as much as forward."""
    checkpoint_seconds: float | None
    seconds_per_step: float | None
    communication_seconds: float | None
    """Per step, as if nothing overlapped."""
    network_seconds: float | None
    """What of it is between nodes; the rest is within them."""
    transfer_seconds: float | None
    """Per step, between host and device, as if nothing overlapped."""
    exposed_seconds: float | None
    """What of communication and transfers no computation hides."""
    tokens_per_second: float | None
    """All ranks together."""
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
    strategy, batch = recipe.strategy, recipe.batch
    replicas, shards = mesh_shape(recipe, world_size, local_world_size)
    shares = world_size // strategy.together
    try:
        plan = plan_batch(batch.global_batch, shares, recipe.micro_batch, fixed=recipe.exact)
    except ValueError as error:
        raise RecipeError(f"batch.global_batch: {error}") from error
    by_fsdp = is_sharded_by_fsdp(recipe, world_size)
    reductions = plan.passes if strategy.reduce_every_pass else 1
    layout = Layout(
        replicas,
        shards,
        by_fsdp,
        gathers_ahead_on_cpu(recipe, device),
        plan.passes,
        reductions,
        plan.micro_batch,
    )
    flash = machine is None or machine.gpu.flash_attention
    if gpu_memory is None:
        gpu_memory = machine.gpu.memory if machine else USUAL_GPU
    keep = by_fsdp or (world_size == plan.passes == 1)  # no bucket, nothing to be added to
    cut = Cut(strategy.tp, strategy.sequence_parallel, strategy.cp, strategy.ep)
    stages = [
        stage_of(blueprint, run, strategy.tp, strategy.ep)
        for run in _runs(blueprint, recipe, shards, local_world_size)
    ]
    of_stage = partial(
        trace, blueprint, plan.micro_batch, strategy.activation_checkpointing,
        DTYPES[recipe.precision.dtype], not by_fsdp, device, flash, gpu_memory, keep, cut,
    )  # fmt: skip
    traces: dict[Stage, Trace] = {}
    for stage in stages:
        traces[stage] = traces.get(stage) or of_stage(stage=stage)
    orders: Sequence[Order] = ()
    if strategy.pp > 1:
        per_rank = strategy.pp_stages_per_rank
        orders = schedule(strategy.pp_schedule, strategy.pp, per_rank, plan.passes)
    pieces = Pieces(stages, [traces[stage] for stage in stages], orders)
    memories = [
        memory_of(
            *pieces.of_rank(rank), recipe, layout, device, blueprint.buffers,
            orders[rank] if orders else None,
        )
        for rank in range(strategy.pp)
    ]  # fmt: skip
    memory = max(memories, key=lambda memory: memory.peak)
    sums = ("parameters", "gradients", "optimizer_state", "activations", "host", "disk")
    most = {name: max(getattr(of_rank, name) for of_rank in memories) for name in sums}
    saved = sum(shape.saved_bytes for unit in blueprint.units for shape in unit)
    checkpoint = saved + blueprint.buffers
    slot = checkpoint * local_world_size // world_size
    on_host = most["host"] + (memory.peak if device == "cpu" else 0)
    node_memory, node_disk = local_world_size * on_host, local_world_size * most["disk"]
    if recipe.checkpoint.slot_directory is not None:
        node_disk += slot
    else:
        peer = recipe.checkpoint.peer_copy and world_size > local_world_size
        node_memory += 2 * slot if peer else slot
    seconds = communication = network = transfer = exposed = rate = mfu = writing = None
    formula = 0.0
    simulation = simulated(pieces, machine) if orders else None
    if orders:
        formula = bubble_formula(strategy.pp_schedule, strategy.pp, per_rank, plan.passes)
    if machine:
        times = times_of(pieces, recipe, layout, machine, simulation)
        seconds, exposed = times.step, times.exposed
        communication, transfer, network = times.communication, times.transfers, times.network
        tokens = batch.global_batch * recipe.data.seq_len
        rate = tokens / seconds
        arithmetic = blueprint.flops_per_token * tokens
        mfu = arithmetic / (seconds * machine.peak_flops * world_size)
        writing = checkpoint / machine.storage if machine.storage else None
    return Prediction(
        world_size=world_size,
        passes=plan.passes,
        micro_batch=plan.micro_batch,
        **dataclasses.asdict(memory) | most,
        communication_bytes=max(
            _sent(*pieces.of_rank(rank), recipe, layout) for rank in range(strategy.pp)
        ),
        bubble=simulation.bubble if simulation else 0.0,
        bubble_formula=formula,
        checkpoint_bytes=checkpoint,
        node_memory=node_memory,
        node_disk=node_disk,
        slot_bytes=slot,
        checkpoint_seconds=writing,
        seconds_per_step=seconds,
        communication_seconds=communication,
        network_seconds=network,
        transfer_seconds=transfer,
        exposed_seconds=exposed,
        tokens_per_second=rate,
        mfu=mfu,
    )


def _sent(
    stages: Sequence[Stage], traces: Sequence[Trace], recipe: Recipe, layout: Layout
) -> float:
    """Bytes that a rank sends in a step."""
    shared = sum(c.sent for c in collectives_of(stages, recipe, layout))
    messages = messages_of(stages, traces, recipe, layout).sent
    tied = tied_gradients_of(stages, recipe, layout).sent
    together = sum(half.tp + half.cp + half.ep for trace in traces for half in trace.sent)
    return shared + layout.passes * together + messages + tied


def _runs(blueprint: Blueprint, recipe: Recipe, shards: int, local_world_size: int) -> list[range]:
    """The blocks of each stage.

    Raises:
        RecipeError: the model cannot be computed by so many ranks together.
    """
    strategy = recipe.strategy
    if strategy.ep > 1:
        if strategy.together > 1:
            raise RecipeError(
                "strategy.ep: beside tp, cp and pp it cannot be planned yet; `perdure compare` "
                "measures it"
            )
        if strategy.ep > local_world_size:
            raise RecipeError(
                f"strategy.ep: {strategy.ep} ranks span several nodes of {local_world_size}, of "
                "which the time cannot be planned yet; set a divisor"
            )
    check_parallel(recipe, blueprint.model, shards)
    if strategy.pp == 1:
        return [range(blueprint.block_count)]
    from trainer.parallel.pipeline import runs_of  # others get by without

    return runs_of(blueprint.model, recipe)
