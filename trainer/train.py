"""The page: build, restore, loop. One optimizer step is in step.py."""

import gc
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from checkpointing import Checkpointer, SaveFailed, load_model, optimizer_tensors
from elastic import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_DONE,
    EXIT_PAUSED,
    PAUSE_TO_LEAVE,
    BatchPlan,
    Pace,
    Pulse,
    SaveClock,
    Start,
    World,
    compare_ranks,
    diverged_ranks,
    expected_mtbf,
    plan_batch,
    read_history,
    reliability,
)
from trainer.data.loader import load
from trainer.evaluate import evaluate
from trainer.metrics import (
    Metrics,
    Startup,
    Window,
    peak_flops,
    peak_memory,
    save_record,
    step_line,
    validation_line,
)
from trainer.models import TIED_COPIES
from trainer.optimizer import (
    LossScale,
    build_optimizer,
    parameter_groups,
)
from trainer.parallel import ParallelModel, build_mesh, parallelize
from trainer.profile import StepProfiler
from trainer.provenance import run_state
from trainer.recipe import Recipe
from trainer.step import Progress, StepResult, TrainState, train_step
from trainer.tasks import Task


def train(recipe: Recipe, task: Task, world: World, pulse: Pulse, startup: Startup) -> int:
    """Train to `run.steps`, from the newest checkpoint if there is one; returns the exit code.

    Called on all ranks. A restart takes the same path as a start: it only finds state to load.
    """
    batch = recipe.batch
    plan = plan_batch(batch.global_batch, world.world_size, batch.micro_batch, fixed=recipe.exact)
    mesh = build_mesh(recipe, world)
    group = dist.group.WORLD
    with Checkpointer(recipe.checkpoint_directory, recipe.checkpoint, group) as checkpointer:
        checkpointer.start_early()
        model = parallelize(task.model, task.blocks, mesh, recipe, world.device, task.fill)
        optimizer = build_optimizer(
            model.optimized, recipe.optimizer, exact=recipe.exact, zeros_like=model.zeros_like
        )
        startup.mark("model")
        pulse.report(0, "load")
        progress = restore(checkpointer, model, optimizer, recipe, task)
        state = TrainState(model, optimizer, progress)
        memory = checkpointer.prepare(
            model=model.tensors, optimizer=optimizer_tensors(optimizer, model.optimized)
        )
        startup.mark("checkpoint")
        start = attempt(checkpointer, progress, plan, recipe, world, startup)
        sinks = Metrics(recipe, start) if world.is_main else nullcontext()
        profiling = recipe.tracking.profile_steps > 0
        profile = StepProfiler(recipe, model, optimizer, world) if profiling else nullcontext()
        with sinks as metrics, profile as profiler:
            startup.mark("trackers")
            say(metrics, f"{describe(recipe, task, world, plan, progress)}\n{memory}")
            batches = load(
                task.stream,
                requests(plan, world.rank, progress.sequences),
                workers=recipe.data.workers,
                pin_memory=world.device.type == "cuda",
            )
            startup.mark("data")
            if checkpointer.newer_than_storage:
                save(checkpointer, state, recipe, task, world)
            gc.freeze()  # what exists by now stays; a collection that looked at it takes 0.15 s
            first_step, last_step = progress.step + 1, recipe.run.steps
            window, pace, clock = Window(), Pace(), save_clock(recipe, world)
            save_every = 0 if recipe.checkpoint.every == "auto" else recipe.checkpoint.every
            while progress.step < last_step:
                pulse.report(progress.step + 1, "step")
                pulse.wants_save = clock is not None and clock.due(time.monotonic())
                result = train_step(
                    state, batches, plan, recipe, world, pulse, checkpointer.wait_staged
                )
                warn(metrics, progress, result.verdict.reason)
                if result.verdict.action == "stop" and not roll_back(
                    checkpointer, state, recipe, metrics
                ):
                    say(metrics, f"stopped: {result.verdict.reason}")
                    return end(metrics, EXIT_DO_NOT_REQUEUE, result.verdict.reason)
                if task.after_step:
                    task.after_step(model, progress.sequences)
                if progress.step == first_step:
                    startup.mark("first step")
                    say(metrics, str(startup))
                    if metrics:
                        metrics.ledger.phases(startup.parts)
                elif not (profiler and profiler.active):
                    # The first step also warms up, and the profiler slows its own: they would
                    # spoil the averages.
                    tokens = plan.global_batch * recipe.data.seq_len
                    window.add(result.seconds, result.data_wait, result.compute, tokens)
                if metrics:
                    skipped = result.verdict.action == "skip"
                    first = progress.sequences - plan.global_batch
                    metrics.done(progress.step, first, progress.sequences, result.seconds, skipped)
                if due(progress.step, recipe.run.log_every, last_step):
                    pace = name_stragglers(pace, window, world, progress, metrics)
                    if metrics:
                        values = step_record(progress, result, window, recipe, task, world)
                        metrics.record(
                            progress.step,
                            values,
                            step_line(progress.step, last_step, values, task.unit),
                        )
                    window = Window()
                check_every = recipe.elastic.check_replicas_every
                if check_every and due(progress.step, check_every, last_step):
                    check_replicas(model, mesh, progress, metrics)
                if task.validation and due(progress.step, recipe.run.evaluate_every, last_step):
                    pulse.report(progress.step, "evaluate")
                    values = evaluate(model, task.validation, recipe, world)
                    progress.validation_loss = values.get("validation_loss")
                    if metrics:
                        metrics.record(progress.step, values, validation_line(values))
                if result.save or due(progress.step, save_every, last_step):
                    pulse.report(progress.step, "save")
                    began = time.monotonic()
                    save(checkpointer, state, recipe, task, world)
                    if clock:
                        clock.begun(began, time.monotonic() - began)
                elif due(progress.step, recipe.elastic.snapshot_every, last_step):
                    save(checkpointer, state, recipe, task, world, memory_only=True)
                report_saves(checkpointer, progress, metrics, clock)
                if profiler:
                    profiler.step_done()
                if result.pause and progress.step < last_step:
                    pulse.report(progress.step, "save")
                    leaving = result.pause >= PAUSE_TO_LEAVE
                    pause(checkpointer, state, recipe, task, world, metrics, leaving)
                    return end(metrics, EXIT_PAUSED, "a node leaves" if leaving else "a node joins")
            pulse.report(progress.step, "end")
            batches.close()
            finish_saves(checkpointer, progress, metrics)
            return end(metrics, EXIT_DONE, "finished")


def name_stragglers(
    pace: Pace, window: Window, world: World, progress: Progress, metrics: Metrics | None
) -> Pace:
    """Compare the ranks' compute times of a log interval, and tell of one that is slow. On all
    ranks."""
    mine = sum(window.computes) / max(1, len(window.computes))
    times = torch.zeros(world.world_size, dtype=torch.float64, device=world.device)
    times[world.rank] = mine
    dist.all_reduce(times)
    pace, sentences = compare_ranks(pace, times.tolist())
    if metrics:
        for sentence in sentences:
            metrics.say(f"warning: {sentence}")
            metrics.ledger.event("straggler", step=progress.step, what=sentence)
    return pace


def check_replicas(
    model: ParallelModel, mesh: DeviceMesh, progress: Progress, metrics: Metrics | None
) -> None:
    """Name a rank whose replica of the weights differs from the others. On all ranks."""
    local = [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for tensor in model.parameters.values()
    ]
    replicas = mesh["dp_replicate"].get_group()
    ranks = diverged_ranks(local, replicas)
    flags = torch.zeros(dist.get_world_size(), device=mesh.device_type)
    flags[ranks] = 1  # other groups of replicas hold other shards
    dist.all_reduce(flags)
    ranks = flags.nonzero().flatten().tolist()
    if ranks:
        named = ", ".join(map(str, ranks))
        warn(metrics, progress, f"weights of rank {named} differ from those of its replicas")


def requests(plan: BatchPlan, rank: int, start: int) -> Iterator[list[int]]:
    """Positions of every micro-batch of `rank`, from the global batch at `start` on, for ever."""
    for batch_start in count(start, plan.global_batch):
        for micro_batch in plan.micro_batches(rank, batch_start):
            yield list(micro_batch.positions)


def due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every so many steps, and at the end, happens now."""
    return step == last or (every > 0 and step % every == 0)


def say(metrics: Metrics | None, text: str) -> None:
    """One line on the console of rank 0."""
    if metrics:
        metrics.say(text)


def step_record(
    progress: Progress,
    result: StepResult,
    window: Window,
    recipe: Recipe,
    task: Task,
    world: World,
) -> dict[str, float]:
    """What metrics.jsonl and the trackers get of a log interval."""
    peak = peak_flops(recipe, world.device)
    values = {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "tokens": progress.tokens,
        "skipped_steps": progress.skipped,
        "peak_memory": peak_memory(world.device),
        **window.summary(world.world_size, task.flops_per_token, peak),
    }
    if recipe.precision.dtype == "fp16":
        values["loss_scale"] = progress.loss_scale.value
    if window.seconds:
        mean_seconds = sum(window.seconds) / len(window.seconds)
        values["eta_seconds"] = mean_seconds * (recipe.run.steps - progress.step)
    return values


def attempt(
    checkpointer: Checkpointer,
    progress: Progress,
    plan: BatchPlan,
    recipe: Recipe,
    world: World,
    startup: Startup,
) -> Start:
    """What this start begins with, for the ledger."""
    return Start(
        step=progress.step,
        sequences=progress.sequences,
        global_batch=plan.global_batch,
        world_size=world.world_size,
        nodes=world.nodes,
        round=world.round,
        generation=world.generation,
        source=checkpointer.loaded_from or ("init" if recipe.model.init_from else "none"),
        cause=world.cause,
        phases=dict(startup.parts),
    )


def end(metrics: Metrics | None, code: int, reason: str) -> int:
    """Note in the ledger how this attempt ended; returns the exit code."""
    if metrics:
        metrics.ledger.end(code, reason)
    return code


def describe(recipe: Recipe, task: Task, world: World, plan: BatchPlan, progress: Progress) -> str:
    """What is about to run, with the arithmetic of the batch."""
    strategy: str = recipe.sharding if recipe.strategy.name == "fsdp" else "DDP"
    if recipe.strategy.offload != "none":
        strategy += f" with offload to {recipe.strategy.offload},"
    stream = task.stream
    epochs = recipe.run.steps * plan.global_batch / stream.sequences
    lines = [
        f"{task.name}: {task.parameter_count / 1e6:,.1f} M parameters, "
        f"{recipe.precision.dtype}, {strategy} over {world.world_size} rank(s) on "
        f"{world.device.type}",
        f"{plan} {stream.describe(plan.global_batch)}",
        f"data: {stream.sequences:,} sequences per epoch; {recipe.run.steps} steps are "
        f"{epochs:.2f} epochs",
    ]
    if progress.step >= recipe.run.steps:
        lines.append(f"nothing to do: step {progress.step} of {recipe.run.steps} is checkpointed")
    elif progress.step:
        lines.append(f"resuming after step {progress.step} of {recipe.run.steps}")
    return "\n".join(lines)


def restore(
    checkpointer: Checkpointer,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    task: Task,
) -> Progress:
    """Load the newest good checkpoint, else `model.init_from`, else draw weights. On all ranks."""
    state = checkpointer.load(
        model=model.tensors, optimizer=optimizer_tensors(optimizer, model.optimized)
    )
    given = [name for name in model.tensors if task.pretrained is None or name in task.pretrained]
    if state is None and not (recipe.model.init_from and len(given) == len(model.tensors)):
        model.draw_weights()
    if state is None and recipe.model.init_from:
        load_model(
            recipe.model.init_from,
            {name: model.tensors[name] for name in given},
            verify=recipe.checkpoint.verify,
            optional={*TIED_COPIES, *model.tensors},
            group=dist.group.WORLD,
        )
    if state is None:
        scale = recipe.precision.loss_scale if recipe.precision.dtype == "fp16" else 1.0
        return Progress(loss_scale=LossScale(scale))
    return Progress(
        **{key: state[key] for key in Progress.__dataclass_fields__ if key != "loss_scale"},
        loss_scale=LossScale(**state["loss_scale"]),
    )


@record_function("save checkpoint")
def save(
    checkpointer: Checkpointer,
    state: TrainState,
    recipe: Recipe,
    task: Task,
    world: World,
    *,
    wait: bool = False,
    memory_only: bool = False,
) -> None:
    """Begin a checkpoint of everything a step depends on; training goes on while it is written. On
    all ranks. With `wait`, and for the last step, it is made whatever is still being written."""
    optimized = state.model.optimized
    checkpointer.save(
        state.progress.step,
        model=state.model.tensors,
        optimizer=optimizer_tensors(state.optimizer, optimized),
        state={
            **asdict(state.progress),
            "parameter_groups": parameter_groups(state.optimizer, optimized),
            **run_state(recipe, task, world),
        },
        files=task.files,
        wait=wait or state.progress.step >= recipe.run.steps,
        memory_only=memory_only,
    )


def pause(
    checkpointer: Checkpointer,
    state: TrainState,
    recipe: Recipe,
    task: Task,
    world: World,
    metrics: Metrics | None,
    leaving: bool,
) -> None:
    """Save the step just done, and wait until it is safe: this world is about to end. On all ranks.

    If all nodes stay, their memory is enough; if one leaves, its part goes with it.
    """
    memory_only = checkpointer.memory_lasts and not leaving
    where = "in memory" if memory_only else "to storage"
    say(metrics, f"pausing after step {state.progress.step}: saving it {where}")
    try:
        save(checkpointer, state, recipe, task, world, wait=True, memory_only=memory_only)
        finish_saves(checkpointer, state.progress, metrics)
    except SaveFailed as error:  # the checkpoints before are as they were
        say(metrics, f"warning: {error}")
    checkpointer.close(keep_memory=True)


def roll_back(
    checkpointer: Checkpointer, state: TrainState, recipe: Recipe, metrics: Metrics | None
) -> bool:
    """Take weights and optimizer state back to the newest good checkpoint, and go on with the data
    after the steps that went wrong. On all ranks.

    Returns False if that was done as often as it may be, or there is no checkpoint.
    """
    progress = state.progress
    if progress.rollbacks == recipe.elastic.max_rollbacks:
        return False
    with suppress(SaveFailed):
        checkpointer.wait()
    loaded = checkpointer.load(
        model=state.model.tensors,
        optimizer=optimizer_tensors(state.optimizer, state.model.optimized),
    )
    if loaded is None:
        return False
    progress.rollbacks += 1
    progress.skipped_in_row = 0
    warn(
        metrics,
        progress,
        f"rolled back to the weights of step {loaded['step']}; the data from there to step "
        f"{progress.step} is not tried again (roll-back {progress.rollbacks})",
    )
    return True


def warn(metrics: Metrics | None, progress: Progress, what: str) -> None:
    """Tell of something that went wrong in a step, on the console and in the ledger."""
    if metrics and what:
        metrics.say(f"warning: {what}")
        metrics.ledger.event("bad numbers", step=progress.step, what=what)


def save_clock(recipe: Recipe, world: World) -> SaveClock | None:
    """What tells when to save, on rank 0 of a run that is to decide itself."""
    if recipe.checkpoint.every != "auto" or not world.is_main:
        return None
    past = reliability(read_history(Path(recipe.run.dir)))
    mtbf = expected_mtbf(past.failures, past.node_seconds, world.nodes)
    return SaveClock(mtbf, time.monotonic())


def report_saves(
    checkpointer: Checkpointer,
    progress: Progress,
    metrics: Metrics | None,
    clock: SaveClock | None = None,
) -> None:
    """Tell how checkpoints ended: one that failed costs the run nothing but that checkpoint."""
    for outcome in checkpointer.outcomes():
        if metrics:
            metrics.record(progress.step, *save_record(outcome))
            metrics.ledger.save(outcome.step, outcome.seconds, error=outcome.error)
        if clock and outcome.path:
            clock.written(outcome.seconds)


def finish_saves(checkpointer: Checkpointer, progress: Progress, metrics: Metrics | None) -> None:
    """Wait for the last checkpoint.

    Raises:
        SaveFailed: there is no checkpoint of the last step.
    """
    try:
        checkpointer.wait()
    finally:
        report_saves(checkpointer, progress, metrics)
