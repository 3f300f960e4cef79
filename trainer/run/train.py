"""The training loop: every step of a run, and what follows some of them. build.py makes the run,
step.py runs a step, saves.py saves checkpoints."""

import gc

from elastic import EXIT_DO_NOT_REQUEUE, EXIT_DONE, EXIT_PAUSED, PAUSE_TO_LEAVE
from elastic.node.progress import pause_code
from elastic.world import supervised
from trainer.data.loader import load, requests
from trainer.run.data_changes import RunDataChanges
from trainer.run.evaluate import RunValidator, pause_request
from trainer.run.metrics import RunStartup
from trainer.run.micro_batch import halving
from trainer.run.profile import StepProfiler
from trainer.run.saves import LAST_TRIES, RunSaves, finish_saves, pause, roll_back
from trainer.run.speed import RunSpeedRecorder
from trainer.run.state import Run
from trainer.run.step import StepInputs, StepResult, train_step
from trainer.run.witness import check_replicas
from trainer.tasks.own_model import refusing_misfits


def train(run: Run, startup: RunStartup) -> int:
    """Train to `run.steps`, or until the ranks agree to pause; returns the exit code. After the
    first step `run.recall` may raise `NodeRecall`; the process then trains on in the next
    attempt. On all ranks."""
    recipe, task, progress, pulse = run.recipe, run.task, run.progress, run.pulse
    micro_batches = load(
        task.stream,
        requests(run.plan_at, run.mesh.dp_rank, progress.sequences),
        workers=recipe.data.workers,
        pin_memory=run.world.device.type == "cuda",
        account=True,
    )
    inputs = StepInputs(micro_batches, run.passes)
    startup.mark("data")
    if not run.done and (request := pause_request(pulse)):
        return stop_together(run, request, saved=not run.checkpointer.newer_than_storage)
    speed = RunSpeedRecorder(run)
    validation = RunValidator(run, speed)
    if request := validation.make_up():
        return stop_together(run, request, saved=not run.checkpointer.newer_than_storage)
    saves, changes = RunSaves(run), RunDataChanges(run)
    # A collection over long-lived objects takes 0.15 s. Under an agent, the process that ranks are
    # forked from has frozen them, and the objects of an attempt must be freed after it.
    if not supervised():
        gc.freeze()
    with (
        StepProfiler(run, speed) as profiler,
        refusing_misfits(recipe, pulse, lambda: progress.step == run.world.generation == 0),
    ):
        while not run.done:
            saves.request()
            changes.look()
            first = run.first_step
            with halving(run):
                result = train_step(run, inputs)
            if first:
                first_step_done(run, startup)
            outcome = result.gradients
            run.log.step(
                progress.step, progress.sequences - run.plan.global_batch, progress.sequences,
                result.seconds, outcome.loss, outcome.norm, result.skipped, outcome.consumed,
                outcome.mute,
            )  # fmt: skip
            if stopped := why_stopped(run, result):
                return run.log.end(EXIT_DO_NOT_REQUEUE, stopped)
            if task.after_step:
                task.after_step(run.model, progress.sequences)
            speed.step(result, odd=first or profiler.active)
            if run.recall.settled:
                run.checkpointer.start_spare()
            check_replicas(run)
            request = validation.after_step(outcome.pause)
            saves.after_step(outcome.save)
            profiler.after_step()
            if request and not run.done:
                return stop_together(run, request)
        micro_batches.close()
        finish_saves(run, tries=LAST_TRIES)
        validation.finish()
        if run.stopped_early:
            run.log.say(run.stopped_early)
        return run.log.end(EXIT_DONE, run.stopped_early or "finished")


def first_step_done(run: Run, startup: RunStartup) -> None:
    """Allow reuse of this process in later attempts, if the recipe does; log the startup times."""
    gc.collect()  # frees models that a process in reserve has built for ranks that it is not
    run.recall.enable()
    startup.mark("first step")
    run.log.started(startup)
    if run.world.device.type == "cuda":
        # After a restart from memory, `build` skips `prepare` so that training resumes sooner.
        # Without it the first save would copy to memory that is not pinned, at a third of the
        # speed, and the optimizer's next update would wait for that copy.
        state = run.model.state_of(run.optimizer)
        with run.pulse.during("save"):
            run.checkpointer.prepare(model=run.model.tensors, optimizer=state)


def why_stopped(run: Run, result: StepResult) -> str:
    """Log a bad loss or gradient; roll back after too many, or if the weights are bad. Returns why
    the run cannot continue; "" if it can. On all ranks."""
    verdict = result.verdict
    run.log.event(run.progress.step, "bad numbers", verdict.reason)
    if verdict.action in ("keep", "skip"):
        return ""
    # After skipped steps the newest copy in memory may hold the present weights, which failed.
    why_not = roll_back(run, memory=verdict.action == "undo")
    if not why_not:
        return ""
    stopped = f"{verdict.reason}; {why_not}"
    run.log.say(f"stopped: {stopped}")
    return stopped


def stop_together(run: Run, request: float, *, saved: bool = False) -> int:
    """End this attempt after the step just done; saves the state first, unless it is `saved`.
    Returns the exit code. `request`: sum of all ranks' `pause_request`. On all ranks."""
    leaving = request >= PAUSE_TO_LEAVE
    if not saved:
        pause(run, leaving=leaving)
    why = "the data changes" if run.pulse.wants_pause else "a node joins"
    run.log.end(EXIT_PAUSED, "a node leaves" if leaving else why)
    return pause_code(run.pulse)
