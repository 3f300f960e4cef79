"""Checkpoints of a run: which one it resumes from, when it saves, and how each save ended."""

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
from trainer.parallel.parallel_model import KEPT, ParallelModel
from trainer.recipe import Recipe
from trainer.run.provenance import check_resume, run_state
from trainer.run.state import Progress, Run
from trainer.tasks.task import Task

logger = logging.getLogger(__name__)

LAST_TRIES, AGAIN_SECONDS = 6, 5.0
"""Tries, and seconds between them, of a run's last save if the filesystem is full: training is
done, and would be lost with this machine's memory."""
VALIDATED = ("validation_loss", "validated", "best_loss", "best_step", "passes_since_best")
"""Fields of `Progress` about validation passes. A roll-back restores them, as they describe the
weights."""
PORTION = 1 << 28
"""Weights loaded in float32 at a time to be quantised: 1 GiB over the ranks that share them."""
NONE_WRONG: Mapping[str, int] = {}
UNWRITTEN = "unwritten_ledger"
"""Key of a trainer state for ledger lines not written yet, see `Ledger.unwritten`; absent if all
are."""


def restore(
    checkpointer: TensorCheckpointer,
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    task: Task,
    init_from: str,
    kept: Progress | None = None,
    *,
    at_beginning: bool = False,
    step: int | None = None,
    wrong: Mapping[str, int] = NONE_WRONG,
) -> tuple[Progress, dict[str, Any] | None]:
    """Load the newest good checkpoint, else `model.init_from`, else draw weights. Frozen weights
    under an adapter come from `model.init_from` at every start. On all ranks.

    Args:
        init_from: digest of the weights in `model.init_from`, "" without any.
        kept: progress of the model and the optimizer that this rank has kept, or None. A snapshot
            of the same progress is not loaded.
        at_beginning: the model has the weights of step 0 already.
        step: load the checkpoint of this step from storage; 0: none.
        wrong: attempt in which a rank computed wrongly → newest step before that. States that it
            computed later are passed over, unless there are no others.

    Returns:
        The progress, and the state of the checkpoint, None without one.

    Raises:
        RecipeError: this recipe cannot continue from the checkpoint.
    """
    targets = model.targets_of(optimizer)
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
                logger.warning("there is no state from before: going on from the newest")
            state = load(lambda saved: None)
    if state is not None:  # a state in memory has not been checked before, unlike one in storage
        where = f"the state in {checkpointer.loaded_from}"
        check_resume(state, recipe, task, where, init_from)
        targets.put()
    if state is None and kept:  # no snapshot yet: the kept optimizer begins anew
        for tensor in model.state_of(optimizer).values():
            local_tensor(tensor).zero_()
    if not at_beginning:
        load_beginning(model, recipe, task, resumed=state is not None)
    scale = LossScale(recipe.precision.loss_scale if recipe.precision.dtype == "fp16" else 1.0)
    if state is None:
        return Progress(loss_scale=scale, init_from=init_from), None
    progress = _progress(state)
    # the scale belongs to the dtype
    if state["recipe"]["precision"]["dtype"] != recipe.precision.dtype:
        progress.loss_scale = scale
    # Rank 0 reads for all: run.stop_after must decide alike on every rank.
    if progress.lacks_pass(recipe.run):
        ranks = RankGroup(dist.group.WORLD)
        for loss in ranks.on_main(lambda: _validation_loss_in_ledger(recipe, progress)):
            progress.judge(loss)
    return progress, state


def _refuse_wrong(wrong: Mapping[str, int], saved: Mapping[str, Any]) -> None:
    """Raise DamagedCheckpoint for a state that `wrong` names, see `restore`."""
    right = wrong.get(str(saved.get("attempt")))
    if right is not None and saved["step"] > right:
        raise DamagedCheckpoint(
            f"a rank may have computed wrongly before it was saved; step {right} was right"
        )


def _validation_loss_in_ledger(recipe: Recipe, progress: Progress) -> list[float | None]:
    """The validation loss that an earlier start computed for the loaded state, in a list; [] if
    none did. The ledger has it, since the step was saved before that pass."""
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
        model: receives the weights.
        resumed: the model has the weights of a checkpoint, and keeps them; only the frozen weights
            under an adapter, which no checkpoint holds, are loaded.
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
    """Load the weights of `model.init_from` into the tensors `wanted`; `tied` as in
    `Task.tied_copies`. On all ranks.

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
            # The first portion holds the originals of the tied weights.
            optional=[*known, *tied] if number else known,
            tied=tied,
            finite=wanted.keys() - model.buffers().keys(),
            group=dist.group.WORLD,
        )


def _portions(
    wanted: Mapping[str, torch.Tensor], in_nf4: Collection[str], ranks: RankGroup
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield the tensors to load: first all that are not in nf4, then float32 targets for the
    others, portion by portion. A portion is quantised when the next is requested. All ranks get the
    same number of portions."""
    yield {name: tensor for name, tensor in wanted.items() if name not in in_nf4}
    parts: list[list[str]] = []
    room = 0
    for name in wanted:
        if name in in_nf4:
            # Whole weights: ranks that share one put it into the same portion.
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
    """An empty float32 weight, sharded as its packed nf4 bytes are."""
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
    """The `Progress` in the state of a checkpoint."""
    # Fields that older checkpoints lack.
    newer: dict[str, Any] = {name: getattr(Progress(), name) for name in VALIDATED}
    newer |= {"attempt": "", "init_from": None}
    known = {key: ({**newer, **state})[key] for key in Progress.__dataclass_fields__}
    return Progress(**{**known, "loss_scale": LossScale(**state["loss_scale"])})


class Saves:
    """Decides when a run saves, and logs how saves ended. On all ranks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        every = run.recipe.checkpoint.every
        self._clock = _save_clock(run) if every == "auto" else None
        self._every = 0 if every == "auto" else every
        self._pending = run.checkpointer.newer_than_storage
        """Whether a save is requested that has not begun."""
        self._best = run.progress.best_step
        self._stalls: dict[int, float] = {}
        """Step → seconds that training stood still for its save, until that save has ended."""
        self._caught_up = 0
        """First step after a failure that is worth saving."""
        if run.world.cause and run.checkpointer.loaded_from == "memory":
            every = run.recipe.elastic.snapshot_every
            self._caught_up = caught_up(run.world.cause["step"], run.progress.step, every)
        if self._pending and run.done:
            save(run)

    def request(self) -> None:
        """Let all ranks know, with the next step, whether rank 0's clock requests a save."""
        self._run.pulse.wants_save = bool(self._clock and self._clock.due(time.monotonic()))

    def after_step(self, wanted: bool) -> None:
        """Save the step just done if a save is due, and log saves that have ended. `wanted`: rank 0
        has requested one."""
        run, progress = self._run, self._run.progress
        self._pending = self._is_best() or self._pending or wanted or run.due(self._every)
        # While steps are skipped, the checkpoint before them must stay, to roll back to.
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
        """Whether `checkpoint.keep_best` needs the step just done: it has the lowest validation
        loss so far, and `run.stop_after` will end the run some passes later."""
        recipe, best = self._run.recipe, self._run.progress.best_step
        improved, self._best = best != self._best, best
        return bool(improved and recipe.run.stop_after and recipe.checkpoint.keep_best)


def caught_up(failed: int, resumed: int, snapshot_every: int) -> int:
    """First step worth saving after a failure. An earlier save would delay steps that are computed
    again, while another failure would still find the copy that the run resumed from.

    Args:
        failed: step that was being computed, by the node that reported it.
        resumed: step of the copy in memory.
        snapshot_every: steps between copies; the result is at most two of these after `resumed`,
            whatever was reported.
    """
    return min(failed - 1, resumed + 2 * snapshot_every)


@record_function("save checkpoint")
def save(run: Run, *, wait: bool = False, memory_only: bool = False) -> None:
    """Begin a checkpoint of all state that a step depends on; training continues while it is
    written. On all ranks. With `wait`, and for the last step, wait for earlier saves and begin in
    any case."""
    # This call waits for earlier saves when it is the last.
    with run.pulse.during("end" if run.done or wait else "save"):
        run.checkpointer.save(
            run.progress.step,
            **contents(run),
            wait=wait or run.done,
            memory_only=memory_only,
            before={} if memory_only else run.log.before_commit(),
        )


def contents(run: Run) -> dict[str, Any]:
    """The contents of a checkpoint of the step just done, as arguments of
    `TensorCheckpointer.save`. On all ranks."""
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
            **({UNWRITTEN: unwritten} if (unwritten := run.log.unwritten) else {}),
            **run.log.to_state(),
        },
        "files": run.task.files,
        # A weight that held NaN from the start is no failure of this run.
        "finite": model.tensors.keys() - run.unchecked,
    }


def report_saves(
    run: Run, raised: SaveFailed | None = None, stalls: dict[int, float] | None = None
) -> list[SaveOutcome]:
    """Log how checkpoints ended. A failed one costs the run nothing else.

    Args:
        run: of which they are.
        raised: a failure that its handler prints, so that the console does not show it twice.
        stalls: step → seconds that training stood still; entries of ended saves are removed.
    """
    outcomes = list(run.checkpointer.outcomes())
    for outcome in outcomes:
        known = raised is not None and str(raised) == outcome.error
        stall = (stalls or {}).pop(outcome.step, None)
        run.log.save(run.progress.step, outcome, known=known, stall=stall)
    return outcomes


def finish_saves(run: Run, tries: int = 1) -> None:
    """Wait for the last checkpoint. On all ranks.

    Args:
        run: of which it is.
        tries: attempts at a save that the filesystem refuses.

    Raises:
        SaveFailed: there is no checkpoint of the last step.
    """
    raised = None
    try:
        with run.pulse.during("end"):
            run.checkpointer.wait()
    except SaveFailed as error:  # raised on all ranks
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
    """Save the step just done and wait for it, before this world ends. On all ranks.

    A copy in the nodes' memory is enough if all nodes stay; a leaving node takes its part along.
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
        except SaveFailed as error:  # earlier checkpoints are intact
            run.log.say(f"warning: {error}")
        checkpointer.close(keep_memory=True)


def roll_back(run: Run, *, memory: bool) -> str:
    """Restore weights and optimizer state of an earlier step, and continue with the data after the
    failed steps. On all ranks.

    Args:
        run: to be rolled back.
        memory: whether the newest copy in memory may be used; it may hold the present weights.

    Returns:
        Why the run was not rolled back; "" if it was.
    """
    checkpointer, progress = run.checkpointer, run.progress
    limit = run.recipe.elastic.max_rollbacks
    if progress.rollbacks == limit:
        return f"the run was rolled back {limit} times already (elastic.max_rollbacks)"
    with run.pulse.during("end"), suppress(SaveFailed):
        checkpointer.wait()
        report_saves(run)
    load = checkpointer.reload if memory else checkpointer.load
    targets = run.model.targets_of(run.optimizer)
    progress.rollbacks += 1  # before the weights change, see `train_step`
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
    """The clock that decides when to save, on rank 0; None on others."""
    if not run.world.is_main:
        return None
    failures, node_seconds = 0, 0.0
    with suppress(LedgerError):  # the ledger may have no line yet
        past = reliability(read_history(run.recipe.directory))
        failures, node_seconds = past.failures, past.node_seconds
    mtbf = expected_mtbf(failures, node_seconds, run.world.nodes)
    return SaveClock(mtbf, time.monotonic())
