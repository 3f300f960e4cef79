"""The page: build, restore, loop. One optimizer step is in step.py, checkpoints are in saves.py."""

import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from checkpointing import Checkpointer, optimizer_tensors
from elastic import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_DONE,
    EXIT_PAUSED,
    PAUSE_TO_LEAVE,
    BatchPlan,
    Pace,
    Pulse,
    Start,
    World,
    compare_ranks,
    describe_failure,
    diverged_ranks,
    job_secret,
    plan_batch,
)
from trainer.data.loader import load
from trainer.evaluate import asked_to_pause, evaluate
from trainer.metrics import (
    Metrics,
    Startup,
    Window,
    peak_flops,
    peak_memory,
    say,
    step_line,
    validation_line,
    warn,
)
from trainer.optimizer import build_optimizer
from trainer.own_model import refusing_misfits
from trainer.parallel.mesh import REPLICATE, build_mesh
from trainer.parallel.parallelize import ParallelModel, parallelize
from trainer.profile import StepProfiler
from trainer.recipe import Recipe
from trainer.saves import finish_saves, pause, report_saves, restore, roll_back, save, save_clock
from trainer.step import Progress, StepResult, TrainState, train_step
from trainer.tasks import Task


def train(
    recipe: Recipe,
    task: Task,
    world: World,
    pulse: Pulse,
    startup: Startup,
    telling: AbstractContextManager[object],
) -> int:
    """Train to `run.steps`, from the newest checkpoint if there is one; returns the exit code.

    Called on all ranks. A restart takes the same path as a start: it only finds state to load. An
    error leaves through `telling` first: the contexts around it wait for saves and other ranks.
    """
    batch = recipe.batch
    plan = plan_batch(batch.global_batch, world.world_size, batch.micro_batch, fixed=recipe.exact)
    mesh = build_mesh(recipe, world)
    group = dist.group.WORLD
    secret = job_secret("checkpoints")
    with Checkpointer(
        recipe.checkpoint_directory, recipe.checkpoint, group, secret
    ) as checkpointer:
        checkpointer.start_early()
        model = parallelize(task.model, task.blocks, mesh, recipe, world.device, task.fill)
        optimizer = build_optimizer(
            model.optimized, recipe.optimizer, exact=recipe.exact, zeros_like=model.zeros_like
        )
        startup.mark("model")
        pulse.report(0, "load")
        progress = restore(checkpointer, model, optimizer, recipe, task)
        pulse.safe = not checkpointer.newer_than_storage
        state = TrainState(model, optimizer, progress)
        memory = checkpointer.prepare(
            model=model.tensors, optimizer=optimizer_tensors(optimizer, model.optimized)
        )
        startup.mark("checkpoint")
        start = attempt(checkpointer, progress, plan, recipe, task, world, startup)
        sinks = Metrics(recipe, start) if world.is_main else nullcontext()
        profiling = recipe.tracking.profile_steps > 0
        profile = StepProfiler(recipe, model, optimizer, world) if profiling else nullcontext()
        with sinks as metrics, profile as profiler, telling:
            startup.mark("trackers")
            if metrics:
                about = describe(recipe, task, world, plan, start, metrics.ledger.reached)
                metrics.say(f"{about}\n{memory}")
            batches = load(
                task.stream,
                requests(plan, world.rank, progress.sequences),
                workers=recipe.data.workers,
                pin_memory=world.device.type == "cuda",
                account=True,
            )
            startup.mark("data")
            if progress.step < recipe.run.steps and (asked := asked_to_pause(pulse)):
                return stop_together(
                    checkpointer, state, recipe, task, world, metrics, pulse, asked,
                    saved=not checkpointer.newer_than_storage,
                )  # fmt: skip
            if checkpointer.newer_than_storage:
                save(checkpointer, state, recipe, task, world)
            gc.freeze()  # what exists by now stays; a collection that looked at it takes 0.15 s
            first_step, last_step = progress.step + 1, recipe.run.steps
            window, pace, clock, owed = Window(), Pace(), save_clock(recipe, world), False
            validated = True

            def before_update() -> None:
                pulse.safe = False
                checkpointer.wait_staged()

            save_every = 0 if recipe.checkpoint.every == "auto" else recipe.checkpoint.every
            while progress.step < last_step:
                pulse.wants_save = clock is not None and clock.due(time.monotonic())
                with refusing_misfits(recipe, pulse, progress.step == world.generation == 0):
                    result = train_step(state, batches, plan, recipe, world, pulse, before_update)
                asked = result.pause
                pulse.report(progress.step, "after")
                warn(metrics, progress.step, result.verdict.reason)
                if result.verdict.action == "stop" and not roll_back(
                    checkpointer, state, recipe, metrics
                ):
                    say(metrics, f"stopped: {result.verdict.reason}")
                    return end(metrics, EXIT_DO_NOT_REQUEUE, result.verdict.reason)
                if task.after_step:
                    task.after_step(model, progress.sequences)
                if progress.step == first_step or (profiler and profiler.active):
                    # The first step also warms up, and the profiler slows its own: they would
                    # spoil the averages.
                    window.leave_out(result.seconds)
                else:
                    tokens = plan.global_batch * recipe.data.seq_len
                    window.add(result.seconds, result.data_wait, result.compute, tokens)
                if progress.step == first_step:
                    startup.mark("first step")
                    say(metrics, str(startup))
                    if metrics:
                        metrics.ledger.phases(startup.parts)
                if metrics:
                    skipped = result.verdict.action != "keep"
                    first = progress.sequences - plan.global_batch
                    metrics.done(
                        progress.step, first, progress.sequences, result.seconds, skipped,
                        result.consumed,
                    )  # fmt: skip
                if due(progress.step, recipe.run.log_every, last_step):
                    pace = name_stragglers(pace, window, plan, world, progress, metrics)
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
                    began = time.perf_counter()
                    validation = None
                    if asked < PAUSE_TO_LEAVE:
                        validation = evaluate(
                            model, task.validation, recipe, world, pulse, progress.step
                        )
                    pulse.report(progress.step, "save")
                    window.leave_out(time.perf_counter() - began)
                    validated = validation is not None
                    if validation is None:
                        asked = PAUSE_TO_LEAVE
                        when = "yet" if progress.step == last_step else "at all"
                        say(metrics, f"step {progress.step} is not validated {when}: a node leaves")
                    else:
                        progress.validation_loss = validation.get("validation_loss")
                    if metrics and validation:
                        metrics.record(progress.step, validation, validation_line(validation))
                # While steps are being skipped, what came before them must stay to roll back to.
                worth_saving = not progress.skipped_in_row or progress.step == last_step
                owed = owed or result.save or due(progress.step, save_every, last_step)
                if owed and worth_saving:
                    owed = False
                    # The last one waits for all that is still being written.
                    pulse.report(progress.step, "save" if progress.step < last_step else "end")
                    began = time.monotonic()
                    save(checkpointer, state, recipe, task, world)
                    if clock:
                        clock.begun(began, time.monotonic() - began)
                elif worth_saving and due(progress.step, recipe.elastic.snapshot_every, last_step):
                    pulse.report(progress.step, "save")
                    save(checkpointer, state, recipe, task, world, memory_only=True)
                report_saves(checkpointer, progress, metrics, clock)
                if profiler:
                    pulse.report(progress.step, "after")
                    began = time.perf_counter()
                    profiler.step_done()
                    window.leave_out(time.perf_counter() - began)
                if asked and progress.step < last_step:
                    return stop_together(
                        checkpointer, state, recipe, task, world, metrics, pulse, asked
                    )
            pulse.report(progress.step, "end")
            batches.close()
            finish_saves(checkpointer, progress, metrics)
            if task.validation and not validated:  # the state is safe, and there may be time left
                validation = evaluate(
                    model, task.validation, recipe, world, pulse, progress.step, heed=False
                )
                if metrics and validation:
                    metrics.record(progress.step, validation, validation_line(validation))
            return end(metrics, EXIT_DONE, "finished")


def stop_together(
    checkpointer: Checkpointer,
    state: TrainState,
    recipe: Recipe,
    task: Task,
    world: World,
    metrics: Metrics | None,
    pulse: Pulse,
    asked: float,
    *,
    saved: bool = False,
) -> int:
    """End this world after the step just done, unless `saved` with its state made safe; returns the
    exit code. On all ranks, that have agreed on `asked`, the sum of their `asked_to_pause`."""
    pulse.report(state.progress.step, "end")
    leaving = asked >= PAUSE_TO_LEAVE
    if not saved:
        pause(checkpointer, state, recipe, task, world, metrics, leaving)
    return end(metrics, EXIT_PAUSED, "a node leaves" if leaving else "a node joins")


def name_stragglers(
    pace: Pace,
    window: Window,
    plan: BatchPlan,
    world: World,
    progress: Progress,
    metrics: Metrics | None,
) -> Pace:
    """Compare the ranks' forward passes of a log interval, and tell of one that is slow. On all
    ranks."""
    shape = (2, world.world_size)
    passes = torch.zeros(shape, dtype=torch.float64, device=world.device)  # seconds, sequences
    mine = plan.micro_batches(world.rank, progress.sequences)
    passes[0, world.rank] = sum(window.computes) / max(1, len(window.computes))
    passes[1, world.rank] = sum(len(micro.positions) for micro in mine) / plan.passes
    dist.all_reduce(passes)
    pace, sentences = compare_ranks(pace, *passes.tolist())
    if metrics:
        for sentence in sentences:
            metrics.say(f"warning: {sentence}")
            metrics.ledger.event("straggler", step=progress.step, what=sentence)
    return pace


def check_replicas(
    model: ParallelModel, mesh: DeviceMesh, progress: Progress, metrics: Metrics | None
) -> None:
    """Name a rank whose replica of the weights differs from the others. On all ranks."""
    if REPLICATE not in (mesh.mesh_dim_names or ()):
        return
    local = [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for tensor in model.parameters.values()
    ]
    replicas = mesh[REPLICATE].get_group()
    ranks = diverged_ranks(local, replicas)
    flags = torch.zeros(dist.get_world_size(), device=mesh.device_type)
    flags[ranks] = 1  # other groups of replicas hold other shards
    dist.all_reduce(flags)
    ranks = flags.nonzero().flatten().tolist()
    if ranks:
        named = ", ".join(map(str, ranks))
        warn(metrics, progress.step, f"weights of rank {named} differ from those of its replicas")


def requests(plan: BatchPlan, rank: int, start: int) -> Iterator[list[int]]:
    """Positions of every micro-batch of `rank`, from the global batch at `start` on, for ever."""
    for batch_start in count(start, plan.global_batch):
        for micro_batch in plan.micro_batches(rank, batch_start):
            yield list(micro_batch.positions)


def due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every so many steps, and at the end, happens now."""
    return step == last or (every > 0 and step % every == 0)


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
        mean_seconds = window.elapsed / len(window.seconds)
        values["eta_seconds"] = mean_seconds * (recipe.run.steps - progress.step)
    return values


def attempt(
    checkpointer: Checkpointer,
    progress: Progress,
    plan: BatchPlan,
    recipe: Recipe,
    task: Task,
    world: World,
    startup: Startup,
) -> Start:
    """What this start begins with, for the ledger."""
    return Start(
        step=progress.step,
        sequences=progress.sequences,
        global_batch=plan.global_batch,
        world_size=world.world_size,
        data=task.stream.fingerprint,
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


def describe(
    recipe: Recipe, task: Task, world: World, plan: BatchPlan, start: Start, reached: int
) -> str:
    """What is about to run, with the arithmetic of the batch; after a failure also whose it was,
    and what it cost of the steps up to `reached`."""
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
        *(f"note: {note}" for note in task.notes),
    ]
    steps, lost = recipe.run.steps, max(0, reached - start.step)
    if start.step >= steps:
        lines.append(f"nothing to train: step {start.step} of {steps} is done")
    elif start.step or lost:
        origin = start.source if start.source in ("memory", "storage") else "the beginning"
        why = f"{describe_failure(start.cause)}; " if start.cause else ""
        cost = f"{lost or 'no'} step{'s' if lost > 1 else ''} lost"
        lines.append(f"resuming after step {start.step} of {steps} from {origin}; {why}{cost}")
    return "\n".join(lines)
