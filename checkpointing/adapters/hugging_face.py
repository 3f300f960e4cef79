"""A callback of transformers' Trainer that saves and resumes through this engine."""

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
        self._global_batch: int | None = None
        """Sequences in a step of the run that saved."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def resume(self) -> str | None:
        """What `Trainer.train` takes as `resume_from_checkpoint`: a folder of links and small files
        in the Trainer's own format; None if there is no checkpoint. On all ranks."""
        path = newest_checkpoint(self._directory)
        if path is None:
            return None
        self._found = parse_step(path.name)
        values = read_state(path)["values"]
        self._folder = tempfile.TemporaryDirectory(prefix="resume-")
        folder = Path(self._folder.name)
        for file in path.absolute().glob("model*"):
            (folder / file.name).symlink_to(file)
        saved = from_json(values["trainer"])
        self._global_batch = saved["global_batch"]
        (folder / "trainer_state.json").write_text(json.dumps(saved["state"]))
        states = from_json(values["random"])
        # Ranks beyond those that saved take over the states of others: the Trainer seeds all alike.
        for rank in range(int(os.environ.get("WORLD_SIZE", "1"))):
            torch.save(_of_process(states[rank % len(states)]), folder / f"rng_state_{rank}.pth")
        torch.save(states[0], folder / "rng_state.pth")
        return str(folder)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Load what the Trainer has not taken from the folder."""
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
        # What is only in memory is passed over: the Trainer reads its own state from storage.
        loaded = newest if found is None else self.checkpointer.load(self._state, step=found)

        def compare() -> None:
            if loaded is not None and loaded != state.global_step:
                raise CheckpointError(
                    f"{self._directory} has step {loaded}, and the Trainer begins at step "
                    f"{state.global_step}: trainer.train(resume_from_checkpoint=callback.resume())"
                )

        self.checkpointer.on_all(compare)
        before, now = self._global_batch, _global_batch(args)
        if before not in (None, now) and state.is_world_process_zero:
            logger.warning(
                "a step of the checkpoint has %s sequences, and one has %s now, so the Trainer "
                "goes on elsewhere in the data: keep the product of per_device_train_batch_size, "
                "gradient_accumulation_steps and the number of processes",
                before,
                now,
            )
        self.checkpointer.guard(optimizer)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save, if that is due. The Trainer logs this step later: after a resume its `log_history`
        has no entry of it."""
        last = control.should_training_stop or state.global_step >= state.max_steps
        if last or state.global_step % self._every == 0:
            # As the Trainer does it: its state as the first process has it, and random numbers of
            # all. So another number of processes can go on.
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
        """Wait for the last save.

        Raises:
            SaveFailed: there is none of the last step.
        """
        self.checkpointer.wait()
        self.checkpointer.close()


@dataclasses.dataclass(frozen=True)
class _OfTrainer:
    """What the Trainer takes from the folder of `resume`."""

    value: Any

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state_dict: Any) -> None:
        """Nothing: see above."""


def _plain(state: TrainerState) -> dict[str, Any]:
    """As the Trainer writes it to trainer_state.json."""
    return dict(json.loads(json.dumps(dataclasses.asdict(state))))


def _global_batch(args: TrainingArguments) -> int:
    """Sequences in a step."""
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def _random() -> dict[str, Any]:
    """States of random numbers, as the Trainer of a single process saves them. It sets them itself,
    once it has skipped data."""
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
    """As one of several processes saves them: for each GPU that it sees."""
    if "cuda" not in state:
        return state
    return {**state, "cuda": [state["cuda"]] * torch.cuda.device_count()}
