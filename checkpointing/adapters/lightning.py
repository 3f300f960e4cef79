"""Strategies of Lightning's Trainer that save and resume through this engine."""

import re
from pathlib import Path
from typing import Any

from pytorch_lightning.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)

from checkpointing.adapters.strategies import WithCheckpointers
from checkpointing.errors import CheckpointError
from checkpointing.format.layout import split_step, step_name
from checkpointing.format.values import from_json, to_json
from checkpointing.load.reader import load_model
from checkpointing.storage.steps import newest_checkpoint, read_state

__all__ = [
    "Checkpointed",
    "CheckpointedDDP",
    "CheckpointedModelParallel",
    "CheckpointedSingleDevice",
]


class Checkpointed(WithCheckpointers):
    """Stands before a strategy of the Trainer among the bases of a class.

    What `ModelCheckpoint(dirpath=DIRECTORY)` or `trainer.save_checkpoint` writes to
    DIRECTORY/…step=100….ckpt becomes DIRECTORY/step-00000100. A process of each node writes it
    while training goes on. `trainer.fit(ckpt_path=…)` takes either name, or DIRECTORY: the newest
    good checkpoint, from whatever number of ranks it was saved. `keep` of `checkpoint` decides
    which steps stay, and not `save_top_k`.
    """

    optimizers: Any
    """Optimizers of the strategy that this class stands before."""
    lightning_module: Any
    """Module of the strategy that this class stands before."""
    _exception: BaseException | None = None
    """What ended the Trainer."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: what is loaded goes into the module and the optimizers that are trained."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: `load_checkpoint` has done it."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: `save_checkpoint` takes the module itself."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: `save_checkpoint` takes the optimizers themselves."""
        return {}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Nothing: `load_checkpoint` has done it."""

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Nothing: `load_checkpoint` has done it."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """What the Trainer calls to save, on all ranks.

        Raises:
            ValueError: the path names no step, or something cannot be saved; says what and why.
        """
        directory, step = _place(filepath)
        if step is None:
            raise ValueError(f"{filepath}: let its name have the step, as {{epoch}}-{{step}} does")
        if storage_options is not None or "optimizer_states" not in checkpoint:
            raise ValueError(f"{filepath}: storage_options and weights alone cannot be saved here")
        checkpointer = self.checkpointer(directory)
        taken = ("state_dict", "optimizer_states")
        values = {key: value for key, value in checkpoint.items() if key not in taken}
        # As the Trainer does it: loops, callbacks and schedules as the first rank has them.
        of_first = checkpointer.on_main(lambda: to_json(values, "the Trainer's checkpoint"))
        checkpointer.guard(*self.optimizers)
        checkpointer.save(step, self._state(_Values(from_json(of_first))))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What the Trainer calls to resume, on all ranks; and to validate, test or predict with the
        weights of a checkpoint.

        Raises:
            CheckpointError: there is no checkpoint, or no good one.
            WrongModel: the checkpoint is of another module or of other optimizers.
        """
        directory, step = _place(checkpoint_path)
        checkpointer = self.checkpointer(directory)
        module = self.lightning_module
        values = _Values({})
        checkpointer.wait()  # what this program has just saved can be loaded
        if module.trainer.state.fn.value == "fit":
            if checkpointer.load(self._state(values), step) is None:
                raise CheckpointError(f"{directory} has no checkpoint; save one first")
            return values.values
        path = newest_checkpoint(checkpointer.directory)
        if step is not None:
            path = checkpointer.directory / step_name(step)
        if path is None:
            raise CheckpointError(f"{directory} has no checkpoint; save one first")
        load_model(str(path), dict(module.state_dict(keep_vars=True)))
        return dict(from_json(read_state(path)["values"]["values"]))

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Nothing: `keep` decides."""

    def on_exception(self, exception: BaseException) -> None:
        """The Trainer has failed, perhaps on this rank alone."""
        self._exception = exception
        strategy: Any = super()
        strategy.on_exception(exception)

    def teardown(self) -> None:
        """Wait until all is written; after an exception, 10 s at most.

        Raises:
            SaveFailed: a last save failed.
        """
        try:
            while self._exception and self._checkpointers:
                _, checkpointer = self._checkpointers.popitem()
                checkpointer.__exit__(type(self._exception))
            self.close_checkpoints()
        finally:
            self._exception = None
            strategy: Any = super()
            strategy.teardown()

    def _state(self, values: "_Values") -> dict[str, Any]:
        """As `Checkpointer` takes it."""
        optimizers = enumerate(self.optimizers)
        return {
            "model": self.lightning_module,
            **{f"optimizer_{number}": optimizer for number, optimizer in optimizers},
            "values": values,
        }


class CheckpointedSingleDevice(Checkpointed, SingleDeviceStrategy):
    """The Trainer's strategy for one process."""


class CheckpointedDDP(Checkpointed, DDPStrategy):
    """The Trainer's strategy with whole weights on each rank."""


class CheckpointedModelParallel(Checkpointed, ModelParallelStrategy):
    """The Trainer's strategy for FSDP2 and tensor parallelism."""


class _Values:
    """What the Trainer sets itself: its loops, callbacks, schedules, …"""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict


def _place(path: str | Path) -> tuple[str, int | None]:
    """(directory, step) of a path; (path, None) of one that names no step."""
    directory, _, name = str(path).rpartition("/")
    if name.endswith(".ckpt") and (found := re.search(r"step=(\d+)", name)):
        return directory or ".", int(found[1])
    return split_step(str(path))
