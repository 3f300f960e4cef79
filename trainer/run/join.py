"""The begin of a rank: it reads and checks its inputs, and joins the other ranks."""

import ctypes
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache

from checkpointing.storage.folders import memory_folders
from checkpointing.storage.ownership import owner
from checkpointing.storage.place import ObjectPath
from elastic.node.occupancy import NodeDirectoryHold, NodeDirectoryOccupiedError
from elastic.world import (
    AGENT,
    JOB,
    World,
    join_world,
    read_environment,
    refuse_stale_store,
    supervised,
)
from trainer.data.cache import keep_copies
from trainer.data.loader import identity_of
from trainer.recipe import Recipe, RecipeError, dump_recipe, load_recipe
from trainer.recipe.strategies import offload
from trainer.run.compiled import keep_caches_closed
from trainer.run.data_changes import shared_changes
from trainer.run.identity import RunAgreement, check_agreement, identify, of_recipe, with_data
from trainer.run.preflight import check_inputs
from trainer.run.provenance import keep_recipe, read_changes
from trainer.run.shipping import RunShipper
from trainer.run.state import RunProcess
from trainer.tasks.task import Task, build_task, open_streams


@cache
def prepare(arguments: tuple[str, ...]) -> tuple[Recipe, str, Task | None, dict[str, str]]:
    """Read a recipe, open the files that it names, and compute its identity. Under an agent, the
    process that ranks are forked from calls this once for all of them. Raises RecipeError,
    DataError or ModelConfigError.

    Returns:
        The fields of `_RunInputs`. The task is None if model or data is a user's own, which ranks
        build: that code may start threads or CUDA, which does not survive a fork. With
        `data.factory` the identity lacks the data.
    """
    recipe = load_recipe(arguments[0], arguments[1:])
    text = dump_recipe(recipe)
    if recipe.data.factory:
        return recipe, text, None, identify(recipe, None)
    task = None if recipe.model.factory else build_task(recipe)
    stream = task.stream if task else open_streams(recipe)[0]
    return recipe, text, task, identify(recipe, identity_of(stream))


@dataclass(frozen=True)
class _RunInputs:
    """What a rank trains on."""

    recipe: Recipe
    text: str
    """The recipe as the run directory keeps it, see provenance.py."""
    task: Task
    identity: Mapping[str, str]
    """All that determines a step, see identity.py."""


def read_inputs(process: RunProcess) -> _RunInputs:
    """Read and check the recipe and what it names, before anything of the run is written or a GPU
    is claimed. Raises RecipeError, DataError, ModelConfigError or CheckpointError, one line per
    problem."""
    recipe, text, prepared_task, identity = prepare(process.arguments)
    keep_caches_closed(recipe.directory, recipe.strategy.compile)
    if recipe.elastic.recovery != "refork":
        process.recall.allow()
    task = prepared_task or build_task(recipe)
    process.startup.mark("inputs")
    if stale := refuse_stale_store():
        raise RecipeError(stale)
    rank, _, world_size, local_world_size = read_environment()
    check_inputs(recipe, task, rank, world_size, local_world_size)
    process.startup.mark("checks")
    return _RunInputs(recipe, text, task, with_data(identity, identity_of(task.stream)))


@dataclass(frozen=True)
class RunRank:
    """A rank in its process group, and what all ranks have agreed on."""

    inputs: _RunInputs
    """With the changes of the data that rank 0 has accepted, see data_changes.py."""
    world: World
    agreement: RunAgreement
    shipper: RunShipper | None
    """On rank 0 of a run in a bucket; else None."""


@contextmanager
def join(process: RunProcess, inputs: _RunInputs) -> Iterator[RunRank]:
    """Keep other launches out of the run while entered, join the process group, and agree with the
    other ranks on what is trained. On all ranks. Raises RecipeError or StorageError as `hold` does,
    and RecipeError if some ranks would train something else."""
    recipe, pulse = inputs.recipe, process.pulse
    rank, local_rank, *_ = read_environment()
    with ExitStack() as stack:
        shipper, changes = None, []
        if rank == 0:
            shipper = stack.enter_context(hold(recipe))
            changes = read_changes(recipe)
            # At every attempt: rank 0 may now be on another node, with another disk.
            keep_recipe(recipe.directory, inputs.text)
        pulse.safe = not any(memory_folders(recipe.checkpoint_directory))
        pulse.report(0, "init")
        timeout = recipe.elastic.timeout_seconds
        world = join_world(recipe.run.device, timeout, pulse.secret, pulse.most_free)
        pulse.most_free = world.free
        identity = inputs.identity
        agreement = check_agreement(recipe, identity, world.device, changes=bool(changes))
        if agreement.changes:
            recipe = shared_changes(recipe, changes)
            task, identity = build_task(recipe), {**identity, **of_recipe(recipe)}
            identity = with_data(identity, identity_of(task.stream))
            inputs = _RunInputs(recipe, dump_recipe(recipe), task, identity)
            agreement = check_agreement(recipe, identity, world.device)
            if rank == 0:
                keep_recipe(recipe.directory, inputs.text)
        process.startup.mark("rendezvous")
        if world.device.type == "cpu" and not offload.used(recipe.strategy):
            keep_freed_memory()
        if local_rank == 0:
            stack.callback(keep_copies(recipe.data))
        yield RunRank(inputs, world, agreement, shipper)


def keep_freed_memory() -> None:
    """Make malloc keep freed memory for the next allocation."""
    # glibc would return large tensors to the system and fault in new pages every step: 5 % of the
    # quickstart's time. On a GPU torch's allocator keeps memory itself.
    trim_threshold, mmap_threshold = -1, -3  # parameters' numbers in malloc.h
    with suppress(AttributeError):  # the C library is not glibc
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (trim_threshold, mmap_threshold):
            mallopt(parameter, 1 << 30)


@contextmanager
def hold(recipe: Recipe) -> Iterator[RunShipper | None]:
    """While entered, keep other launches out of a run, unless this node's agent already does. If
    the run is in a bucket, also copy its record to this machine, and yield the `RunShipper` that
    writes it back. On rank 0. Raises RecipeError if another launch trains there or the local
    directory cannot be written, StorageError if the bucket cannot be used."""
    occupancy = shipper = None
    try:
        if recipe.in_bucket:
            run = ObjectPath.of(recipe.run.dir)
            shipper = RunShipper(run, recipe.directory, this_job(), this_launcher())
        elif not supervised():
            occupancy = NodeDirectoryHold(recipe.directory, this_job())
    except NodeDirectoryOccupiedError as occupied:
        raise RecipeError(str(occupied)) from occupied
    except OSError as error:
        raise RecipeError(
            f"run.dir: cannot write to {recipe.directory}, which this machine needs of a run in a "
            f"bucket: {error.strerror}; set XDG_CACHE_HOME to a directory on a local disk"
        ) from error
    with shipper or nullcontext():
        yield shipper
    if occupancy:  # not after an error: other ranks may still use the directory
        occupancy.release()


def this_launcher() -> str:
    """Return the id of the process that lives as long as this launch: our agent, or rank 0 if there
    is none. "" with several nodes, because no process lives exactly as long as their agents
    together."""
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        return ""
    return owner(int(os.environ[AGENT])) if supervised() else owner()


def this_job() -> str:
    """Return an identity that all processes of this launch share, and no other launch."""
    job = os.environ.get(JOB) or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return secrets.token_hex(8) if job == "none" else job
