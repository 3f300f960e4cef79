"""A callback of transformers' Trainer that saves and resumes through this engine."""

import dataclasses
import json
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
from checkpointing.format.values import from_json
from checkpointing.storage.steps import newest_checkpoint, read_state

__all__ = ["CheckpointCallback"]


class CheckpointCallback(TrainerCallback):
    """Saves model, optimizer, schedule, random numbers and the Trainer's own state.

        callback = CheckpointCallback("checkpoints", every=500, keep=2)
        trainer = Trainer(…, callbacks=[callback])  # with save_strategy="no"
        trainer.train(resume_from_checkpoint=callback.resume())

    Every process makes one. Once trained with, it is used up.

    Args:
        directory: holds the steps; a path, as the Trainer reads files of them.
        every: optimizer steps between saves; the last is always saved.
        options: as those of `Checkpointer`.

    Raises:
        ValueError: `directory` is a URL.
    """

    def __init__(self, directory: str | Path, *, every: int, **options: Any) -> None:
        if "://" in str(directory):
            raise ValueError(f"{directory}: the Trainer reads files of a checkpoint; give a path")
        self._directory, self._every, self._options = Path(directory), every, options
        self._found: int | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def resume(self) -> str | None:
        """What `Trainer.train` takes as `resume_from_checkpoint`: a folder of links and small files
        in the Trainer's own format; None if there is no checkpoint. On all ranks."""
        path = newest_checkpoint(self._directory)
        if path is None:
            return None
        self._found = parse_step(path.name)
        saved = read_state(path)
        self._folder = tempfile.TemporaryDirectory(prefix="resume-")
        folder = Path(self._folder.name)
        for file in path.absolute().glob("model*"):
            (folder / file.name).symlink_to(file)
        trainer_state = json.dumps(from_json(saved["values"]["trainer"]))
        (folder / "trainer_state.json").write_text(trainer_state)
        numbers = saved["values"].get("random")
        for rank, one in enumerate(saved.get("values_by_rank", {}).get("random", [numbers])):
            found = from_json(one)
            torch.save(found, folder / f"rng_state_{rank}.pth")
            torch.save(found, folder / "rng_state.pth")
        return str(folder)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Load what the Trainer has not taken from the folder."""
        optimizer = kwargs["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        self.checkpointer = Checkpointer(self._directory, **self._options)
        self._state = {
            "model": kwargs["model"],
            "optimizer": optimizer,
            "schedule": kwargs["lr_scheduler"],
            "trainer": _OfTrainer(state),
            "random": _Random(),
        }
        loaded = self.checkpointer.load(self._state, step=self._found)

        def compare() -> None:
            if loaded is not None and loaded != state.global_step:
                raise CheckpointError(
                    f"{self._directory} has step {loaded}, and the Trainer begins at step "
                    f"{state.global_step}: trainer.train(resume_from_checkpoint=callback.resume())"
                )

        self.checkpointer.on_all(compare)
        self.checkpointer.guard(optimizer)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save, if that is due. The Trainer logs this step later: after a resume its `log_history`
        has no entry of it."""
        last = control.should_training_stop or state.global_step >= state.max_steps
        if last or state.global_step % self._every == 0:
            self._state["trainer"] = _OfTrainer(state)
            self.checkpointer.save(state.global_step, self._state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Wait for the last save.

        Raises:
            SaveFailed: there is none of the last step.
        """
        self.checkpointer.wait()
        self.checkpointer.close()


@dataclasses.dataclass(frozen=True)
class _OfTrainer:
    """Which the Trainer has loaded itself, to skip data it has seen."""

    state: TrainerState

    def state_dict(self) -> dict[str, Any]:
        return dict(json.loads(json.dumps(dataclasses.asdict(self.state))))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: see above."""


class _Random:
    """As the Trainer saves them, and sets them itself once it has skipped data."""

    def state_dict(self) -> dict[str, Any]:
        name, keys, *rest = np.random.get_state()
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": (name, keys, *rest),
            "cpu": torch.random.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing: see above."""
