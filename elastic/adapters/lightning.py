"""Runs the Trainer of Lightning as an elastic job."""

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer

from elastic.group.sampler import Sampler
from elastic.job import Job

__all__ = ["ElasticCallback"]


class ElasticCallback(Callback):
    """Makes a Trainer train as this rank of a job. The Trainer needs `max_steps`,
    `use_distributed_sampler=False`, and a `ModelCheckpoint`, which also saves when the job pauses.

        def train(job):
            batches = elastic.sampler(data, global_batch=48)
            saves = ModelCheckpoint("checkpoints", every_n_train_steps=100, save_last=True)
            trainer = Trainer(
                devices=job.world.local_world_size, num_nodes=job.world.nodes, strategy="ddp",
                callbacks=[ElasticCallback(job, batches), saves], use_distributed_sampler=False, …
            )
            trainer.fit(module, DataLoader(data, batch_sampler=batches), ckpt_path="last")

        elastic.run(train)

    Args:
        job: the job of this rank.
        batches: the `batch_sampler` of the data loader. Its state is saved in the checkpoints.
    """

    def __init__(self, job: Job, batches: Sampler) -> None:
        self._job, self._batches = job, batches
        self._begun = False

    def state_dict(self) -> dict[str, Any]:
        """Called by the Trainer when it saves: returns the sampler's state."""
        return self._batches.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called by the Trainer before it fetches batches: loads the sampler's state."""
        self._batches.load_state_dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise ValueError if the Trainer, its data loader or the loaded checkpoint do not fit the
        job. The message says what to do."""
        batches = self._batches
        if getattr(trainer.train_dataloader, "batch_sampler", None) is not batches:
            raise ValueError(
                "an elastic Trainer needs DataLoader(…, batch_sampler=…) with the sampler of its "
                "ElasticCallback, and use_distributed_sampler=False"
            )
        if trainer.max_steps <= 0 or trainer.checkpoint_callback is None:
            raise ValueError("an elastic Trainer needs max_steps and a ModelCheckpoint")
        if trainer.accumulate_grad_batches != batches.passes:
            raise ValueError(
                f"accumulate_grad_batches is {trainer.accumulate_grad_batches}, and a step of the "
                f"sampler has {batches.passes} passes: Trainer(accumulate_grad_batches="
                "sampler.passes)"
            )
        if not batches.even:
            raise ValueError(
                f"{self._job.world.world_size} rank(s) would have unequal parts of a global batch, "
                "and each rank's loss is the mean over its own part: choose a global batch and a "
                "micro-batch that divide evenly among the ranks"
            )
        if batches.done != trainer.global_step:
            raise ValueError(
                f"the checkpoint of step {trainer.global_step} has no state of ElasticCallback, so "
                "nobody knows which samples it took: start a new run in another folder"
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step before its first pass. Raises SystemExit on all ranks if the job pauses
        after the previous step, which is saved."""
        if self._begun and self._batches.done > trainer.global_step:
            return
        self._end_step()
        self._batches.done = trainer.global_step + 1
        self._job.begin_step(self._batches.done, trainer.max_steps)
        self._begun = True
        self._job.report("step")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after each pass. If the job pauses after this step, its last pass makes
        `ModelCheckpoint` save, which Lightning calls after all other callbacks."""
        if self._begun and self._batches.done == trainer.global_step:
            self._job.report("after")
            if self._job.due_to_pause():
                saves: Any = trainer.checkpoint_callback
                saves._every_n_train_steps = 1

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_step()

    def _end_step(self) -> None:
        if self._begun:
            self._begun = False
            self._job.end_step()
