"""State to and from checkpoints: where a run goes on, when it saves, how that ended."""

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from checkpointing import SaveFailed, SaveOutcome, TensorCheckpointer, load_model
from checkpointing.format.nf4 import NF4, quantise, weight_shape
from checkpointing.format.tensors import local_tensor
from checkpointing.ranks import RankGroup
from elastic import LedgerError, SaveClock, expected_mtbf, read_history, reliability
from trainer.optim.optimizer import LossScale, parameter_groups
from trainer.parallel.parallelize import KEPT, ParallelModel
from trainer.recipe import Recipe
from trainer.run.provenance import check_resume, run_state
from trainer.run.state import Progress, Run
from trainer.tasks.task import Task

LAST_TRIES, AGAIN_SECONDS = 6, 5.0
"""A run whose last save the filesystem refuses, as it is full, tries so often, and waits between:
all else is done, and would be lost with this machine's memory."""
VALIDATED = ("validation_loss", "validated", "best_loss", "best_step", "passes_since_best")
"""What a `Progress` says of validation passes: it belongs to the weights."""
PORTION = 1 << 28
"""Weights that are loaded in float32 at a time, to be quantised: 1 GiB over the ranks that have
parts of them."""
UNWRITTEN = "unwritten_ledger"
"""Key of a trainer state: see `Ledger.unwritten`. Absent where all lines are written."""


def restore(
    checkpointer: TensorCheckpointer,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    task: Task,
    init_from: str,
    kept: Progress | None = None,
    *,
    begun: bool = False,
    step: int | None = None,
) -> tuple[Progress, dict[str, Any] | None]:
    """Load the newest good checkpoint, else `model.init_from`, else draw weights. On all ranks.
    What is under an adapter is loaded from `model.init_from` at every start.

    Args:
        init_from: digest of the weights in `model.init_from`, "" without any.
        kept: progress that model and optimizer of this rank have made already, if they have: a
            snapshot of the same needs not be loaded.
        begun: the model has the weights of step 0.
        step: the checkpoint of this step, from storage; 0: none is loaded.

    Returns:
        The progress, and the state of the checkpoint, None without one.

    Raises:
        RecipeError: the checkpoint is not one that this recipe can go on from.
    """
    targets = model.targets_of(optimizer)
    state = None
    if step != 0:
        state = checkpointer.load(
            model=model.tensors,
            optimizer=targets,
            step=step,
            finite=model.trained,
            holds=lambda saved: kept is not None and _progress(saved) == kept,
        )
    if state is not None:  # what is in memory has not been looked at before
        there = f"the state in {checkpointer.loaded_from}"
        check_resume(state, recipe, task, there, init_from)
        targets.put()
    if state is None and kept:  # there was no snapshot yet: as when it was made
        for tensor in model.state_of(optimizer).values():
            local_tensor(tensor).zero_()
    if not begun:
        load_beginning(model, recipe, task, resumed=state is not None)
    scale = LossScale(recipe.precision.loss_scale if recipe.precision.dtype == "fp16" else 1.0)
    if state is None:
        return Progress(loss_scale=scale, init_from=init_from), None
    progress = _progress(state)
    if state["recipe"]["precision"]["dtype"] != recipe.precision.dtype:  # then it means nothing
        progress.loss_scale = scale
    if progress.lacks_pass(recipe.run):
        for loss in RankGroup(dist.group.WORLD).on_main(lambda: _made_up(recipe, progress)):
            progress.judge(loss)
    return progress, state


def _made_up(recipe: Recipe, progress: Progress) -> list[float | None]:
    """The loss that an earlier start has found for the state loaded, in a list; [] if none has, or
    the ledger does not tell. The step itself was saved before, and is not saved again."""
    try:
        attempts = read_history(recipe.directory).attempts
    except LedgerError:
        return []
    step, by = progress.step, progress.attempt
    losses = []
    for attempt in attempts:
        start = attempt.start
        same_state = by == start.attempt or (by, step) == (start.parent, start.step)
        if by and same_state and step in attempt.validations:
            losses.append(attempt.validations[step].get("validation_loss"))
    return losses[-1:]


def load_beginning(
    model: ParallelModel, recipe: Recipe, task: Task, *, resumed: bool = False
) -> None:
    """Load `model.init_from`, else draw weights: those of step 0. On all ranks.

    Args:
        model: to be given them.
        recipe: of the run.
        task: of the recipe.
        resumed: the model has the weights of a checkpoint, which are to stay: load what is in none,
            the weights under an adapter.
    """
    adapter = recipe.model.adapter
    if adapter:
        wanted = model.under_adapter(whole=not resumed)
    else:
        given = task.pretrained
        wanted = {name: t for name, t in model.tensors.items() if given is None or name in given}
    complete = recipe.model.init_from and not adapter and len(wanted) == len(model.tensors)
    if not (resumed or complete):
        model.draw_weights()
    if recipe.model.init_from and (adapter or not resumed):
        load_published(model, recipe, wanted, task.tied_copies)


def load_published(
    model: ParallelModel,
    recipe: Recipe,
    wanted: Mapping[str, torch.Tensor],
    tied: Mapping[str, str],
) -> None:
    """Load the weights of `model.init_from` into some tensors of a model, of which `tied` are as
    `Task.tied_copies` says. On all ranks.

    Raises:
        CheckpointError: as `load_model`.
    """
    adapter = recipe.model.adapter
    known: Collection[str] = model.under_adapter(whole=True) if adapter else model.tensors
    portions: Iterable[Mapping[str, torch.Tensor]] = [wanted]
    if adapter and adapter.base == NF4:
        ranks = RankGroup(dist.group.WORLD)
        known = {name for of_rank in ranks.together(lambda: sorted(known)) for name in of_rank}
        portions = _portions(wanted, model.in_nf4, ranks)
    for number, tensors in enumerate(portions):
        load_model(
            recipe.model.init_from or "",
            tensors,
            verify=recipe.checkpoint.verify,
            # The first has the weight of which these are copies.
            optional=[*known, *tied] if number else known,
            tied=tied,
            finite=wanted.keys() - model.buffers().keys(),
            group=dist.group.WORLD,
        )


def _portions(
    wanted: Mapping[str, torch.Tensor], in_nf4: Collection[str], ranks: RankGroup
) -> Iterator[Mapping[str, torch.Tensor]]:
    """What to load, one after the other: first all that is not in nf4, then the rest, by and by, in
    float32. Each portion is quantised when the next is asked for. As many on all ranks."""
    yield {name: tensor for name, tensor in wanted.items() if name not in in_nf4}
    parts: list[list[str]] = []
    room = 0
    for name in wanted:
        if name in in_nf4:
            # By whole weights: ranks that have parts of one put it into the same portion.
            size = math.prod(weight_shape(wanted[name]))
            if size > room:
                parts.append([])
                room = PORTION
            parts[-1].append(name)
            room -= size
    for number in range(max(ranks.together(lambda: len(parts)))):
        names = parts[number] if number < len(parts) else []
        targets = {name: _in_float32(wanted[name]) for name in names}
        yield targets
        while targets:  # so each goes at once
            name, target = targets.popitem()
            local_tensor(wanted[name]).copy_(quantise(local_tensor(target)))


def _in_float32(packed: torch.Tensor) -> torch.Tensor:
    """An empty weight in place of its bytes in nf4, cut as they are."""
    local = local_tensor(packed)
    weight = torch.empty(weight_shape(local), device=local.device)
    if not isinstance(packed, DTensor):
        return weight
    shape = torch.Size(weight_shape(packed))
    return DTensor.from_local(
        weight,
        packed.device_mesh,
        packed.placements,
        run_check=False,
        shape=shape,
        stride=(shape[1], 1),
    )


def _progress(state: Mapping[str, Any]) -> Progress:
    """That of the state of a checkpoint."""
    newer: dict[str, Any] = {name: getattr(Progress(), name) for name in VALIDATED}
    newer |= {"attempt": "", "init_from": None}  # than some checkpoints, as are those before
    known = {key: ({**newer, **state})[key] for key in Progress.__dataclass_fields__}
    return Progress(**{**known, "loss_scale": LossScale(**state["loss_scale"])})


class Saves:
    """When a run saves, and how that ended. On all ranks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        every = run.recipe.checkpoint.every
        self._clock = _save_clock(run) if every == "auto" else None
        self._every = 0 if every == "auto" else every
        self._owed = run.checkpointer.newer_than_storage
        """Whether the step after the one to come is saved though none is due."""
        self._best = run.progress.best_step
        self._stalls: dict[int, float] = {}
        """By step: seconds for which training stood still for its save, until that has ended."""
        self._caught_up = 0
        """The first step that is worth saving."""
        if run.world.cause and run.checkpointer.loaded_from == "memory":
            every = run.recipe.elastic.snapshot_every
            self._caught_up = caught_up(run.world.cause["step"], run.progress.step, every)
        if self._owed and run.done:
            save(run)

    def ask(self) -> None:
        """Tell all, with the next step, whether it is time by the clock of rank 0."""
        self._run.pulse.wants_save = bool(self._clock and self._clock.due(time.monotonic()))

    def after_step(self, wanted: bool) -> None:
        """Save the step just done if that is due; `wanted`: rank 0 has asked for it. Tell of saves
        that have ended."""
        run, progress = self._run, self._run.progress
        self._owed = self._is_best() or self._owed or wanted or run.due(self._every)
        # While steps are being skipped, what came before them must stay to roll back to.
        worth_saving = run.done or (
            not progress.skipped_in_row and progress.step >= self._caught_up
        )
        if self._owed and worth_saving:
            self._owed = False
            began = time.monotonic()
            save(run)
            self._stalls[progress.step] = stall = time.monotonic() - began
            if self._clock:
                self._clock.begun(began, stall)
        elif worth_saving and run.due(run.recipe.elastic.snapshot_every):
            save(run, memory_only=True)
        for outcome in report_saves(run, stalls=self._stalls):
            if self._clock and outcome.path:
                self._clock.written(outcome.seconds)

    def _is_best(self) -> bool:
        """Whether `run.stop_after` and `checkpoint.keep_best` want the step just done: it is the
        best so far, and the run is going to end some passes later."""
        recipe, best = self._run.recipe, self._run.progress.best_step
        found, self._best = best != self._best, best
        return bool(found and recipe.run.stop_after and recipe.checkpoint.keep_best)


def caught_up(failed: int, resumed: int, snapshot_every: int) -> int:
    """The first step worth saving after a failure. Before it a save would hold up steps that are
    computed again, and another failure would find the copy that the run resumed from.

    Args:
        failed: step that was being computed, by the node that reported it.
        resumed: step of the copy in memory.
        snapshot_every: steps between copies; no more than two of these are waited for, whatever was
            reported.
    """
    return min(failed - 1, resumed + 2 * snapshot_every)


@record_function("save checkpoint")
def save(run: Run, *, wait: bool = False, memory_only: bool = False) -> None:
    """Begin a checkpoint of everything a step depends on; training goes on while it is written. On
    all ranks. With `wait`, and for the last step, it is made whatever is still being written."""
    # The last one waits for all that is still being written.
    with run.pulse.during("end" if run.done or wait else "save"):
        run.checkpointer.save(
            run.progress.step,
            **contents(run),
            wait=wait or run.done,
            memory_only=memory_only,
            before={} if memory_only else run.log.before_commit(),
        )


def contents(run: Run) -> dict[str, Any]:
    """What a checkpoint of the step just done holds, by the arguments of
    `TensorCheckpointer.save`. On all ranks."""
    model, optimized = run.model, run.model.optimized
    tensors, kept = model.kept_by(run.optimizer, run.mesh.merged)
    return {
        "model": model.saved,
        "optimizer": tensors,
        "state": {
            **asdict(run.progress),
            **({KEPT: kept} if kept else {}),
            "parameter_groups": run.mesh.merged(parameter_groups(run.optimizer, optimized)),
            **run_state(run.recipe, run.task, run.world, run.progress.init_from),
            **({UNWRITTEN: unwritten} if (unwritten := run.log.unwritten) else {}),
            **run.log.to_state(),
        },
        "files": run.task.files,
        "finite": model.tensors.keys() - run.unchecked,
    }


def report_saves(
    run: Run, raised: SaveFailed | None = None, stalls: dict[int, float] | None = None
) -> list[SaveOutcome]:
    """Tell how checkpoints ended: one that failed costs the run nothing but that checkpoint. The
    console hears of one that is `raised` from whoever catches it. `stalls`: by step, seconds for
    which training stood still; those that are told are taken out."""
    outcomes = list(run.checkpointer.outcomes())
    for outcome in outcomes:
        known = raised is not None and str(raised) == outcome.error
        stall = (stalls or {}).pop(outcome.step, None)
        run.log.save(run.progress.step, outcome, known=known, stall=stall)
    return outcomes


def finish_saves(run: Run, tries: int = 1) -> None:
    """Wait for the last checkpoint. On all ranks.

    Args:
        run: whose.
        tries: a save that the filesystem refused is made anew, until it was tried so often.

    Raises:
        SaveFailed: there is no checkpoint of the last step.
    """
    raised = None
    try:
        with run.pulse.during("end"):
            run.checkpointer.wait()
    except SaveFailed as error:  # on all ranks alike
        if tries == 1 or not error.errno:
            raised = error
            raise
    else:
        return
    finally:
        report_saves(run, raised)
    with run.pulse.during("end"):
        time.sleep(AGAIN_SECONDS)
    save(run, wait=True)
    finish_saves(run, tries - 1)


def pause(run: Run, *, leaving: bool) -> None:
    """Save the step just done, and wait until it is safe: this world is about to end. On all ranks.

    If all nodes stay, their memory is enough; if one leaves, its part goes with it.
    """
    checkpointer, step = run.checkpointer, run.progress.step
    memory_only = checkpointer.memory_lasts and not leaving
    run.log.say(
        f"pausing after step {step}: saving it {'in memory' if memory_only else 'to storage'}"
    )
    with run.pulse.during("end"):
        try:
            save(run, wait=True, memory_only=memory_only)
            finish_saves(run)
        except SaveFailed as error:  # the checkpoints before are as they were
            run.log.say(f"warning: {error}")
        checkpointer.close(keep_memory=True)


def roll_back(run: Run, *, memory: bool) -> str:
    """Take weights and optimizer state back to those of an earlier step, and go on with the data
    after the steps that went wrong. On all ranks.

    Args:
        run: whose.
        memory: whether the newest copy in memory will do. It may hold the weights of now.

    Returns:
        Why that was not done; empty if it was.
    """
    checkpointer, progress = run.checkpointer, run.progress
    most = run.recipe.elastic.max_rollbacks
    if progress.rollbacks == most:
        return f"the run was rolled back {most} times already (elastic.max_rollbacks)"
    with run.pulse.during("end"), suppress(SaveFailed):
        checkpointer.wait()
        report_saves(run)
    load = checkpointer.reload if memory else checkpointer.load
    targets = run.model.targets_of(run.optimizer)
    progress.rollbacks += 1  # before the weights change, as in a step
    with run.pulse.during("load"):
        loaded = load(model=run.model.tensors, optimizer=targets, finite=run.model.trained)
    if loaded is None:
        return "there is no checkpoint to roll back to"
    targets.put()
    progress.skipped_in_row = 0
    earlier = _progress(loaded)
    for name in VALIDATED:
        setattr(progress, name, getattr(earlier, name))
    run.log.rollback(
        progress.step, loaded["step"], checkpointer.loaded_from or "storage", progress.rollbacks
    )
    return ""


def _save_clock(run: Run) -> SaveClock | None:
    """What tells when to save, on rank 0."""
    if not run.world.is_main:
        return None
    failures, node_seconds = 0, 0.0
    with suppress(LedgerError):  # the disk has not taken its first line yet
        past = reliability(read_history(run.recipe.directory))
        failures, node_seconds = past.failures, past.node_seconds
    mtbf = expected_mtbf(failures, node_seconds, run.world.nodes)
    return SaveClock(mtbf, time.monotonic())
