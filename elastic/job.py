"""A rank of an elastic job, for training loops other than the trainer's.

`python -m elastic.job PROGRAM` runs a program that calls `join` or `run`; see node/standin.py.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from elastic.exits import EXIT_PEER_GONE
from elastic.node.progress import Pulse, pause_code, watch_signals
from elastic.node.recall import NodeRecall, NodeRecallSocket
from elastic.node.standin import execute, is_stand_in, stand_in_for, this_program
from elastic.node.zygote import RESERVE
from elastic.process import die_with_parent, set_name, tolerate_lost_output

if TYPE_CHECKING:  # a stand-in (standin.py) runs this module, and must not import torch
    from torch.distributed import ProcessGroup

    from elastic.group.sampler import Sampler
    from elastic.node.exchange import NodeExchangeSum
    from elastic.world import World


class JobPaused(SystemExit):
    """Raised on all ranks after the same step, when the job pauses."""

    of_all_ranks = True
    """Tells `Checkpointer` that it may wait for other ranks while this exception unwinds."""


class Job:
    """An elastic job, as seen by one of its ranks. `join` and `run` create it."""

    def __init__(
        self, world: "World", pulse: Pulse, recall: NodeRecallSocket | None = None
    ) -> None:
        self.world = world
        self._pulse = pulse
        self._recall = recall or NodeRecallSocket(None)
        self._pause_sum: NodeExchangeSum | None = None
        """The ranks' summed pause requests for the current step; None outside of steps."""
        self._step = self._last = 0

    def steps(self, done: "int | Sampler", total: int) -> Iterator[int]:
        """Yield the steps from `done` + 1 to `total`. Called on all ranks.

            for step in job.steps(done, total):
                …
                if step % 100 == 0 or job.due_to_pause():
                    checkpointer.save(step, state)

        When the job is to pause, because a node leaves or joins, this raises SystemExit on all
        ranks after the same step. Steps that have not been saved by then are computed again. Code
        after the loop runs only once all steps are done.

        Args:
            done: number of steps done, or a sampler that has loaded this number. The sampler then
                counts a step as done when it begins, so that a save at the end of a step is right.
            total: the last step.
        """
        first = done if isinstance(done, int) else done.done
        for step in range(first + 1, total + 1):
            if not isinstance(done, int):
                done.done = step
            self.begin_step(step, total)
            yield step
            self.end_step()
        self._pulse.report(total, "end")

    def begin_step(self, step: int, total: int) -> None:
        """Begin step number `step` of `total`. For the callbacks of a library whose loop `steps`
        cannot drive: they call `begin_step`, `due_to_pause` and `end_step`. Called on all ranks."""
        from elastic.node.exchange import NodeExchangeSum

        # From here on there is something to save.
        self._pulse.safe = False
        self._pulse.report(step, "data")
        self._step, self._last = step, total
        # The sum begins before the step's work, so that the ranks agree while the step runs.
        self._pause_sum = NodeExchangeSum(self._pulse.pause_request)

    def end_step(self) -> None:
        """End the step that was begun. Called on all ranks, after `save` was called for the step.

        Raises:
            RuntimeError: no step was begun.
            SystemExit: the job pauses. Raised on all ranks after the same step.
        """
        pauses = self.due_to_pause()
        self._pause_sum = None
        if not self._recall.able:
            self._recall.enable()
        if pauses:
            self._pulse.report(self._step, "end")
            raise JobPaused(pause_code(self._pulse))

    def report(self, phase: Literal["data", "step", "after"]) -> None:
        """Report the phase of the step that this rank enters, for callers without a `with` block
        for `during`."""
        self._pulse.report(self._step, phase)

    def due_to_pause(self) -> bool:
        """Whether all ranks leave after this step, so that the step must be saved. The ranks agree
        while the step runs, so the call costs next to nothing. Any rank may call it, at any point
        of a step.

        Raises:
            RuntimeError: no step is under way.
        """
        if self._pause_sum is None:
            raise RuntimeError("due_to_pause() is for the body of `for step in job.steps(…)`")
        pauses = self._pause_sum.wait() > 0 and self._step < self._last
        # An aborted collective of NCCL leaves garbage and raises no error: the sum above is valid
        # only if the agent has not ended this attempt meanwhile (recall.py).
        self._recall.check()
        return pauses

    @contextmanager
    def during(self, phase: Literal["data", "step", "evaluate", "save"]) -> Iterator[None]:
        """Report what this rank does inside the block, so that a hang there is noticed soon.

        Args:
            phase: "step" for forward, backward and update, "evaluate" for a batch of validation.
                Their durations are learned: twelve times the 99th percentile counts as a hang.
                "data" and "save" are waits. They may take `timeout_seconds` of `join`, and at
                least 10 ("data") or 34 minutes ("save").
        """
        self._pulse.report(self._step, phase)
        yield
        # watchdog.ORDER: a rank that has done its step is ahead of one that has not
        self._pulse.report(self._step, "data" if phase == "data" else "after")

    def share(
        self, global_batch: int, group: "ProcessGroup | None" = None
    ) -> tuple[list[int], float]:
        """Returns this rank's rows of a global batch whose size is the same at every world size.

            rows, weight = job.share(48)
            loss = weight * F.mse_loss(model(x[rows]), y[rows])

        Args:
            global_batch: rows of all ranks together.
            group: ranks that share the batch; None: all ranks.

        Returns:
            (rows, weight). The mean loss of these rows times `weight`, averaged over the ranks as
            FSDP and DDP average gradients, is the mean over the global batch. `weight` is 1 if all
            ranks have equally many rows. A rank without rows of its own gets one row with weight 0.
        """
        return self.passes(global_batch, global_batch, group)[0]

    def passes(
        self, global_batch: int, micro_batch: int, group: "ProcessGroup | None" = None
    ) -> list[tuple[list[int], float]]:
        """Returns this rank's rows as in `share`, split into passes for gradient accumulation:
        (rows, weight) of each pass. All ranks have equally many passes, each with at most
        `micro_batch` rows.

            for rows, weight in job.passes(48, micro_batch=4):
                (weight * F.mse_loss(model(x[rows]), y[rows])).backward()
        """
        import torch.distributed as dist

        from elastic.group.batch_plan import plan_batch

        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        plan = plan_batch(global_batch, min(ranks, global_batch), micro_batch)
        return [
            (list(micro.positions), micro.real * len(micro.positions) * ranks / global_batch)
            for micro in plan.micro_batches(rank, start=0)
        ]


def join(device: str = "auto", timeout_seconds: float = 1800.0) -> Job:
    """Join the job that torchrun started, as one rank; without torchrun, as the only rank. Creates
    the default process group. Call it once and first. Under `--rdzv-backend perdure` this call
    never returns in the process that torchrun started. The program runs again from its first line
    in another process, forked from one that has imported torch, and `join` returns there. After
    every failure the program runs again in the same way. With `run`, ranks that outlive a failure
    keep their processes instead.

    Args:
        device: "cuda", "cpu", or "auto" for CUDA where there is a GPU. The process group carries
            CPU tensors in any case.
        timeout_seconds: how long a collective waits for another rank, and the time limit of the
            start and of a step outside of `during`.

    Raises:
        RuntimeError: a process group exists already, or torchrun's own c10d rendezvous shares a
            store among several nodes, where a failure would hang the job. The message says what to
            do.
    """
    _become_rank()
    pulse = Pulse.from_environment()
    watch_signals(pulse)
    return _joined(pulse, NodeRecallSocket(None), device, timeout_seconds)


def run(
    main: Callable[[Job], object], device: str = "auto", timeout_seconds: float = 1800.0
) -> None:
    """Join the job that torchrun started, and call `main(job)` on this rank. After other ranks have
    failed, `main` is called again in the same process, with another process group. So imports, the
    GPU's context, and what the program has made before `run` are kept. Only ranks that ended get a
    new process. Each node keeps one process in reserve for that, which has already run the program
    up to the call of `run`.

        def train(job):
            …

        if __name__ == "__main__":
            elastic.run(train)

    `main` makes all that it trains, and loads the newest save: it must use nothing of its previous
    call. An error that `main` raises because peers are gone ends this call of `main` only. When a
    node joins or leaves, all ranks end, and the program starts from its first line, as with `join`.

    Args:
        main: called with the job.
        device: as for `join`.
        timeout_seconds: as for `join`.

    Raises:
        RuntimeError: as for `join`.
    """
    _become_rank()
    recall, own = NodeRecallSocket.from_environment(), dict(os.environ)
    if RESERVE in own:
        _wait_for_generation(recall, own, seconds=None)
        set_name("rank")  # its name was "reserve"
    pulse = Pulse.from_environment()
    watch_signals(pulse)
    recall.allow()
    while True:
        try:
            with recall.attempt():
                main(_joined(pulse, recall, device, timeout_seconds))
                return
        except NodeRecall:
            pass
        except Exception as error:
            if not recall.recalls(error, _says_peer_is_lost(error)):
                raise
        _release(recall)
        pulse.forget()
        _wait_for_generation(recall, own)


def _become_rank() -> None:
    """Prepare this process to be a rank. If an agent of Perdure runs the rank in another process,
    become its stand-in (standin.py) instead, and do not return."""
    if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        raise RuntimeError(
            "elastic.join() and run() make the process group: call them in place of "
            "init_process_group"
        )
    if is_stand_in():
        stand_in_for(this_program())
    from elastic.world import refuse_stale_store

    if stale := refuse_stale_store():
        raise RuntimeError(stale)
    if "RANK" in os.environ:
        die_with_parent()
    tolerate_lost_output()


def _joined(pulse: Pulse, recall: NodeRecallSocket, device: str, timeout_seconds: float) -> Job:
    from elastic.world import join_world

    pulse.safe = True  # before the first step there is nothing to save
    pulse.request_patience(timeout_seconds)
    pulse.report(0, "init")
    world = join_world(device, timeout_seconds, pulse.secret, pulse.most_free)
    pulse.most_free = world.free
    pulse.report(0, "load")
    return Job(world, pulse, recall)


def _says_peer_is_lost(error: BaseException | None) -> bool:
    """Whether `error`, or an error that it was raised from, only says that a peer is gone."""
    from elastic.world import is_lost_peer

    while error is not None:
        if isinstance(error, RuntimeError) and is_lost_peer(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _release(recall: NodeRecallSocket) -> None:
    """Free what an ended attempt held: its process groups, and references to them in libraries."""
    import torch

    from elastic.world import drop_world

    recall.abort()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    drop_world()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()  # the cache would return meshes of the old world
    if state := sys.modules.get("accelerate.state"):  # singletons with the old rank and world size
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    gc.collect()  # wrapped models contain reference cycles


def _wait_for_generation(
    recall: NodeRecallSocket, own: dict[str, str], seconds: float | None = 60.0
) -> None:
    """Wait until this process is a rank of the next generation, or end it after `seconds` (None: no
    limit). Variables of `own`, the environment at the call of `run`, are kept unless the generation
    sets them."""
    from elastic.world import leave_world

    if not recall.wait(seconds):
        leave_world(EXIT_PEER_GONE)
    for name, value in own.items():
        if not name.startswith("PERDURE_"):  # such variables belong to one generation
            os.environ.setdefault(name, value)


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("usage: python -m elastic.job PROGRAM.py [ARGUMENT ...]")
    if is_stand_in():
        stand_in_for(sys.argv[1:])
    execute(sys.argv[1:])
