"""A callback for the Trainer of transformers that saves and resumes with this package."""

import dataclasses
import json
import logging
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from checkpointing.checkpointer import Checkpointer
from checkpointing.errors import CheckpointError
from checkpointing.format.layout import parse_step
from checkpointing.format.values import from_json, to_json
from checkpointing.storage.steps import newest_checkpoint, read_state

__all__ = ["CheckpointCallback"]

logger = logging.getLogger(__name__)


class CheckpointCallback(TrainerCallback):
    """Saves model, optimizer, schedule, random number generators and the Trainer's own state.

        callback = CheckpointCallback("checkpoints", every=500, keep=2)
        trainer = Trainer(…, callbacks=[callback])  # with save_strategy="no"
        trainer.train(resume_from_checkpoint=callback.resume())

    Every process creates a callback of its own, for one call of `train`.

    Args:
        directory: directory of the steps; a path, since the Trainer reads files in it.
        every: optimizer steps between saves; the last step is always saved.
        options: options of `Checkpointer`.

    Raises:
        ValueError: `directory` is a URL.
    """

    def __init__(self, directory: str | Path, *, every: int, **options: Any) -> None:
        if "://" in str(directory):
            raise ValueError(f"{directory}: the Trainer cannot read files at a URL; give a path")
        self._directory, self._every, self._options = Path(directory), every, options
        self._found: int | None = None
        self._global_batch: int | None = None
        """Sequences per step in the run that saved the checkpoint."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def resume(self) -> str | None:
        """Returns the `resume_from_checkpoint` for `Trainer.train`: a folder of links and small
        files in the Trainer's format; None if there is no checkpoint. Called on all ranks."""
        path = newest_checkpoint(self._directory)
        if path is None:
            return None
        self._found = parse_step(path.name)
        values = read_state(path)["values"]
        self._folder = tempfile.TemporaryDirectory(prefix="resume-")
        folder = Path(self._folder.name)
        # links, as the weights may be large
        for file in path.absolute().glob("model*"):
            (folder / file.name).symlink_to(file)
        saved = from_json(values["trainer"])
        self._global_batch = saved["global_batch"]
        (folder / "trainer_state.json").write_text(json.dumps(saved["state"]))
        states = from_json(values["random"])
        # with more ranks than saved, states repeat, as the Trainer seeds all ranks equally
        for rank in range(int(os.environ.get("WORLD_SIZE", "1"))):
            torch.save(_of_process(states[rank % len(states)]), folder / f"rng_state_{rank}.pth")
        torch.save(states[0], folder / "rng_state.pth")
        return str(folder)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called by the Trainer: loads the state that the Trainer does not read from the folder
        that `resume` made."""
        optimizer = kwargs["optimizer"]
        self.checkpointer = Checkpointer(self._directory, **self._options)
        self._state = {
            "model": kwargs["model"],
            "optimizer": optimizer,
            "schedule": kwargs["lr_scheduler"],
            "trainer": _OfTrainer(None),
            "random": _OfTrainer(None),
        }

        def steps() -> tuple[int | None, int | None]:
            newest = newest_checkpoint(self._directory)
            return self._found, parse_step(newest.name) if newest else None

        found, newest = self.checkpointer.on_main(steps)
        # not from memory, as the Trainer reads its own state from storage
        loaded = newest if found is None else self.checkpointer.load(self._state, step=found)

        def compare() -> None:
            if loaded is not None and loaded != state.global_step:
                raise CheckpointError(
                    f"{self._directory} has step {loaded}, but the Trainer begins at step "
                    f"{state.global_step}: call "
                    "trainer.train(resume_from_checkpoint=callback.resume())"
                )

        self.checkpointer.on_all(compare)
        before, now = self._global_batch, _global_batch(args)
        if before not in (None, now) and state.is_world_process_zero:
            logger.warning(
                "the checkpoint was trained with %s sequences per step, but now a step has %s, so "
                "the Trainer continues at another place in the data: keep the product of "
                "per_device_train_batch_size, gradient_accumulation_steps and number of processes",
                before, now,
            )  # fmt: skip
        self.checkpointer.guard(optimizer)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called by the Trainer: saves if the step is a multiple of `every` or the last step. With
        save_strategy="no" it also saves if another callback has set `should_save`. The Trainer logs
        the step later, so after a resume its `log_history` lacks the entry of that step."""
        last = control.should_training_stop or state.global_step >= state.max_steps
        asked = control.should_save and args.save_strategy == "no"
        if asked:
            control.should_save = False  # otherwise the Trainer would save as well
        if last or asked or state.global_step % self._every == 0:
            # Rank 0's state, as in the Trainer, so that any number of processes can resume.
            trainer = self.checkpointer.on_main(
                lambda: {"state": _plain(state), "global_batch": _global_batch(args)}
            )
            states = self.checkpointer.gather(lambda: to_json(_random(), "random numbers"))
            self._state["trainer"] = _OfTrainer(trainer)
            self._state["random"] = _OfTrainer([from_json(one) for one in states])
            self.checkpointer.save(state.global_step, self._state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Called by the Trainer: waits for the last save. Raises SaveFailed if it failed."""
        self.checkpointer.wait()
        self.checkpointer.close()


@dataclasses.dataclass(frozen=True)
class _OfTrainer:
    """A value that the Trainer itself reads from the folder of `resume`."""

    value: Any

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state_dict: Any) -> None:
        """Does nothing, as the Trainer has loaded the value."""


def _plain(state: TrainerState) -> dict[str, Any]:
    return dict(json.loads(json.dumps(dataclasses.asdict(state))))


def _global_batch(args: TrainingArguments) -> int:
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _random() -> dict[str, Any]:
    """Returns the states of all random number generators, in the Trainer's format for a single
    process. The Trainer restores them itself, after it has skipped data."""
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, keys, *rest),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _of_process(state: dict[str, Any]) -> dict[str, Any]:
    """Returns random states in the Trainer's format for one of several processes: with a state for
    each visible GPU."""
    if "cuda" not in state:
        return state
    return {**state, "cuda": [state["cuda"]] * torch.cuda.device_count()}
