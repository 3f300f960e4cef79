"""Predicts memory, time and traffic of one recipe on one machine, for `perdure plan` and `perdure
compare`."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, Literal

import torch

from trainer.parallel.parallelize import DTYPES, check_parallel
from trainer.parallel.schedules import (
    Order,
    PipelineActionSequence,
    arranged,
    bubble_formula,
    schedule,
)
from trainer.plan.blueprint import (
    PlannedLayout,
    PlannedModel,
    PlannedStage,
    layout_of,
    read_blueprint,
    stage_of,
    trained_of,
)
from trainer.plan.costs import PlannedMachine
from trainer.plan.peak_points import adds_gradients
from trainer.plan.rank_memory import PlannedRankMemory, memory_of, messages_beside
from trainer.plan.tape import PlannedPassTrace
from trainer.plan.times import (
    PlannedStages,
    messages_of,
    simulated,
    tied_gradients_of,
    times_of,
    traffic_of,
)
from trainer.plan.trace import USUAL_GPU, trace
from trainer.recipe import Recipe, StrategySection
from trainer.recipe.sections import PipelineSchedule
from trainer.recipe.strategies import MODEL_PARALLEL, WITHIN_PASS, only, pp

HOW = {
    "shapes": "parameters gradients optimizer_state buffers host disk node_memory node_disk "
    "slot_bytes communication_bytes checkpoint_bytes",
    "trace": "activations",
    "both": "transient peak",
    "simulation": "bubble",
    "roofline": "seconds_per_step communication_seconds network_seconds transfer_seconds "
    "exposed_seconds tokens_per_second mfu checkpoint_seconds",
}
"""Method → figures of a `Prediction` that it computes. shapes: sums over parameters. trace: one
pass of the model on fake tensors. both: sums, and the memory of the traced pass. simulation: of the
pipeline's schedule. roofline: traced work and bytes, divided by the speeds of the machine."""


@dataclass(frozen=True)
class Prediction(PlannedRankMemory):
    """Predicted memory, traffic and time of a step, in bytes and seconds. Peak and transient memory
    are of the rank with the largest peak; of other kinds of memory the largest on any rank counts.
    Seconds are None if no machine is described."""

    world_size: int
    passes: int
    micro_batch: int
    """Sequences of the largest pass, at most `batch.micro_batch` (1 for auto)."""
    communication_bytes: float
    """Bytes that a rank sends per step; it receives as many."""
    checkpoint_bytes: int
    node_memory: int
    """Bytes of a node's host memory: `host` of its ranks (`peak` on CPUs), and one checkpoint slot;
    with `checkpoint.peer_copy` also a slot for another node. Processes and data need more."""
    node_disk: int
    """Bytes on a node's local disk: `disk` of its ranks, and one slot if slots are files."""
    slot_bytes: int
    bubble: float
    """Fraction of the time in which pipeline ranks are idle, by simulation of the schedule with the
    costs of its stages, and with a machine the time of messages."""
    bubble_formula: float
    """The bubble by its closed form: for equal stages, and backward twice as long as forward."""
    checkpoint_seconds: float | None = None
    seconds_per_step: float | None = None
    communication_seconds: float | None = None
    """Seconds per step without any overlap."""
    network_seconds: float | None = None
    """Part of `communication_seconds` that is between nodes."""
    transfer_seconds: float | None = None
    """Seconds per step between host and device without any overlap."""
    exposed_seconds: float | None = None
    """Seconds per step of communication and transfers that computation does not hide."""
    tokens_per_second: float | None = None
    mfu: float | None = None
    """Fraction of the peak FLOP/s, as in `perdure train`."""


def predict(
    recipe: Recipe,
    world_size: int,
    local_world_size: int,
    *,
    machine: PlannedMachine | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    gpu_memory: float | None = None,
    blueprint: PlannedModel | None = None,
) -> Prediction:
    """Predict a run of `recipe`. Needs neither its data nor a GPU, and creates no process group.

    Args:
        machine: the machine for which seconds are predicted; None: predict memory only.
        device: device whose kernels are traced; None: `run.device`, or for `auto` the local device.
        gpu_memory: bytes of a GPU; None: those of `machine`, else of the local GPU, else USUAL_GPU.

    Raises:
        RecipeError: the recipe cannot run on so many ranks, or its model cannot be traced.
    """
    blueprint = blueprint or read_blueprint(recipe)
    if device is None:
        auto: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
        device = auto if recipe.run.device == "auto" else recipe.run.device
    strategy, layout = recipe.strategy, layout_of(recipe, world_size, local_world_size, device)
    # Only the keys that matter, so that the cache works for strategies that differ in others.
    runs = _runs(blueprint, only(strategy, *MODEL_PARALLEL), layout.shards)
    if gpu_memory is None:
        here = device == "cuda" and not machine and torch.cuda.is_available()
        usual = torch.cuda.get_device_properties(0).total_memory if here else USUAL_GPU
        gpu_memory = machine.gpu.memory if machine else usual
    traced = partial(
        trace,
        blueprint,
        layout.micro_batch,
        device=device,
        flash=machine is None or machine.gpu.flash_attention,
        gpu_memory=gpu_memory,
        keep_gradients=(
            not adds_gradients(recipe, layout)
            if layout.by_fsdp
            # Without FSDP gradients are counted apart from the trace: in DDP's buckets, which a
            # single rank lacks, or as those of earlier passes, which a single pass lacks.
            else world_size == layout.passes == 1
        ),
    )
    orders, arrangement, messages = _orders(*pp.shape(strategy), layout.passes)
    pieces = _pieces(blueprint, recipe, layout, runs, orders, traced)
    ranks = [pieces.of_rank(rank) for rank in range(pp.ranks(strategy))]
    memory = _memory(ranks, orders, messages, recipe, layout, device, blueprint)
    on_host = memory.host + (memory.peak if device == "cpu" else 0)
    of_node = _of_node(recipe, blueprint, world_size, local_world_size, on_host, memory.disk)
    simulation = simulated(pieces, arrangement, layout, machine) if arrangement else None
    seconds: dict[str, Any] = {}
    if machine:
        times = times_of(pieces, recipe, layout, machine, simulation)
        tokens = recipe.batch.global_batch * recipe.data.seq_len
        arithmetic = blueprint.flops_per_token * tokens
        seconds = {
            "seconds_per_step": times.step,
            "communication_seconds": times.communication,
            "network_seconds": times.network,
            "transfer_seconds": times.transfers,
            "exposed_seconds": times.exposed,
            "tokens_per_second": tokens / times.step,
            "mfu": arithmetic / (times.step * machine.peak_flops * world_size),
        }
        if machine.storage:
            seconds["checkpoint_seconds"] = of_node["checkpoint_bytes"] / machine.storage
    return Prediction(
        **dataclasses.asdict(memory),
        world_size=world_size,
        passes=layout.passes,
        micro_batch=layout.micro_batch,
        communication_bytes=max(_sent(*rank, recipe, layout) for rank in ranks),
        bubble=simulation.bubble if simulation else 0.0,
        bubble_formula=bubble_formula(*pp.shape(strategy), layout.passes),
        **of_node,
        **seconds,
    )


@cache
def _runs(blueprint: PlannedModel, strategy: StrategySection, shards: int) -> tuple[range, ...]:
    """Return the blocks of each pipeline stage; RecipeError if the model cannot be divided."""
    recipe = dataclasses.replace(blueprint.recipe, strategy=strategy)
    check_parallel(recipe, blueprint.model, shards)
    if pp.ranks(strategy) == 1:
        return (range(blueprint.block_count),)
    from trainer.parallel.pipeline import blocks_by_stage  # imported only if the recipe uses it

    return tuple(blocks_by_stage(blueprint.model, recipe))


@lru_cache(maxsize=128)
def _orders(
    name: PipelineSchedule, ranks: int, per_rank: int, passes: int
) -> tuple[Sequence[Order], PipelineActionSequence | None, list[list[int]]]:
    """Return each pipeline rank's actions in order, the actions of all in one sequence, and the
    result of `messages_beside`, for pipelines of `ranks` ranks with `per_rank` stages each and
    `passes` micro-batches. One rank has no such order: [], None, []."""
    if ranks == 1:
        return [], None, []
    orders = schedule(name, ranks, per_rank, passes)
    return orders, arranged(orders), messages_beside(orders)


def _pieces(
    blueprint: PlannedModel,
    recipe: Recipe,
    layout: PlannedLayout,
    runs: Sequence[range],
    orders: Sequence[Order],
    traced: Callable[..., PlannedPassTrace],
) -> PlannedStages:
    """Build and trace the stages. `traced`: `trace` with all arguments that do not depend on the
    strategy."""
    strategy = recipe.strategy
    cut = only(strategy, *WITHIN_PASS)
    stages = [stage_of(blueprint, run, cut) for run in runs]
    traces = {
        stage: traced(
            recompute=strategy.activation_checkpointing,
            dtype=DTYPES[recipe.precision.dtype],
            autocast=not layout.by_fsdp,
            cut=cut,
            stage=stage,
            in_two=pp.splits_backward(strategy),
            compiled=strategy.compile,
        )
        # Equal stages are the same object, so they are traced once.
        for stage in dict.fromkeys(stages)
    }
    return PlannedStages(stages, [traces[stage] for stage in stages], orders)


def _memory(
    ranks: Sequence[tuple[Sequence[PlannedStage], Sequence[PlannedPassTrace]]],
    orders: Sequence[Order],
    counts: Sequence[Sequence[int]],
    recipe: Recipe,
    layout: PlannedLayout,
    device: Literal["cpu", "cuda"],
    blueprint: PlannedModel,
) -> PlannedRankMemory:
    """Return the memory of the rank with the largest peak, but for each kind of memory the maximum
    over all ranks. `counts`: result of `messages_beside`."""
    memories = []
    each: Sequence[Order | None] = orders or [None]
    for rank, ((stages, traces), order) in enumerate(zip(ranks, each, strict=True)):
        buffers, messages = blueprint.buffers, []
        if order:  # buffers are divided among stages as the blocks are
            buffers = buffers * sum(stage.blocks for stage in stages) // blueprint.block_count
            # A message holds the hidden states of one micro-batch.
            messages = [count * traces[0].hidden for count in counts[rank]]
        memories.append(memory_of(stages, traces, recipe, layout, device, buffers, order, messages))
    kinds = "parameters", "gradients", "optimizer_state", "buffers", "activations", "host", "disk"
    most = {kind: max(getattr(memory, kind) for memory in memories) for kind in kinds}
    return dataclasses.replace(max(memories, key=lambda memory: memory.peak), **most)


def _of_node(
    recipe: Recipe,
    blueprint: PlannedModel,
    world_size: int,
    local_world_size: int,
    on_host: int,
    on_disk: int,
) -> dict[str, Any]:
    """Return the bytes of a checkpoint, of a slot, and of a node's memory and disk, by the names of
    the fields. `on_host`, `on_disk`: bytes of each rank there."""
    adapter = recipe.model.adapter  # checkpoints hold only trained weights
    units = [trained_of(unit) if adapter else unit for unit in blueprint.units]
    saved = sum(shape.saved_bytes for unit in units for shape in unit)
    checkpoint = saved + (0 if adapter else blueprint.buffers)
    # Nodes save about equal parts of a checkpoint.
    slot = checkpoint * local_world_size // world_size
    memory, disk = local_world_size * on_host, local_world_size * on_disk
    if recipe.checkpoint.slot_directory is not None:
        disk += slot
    else:
        peer = recipe.checkpoint.peer_copy and world_size > local_world_size
        memory += 2 * slot if peer else slot
    return {
        "checkpoint_bytes": checkpoint,
        "node_memory": memory,
        "node_disk": disk,
        "slot_bytes": slot,
    }


def _sent(
    stages: Sequence[PlannedStage],
    traces: Sequence[PlannedPassTrace],
    recipe: Recipe,
    layout: PlannedLayout,
) -> float:
    shared = sum(c.sent for c in traffic_of(stages, recipe, layout).all)
    messages = messages_of(stages, traces, layout).sent
    tied = tied_gradients_of(stages, layout).sent
    halves = (half for trace in traces for half in trace.sent)
    together = sum(half.layers + half.ring + half.experts for half in halves)
    return shared + layout.passes * together + messages + tied
