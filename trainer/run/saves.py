"""Checkpoints of a run: which weights it begins with, when it saves, how each save ended, and
roll-backs."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from checkpointing import SaveFailed, SaveOutcome, TensorCheckpointer, load_model
from checkpointing.errors import DamagedCheckpoint
from checkpointing.format.nf4 import NF4, quantise, weight_shape
from checkpointing.format.tensors import local_tensor
from checkpointing.ranks import RankGroup
from elastic import LedgerError, SaveClock, expected_mtbf, read_history, reliability
from trainer.optim.optimizer import LossScale, parameter_groups
from trainer.parallel.parallel_model import KEPT, ParallelModel, ParallelStateTargets
from trainer.recipe import Recipe
from trainer.run.provenance import check_resume, run_state
from trainer.run.state import Run, RunProgress
from trainer.tasks.task import Task

logger = logging.getLogger(__name__)

LAST_TRIES, AGAIN_SECONDS = 6, 5.0
"""Number of tries of a run's last save if the system reports an error, such as a full disk, and
seconds between them: after the last step, a failure would lose the result of the training."""
VALIDATED = ("validation_loss", "validated", "best_loss", "best_step", "passes_since_best")
"""Fields of `RunProgress` on validation, which a roll-back restores with the validated weights."""
PORTION = 1 << 28
"""Elements loaded in float32 at a time to be quantised: 1 GiB, divided among ranks by sharding."""
NONE_WRONG: Mapping[str, int] = {}


def restore(
    checkpointer: TensorCheckpointer,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    task: Task,
    init_from: str,
    kept: RunProgress | None = None,
    *,
    at_beginning: bool = False,
    step: int | None = None,
    wrong: Mapping[str, int] = NONE_WRONG,
) -> tuple[RunProgress, dict[str, Any] | None]:
    """Load the newest good checkpoint; without any, the weights in `model.init_from`; without
    these, random weights. Frozen weights of an adapter always come from `model.init_from`. Returns
    the progress, and the state of the checkpoint, or None if none was loaded. On all ranks.

    Args:
        init_from: digest of the weights in `model.init_from`; "" if the recipe names none.
        kept: progress of model and optimizer that this process keeps from the last attempt, or
            None. A copy of the same progress need not be loaded.
        at_beginning: whether the model has the weights of step 0 already.
        step: load the checkpoint of this step from storage; 0: begin anew; None: the newest.
        wrong: attempt in which a rank computed wrongly → its last step known to be right. States of
            later steps are skipped, unless there are no others.

    Raises:
        RecipeError: this recipe cannot continue from the checkpoint.
    """
    targets = ParallelStateTargets(model, optimizer)
    state = None

    def load(refuse: Callable[[Mapping[str, Any]], None]) -> dict[str, Any] | None:
        return checkpointer.load(
            model=model.tensors,
            optimizer=targets,
            step=step,
            finite=model.trained,
            refuse=refuse,
            holds=lambda saved: kept is not None and _progress(saved) == kept,
        )

    if step != 0:
        try:
            state = load(partial(_refuse_wrong, wrong))
        except DamagedCheckpoint:
            if not wrong:
                raise
            if dist.get_rank() == 0:
                logger.warning(
                    "a rank may have computed wrongly, and no checkpoint from before that is left; "
                    "resuming from the newest"
                )
            state = load(lambda saved: None)
    if state is not None:  # preflight has checked the newest state in storage, not one in memory
        where = f"the state in {checkpointer.loaded_from}"
        check_resume(state, recipe, task, where, init_from)
        targets.put()
    if state is None and kept:  # the kept optimizer holds moments, and training begins anew
        for tensor in model.state_of(optimizer).values():
            local_tensor(tensor).zero_()
    if not at_beginning:
        load_beginning(model, recipe, task, resumed=state is not None)
    scale = LossScale(recipe.precision.loss_scale if recipe.precision.dtype == "fp16" else 1.0)
    if state is None:
        return RunProgress(loss_scale=scale, init_from=init_from), None
    progress = _progress(state)
    # A loss scale saved under another dtype is not used.
    if state["recipe"]["precision"]["dtype"] != recipe.precision.dtype:
        progress.loss_scale = scale
    # Rank 0 reads and broadcasts, so that run.stop_after decides alike on all ranks.
    if progress.lacks_pass(recipe.run):
        ranks = RankGroup(dist.group.WORLD)
        for loss in ranks.on_main(lambda: _validation_loss_in_ledger(recipe, progress)):
            progress.judge(loss)
    return progress, state


def _refuse_wrong(wrong: Mapping[str, int], saved: Mapping[str, Any]) -> None:
    """Raise DamagedCheckpoint for a saved state after the last right step of its attempt."""
    right = wrong.get(str(saved.get("attempt")))
    if right is not None and saved["step"] > right:
        raise DamagedCheckpoint(
            f"a rank may have computed wrongly after step {right}, the last step known to be right"
        )


def _validation_loss_in_ledger(recipe: Recipe, progress: RunProgress) -> list[float | None]:
    """Return, in a list, the validation loss that an earlier attempt computed for the loaded state;
    [] if none did. The state lacks this loss, because it was saved before the pass."""
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
    """Set the weights of step 0: those in `model.init_from`, else random ones. With `resumed` the
    model has the weights of a checkpoint, and only frozen weights under an adapter are loaded,
    which no checkpoint holds. On all ranks."""
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
    """Load the weights in `model.init_from` into the tensors `wanted`. `tied`: see
    `Task.tied_copies`. Raises CheckpointError as `load_model` does. On all ranks."""
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
            # The first portion holds the targets of `tied`. Later portions lack them, so there the
            # names of the copies must be optional.
            optional=[*known, *tied] if number else known,
            tied=tied,
            finite=wanted.keys() - model.buffers().keys(),
            group=dist.group.WORLD,
        )


def _portions(
    wanted: Mapping[str, torch.Tensor], in_nf4: Collection[str], ranks: RankGroup
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield the tensors to load: first all that are not in nf4, then float32 tensors in place of
    nf4 weights. Requesting the next portion quantises the last."""
    yield {name: tensor for name, tensor in wanted.items() if name not in in_nf4}
    parts: list[list[str]] = []
    room = 0
    for name in wanted:
        if name in in_nf4:
            # The whole weight's size counts, so that all its ranks put it into the same portion.
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
        while targets:  # frees each float32 weight once it is quantised
            name, target = targets.popitem()
            local_tensor(wanted[name]).copy_(quantise(local_tensor(target)))


def _in_float32(packed: torch.Tensor) -> torch.Tensor:
    local, shape = local_tensor(packed), torch.Size(weight_shape(packed))
    weight = torch.empty(weight_shape(local), device=local.device)
    if not isinstance(packed, DTensor):
        return weight
    return DTensor.from_local(
        weight, packed.device_mesh, packed.placements,
        run_check=False, shape=shape, stride=(shape[1], 1),
    )  # fmt: skip


def _progress(state: Mapping[str, Any]) -> RunProgress:
    # Defaults for fields that older checkpoints lack.
    newer: dict[str, Any] = {name: getattr(RunProgress(), name) for name in VALIDATED}
    newer |= {"attempt": "", "init_from": None}
    known = {key: ({**newer, **state})[key] for key in RunProgress.__dataclass_fields__}
    return RunProgress(**{**known, "loss_scale": LossScale(**state["loss_scale"])})


class RunSaves:
    """Decides when a run saves, and logs how saves ended. On all ranks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        options = run.recipe.checkpoint
        self._clock = _save_clock(run) if options.every == "auto" else None
        # With `every: auto`, saves hardly ever fall on multiples of `keep_every`. So these
        # multiples are saved too.
        self._every = options.keep_every if options.every == "auto" else options.every
        self._pending = run.checkpointer.newer_than_storage
        """Whether a save is due but has not begun."""
        self._best = run.progress.best_step
        self._stalls: dict[int, float] = {}
        """Step → seconds for which its save blocked training. Entries go when the save ends."""
        self._caught_up = 0
        """First step that is saved after a failure, see `caught_up`."""
        if run.world.cause and run.checkpointer.loaded_from == "memory":
            every = run.recipe.elastic.snapshot_every
            self._caught_up = caught_up(run.world.cause["step"], run.progress.step, every)
        if self._pending and run.done:
            save(run)

    def request(self) -> None:
        """If rank 0's clock says that a save is due, send that to all ranks with the next step."""
        self._run.pulse.wants_save = bool(self._clock and self._clock.due(time.monotonic()))

    def after_step(self, wanted: bool) -> None:
        """Save this step if a save is due or `wanted` by rank 0's clock. Log saves that ended."""
        run, progress = self._run, self._run.progress
        self._pending = self._is_best() or self._pending or wanted or run.due(self._every)
        # While steps are skipped, a save could replace the checkpoint that a roll-back needs.
        worth_saving = run.done or (
            not progress.skipped_in_row and progress.step >= self._caught_up
        )
        if self._pending and worth_saving:
            self._pending = False
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
        """Return whether this step must be saved for `checkpoint.keep_best`: its validation loss is
        the lowest so far, and `run.stop_after` may end the run long after it."""
        recipe, best = self._run.recipe, self._run.progress.best_step
        improved, self._best = best != self._best, best
        return bool(improved and recipe.run.stop_after and recipe.checkpoint.keep_best)


def caught_up(failed: int, resumed: int, snapshot_every: int) -> int:
    """Return the first step to save after a failure in step `failed` and a restart from the copy of
    step `resumed` in memory. Earlier saves would slow the steps that are repeated, and add no
    safety: the copy in memory still exists."""
    # At most two intervals between copies, so that a wrong report does not put saves off for long.
    return min(failed - 1, resumed + 2 * snapshot_every)


@record_function("save checkpoint")
def save(run: Run, *, wait: bool = False, memory_only: bool = False) -> None:
    """Begin a checkpoint of all state that a step depends on; training continues while it is
    written. On all ranks.

    Args:
        wait: wait for earlier saves first; always so at the last step. Otherwise this save may be
            dropped while another is being written.
        memory_only: copy the state to the nodes' memory, not to storage.
    """
    with run.pulse.during("end" if run.done or wait else "save"):
        run.checkpointer.save(
            run.progress.step,
            **contents(run),
            wait=wait or run.done,
            memory_only=memory_only,
            before={} if memory_only else run.log.before_commit(),
        )


def contents(run: Run) -> dict[str, Any]:
    """Return keyword arguments for `TensorCheckpointer.save`. On all ranks."""
    model = run.model
    tensors, of_stage = model.kept_by(run.optimizer)
    groups_of_stage = parameter_groups(run.optimizer, model.optimized)
    kept, groups = run.mesh.merged(of_stage, groups_of_stage)
    return {
        "model": model.saved,
        "optimizer": tensors,
        "state": {
            **asdict(run.progress),
            **({KEPT: kept} if kept else {}),
            "parameter_groups": groups,
            **run_state(run.recipe, run.task, run.world, run.progress.init_from),
            **run.log.to_state(),
        },
        "files": run.task.files,
        # Frozen weights and buffers that held NaN or infinity at the start are not checked, as the
        # run did not cause it.
        "finite": model.tensors.keys() - run.unchecked,
    }


def report_saves(
    run: Run, raised: SaveFailed | None = None, stalls: dict[int, float] | None = None
) -> list[SaveOutcome]:
    """Log and return the outcomes of saves that ended since the last call. `raised`: a failure that
    the caller prints, and that the console need not show. `stalls`: step → seconds for which its
    save blocked training; those of ended saves are removed."""
    outcomes = list(run.checkpointer.outcomes())
    for outcome in outcomes:
        known = raised is not None and str(raised) == outcome.error
        stall = (stalls or {}).pop(outcome.step, None)
        run.log.save(run.progress.step, outcome, known=known, stall=stall)
    return outcomes


def finish_saves(run: Run, tries: int = 1) -> None:
    """Wait until the checkpoint of the last step is written. If the system reports an error, such
    as a full disk, save again, up to `tries` tries. Raises SaveFailed. On all ranks."""
    raised = None
    try:
        with run.pulse.during("end"):
            run.checkpointer.wait()
    except SaveFailed as error:  # raised on all ranks, so all of them retry
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
    """Save this step and wait until it is saved, before the ranks end. On all ranks."""
    checkpointer, step = run.checkpointer, run.progress.step
    # A leaving node would take its part of the copy in the nodes' memory away.
    memory_only = checkpointer.memory_lasts and not leaving
    run.log.say(
        f"pausing after step {step}: saving it {'in memory' if memory_only else 'to storage'}"
    )
    with run.pulse.during("end"):
        try:
            save(run, wait=True, memory_only=memory_only)
            finish_saves(run)
        except SaveFailed as error:  # earlier checkpoints are intact, so the ranks may end
            run.log.say(f"warning: {error}")
        checkpointer.close(keep_memory=True)


def roll_back(run: Run, *, memory: bool) -> str:
    """Load weights and optimizer state of an earlier step. Training continues with the data after
    the failed steps. Returns why the run was not rolled back; "" if it was. `memory`: whether the
    newest copy in memory, which may hold the present weights, may be loaded. On all ranks."""
    checkpointer, progress = run.checkpointer, run.progress
    limit = run.recipe.elastic.max_rollbacks
    if progress.rollbacks == limit:
        return f"the run was rolled back {limit} times already (elastic.max_rollbacks)"
    with run.pulse.during("end"), suppress(SaveFailed):
        checkpointer.wait()
        report_saves(run)
    load = checkpointer.reload if memory else checkpointer.load
    targets = ParallelStateTargets(run.model, run.optimizer)
    progress.rollbacks += 1  # before the weights change, for the reason in `train_step`
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
    """Return the clock by which rank 0 decides when to save; None on all other ranks."""
    if not run.world.is_main:
        return None
    failures, node_seconds = 0, 0.0
    with suppress(LedgerError):  # the ledger may have no line yet
        past = reliability(read_history(run.recipe.directory))
        failures, node_seconds = past.failures, past.node_seconds
    mtbf = expected_mtbf(failures, node_seconds, run.world.nodes)
    return SaveClock(mtbf, time.monotonic())
