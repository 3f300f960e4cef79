"""A training process: argv → Recipe → process group → train → exit code.

Imported by the warm process that ranks are forked from, so it imports here all that a rank needs,
and starts nothing: no thread, no CUDA.
"""

import ctypes
import logging
import os
import secrets
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

import torch
import torch._dynamo  # DTensor imports it on first use: once here rather than in each fork

from checkpointing.folders import of_run
from elastic import (
    EXIT_PAUSED,
    EXIT_WRONG_INPUT,
    Pulse,
    die_with_parent,
    register_dumps,
    watch_signals,
)
from elastic.exits import leaving_code
from elastic.occupancy import Occupancy, OccupiedError
from elastic.world import (
    join_world,
    leave_world,
    read_environment,
    refuse_stale_store,
    supervised,
)
from elastic.zygote import DUMPS
from trainer.failures import Telling
from trainer.identity import check_agreement, identify
from trainer.metrics import Startup
from trainer.preflight import check_inputs
from trainer.recipe import Recipe, RecipeError, dump_recipe, load_recipe
from trainer.tasks import Task, build_task, open_streams
from trainer.train import train


def main(arguments: list[str]) -> NoReturn:
    """Run one rank; never returns."""
    startup = Startup()
    rank, local_rank, world_size, local_world_size = read_environment()
    if world_size > 1:
        die_with_parent()
    # The process that this one was forked from may have begun before it was known.
    threads = int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads())
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    pulse = Pulse.from_environment()
    telling = Telling(pulse, rank)
    watch_signals(pulse)
    if DUMPS in os.environ:
        register_dumps(Path(os.environ[DUMPS]))
    logging.basicConfig(format=f"%(levelname)s rank {rank} %(name)s: %(message)s")
    if not arguments:
        print("usage: python -m trainer RECIPE.yaml [key.sub=value ...]", file=sys.stderr)
        leave_world(EXIT_WRONG_INPUT)
    occupancy = None
    try:
        recipe, ready, identity = prepare(tuple(arguments))
        task = ready or build_task(recipe)
        startup.mark("inputs")
        stale = refuse_stale_store()
        if stale:
            raise RecipeError(stale)
        check_inputs(recipe, task, rank, world_size, local_world_size)
        startup.mark("checks")
        if rank == 0:
            occupancy = occupy(recipe)
            prepare_run_directory(recipe)
        pulse.safe = not any(of_run(recipe.checkpoint_directory))
        pulse.report(0, "init")
        world = join_world(recipe.run.device, recipe.elastic.timeout_seconds)
        check_agreement(identity)
        startup.mark("rendezvous")
        if world.device.type == "cpu" and recipe.strategy.offload == "none":
            keep_freed_memory()
        code = train(recipe, task, world, pulse, startup, telling)
    except Exception as error:
        # The first rank that leaves ends all. What is wrong for all is told by local rank 0, before
        # the others have waited; what is wrong for one of them alone, by that one afterwards.
        leave_world(telling.tell(error, wait=10 if local_rank else 0))
    if occupancy:
        occupancy.release()
    alone = code == EXIT_PAUSED and not supervised()
    leave_world(leaving_code(pulse.noticed) if alone else code)


def keep_freed_memory() -> None:
    """Have malloc keep what is freed for the next allocation. glibc would give large tensors back
    to the system at once and fault in the pages of new ones, every step: 5 % of the quickstart's
    time. On a GPU torch keeps memory itself."""
    trim_threshold, mmap_threshold = -1, -3  # numbers of malloc.h
    with suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter in (trim_threshold, mmap_threshold):
            mallopt(parameter, 1 << 30)


@cache
def prepare(arguments: tuple[str, ...]) -> tuple[Recipe, Task | None, dict[str, str]]:
    """Read a recipe, open what it names, and say what decides its steps (identity.py). The warm
    process does it once for all its forks.

    A user's own model is left to them: its code may start threads or CUDA, which no fork survives.

    Raises:
        RecipeError, DataError, ConfigError: what is wrong, in one line.
    """
    recipe = load_recipe(arguments[0], arguments[1:])
    task = None if recipe.model.factory else build_task(recipe)
    stream = task.stream if task else open_streams(recipe)[0]
    return recipe, task, identify(recipe, stream.fingerprint)


def occupy(recipe: Recipe) -> Occupancy | None:
    """Keep other launches out of the run directory; an agent of ours has done that. On rank 0.

    Raises:
        RecipeError: another launch trains there.
    """
    if supervised():
        return None
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    try:
        return Occupancy(Path(recipe.run.dir), secrets.token_hex(8) if job == "none" else job)
    except OccupiedError as occupied:
        raise RecipeError(str(occupied)) from occupied


def prepare_run_directory(recipe: Recipe) -> None:
    """Make the run directory and leave the resolved recipe in it. On rank 0."""
    directory, text = Path(recipe.run.dir), dump_recipe(recipe)
    with suppress(OSError):
        if (directory / "recipe.yaml").read_text(encoding="utf-8") == text:
            return  # a restart gets by without writing, so a full disk does not end the run
    try:
        directory.mkdir(parents=True, exist_ok=True)
        aside = directory / f"recipe.yaml.{os.getpid()}"
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, directory / "recipe.yaml")
    except OSError as error:
        raise RecipeError(
            f"run.dir: cannot write to {directory}: {error.strerror}; choose another run.dir"
        ) from error
