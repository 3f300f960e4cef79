"""A rank of an elastic job, for training loops other than the trainer's.

`python -m elastic.job PROGRAM` runs a program that calls `join`; see node/standin.py.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from elastic.node.progress import Pulse, pause_code, watch_signals
from elastic.node.standin import execute, is_stand_in, stand_in_for, this_program
from elastic.process import die_with_parent, tolerate_lost_output

if TYPE_CHECKING:  # a stand-in does not import torch
    from torch.distributed import ProcessGroup

    from elastic.node.exchange import Sum
    from elastic.world import World


class Paused(SystemExit):
    """Raised on all ranks after the same step, when the job pauses."""

    of_all_ranks = True
    """Tells `Checkpointer` that it may wait for other ranks while this exception unwinds."""


class Job:
    """An elastic job, as seen by one of its ranks. `join` creates it.

    Args:
        world: rank, world size and device.
        pulse: shared memory through which this rank reports progress and reads requests.
    """

    def __init__(self, world: "World", pulse: Pulse) -> None:
        self.world = world
        self._pulse = pulse
        self._pause_sum: Sum | None = None
        """The ranks' summed pause requests for the current step; None outside of steps."""
        self._step = self._last = 0

    def steps(self, done: int, total: int) -> Iterator[int]:
        """Yield the steps from `done` + 1 to `total`. Called on all ranks.

            for step in job.steps(done, total):
                …
                if step % 100 == 0 or job.due_to_pause():
                    checkpointer.save(step, state)

        When the job is to pause, because a node leaves or joins, this raises SystemExit on all
        ranks after the same step. Steps that have not been saved by then are computed again. Code
        after the loop runs only once all steps are done.
        """
        from elastic.node.exchange import Sum

        for step in range(done + 1, total + 1):
            self._pulse.safe = False
            self._pulse.report(step, "data")
            self._step, self._last = step, total
            self._pause_sum = Sum(self._pulse.pause_request)
            yield step
            pauses = self.due_to_pause()
            self._pause_sum = None
            if pauses:
                self._pulse.report(step, "end")
                raise Paused(pause_code(self._pulse))
        self._pulse.report(total, "end")

    def due_to_pause(self) -> bool:
        """Whether all ranks leave after this step, so that it is to be saved. The ranks agree while
        the step runs, so the call costs next to nothing. Any rank may call it, at any point of a
        step.

        Raises:
            RuntimeError: no step is under way.
        """
        if self._pause_sum is None:
            raise RuntimeError("due_to_pause() is for the body of `for step in job.steps(…)`")
        return self._pause_sum.wait() > 0 and self._step < self._last

    @contextmanager
    def during(self, phase: Literal["data", "step", "evaluate", "save"]) -> Iterator[None]:
        """Report what this rank does inside the block, so that a hang there is noticed soon.

        Args:
            phase: "step" for forward, backward and update, "evaluate" for a batch of validation.
                The usual duration of these is learned, and twelve times that counts as a hang.
                "data" and "save" are waits, limited to 10 and 34 minutes.
        """
        self._pulse.report(self._step, phase)
        yield
        # watchdog.ORDER: a rank that has done its step is ahead of one that has not
        self._pulse.report(self._step, "data" if phase == "data" else "after")

    def share(
        self, global_batch: int, group: "ProcessGroup | None" = None
    ) -> tuple[list[int], float]:
        """This rank's rows of a global batch whose size is the same at every world size.

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
        """`share` split into passes for gradient accumulation: equally many passes on each rank,
        each with at most `micro_batch` rows.

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
    the default process group. Call it once and first: under `--rdzv-backend perdure` the program
    starts again here, in a process forked from a warm one, now and after every failure.

    Args:
        device: "cuda", "cpu", or "auto" for CUDA where there is a GPU. The process group carries
            CPU tensors in any case.
        timeout_seconds: how long a collective waits for another rank, and the time limit of the
            start and of a step outside of `during`.

    Raises:
        RuntimeError: a process group exists already, or torchrun's own rendezvous would not survive
            a failure here. The message says what to do.
    """
    if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        raise RuntimeError(
            "elastic.join() makes the process group: call it in place of init_process_group"
        )
    if is_stand_in():
        stand_in_for(this_program())
    from elastic.world import join_world, refuse_stale_store

    if stale := refuse_stale_store():
        raise RuntimeError(stale)
    if "RANK" in os.environ:
        die_with_parent()
    tolerate_lost_output()
    pulse = Pulse.from_environment()
    pulse.safe = True  # before the first step there is nothing to save
    pulse.request_patience(timeout_seconds)
    watch_signals(pulse)
    pulse.report(0, "init")
    world = join_world(device, timeout_seconds, pulse.secret, pulse.most_free)
    pulse.most_free = world.free
    pulse.report(0, "load")
    return Job(world, pulse)


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("usage: python -m elastic.job PROGRAM.py [ARGUMENT ...]")
    if is_stand_in():
        stand_in_for(sys.argv[1:])
    execute(sys.argv[1:])
