"""Runs the Trainer of transformers as an elastic job."""

from typing import Any

from torch.utils.data import DataLoader
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    is_datasets_available,
)

from elastic.group.sampler import Sampler, sampler
from elastic.job import Job

__all__ = ["make_elastic"]

STATE = "elastic.sampler"
"""Key of the sampler's state in `TrainerState.stateful_callbacks`."""


def make_elastic(trainer: Trainer, job: Job, global_batch: int) -> Sampler:
    """Make a Trainer train as this rank of a job, with the samples of `elastic.sampler`. Call it
    before `trainer.train()`. Set `max_steps` and `save_strategy="no"`, and save with the
    `CheckpointCallback` of `checkpointing.adapters.hugging_face`.

        def train(job):
            saves = CheckpointCallback("checkpoints", every=100, keep=2)
            trainer = Trainer(model, arguments, train_dataset=data, callbacks=[saves])
            make_elastic(trainer, job, global_batch=48)
            trainer.train(resume_from_checkpoint=saves.resume())

        elastic.run(train)

    Args:
        trainer: `per_device_train_batch_size` is the largest number of samples in a pass.
            `gradient_accumulation_steps` is set to the passes that a global batch takes.
        job: the job of this rank.
        global_batch: samples per optimizer step, over all ranks.

    Returns:
        The sampler, whose state is saved in the `TrainerState`.

    Raises:
        ValueError: the Trainer has no `max_steps`, its data set no length, or ranks would have
            unequal parts of a batch and the model does not accept `num_items_in_batch`.
    """
    arguments, data = trainer.args, trainer.train_dataset
    if arguments.max_steps <= 0:
        raise ValueError("an elastic Trainer needs max_steps in its TrainingArguments")
    if not hasattr(data, "__len__"):
        raise ValueError(
            f"train_dataset: {type(data).__name__} has no length, which the elastic sampler needs; "
            "use a map-style data set"
        )
    batches = sampler(
        data,
        global_batch,
        micro_batch=arguments.per_device_train_batch_size,
        seed=arguments.seed if arguments.data_seed is None else arguments.data_seed,
    )
    # A model that takes `num_items_in_batch` divides its loss sum by the tokens of all ranks.
    if not (batches.even or trainer.model_accepts_loss_kwargs or trainer.compute_loss_func):
        raise ValueError(
            f"{job.world.world_size} rank(s) would have unequal parts of {global_batch} samples, "
            "and each rank's loss is the mean over its own part: choose a global batch and a "
            "per_device_train_batch_size that divide evenly among the ranks, or a model that takes "
            "num_items_in_batch"
        )
    arguments.gradient_accumulation_steps = batches.passes
    arguments.ignore_data_skip = True  # the sampler already begins at the right step
    trainer.get_train_dataloader = lambda: _loader(trainer, batches)
    trainer.add_callback(_Steps(job, batches))
    return batches


class _Steps(TrainerCallback):
    """Reports the Trainer's steps to the job, and makes the Trainer save before a pause."""

    def __init__(self, job: Job, batches: Sampler) -> None:
        self._job, self._batches = job, batches
        self._begun = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        saved = state.stateful_callbacks.get(STATE)
        if saved:
            self._batches.load_state_dict(saved)
        elif state.global_step:
            raise ValueError(
                f"the checkpoint of step {state.global_step} was saved by a Trainer that was not "
                "made elastic, so nobody knows which samples it took: start a new run in another "
                "folder"
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # The previous step ends only now: the Trainer saves and evaluates after `on_step_end`.
        self._end_step()
        self._job.begin_step(state.global_step + 1, state.max_steps)
        self._begun = True
        self._batches.done = state.global_step + 1
        state.stateful_callbacks[STATE] = self._batches.state_dict()
        self._job.report("step")

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # Set before `on_step_end`, in which `CheckpointCallback` saves if `should_save` is set.
        control.should_save = control.should_save or self._job.due_to_pause()
        self._job.report("after")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._end_step()

    def _end_step(self) -> None:
        if self._begun:
            self._begun = False
            self._job.end_step()


def _loader(trainer: Trainer, batches: Sampler) -> DataLoader[Any]:
    """Returns a data loader like the Trainer's own, but with the sampler's batches. accelerate must
    not prepare this loader, as it would divide the batches among the ranks once more."""
    arguments, data = trainer.args, trainer.train_dataset
    collate = trainer.data_collator
    if is_datasets_available() and type(data).__module__.startswith("datasets."):
        data = trainer._remove_unused_columns(data, description="Training")
    else:
        collate = trainer._get_collator_with_removed_columns(collate, description="Training")
    return DataLoader(
        data,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=arguments.dataloader_num_workers,
        pin_memory=arguments.dataloader_pin_memory,
        persistent_workers=arguments.dataloader_persistent_workers,
        prefetch_factor=arguments.dataloader_prefetch_factor,
    )
