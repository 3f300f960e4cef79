"""The page: every step of a run, and what follows some of them. build.py makes the run, step.py
does a step, saves.py makes checkpoints."""

import gc
from collections.abc import Iterator
from itertools import count

import torch
import torch.distributed as dist

from checkpointing.format.tensors import local_tensor
from elastic import EXIT_DO_NOT_REQUEUE, EXIT_DONE, EXIT_PAUSED, PAUSE_TO_LEAVE
from elastic.group.batch_plan import BatchPlan
from elastic.node.exchange import received
from elastic.world import supervised
from trainer.data.loader import load
from trainer.parallel.mesh import REPLICATE
from trainer.run.evaluate import Validation, asked_to_pause
from trainer.run.metrics import Startup
from trainer.run.micro_batch import halving
from trainer.run.profile import StepProfiler
from trainer.run.replicas import diverged_ranks
from trainer.run.saves import Saves, finish_saves, pause, roll_back
from trainer.run.speed import Speed
from trainer.run.state import Run
from trainer.run.step import StepResult, train_step
from trainer.tasks.own_model import refusing_misfits


def train(run: Run, startup: Startup) -> int:
    """Train to `run.steps`, or until the ranks agree to pause; returns the exit code. On all ranks.
    From its first step on, `run.recall` may end it by `Recalled`, for this process to begin again.
    """
    recipe, task, progress, pulse = run.recipe, run.task, run.progress, run.pulse
    batches = load(
        task.stream,
        requests(run.plan, run.mesh.dp_rank, progress.sequences),
        workers=recipe.data.workers,
        pin_memory=run.world.device.type == "cuda",
        account=True,
    )
    startup.mark("data")
    if not run.done and (asked := asked_to_pause(pulse)):
        return stop_together(run, asked, saved=not run.checkpointer.newer_than_storage)
    saves, speed = Saves(run), Speed(run)
    validation = Validation(run, speed)
    if not supervised():  # else the warm process has done that, and this attempt may end
        gc.freeze()  # what exists by now stays; a collection that looked at it takes 0.15 s
    with (
        StepProfiler(run, speed) as profiler,
        refusing_misfits(recipe, pulse, lambda: progress.step == run.world.generation == 0),
    ):
        while not run.done:
            saves.ask()
            first = run.first_step
            with halving(run):
                result = train_step(run, batches)
            if first:
                first_step_done(run, startup)
            if not went_on(run, result):
                return run.log.end(EXIT_DO_NOT_REQUEUE, result.verdict.reason)
            if task.after_step:
                task.after_step(run.model, progress.sequences)
            run.log.step(
                progress.step, progress.sequences - run.plan.global_batch, progress.sequences,
                result.seconds, result.loss, result.verdict.action != "keep", result.consumed,
            )  # fmt: skip
            speed.step(result, odd=first or profiler.active)
            if run.recall.settled:
                run.checkpointer.start_spare()
            check_replicas(run)
            asked = validation.after_step(result.pause)
            saves.after_step(result.save)
            profiler.after_step()
            if asked and not run.done:
                return stop_together(run, asked)
        pulse.report(progress.step, "end")
        batches.close()
        finish_saves(run)
        validation.finish()
        return run.log.end(EXIT_DONE, "finished")


def first_step_done(run: Run, startup: Startup) -> None:
    """From now on this process may be recalled, if the recipe allows it."""
    run.recall.enable()
    startup.mark("first step")
    run.log.started(startup)


def went_on(run: Run, result: StepResult) -> bool:
    """Tell of bad numbers in a step, and roll back if there were too many; whether that helped."""
    verdict = result.verdict
    run.log.event(run.progress.step, "bad numbers", verdict.reason)
    if verdict.action != "stop" or roll_back(run):
        return True
    run.log.say(f"stopped: {verdict.reason}")
    return False


def stop_together(run: Run, asked: float, *, saved: bool = False) -> int:
    """End this world after the step just done, unless `saved` with its state made safe; returns the
    exit code. On all ranks, that have agreed on `asked`, the sum of their `asked_to_pause`."""
    run.pulse.report(run.progress.step, "end")
    leaving = asked >= PAUSE_TO_LEAVE
    if not saved:
        pause(run, leaving=leaving)
    return run.log.end(EXIT_PAUSED, "a node leaves" if leaving else "a node joins")


def check_replicas(run: Run) -> None:
    """Name a rank whose replica of the weights differs from the others, if that is due. On all
    ranks."""
    every, mesh = run.recipe.elastic.check_replicas_every, run.mesh.device_mesh
    if not every or not run.due(every) or REPLICATE not in (mesh.mesh_dim_names or ()):
        return
    ranks = diverged_ranks(
        map(local_tensor, run.model.parameters.values()), mesh[REPLICATE].get_group()
    )
    flags = torch.zeros(run.world.world_size, device=mesh.device_type)
    flags[ranks] = 1  # other groups of replicas hold other shards
    dist.all_reduce(flags)
    if ranks := [rank for rank, flag in enumerate(received(flags)) if flag]:
        named = ", ".join(map(str, ranks))
        what = f"weights of rank {named} differ from those of its replicas"
        run.log.event(run.progress.step, "bad numbers", what)


def requests(plan: BatchPlan, dp_rank: int, start: int) -> Iterator[list[int]]:
    """Positions of every micro-batch of a data-parallel rank, from the global batch at `start` on,
    for ever."""
    for batch_start in count(start, plan.global_batch):
        for micro_batch in plan.micro_batches(dp_rank, batch_start):
            yield list(micro_batch.positions)
