"""A training process: inputs → process group → model → restored state → training → exit code.

An agent forks ranks from a process that has imported this module. So the module imports all that a
rank needs, and starts no thread and no CUDA. The error
of a failing rank is reported at once, on the console and to the agent of its node.
"""

import gc
import logging
import os
import signal
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import NoReturn

import numpy.ma  # noqa: F401  # numpy.unique imports it on first use
import torch
import torch._dynamo  # DTensor would import it on first use, in each forked rank
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known
from torch.distributed import DistBackendError

from checkpointing import SaveFailed, SpareWriter
from checkpointing.format.untrusted import printable
from elastic import (
    EXIT_DO_NOT_REQUEUE,
    EXIT_FAILED,
    EXIT_MENDED,
    EXIT_OUTVOTED,
    EXIT_PEER_GONE,
    EXIT_WRONG_INPUT,
    Pulse,
    die_with_parent,
    watch_signals,
)
from elastic.node.recall import NEXT_GENERATION_SECONDS, NodeRecall, NodeRecallSocket
from elastic.node.zygote import RESERVE
from elastic.process import plain_text, set_name
from elastic.world import World, drop_world, is_lost_peer, leave_world, read_environment, supervised
from trainer.data.loader import load, requests
from trainer.data.stream import CONSUMED, COUNTED
from trainer.parallel.mesh import build_mesh, forget_meshes, is_sharded_by_fsdp
from trainer.recipe.errors import error_text, known_errors
from trainer.recipe.factory import RecipeFactoryError
from trainer.recipe.strategies import ep, exact, offload
from trainer.run.build import (
    build,
    build_ahead,
    model_and_optimizer,
    restore_state,
    with_copied_model,
)
from trainer.run.compiled import keep_caches_closed
from trainer.run.guard import GradientDisputeError
from trainer.run.join import join, prepare, read_inputs
from trainer.run.metrics import RunStartup
from trainer.run.micro_batch import RunOutOfMemoryError
from trainer.run.state import KeptModel, RunProcess
from trainer.run.train import train
from trainer.tasks.own_model import refusing_misfits
from trainer.text import show_only_visible


class RunFailureReport:
    """Context manager that reports an exception before the contexts around it are left, because
    these may wait for writes and for other ranks. If `recall` says that this process runs another
    attempt, nothing is reported. `wait`: seconds to wait before printing an error that another rank
    may print as well."""

    def __init__(self, pulse: Pulse, rank: int, recall: NodeRecallSocket, wait: float = 0) -> None:
        self._pulse, self._rank, self._recall, self._wait = pulse, rank, recall, wait
        self._sent: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            if self.recalls(error):
                raise NodeRecall from None
            self.send(error, self._wait)

    def recalls(self, error: Exception) -> bool:
        """Return whether this process continues with another attempt after `error`."""
        return self._recall.recalls(error, _says_peer_is_lost(error))

    def send(self, error: Exception, wait: float = 0) -> int:
        """Report the error that ends this rank, unless it was reported; returns the exit code.
        `wait`: seconds before an error in the user's input or code is printed."""
        code = exit_code(error)
        if error is self._sent:
            return code
        self._sent = error
        what = printable(plain_text(error).partition("\n")[0])
        line = f"{type(error).__name__}: {what}"
        if isinstance(error, SaveFailed):  # the agent repeats this line; rank 0 prints the reason
            line = f"{type(error).__name__}: {error}".partition(" failed")[0] + " failed"
        self._pulse.fail(line)
        if isinstance(error, SaveFailed):  # raised on all ranks: only one prints it
            text = f"{error_text(error)}; the same command resumes" if self._rank == 0 else ""
        elif code in (EXIT_WRONG_INPUT, EXIT_DO_NOT_REQUEUE):
            time.sleep(wait)
            cause = error.__cause__ if code == EXIT_DO_NOT_REQUEUE else None
            trace = "".join(traceback.format_exception(cause)) if cause else ""
            text = "" if self._pulse.same_error_as_first else trace + error_text(error)
        elif code == EXIT_PEER_GONE:
            text = f"rank {self._rank}: a peer is gone: {what}"
        elif _says_peer_is_lost(error) and not isinstance(error, DistBackendError):
            # A traceback would show where this rank waited, not the cause. NCCL's errors may name
            # the cause, so they are printed in full below.
            text = (
                f"rank {self._rank}: a peer is gone: {what}; the output of that "
                "rank says why, and the same command resumes"
            )
        elif code in (EXIT_MENDED, EXIT_OUTVOTED):
            text = f"rank {self._rank}: {error}"
        else:
            text = f"rank {self._rank} failed:\n{''.join(traceback.format_exception(error))}"
        if text:  # in one write, because this process may be killed at any moment
            print(f"{text.rstrip()}\n", end="", file=sys.stderr, flush=True)
        return code


def exit_code(error: Exception) -> int:
    if isinstance(error, SaveFailed):  # not an error in the recipe: a retry may succeed
        return EXIT_FAILED
    if isinstance(error, GradientDisputeError) and error.outvoted and supervised():
        return EXIT_OUTVOTED
    if isinstance(error, RecipeFactoryError | GradientDisputeError):
        return EXIT_DO_NOT_REQUEUE
    if isinstance(error, known_errors()):
        return EXIT_WRONG_INPUT
    if isinstance(error, RunOutOfMemoryError) and supervised():
        return EXIT_MENDED
    if supervised() and _says_peer_is_lost(error):
        return EXIT_PEER_GONE
    return EXIT_FAILED


def _says_peer_is_lost(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and is_lost_peer(error)


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
    """Set up this process. A reserve process first rehearses and builds models, then waits to be
    made a rank."""
    if read_environment()[2] > 1:
        die_with_parent()
    grow_segments()
    recall, spare, in_reserve = (
        NodeRecallSocket.from_environment(),
        SpareWriter(),
        RESERVE in os.environ,
    )
    kept: list[KeptModel] = []
    if in_reserve:
        spare.start()
        with suppress(Exception):  # an error is reported when it occurs again in the rank
            kept = rehearse(arguments)
        drop_world()
        forget_meshes()
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
    return RunProcess(arguments, pulse, recall, spare, RunStartup(again=in_reserve), kept)


def rehearse(arguments: tuple[str, ...]) -> list[KeptModel]:
    """Build the model once in a fake process group, to fill torch's caches for DTensors. A small
    model also runs forward and backward once, with arbitrary weights, to load and compile code
    before a rank needs it. Then build and return the model of each rank of this node, because other
    ranks would wait for that once this process is one of them. Does nothing without FSDP, or if the
    ranks use GPUs."""
    recipe, _, task, _ = prepare(arguments)
    ranks = rank, local_rank, world_size, local_world_size = read_environment()
    keep_caches_closed(recipe.directory, recipe.strategy.compile)
    gpus = recipe.run.device != "cpu" and torch.cuda.is_available()
    if not task or gpus or not is_sharded_by_fsdp(recipe, world_size):
        return []
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
    drop_world()
    in_place = recipe.elastic.recovery == "in_place" and not offload.used(recipe.strategy)
    if not (small and in_place and task.fill):
        return []
    first = rank - local_rank
    return [
        build_ahead(recipe, task, replace(world, rank=first + place, local_rank=place))
        for place in range(local_world_size)
    ]


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
    """Free the process groups and the memory of a finished attempt, except `process.kept`."""
    process.recall.abort()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    drop_world()
    gc.collect()  # wrapped models, and the graph of a failed step, are reference cycles


def grow_segments() -> None:
    """Make CUDA's allocator use expandable segments, by its environment variable, unless the user
    has set that. Tensors of changing sizes then leave less memory unused. Called before CUDA's
    first allocation, because the variable is read once."""
    if not os.environ.keys() & set(ALLOCATOR_OPTIONS):
        os.environ[ALLOCATOR_OPTIONS[0]] = "expandable_segments:True"
