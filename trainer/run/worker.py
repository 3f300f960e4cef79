"""A training process: argv → Recipe → process group → train → exit code.

Imported by the warm process that ranks are forked from, so it imports here all that a rank needs,
and starts nothing: no thread, no CUDA.
"""

import copy
import ctypes
import gc
import logging
import os
import secrets
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from typing import NamedTuple, NoReturn

import numpy.ma  # noqa: F401  # numpy.unique imports it on first use
import torch
import torch._dynamo  # DTensor imports it on first use: once here rather than in each fork
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known

from checkpointing import Spare
from checkpointing.storage.folders import of_run
from checkpointing.storage.place import ObjectPath
from elastic import (
    EXIT_PAUSED,
    EXIT_PEER_GONE,
    EXIT_WRONG_INPUT,
    Pulse,
    die_with_parent,
    watch_signals,
)
from elastic.node.occupancy import Occupancy, OccupiedError
from elastic.node.progress import pause_code
from elastic.node.recall import Recall, Recalled
from elastic.node.zygote import RESERVE
from elastic.process import set_name
from elastic.world import (
    JOB,
    World,
    drop_world,
    join_world,
    leave_world,
    read_environment,
    refuse_stale_store,
    supervised,
)
from trainer.data.loader import load, requests
from trainer.data.stream import CONSUMED, COUNTED
from trainer.optim.optimizer import build_optimizer
from trainer.parallel.kept import CAN_RESET
from trainer.parallel.mesh import build_mesh, forget_meshes, is_sharded_by_fsdp
from trainer.parallel.parallelize import parallelize
from trainer.parallel.passes import Call, Passed
from trainer.recipe import Recipe, RecipeError, counted, dump_recipe, load_recipe
from trainer.recipe.strategies import ep, exact, offload
from trainer.run.build import build
from trainer.run.compiled import keep_caches_closed
from trainer.run.failures import Telling
from trainer.run.identity import check_agreement, identify, with_data
from trainer.run.metrics import Startup
from trainer.run.micro_batch import settled
from trainer.run.preflight import check_inputs
from trainer.run.provenance import keep_recipe
from trainer.run.shipping import Shipper
from trainer.run.state import Kept, Run
from trainer.run.train import train
from trainer.tasks.own_model import refusing_misfits
from trainer.tasks.task import Task, build_task, open_streams
from trainer.text import show_only_visible

logger = logging.getLogger(__name__)

REHEARSED_PARAMETERS = 20_000_000
"""A model of no more is computed once by a process in reserve, which takes memory meanwhile."""

ALLOCATOR_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""torch reads one of these. Which one, if several are set, differs between its versions."""


def main(arguments: list[str]) -> NoReturn:
    """Run one rank; never returns."""
    show_only_visible()
    if read_environment()[2] > 1:
        die_with_parent()
    grow_segments()
    recall = Recall.from_environment()
    again, spare, kept = RESERVE in os.environ, Spare(), Kept()
    place = read_environment()
    if again:
        spare.start()
        with suppress(Exception):  # what is wrong will be so when it is a rank
            rehearse(arguments)
        drop_world()
        gc.collect()
        if not recall.wait(None):
            leave_world(EXIT_PEER_GONE)
        set_name("rank")  # it was "reserve"
    pulse = Pulse.from_environment()
    watch_signals(pulse)
    if "RANK" in os.environ and not supervised():
        # torchrun passes Ctrl-C on: Python's traceback would say where this rank was, not why.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not arguments:
        print("usage: python -m trainer RECIPE.yaml [key.sub=value ...]", file=sys.stderr)
        leave_world(EXIT_WRONG_INPUT)
    if read_environment()[1] == 0:  # it is going to have the writer of its node
        spare.start()
    else:
        spare.end()
    while True:
        if place != read_environment():
            forget_meshes()
        rank, local_rank, *_ = place = read_environment()
        named = f"%(levelname)s rank {rank} %(name)s: %(message)s"
        logging.basicConfig(format=named, force=True)
        telling = Telling(pulse, rank, recall, wait=2 if rank else 0)
        code = None
        try:
            with recall.attempt():
                startup = Startup(again=again)
                code = attempt(arguments, pulse, startup, telling, recall, spare, kept)
        except Recalled:
            pass
        except Exception as error:
            if not telling.recalls(error):
                # The first rank that leaves ends all. What is wrong for all is told by local rank
                # 0, before the others have waited; what is wrong for one alone, by that one.
                code = telling.tell(error, wait=10 if local_rank else 0)
        if code is not None:
            leave_world(code)
        let_go(recall, kept)
        pulse.forget()
        if not recall.wait():
            leave_world(EXIT_PEER_GONE)
        again = True


def attempt(
    arguments: list[str],
    pulse: Pulse,
    startup: Startup,
    telling: Telling,
    recall: Recall,
    spare: Spare,
    kept: Kept,
) -> int:
    """Join the others and train; returns the exit code.

    `kept` has the run of the attempt before, and gets that of this one.
    """
    torch.set_grad_enabled(True)  # the attempt before may have ended in a backward pass
    rank, _, world_size, local_world_size = read_environment()
    recipe, text, ready, identity = prepare(tuple(arguments))
    keep_caches_closed(recipe.directory, recipe.strategy.compile)
    if recipe.elastic.recovery != "refork":
        recall.allow()
    task = ready or build_task(recipe)
    startup.mark("inputs")
    stale = refuse_stale_store()
    if stale:
        raise RecipeError(stale)
    check_inputs(recipe, task, rank, world_size, local_world_size)
    startup.mark("checks")
    with ExitStack() as stack:
        occupancy = shipper = None
        if rank == 0:
            if recipe.in_bucket:
                shipper = stack.enter_context(ship(recipe))
            else:
                occupancy = occupy(recipe)
            # At every attempt: the one before had another rank 0, perhaps, and that another disk.
            keep_recipe(recipe.directory, text)
        pulse.safe = not any(of_run(recipe.checkpoint_directory))
        pulse.report(0, "init")
        timeout = recipe.elastic.timeout_seconds
        world = join_world(recipe.run.device, timeout, pulse.secret, pulse.most_free)
        pulse.most_free = world.free
        identity = with_data(identity, task.stream.fingerprint)
        agreement = check_agreement(recipe, identity, world.device)
        startup.mark("rendezvous")
        if world.device.type == "cpu" and not offload.used(recipe.strategy):
            keep_freed_memory()
        last, kept.run = kept.run, None  # if it fails until there is another, nothing is whole
        with refusing_misfits(recipe, pulse, lambda: world.generation == 0):
            given = recipe
            recipe = counted(settled(recipe, world), task.stream.sequences)
            if last and (why := why_anew(last, recipe)):
                logger.warning("model and optimizer are built anew: %s", why)
                last = None
            if not last and ready:
                task = unused(ready, recall)
            known = given, recipe, text, task, world, agreement, pulse, startup
            parts = *known, recall, spare, shipper, last
            kept.run = run = stack.enter_context(build(*parts))
            del last, parts
        # An error leaves through `telling` first: the run waits for saves, and for other ranks.
        stack.enter_context(telling)
        code = train(run, startup)
        if shipper:
            shipper.goes_on = code == EXIT_PAUSED and supervised()
    if occupancy:
        occupancy.release()
    return pause_code(pulse) if code == EXIT_PAUSED else code


def rehearse(arguments: list[str]) -> None:
    """Build the model once, in a group that is not there: what torch finds out about the tensors of
    a strategy stays in its caches. A small one also computes once, with whatever numbers: code is
    loaded and compiled, for which all others would wait. Not for GPUs: this process has none yet.

    Args:
        arguments: of the process.
    """
    rank, local_rank, world_size, local_world_size = read_environment()
    recipe, _, task, _ = prepare(tuple(arguments))
    keep_caches_closed(recipe.directory, recipe.strategy.compile)
    gpus = recipe.run.device != "cpu" and torch.cuda.is_available()
    if not task or gpus or not is_sharded_by_fsdp(recipe, world_size):
        return
    cpu, meta = torch.device("cpu"), torch.device("meta")
    world = World(rank, local_rank, world_size, local_world_size, 1, 0, 0, None, cpu)
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    model, blocks = copy.deepcopy((task.model, task.blocks))
    in_memory = replace(recipe, strategy=replace(recipe.strategy, offload="none"))
    small, mesh = task.parameter_count <= REHEARSED_PARAMETERS, build_mesh(recipe, world)
    built = parallelize(model, blocks, mesh, in_memory, cpu if small else meta, task.fill)
    build_optimizer(
        built.optimized, recipe.optimizer, exact=exact.used(recipe), zeros_like=built.zeros_like
    )
    # Experts would get as many rows as a message says that nobody sends.
    if small and ep.ranks(recipe.strategy) == 1:
        given = requests(exact.batch_plan(recipe, mesh.dp_size), mesh.dp_rank, 0)
        batches = load(task.stream, given, workers=0, pin_memory=False)
        built.run([next(batches)], _loss, train=True)


def _loss(_number: int, batch: Mapping[str, torch.Tensor], call: Call) -> Passed:
    found = call({key: tensor for key, tensor in batch.items() if key not in (COUNTED, CONSUMED)})
    return found["loss"] if isinstance(found, dict) else found


def unused(task: Task, recall: Recall) -> Task:
    """A task whose model is to be trained; where there may be another attempt, a copy of one that
    stays on the meta device."""
    if not recall.allowed:
        return task
    model, blocks = copy.deepcopy((task.model, task.blocks))
    return replace(task, model=model, blocks=blocks)


def why_anew(last: Run, recipe: Recipe) -> str:
    """Why this process cannot go on with the model and the optimizer of its last run; "" if it can.

    Args:
        last: that run.
        recipe: as it is `settled` for the world of now.
    """
    rank, _, size, _ = now = read_environment()
    world, strategy = last.world, recipe.strategy
    if recipe.elastic.recovery == "rebuild":
        return "elastic.recovery is rebuild"
    if now != (world.rank, world.local_rank, world.world_size, world.local_world_size):
        return f"rank {world.rank} of {world.world_size} is rank {rank} of {size} now"
    if recipe != last.recipe:
        return "batch.micro_batch is another"
    own = [key for key in recipe.own_code if key != "schedule.factory"]
    if own or recipe.model.kgat:
        return f"{[*own, 'model.kgat'][0]} may keep more than its tensors"
    if offload.used(strategy):
        return f"strategy.offload is {strategy.offload}"
    return "" if CAN_RESET else f"torch {torch.__version__} cannot drop a step that failed"


def let_go(recall: Recall, kept: Kept) -> None:
    """Free what an attempt that is over has held, but for what is kept: its groups, and its memory,
    which goes back to the allocator for the next."""
    recall.abort()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    drop_world()
    if not kept.run:  # else `build` does it, while others still build
        gc.collect()  # wrapped models hold themselves


def grow_segments() -> None:
    """Have CUDA's allocator, which reads this when it begins, grow its segments instead of adding
    others beside them: tensors of changing sizes leave less memory unused. Whoever has set options
    of it, under whichever of its names, keeps theirs."""
    if not os.environ.keys() & set(ALLOCATOR_OPTIONS):
        os.environ[ALLOCATOR_OPTIONS[0]] = "expandable_segments:True"


def keep_freed_memory() -> None:
    """Have malloc keep what is freed for the next allocation. glibc would give large tensors back
    to the system at once and fault in the pages of new ones, every step: 5 % of the quickstart's
    time. On a GPU torch keeps memory itself."""
    trim_threshold, mmap_threshold = -1, -3  # numbers of malloc.h
    with suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (trim_threshold, mmap_threshold):
            mallopt(parameter, 1 << 30)


class Prepared(NamedTuple):
    """What a rank knows before it joins others."""

    recipe: Recipe
    text: str
    """The recipe as the run keeps it, see provenance.py."""
    task: Task | None
    identity: dict[str, str]
    """See identity.py; without the data of a task that is None."""


@cache
def prepare(arguments: tuple[str, ...]) -> Prepared:
    """Read a recipe, open what it names, and say what decides its steps. The warm process does it
    once for all its forks.

    A user's own model and data are left to them: code may start threads or CUDA, which no fork
    survives.

    Raises:
        RecipeError, DataError, ConfigError: what is wrong, in one line.
    """
    recipe = load_recipe(arguments[0], arguments[1:])
    text = dump_recipe(recipe)
    if recipe.data.factory:
        return Prepared(recipe, text, None, identify(recipe, None))
    task = None if recipe.model.factory else build_task(recipe)
    stream = task.stream if task else open_streams(recipe)[0]
    return Prepared(recipe, text, task, identify(recipe, stream.fingerprint))


def occupy(recipe: Recipe) -> Occupancy | None:
    """Keep other launches out of the run directory; an agent of ours has done that. On rank 0.

    Raises:
        RecipeError: another launch trains there.
    """
    if supervised():
        return None
    try:
        return Occupancy(recipe.directory, this_job())
    except OccupiedError as occupied:
        raise RecipeError(str(occupied)) from occupied


def ship(recipe: Recipe) -> Shipper:
    """Keep other launches out of a run in a bucket, and bring its record here. On rank 0.

    Raises:
        RecipeError: another launch trains there, or the local directory cannot be written.
        StorageError: the bucket cannot be used.
    """
    try:
        return Shipper(ObjectPath.of(recipe.run.dir), recipe.directory, this_job())
    except OccupiedError as occupied:
        raise RecipeError(str(occupied)) from occupied
    except OSError as error:
        raise RecipeError(
            f"run.dir: cannot write to {recipe.directory}, which this machine needs of a run in a "
            f"bucket: {error.strerror}; set XDG_CACHE_HOME to a directory on a local disk"
        ) from error


def this_job() -> str:
    """Identity of this launch: equal in all its processes, different in every other launch."""
    job = os.environ.get(JOB) or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return secrets.token_hex(8) if job == "none" else job
