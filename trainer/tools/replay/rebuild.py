"""Rebuilds a run as it was after one of its steps, on other ranks, without writing into its
directory."""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from checkpointing import TensorCheckpointer
from checkpointing.format.tensors import tensors_not_finite
from checkpointing.storage.place import StoragePlace, location
from elastic import Pulse, World
from elastic.node.recall import NodeRecallSocket
from elastic.record.history import RecordedAttempt
from elastic.world import limit_waits
from trainer.data.loader import identity_of
from trainer.optim.optimizer import build_schedule
from trainer.parallel.mesh import build_mesh
from trainer.parallel.parallel_model import ParallelStateTargets
from trainer.recipe import Recipe, RecipeError, counted
from trainer.recipe.strategies import exact
from trainer.run.build import attention_kernel, model_and_optimizer
from trainer.run.compiled import keep_caches_closed
from trainer.run.identity import computed_by, identify
from trainer.run.metrics import RunLog
from trainer.run.micro_batch import noted
from trainer.run.provenance import RunProvenanceError, kept_recipe, other_data, where_it_lies
from trainer.run.reference import RunReference
from trainer.run.saves import contents, load_beginning, restore
from trainer.run.state import Run
from trainer.tasks.task import build_task


@dataclass(frozen=True)
class ReplaySources:
    """The inputs from which a run is rebuilt. `data`: current locations of the data sets, in the
    order of the recipe; empty: those of the recipe. `scratch`: scratch folder of this replay."""

    run: Path
    data: Sequence[str]
    scratch: Path

    def recipe_of(self, attempt: RecordedAttempt) -> Recipe:
        """Return the recipe of an attempt for a replay on this machine: with paths that are valid
        here, a device of the same kind if there is one, no validation, checkpoints verified, and
        the run's owner trusted.

        Raises:
            RunProvenanceError: the recipe or its data is missing, or this version cannot read the
                recipe.
            RecipeError: the file is not the recipe of the attempt, or `data` does not fit it.
        """
        recipe = kept_recipe(self.run, [attempt])
        if self.data:
            if len(self.data) != len(recipe.data.sources):
                raise RecipeError(
                    f"--data: given {len(self.data)} time(s), but the recipe has "
                    f"{len(recipe.data.sources)} data set(s); give one for each, in their order"
                )
            paths = zip(recipe.data.sources, self.data, strict=True)
            sources = tuple(replace(source, path=path) for source, path in paths)
            recipe = replace(recipe, data=replace(recipe.data, sources=sources))
        found, away = where_it_lies(recipe, attempt.start.directory)
        if away:
            raise RunProvenanceError(
                f"there is no data in {away}, which has no index.json; say where it lies now with "
                "--data"
            )
        checkpoint = recipe.checkpoint
        directory = recipe.checkpoint_directory if recipe.in_bucket else checkpoint.directory
        if directory and "://" not in directory:
            there = Path(attempt.start.directory) / directory
            directory = str(there if there.exists() else Path(directory).absolute())
        made_by, device = attempt.start.computed_by, recipe.run.device
        if made_by:
            device = "cuda" if "gpu" in made_by and torch.cuda.is_available() else "cpu"
        return replace(
            recipe,
            run=replace(recipe.run, dir=str(self.run), device=device),
            data=found.data,
            model=found.model,
            # Whoever names a run to be replayed trusts the user who trained it.
            checkpoint=replace(
                checkpoint,
                directory=directory,
                verify=True,
                trust=(*checkpoint.trust, self.run.stat().st_uid),
            ),
        )

    def states_of(self, recipe: Recipe) -> StoragePlace:
        """Return the directory of the run's checkpoints."""
        return location(recipe.checkpoint_directory).absolute()


@contextmanager
def rebuilt(
    sources: ReplaySources,
    attempt: RecordedAttempt,
    recipe: Recipe,
    states: StoragePlace,
    step: int,
    world: World,
) -> Iterator[tuple[Run, Mapping[str, str]]]:
    """Rebuild a run as it was after a step. On all ranks.

    Args:
        attempt: the attempt that computed the next step.
        recipe: the attempt's recipe, from `ReplaySources.recipe_of`.
        states: directory with the state of the step.
        step: the step whose state is restored; 0: the initial weights.
        world: ranks of this replay.

    Yields:
        (the run; code, torch, cpu and gpu → their versions in this replay).

    Raises:
        RecipeError, DataError, CheckpointError: recipe, data and state contradict each other.
    """
    # The replay writes nothing into the run's directory, not even compiled code.
    keep_caches_closed(sources.scratch, recipe.strategy.compile)
    given = recipe
    if recipe.batch.micro_batch == "auto":  # another size than the run's only changes rounding
        size = noted(recipe, world) or 1
        recipe = replace(recipe, batch=replace(recipe.batch, micro_batch=size))
    task = build_task(recipe)
    if attempt.start.data and (what := other_data(attempt.start, task.stream)):
        raise RecipeError(f"the data is not what attempt {attempt.number} trained on: {what}")
    identity = identify(recipe, identity_of(task.stream))
    init_from = identity["model.init_from"] if recipe.model.init_from else ""
    recipe = counted(recipe, task.stream.sequences)
    mesh = build_mesh(recipe, world)
    try:
        plan = exact.batch_plan(recipe, mesh.dp_size)
    except RecipeError as error:
        raise RecipeError(f"--nproc: {error}") from error
    with (
        _reader(recipe, states) as checkpointer,
        attention_kernel(recipe, task, world.device),
    ):
        model, optimizer = model_and_optimizer(recipe, task, world, mesh)
        limit_waits(recipe.elastic.timeout_seconds)
        pulse, begun = Pulse.from_environment(), False
        if recipe.objective.referenced and not RunReference(recipe, task, init_from).find(
            world, mesh
        ):
            begun = True
            load_beginning(model, recipe, task)
            # The log-probabilities are stored in the scratch folder, not in the run's directory.
            elsewhere = replace(recipe, run=replace(recipe.run, dir=str(sources.scratch)))
            RunReference(elsewhere, task, init_from).compute(model, world, mesh, pulse)
        progress, _ = restore(
            checkpointer, model, optimizer, recipe, task, init_from, at_beginning=begun, step=step
        )
        start = replace(
            attempt.start,
            step=progress.step,
            sequences=progress.sequences,
            world_size=world.world_size,
        )
        fixed = {name: one for name, one in model.tensors.items() if name not in model.trained}
        yield Run(
            given, recipe, task, world, mesh, plan, model, optimizer, build_schedule(recipe),
            progress, checkpointer, start, RunLog(recipe, start, silent=True), pulse,
            NodeRecallSocket(None), frozenset(tensors_not_finite(fixed)),
        ), computed_by(identity, world.device)  # fmt: skip
    gc.collect()  # wrapped models are reference cycles; GPU memory is needed at once


def _reader(recipe: Recipe, directory: StoragePlace) -> TensorCheckpointer:
    adapter = bool(recipe.model.adapter)
    return TensorCheckpointer(
        str(directory), recipe.checkpoint, dist.group.WORLD, adapter=adapter, read_only=True
    )


def keep_state(run: Run, directory: Path) -> None:
    """Save the state of the step just done in a folder of this replay. Collective."""
    options = replace(
        run.recipe.checkpoint,
        directory=None, every=0, keep=0, keep_every=0, keep_best=0, when_busy="wait", slots=1,
        max_bandwidth=None, peer_copy=False, trace=False,
    )  # fmt: skip
    adapter = bool(run.recipe.model.adapter)
    with TensorCheckpointer(directory, options, dist.group.WORLD, adapter=adapter) as saver:
        saver.save(run.progress.step, **contents(run), wait=True)
        saver.wait()


def go_back(run: Run, directory: StoragePlace, step: int) -> None:
    """Load weights and moments of a step from `directory`, as `roll_back` does. Collective."""
    targets = ParallelStateTargets(run.model, run.optimizer)
    with _reader(run.recipe, directory) as checkpointer:
        checkpointer.load(
            model=run.model.tensors, optimizer=targets, step=step, finite=run.model.trained
        )
    targets.put()
    run.progress.rollbacks += 1
    run.progress.skipped_in_row = 0
