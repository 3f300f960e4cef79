"""A training process: argv → recipe → process group → training → exit code.

The warm process that ranks are forked from imports this module. So it imports all that a rank
needs, and starts no thread and no CUDA.
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
from checkpointing.storage.ownership import owner
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
from elastic.node.recall import AttemptRecalled, RecallSocket
from elastic.node.zygote import RESERVE
from elastic.process import set_name
from elastic.world import (
    AGENT,
    JOB,
    World,
    drop_world,
    join_world,
    leave_world,
    read_environment,
    refuse_stale_store,
    supervised,
)
from trainer.data.cache import keep_copies
from trainer.data.loader import identity_of, load, requests
from trainer.data.stream import CONSUMED, COUNTED
from trainer.optim.optimizer import build_optimizer
from trainer.parallel.mesh import build_mesh, forget_meshes, is_sharded_by_fsdp
from trainer.parallel.parallelize import parallelize
from trainer.parallel.passes import Call, Passed
from trainer.parallel.rejoin import CAN_RESET
from trainer.recipe import Recipe, RecipeError, counted, dump_recipe, load_recipe
from trainer.recipe.strategies import ep, exact, offload
from trainer.run.build import build
from trainer.run.compiled import keep_caches_closed
from trainer.run.data_changes import shared_changes
from trainer.run.failures import FailureReport
from trainer.run.identity import check_agreement, identify, of_recipe, with_data
from trainer.run.metrics import Startup
from trainer.run.micro_batch import settled
from trainer.run.preflight import check_inputs
from trainer.run.provenance import keep_recipe, read_changes
from trainer.run.shipping import Shipper
from trainer.run.state import Kept, Run
from trainer.run.train import train
from trainer.tasks.own_model import refusing_misfits
from trainer.tasks.task import Task, build_task, open_streams
from trainer.text import show_only_visible

logger = logging.getLogger(__name__)

REHEARSED_PARAMETERS = 20_000_000
"""Largest model whose forward and backward a reserve process computes once; they take memory
meanwhile."""

ALLOCATOR_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of the environment variable for torch's allocator. Which one wins, if several are set,
differs between versions of torch."""


def main(arguments: list[str]) -> NoReturn:
    """Run one rank; never returns."""
    show_only_visible()
    if read_environment()[2] > 1:
        die_with_parent()
    grow_segments()
    recall = RecallSocket.from_environment()
    again, spare, kept = RESERVE in os.environ, Spare(), Kept()
    place = read_environment()
    if again:
        spare.start()
        with suppress(Exception):  # an error shows again, and is reported, once this is a rank
            rehearse(arguments)
        drop_world()
        gc.collect()
        if not recall.wait(None):
            leave_world(EXIT_PEER_GONE)
        set_name("rank")  # its name was "reserve"
    pulse = Pulse.from_environment()
    watch_signals(pulse)
    if "RANK" in os.environ and not supervised():
        # torchrun passes Ctrl-C on: Python's traceback would say where this rank was, not why.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not arguments:
        print("usage: python -m trainer RECIPE.yaml [key.sub=value ...]", file=sys.stderr)
        leave_world(EXIT_WRONG_INPUT)
    if read_environment()[1] == 0:  # local rank 0 starts the checkpoint writer of its node
        spare.start()
    else:
        spare.end()
    while True:
        if place != read_environment():
            forget_meshes()
        rank, local_rank, *_ = place = read_environment()
        named = f"%(levelname)s rank {rank} %(name)s: %(message)s"
        logging.basicConfig(format=named, force=True)
        failure_report = FailureReport(pulse, rank, recall, wait=2 if rank else 0)
        code = None
        try:
            with recall.attempt():
                startup = Startup(again=again)
                code = run_attempt(arguments, pulse, startup, failure_report, recall, spare, kept)
        except AttemptRecalled:
            pass
        except Exception as error:
            if not failure_report.recalls(error):
                # The first rank that exits ends the job. An error of all ranks is printed by local
                # rank 0 while the others wait; an error of one rank is printed by that rank.
                code = failure_report.send(error, wait=10 if local_rank else 0)
        if code is not None:
            leave_world(code)
        release_attempt(recall, kept)
        pulse.forget()
        if not recall.wait():
            leave_world(EXIT_PEER_GONE)
        again = True


def run_attempt(
    arguments: list[str],
    pulse: Pulse,
    startup: Startup,
    failure_report: FailureReport,
    recall: RecallSocket,
    spare: Spare,
    kept: Kept,
) -> int:
    """Join the other ranks and train; returns the exit code.

    `kept` holds the run of the last attempt, and gets the run of this one.
    """
    torch.set_grad_enabled(True)  # the last attempt may have ended inside no_grad
    rank, local_rank, world_size, local_world_size = read_environment()
    recipe, text, prepared_task, identity = prepare(tuple(arguments))
    keep_caches_closed(recipe.directory, recipe.strategy.compile)
    if recipe.elastic.recovery != "refork":
        recall.allow()
    task = prepared_task or build_task(recipe)
    startup.mark("inputs")
    stale = refuse_stale_store()
    if stale:
        raise RecipeError(stale)
    check_inputs(recipe, task, rank, world_size, local_world_size)
    startup.mark("checks")
    with ExitStack() as stack:
        occupancy = shipper = None
        changes = []
        if rank == 0:
            if recipe.in_bucket:
                shipper = stack.enter_context(ship(recipe))
            else:
                occupancy = occupy(recipe)
            changes = read_changes(recipe)
            # At every attempt: rank 0 may now be on another node, with another disk.
            keep_recipe(recipe.directory, text)
        pulse.safe = not any(of_run(recipe.checkpoint_directory))
        pulse.report(0, "init")
        timeout = recipe.elastic.timeout_seconds
        world = join_world(recipe.run.device, timeout, pulse.secret, pulse.most_free)
        pulse.most_free = world.free
        identity = with_data(identity, identity_of(task.stream))
        agreement = check_agreement(recipe, identity, world.device, changes=bool(changes))
        if agreement.changes:
            recipe = shared_changes(recipe, changes)
            text, task, prepared_task = dump_recipe(recipe), build_task(recipe), None
            identity = with_data({**identity, **of_recipe(recipe)}, identity_of(task.stream))
            agreement = check_agreement(recipe, identity, world.device)
            if rank == 0:
                keep_recipe(recipe.directory, text)
        startup.mark("rendezvous")
        if world.device.type == "cpu" and not offload.used(recipe.strategy):
            keep_freed_memory()
        last, kept.run = kept.run, None  # until `build` returns no model is whole
        if local_rank == 0:
            stack.callback(keep_copies(recipe.data))
        with refusing_misfits(recipe, pulse, lambda: world.generation == 0):
            written = recipe
            recipe = counted(settled(recipe, world), task.stream.sequences)
            if last and (why := reason_to_rebuild(last, recipe)):
                logger.warning("model and optimizer are built anew: %s", why)
                last = None
            if not last and prepared_task:
                task = copy_for_attempt(prepared_task, recall)
            known = written, recipe, text, task, world, agreement, pulse, startup
            parts = *known, recall, spare, shipper, last
            kept.run = run = stack.enter_context(build(*parts))
            del last, parts
        # The report comes first: the contexts of `build` wait for saves, and for other ranks.
        stack.enter_context(failure_report)
        code = train(run, startup)
        if shipper:
            shipper.goes_on = code == EXIT_PAUSED and supervised()
    if occupancy:
        occupancy.release()
    return pause_code(pulse) if code == EXIT_PAUSED else code


def rehearse(arguments: list[str]) -> None:
    """Build the model once in a fake process group, which fills torch's caches for the tensors of
    the strategy. A small model also computes once with arbitrary weights, which loads and compiles
    code that all ranks would wait for. CPU only: a reserve process has no GPU."""
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
    # The fake group returns no row counts for experts.
    if small and ep.ranks(recipe.strategy) == 1:
        plan = exact.batch_plan(recipe, mesh.dp_size)
        batch_requests = requests(lambda _: plan, mesh.dp_rank, 0)
        batches = load(task.stream, batch_requests, workers=0, pin_memory=False)
        built.run([next(batches)], _loss, train=True)


def _loss(_number: int, batch: Mapping[str, torch.Tensor], call: Call) -> Passed:
    result = call({key: tensor for key, tensor in batch.items() if key not in (COUNTED, CONSUMED)})
    return result["loss"] if isinstance(result, dict) else result


def copy_for_attempt(task: Task, recall: RecallSocket) -> Task:
    """A task whose model may be trained. If further attempts may follow, its model is a copy, and
    the original stays on the meta device."""
    if not recall.allowed:
        return task
    model, blocks = copy.deepcopy((task.model, task.blocks))
    return replace(task, model=model, blocks=blocks)


def reason_to_rebuild(last: Run, recipe: Recipe) -> str:
    """Why this process cannot keep the model and the optimizer of its last run; "" if it can.

    Args:
        last: the last run.
        recipe: `settled` for the present world.
    """
    rank, _, size, _ = now = read_environment()
    world, strategy = last.world, recipe.strategy
    if recipe.elastic.recovery == "rebuild":
        return "elastic.recovery is rebuild"
    if now != (world.rank, world.local_rank, world.world_size, world.local_world_size):
        return f"rank {world.rank} of {world.world_size} is rank {rank} of {size} now"
    if recipe.data != last.recipe.data:
        return "the data has other stages"
    if recipe != last.recipe:
        return "batch.micro_batch is another"
    own = [key for key in recipe.own_code if key != "schedule.factory"]
    if own:
        return f"{own[0]} may keep more than its tensors"
    if offload.used(strategy):
        return f"strategy.offload is {strategy.offload}"
    return "" if CAN_RESET else f"torch {torch.__version__} cannot drop a step that failed"


def release_attempt(recall: RecallSocket, kept: Kept) -> None:
    """Free what a finished attempt held, except `kept`: process groups, and memory, which returns
    to the allocator for the next attempt."""
    recall.abort()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    drop_world()
    if not kept.run:  # with a kept run `build` collects, while new ranks still build
        gc.collect()  # wrapped models are cycles


def grow_segments() -> None:
    """Set CUDA's allocator to expandable segments, unless the user has set options of it: tensors
    of changing sizes then leave less memory unused. Before the allocator starts, which reads the
    variable once."""
    if not os.environ.keys() & set(ALLOCATOR_OPTIONS):
        os.environ[ALLOCATOR_OPTIONS[0]] = "expandable_segments:True"


def keep_freed_memory() -> None:
    """Make malloc keep freed memory for the next allocation."""
    # glibc would return large tensors to the system and fault in new pages every step: 5 % of the
    # quickstart's time. On a GPU torch's allocator keeps memory itself.
    trim_threshold, mmap_threshold = -1, -3  # numbers of malloc.h
    with suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (trim_threshold, mmap_threshold):
            mallopt(parameter, 1 << 30)


class Prepared(NamedTuple):
    """What a rank reads and opens before it joins other ranks."""

    recipe: Recipe
    text: str
    """The recipe as the run directory keeps it, see provenance.py."""
    task: Task | None
    """None if the data is a user's own."""
    identity: dict[str, str]
    """See identity.py; without the data if `task` is None."""


@cache
def prepare(arguments: tuple[str, ...]) -> Prepared:
    """Read a recipe, open the files that it names, and compute its identity. The warm process calls
    it once for all ranks that it forks.

    A user's own model and data are built in the ranks: their code may start threads or CUDA, which
    does not survive a fork.

    Raises:
        RecipeError, DataError, ConfigError: what is wrong, in one line.
    """
    recipe = load_recipe(arguments[0], arguments[1:])
    text = dump_recipe(recipe)
    if recipe.data.factory:
        return Prepared(recipe, text, None, identify(recipe, None))
    task = None if recipe.model.factory else build_task(recipe)
    stream = task.stream if task else open_streams(recipe)[0]
    return Prepared(recipe, text, task, identify(recipe, identity_of(stream)))


def occupy(recipe: Recipe) -> Occupancy | None:
    """Lock the run directory against other launches, unless an agent of ours has done so. On rank
    0.

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
        run = ObjectPath.of(recipe.run.dir)
        return Shipper(run, recipe.directory, this_job(), this_launcher())
    except OccupiedError as occupied:
        raise RecipeError(str(occupied)) from occupied
    except OSError as error:
        raise RecipeError(
            f"run.dir: cannot write to {recipe.directory}, which this machine needs of a run in a "
            f"bucket: {error.strerror}; set XDG_CACHE_HOME to a directory on a local disk"
        ) from error


def this_launcher() -> str:
    """The process that starts this rank again as long as it lives: the agent, without one of ours
    rank 0 itself; "" with several nodes, whose agents go on without each other."""
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        return ""
    return owner(int(os.environ[AGENT])) if supervised() else owner()


def this_job() -> str:
    """Identity of this launch: equal in all its processes, different in every other launch."""
    job = os.environ.get(JOB) or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return secrets.token_hex(8) if job == "none" else job
