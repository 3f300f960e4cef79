"""State to and from checkpoints: where a run goes on, when it saves, how that ended."""

import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import record_function

from checkpointing import Checkpointer, SaveFailed, load_model, optimizer_tensors
from elastic import SaveClock, World, expected_mtbf, read_history, reliability
from trainer.metrics import Metrics, save_record, say, warn
from trainer.models import TIED_COPIES
from trainer.optimizer import LossScale, parameter_groups
from trainer.parallel.parallelize import ParallelModel
from trainer.provenance import check_resume, run_state
from trainer.recipe import Recipe
from trainer.step import Progress, TrainState
from trainer.tasks import Task


def restore(
    checkpointer: Checkpointer,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    task: Task,
) -> Progress:
    """Load the newest good checkpoint, else `model.init_from`, else draw weights. On all ranks.

    Raises:
        RecipeError: the checkpoint is not one that this recipe can go on from.
    """
    state = checkpointer.load(
        model=model.tensors, optimizer=optimizer_tensors(optimizer, model.optimized)
    )
    if state is not None:  # what is in memory has not been looked at before
        check_resume(state, recipe, task, f"the state in {checkpointer.loaded_from}")
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
    scale = LossScale(recipe.precision.loss_scale if recipe.precision.dtype == "fp16" else 1.0)
    if state is None:
        return Progress(loss_scale=scale)
    if state["recipe"]["precision"]["dtype"] == recipe.precision.dtype:  # else it means nothing
        scale = LossScale(**state["loss_scale"])
    return Progress(
        **{key: state[key] for key in Progress.__dataclass_fields__ if key != "loss_scale"},
        loss_scale=scale,
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
    model, optimized = state.model, state.model.optimized
    # Parameters wait for the copy before the update; buffers may change in the next forward pass.
    buffers = {name: buffer.clone() for name, buffer in model.buffers.items()}
    checkpointer.save(
        state.progress.step,
        model={**model.parameters, **buffers},
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
        progress.step,
        f"rolled back to the weights of step {loaded['step']}; the data from there to step "
        f"{progress.step} is not tried again (roll-back {progress.rollbacks})",
    )
    return True


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
