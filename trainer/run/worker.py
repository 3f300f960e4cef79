"""A training process: inputs → process group → model → restored state → training → exit code.

An agent forks ranks from a process that has imported this module. So the module imports all that a
rank needs, and starts no thread and no CUDA.
"""

import gc
import logging
import os
import signal
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import NoReturn

import numpy.ma  # noqa: F401  # numpy.unique imports it on first use
import torch
import torch._dynamo  # DTensor would import it on first use, in each forked rank
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known

from checkpointing import Spare
from elastic import EXIT_PEER_GONE, EXIT_WRONG_INPUT, Pulse, die_with_parent, watch_signals
from elastic.node.recall import NEXT_GENERATION_SECONDS, NodeRecall, NodeRecallSocket
from elastic.node.zygote import RESERVE
from elastic.process import set_name
from elastic.world import World, drop_world, leave_world, read_environment, supervised
from trainer.data.loader import load, requests
from trainer.data.stream import CONSUMED, COUNTED
from trainer.parallel.mesh import build_mesh, forget_meshes, is_sharded_by_fsdp
from trainer.recipe.strategies import ep, exact
from trainer.run.build import build, model_and_optimizer, restore_state, with_copied_model
from trainer.run.compiled import keep_caches_closed
from trainer.run.failures import RunFailureReport
from trainer.run.join import join, prepare, read_inputs
from trainer.run.metrics import RunStartup
from trainer.run.state import RunProcess
from trainer.run.train import train
from trainer.tasks.own_model import refusing_misfits
from trainer.text import show_only_visible

REHEARSED_PARAMETERS = 20_000_000
"""Parameters of the largest model of which a reserve process computes a forward and a backward
pass, see `rehearse`. The passes take memory beside that of the ranks."""

ALLOCATOR_OPTIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of the environment variable for torch's allocator. Which one wins, if several are set,
differs between versions of torch."""


def main(arguments: list[str]) -> NoReturn:
    show_only_visible()
    if not arguments:
        print("usage: python -m trainer RECIPE.yaml [key.sub=value ...]", file=sys.stderr)
        leave_world(EXIT_WRONG_INPUT)
    process = begin(tuple(arguments))
    while (code := run_attempt(process)) is None:
        release_attempt(process)
        process.pulse.forget()
        wait_for_generation(process.recall)
        process.startup = RunStartup(again=True)
    leave_world(code)


def run_attempt(process: RunProcess) -> int | None:
    """Train with the other ranks of this generation; returns the exit code, or None if this process
    continues with another attempt."""
    rank, local_rank, *_ = read_environment()
    named = f"%(levelname)s rank {rank} %(name)s: %(message)s"
    logging.basicConfig(format=named, force=True)
    torch.set_grad_enabled(True)  # the last attempt may have ended inside no_grad
    failure_report = RunFailureReport(process.pulse, rank, process.recall, wait=2 if rank else 0)
    try:
        with process.recall.attempt(), ExitStack() as stack:
            inputs = read_inputs(process)
            joined = stack.enter_context(join(process, inputs))
            first = joined.world.generation == 0
            with refusing_misfits(joined.inputs.recipe, process.pulse, lambda: first):
                built = stack.enter_context(build(process, joined))
                run = stack.enter_context(restore_state(process, built))
            # Entered last, so that an error is reported before the contexts above wait for saves
            # and for other ranks.
            stack.enter_context(failure_report)
            return train(run, process.startup)
    except NodeRecall:
        return None
    except Exception as error:
        if failure_report.recalls(error):
            return None
        # The first rank that exits ends the job. An error of all ranks is printed by local rank 0
        # while the other ranks wait; an error of one rank is printed by that rank.
        return failure_report.send(error, wait=10 if local_rank else 0)


def begin(arguments: tuple[str, ...]) -> RunProcess:
    """Set up this process. A reserve process first rehearses, then waits to be made a rank."""
    if read_environment()[2] > 1:
        die_with_parent()
    grow_segments()
    recall, spare, in_reserve = NodeRecallSocket.from_environment(), Spare(), RESERVE in os.environ
    if in_reserve:
        spare.start()
        with suppress(Exception):  # an error is reported when it occurs again in the rank
            rehearse(arguments)
        drop_world()
        gc.collect()
        wait_for_generation(recall, seconds=None)
        set_name("rank")  # its name was "reserve"
    pulse = Pulse.from_environment()
    watch_signals(pulse)
    if "RANK" in os.environ and not supervised():
        # torchrun passes Ctrl-C on to all ranks: each would print a traceback, which tells nothing.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if read_environment()[1] == 0:  # local rank 0 starts the checkpoint writer of its node
        spare.start()
    else:
        spare.end()
    return RunProcess(arguments, pulse, recall, spare, RunStartup(again=in_reserve))


def rehearse(arguments: tuple[str, ...]) -> None:
    """Build the model once in a fake process group, to fill torch's caches for DTensors. A small
    model also runs forward and backward once, with arbitrary weights, to load and compile code
    before a rank needs it. Does nothing without FSDP, or if the ranks use GPUs."""
    recipe, _, task, _ = prepare(arguments)
    ranks = rank, _, world_size, _ = read_environment()
    keep_caches_closed(recipe.directory, recipe.strategy.compile)
    gpus = recipe.run.device != "cpu" and torch.cuda.is_available()
    if not task or gpus or not is_sharded_by_fsdp(recipe, world_size):
        return
    small = task.parameter_count <= REHEARSED_PARAMETERS
    device = torch.device("cpu" if small else "meta")
    world = World(*ranks, nodes=1, round=0, generation=0, cause=None, device=device)
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)
    in_memory = replace(recipe, strategy=replace(recipe.strategy, offload="none"))
    mesh = build_mesh(recipe, replace(world, device=torch.device("cpu")))
    model, _ = model_and_optimizer(in_memory, with_copied_model(task), world, mesh)
    # Experts need the row counts of other ranks, which a fake group does not return.
    if small and ep.ranks(recipe.strategy) == 1:
        plan = exact.batch_plan(recipe, mesh.dp_size)
        batch_requests = requests(lambda _: plan, mesh.dp_rank, 0)
        batches = load(task.stream, batch_requests, workers=0, pin_memory=False)
        batch = next(batches)
        inputs = {key: tensor for key, tensor in batch.items() if key not in (COUNTED, CONSUMED)}
        for forward in model.run([inputs], train=True):
            result = forward(inputs)
            if isinstance(result, dict):
                forward.root = result["loss"]


def wait_for_generation(
    recall: NodeRecallSocket, seconds: float | None = NEXT_GENERATION_SECONDS
) -> None:
    """Wait until this process is a rank of the next generation; end it if none follows within
    `seconds` (None: no limit)."""
    place = read_environment()
    if not recall.wait(seconds):
        leave_world(EXIT_PEER_GONE)
    if place != read_environment():
        forget_meshes()


def release_attempt(process: RunProcess) -> None:
    """Free the process groups and the memory of a finished attempt, except `process.run`."""
    process.recall.abort()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    drop_world()
    if not process.run:  # if a run is kept, `build` collects while new ranks still build
        gc.collect()  # wrapped models are reference cycles


def grow_segments() -> None:
    """Make CUDA's allocator use expandable segments, by its environment variable, unless the user
    has set that. Tensors of changing sizes then leave less memory unused. Called before CUDA's
    first allocation, because the variable is read once."""
    if not os.environ.keys() & set(ALLOCATOR_OPTIONS):
        os.environ[ALLOCATOR_OPTIONS[0]] = "expandable_segments:True"
