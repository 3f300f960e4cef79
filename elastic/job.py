"""The face for a loop of one's own: a rank of a job whose nodes come and go.

`python -m elastic.job PROGRAM` runs a program that calls `join`; see node/script.py.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from elastic.node.progress import Pulse, pause_code, watch_signals
from elastic.node.standin import execute, stand_in_for, stands_in, this_program
from elastic.process import die_with_parent, outlive

if TYPE_CHECKING:  # torch, which a process that only stands in does without
    from torch.distributed import ProcessGroup

    from elastic.node.exchange import Sum
    from elastic.world import World


class Paused(SystemExit):
    """All ranks leave after the same step."""

    of_all_ranks = True
    """So what waits for others may wait for them: `Checkpointer` does, for its last save."""


class Job:
    """A job, as one of its ranks sees it. `join` makes it.

    Args:
        world: rank, world size and device.
        pulse: by which this rank and its agent tell each other how it stands.
    """

    def __init__(self, world: "World", pulse: Pulse) -> None:
        self.world = world
        self._pulse = pulse
        self._asked: Sum | None = None
        """What the ranks were asked before the step under way; None outside of steps."""
        self._step = self._last = 0

    def steps(self, done: int, total: int) -> Iterator[int]:
        """The steps from `done` + 1 to `total`. On all ranks alike.

            for step in job.steps(done, total):
                …
                if step % 100 == 0 or job.due_to_pause():
                    checkpointer.save(step, state)

        When the job is to pause, as a node leaves or joins, this raises SystemExit on all ranks
        after the same step. What has not been saved by then is done again; and so nothing that
        comes after the loop is done before all steps are.
        """
        from elastic.node.exchange import Sum

        for step in range(done + 1, total + 1):
            self._pulse.safe = False
            self._pulse.report(step, "data")
            self._step, self._last = step, total
            self._asked = Sum(self._pulse.asked_to_pause)
            yield step
            pauses = self.due_to_pause()
            self._asked = None
            if pauses:
                self._pulse.report(step, "end")
                raise Paused(pause_code(self._pulse))
        self._pulse.report(total, "end")

    def due_to_pause(self) -> bool:
        """Whether this step is to be saved, as all ranks leave after it. The ranks agree on that
        while the step goes on; so this costs next to nothing, and may be asked at any place of it,
        by any rank, or never.

        Raises:
            RuntimeError: no step is under way.
        """
        if self._asked is None:
            raise RuntimeError("due_to_pause() is for the body of `for step in job.steps(…)`")
        return self._asked.wait() > 0 and self._step < self._last

    @contextmanager
    def during(self, phase: Literal["data", "step", "evaluate", "save"]) -> Iterator[None]:
        """Say what this rank does within, so that a rank that hangs there is soon found.

        Args:
            phase: "step" for forward, backward and update, and "evaluate" for a batch of
                validation: what usually takes long is learned, and twelve times that is a hang.
                "data" and "save" for waiting, which has 10 and 34 minutes.
        """
        self._pulse.report(self._step, phase)
        yield
        # As watchdog.py orders the phases: who has done its step is ahead of who has not.
        self._pulse.report(self._step, "data" if phase == "data" else "after")

    def share(
        self, global_batch: int, group: "ProcessGroup | None" = None
    ) -> tuple[list[int], float]:
        """This rank's rows of a global batch that stays the same at every world size.

            rows, weight = job.share(48)
            loss = weight * F.mse_loss(model(x[rows]), y[rows])

        Args:
            global_batch: rows of all ranks together.
            group: of the ranks that share it; None: all of them.

        Returns:
            (rows, weight). The mean loss of these rows times `weight`, averaged over the ranks as
            FSDP and DDP average gradients, is the mean over the global batch. `weight` is 1 if the
            ranks have equally many rows. A rank that would have none has one, and weight 0.
        """
        return self.passes(global_batch, global_batch, group)[0]

    def passes(
        self, global_batch: int, micro_batch: int, group: "ProcessGroup | None" = None
    ) -> list[tuple[list[int], float]]:
        """`share` in several passes, for gradients that are accumulated: on each rank as many,
        with at most `micro_batch` rows each.

            for rows, weight in job.passes(48, micro_batch=4):
                (weight * F.mse_loss(model(x[rows]), y[rows])).backward()
        """
        import torch.distributed as dist

        from elastic.group.batch_plan import plan_batch

        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        plan = plan_batch(global_batch, min(ranks, global_batch), micro_batch)
        return [
            (list(one.positions), one.real * len(one.positions) * ranks / global_batch)
            for one in plan.micro_batches(rank, start=0)
        ]


def join(device: str = "auto", timeout_seconds: float = 1800.0) -> Job:
    """Be a rank of the job that torchrun started; alone without torchrun. It makes the default
    process group. To be called once, first of all: under `--rdzv-backend perdure` the program
    begins here again, in a process forked from a warm one, now and after every failure.

    Args:
        device: "cuda", "cpu", or "auto" for CUDA where there is a GPU. The process group carries
            CPU tensors in any case.
        timeout_seconds: how long a rank may wait for another in a collective, and how long it may
            be before its first step or in a step, where `during` does not say more.

    Raises:
        RuntimeError: there is a process group already, or torchrun's own rendezvous would not
            survive a failure here; says what to do.
    """
    if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        raise RuntimeError(
            "elastic.join() makes the process group: call it in place of init_process_group"
        )
    if stands_in():
        stand_in_for(this_program())
    from elastic.world import join_world, refuse_stale_store

    if stale := refuse_stale_store():
        raise RuntimeError(stale)
    if "RANK" in os.environ:
        die_with_parent()
    outlive()
    pulse = Pulse.from_environment()
    pulse.safe = True
    pulse.be_patient(timeout_seconds)
    watch_signals(pulse)
    pulse.report(0, "init")
    world = join_world(device, timeout_seconds, pulse.secret, pulse.most_free)
    pulse.most_free = world.free
    pulse.report(0, "load")
    return Job(world, pulse)


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("usage: python -m elastic.job PROGRAM.py [ARGUMENT ...]")
    if stands_in():
        stand_in_for(sys.argv[1:])
    execute(sys.argv[1:])
