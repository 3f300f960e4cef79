"""Strategies of Lightning's Trainer that save and resume with this package."""

import re
from pathlib import Path
from typing import Any

from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from checkpointing.adapters.fabric import FabricCheckpointers, FabricValues
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


class Checkpointed(FabricCheckpointers):
    """Mixin that makes a strategy of the Trainer save and load with this package. Must precede the
    strategy among a class's bases.

    What `ModelCheckpoint(dirpath=DIRECTORY)` or `trainer.save_checkpoint` saves as
    DIRECTORY/…step=100….ckpt becomes DIRECTORY/step-00000100. A process of each node writes it
    while training continues. `trainer.fit(ckpt_path=…)` takes either name, or DIRECTORY for the
    newest good checkpoint. Any number of ranks may have saved it. `keep` in `checkpoint` decides
    which steps stay; `save_top_k` does not."""

    optimizers: Any
    lightning_module: Any
    _exception: BaseException | None = None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: checkpoints are loaded into the module and optimizers being trained."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: `load_checkpoint` restores optimizers."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty, as `save_checkpoint` reads the module itself."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Empty, as `save_checkpoint` reads the optimizers themselves."""
        return {}

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Does nothing, as `load_checkpoint` has loaded the model."""

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Does nothing, as `load_checkpoint` has loaded the optimizers."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Called by the Trainer to save, on all ranks. Raises ValueError, which says why, if the
        path names no step, or part of the state cannot be saved."""
        directory, step = _place(filepath)
        if step is None:
            raise ValueError(f"{filepath}: let its name have the step, as {{epoch}}-{{step}} does")
        if storage_options is not None or "optimizer_states" not in checkpoint:
            raise ValueError(
                f"{filepath}: this strategy cannot save weights alone, nor with storage_options; "
                "leave out save_weights_only and storage_options"
            )
        checkpointer = self.checkpointer(directory)
        taken = ("state_dict", "optimizer_states")
        values = {key: value for key, value in checkpoint.items() if key not in taken}
        # as the Trainer does: loops, callbacks and schedules come from the first rank
        of_first = checkpointer.on_main(lambda: to_json(values, "the Trainer's checkpoint"))
        checkpointer.guard(*self.optimizers)
        checkpointer.save(step, self._state(FabricValues(from_json(of_first))))

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Called by the Trainer on all ranks, to resume, or to validate, test or predict with a
        checkpoint's weights.

        Raises:
            CheckpointError: there is no checkpoint, or no good one.
            WrongModel: the checkpoint is of another module or of other optimizers.
        """
        directory, step = _place(checkpoint_path)
        checkpointer = self.checkpointer(directory)
        module = self.lightning_module
        # Values that the Trainer restores itself: loops, callbacks, schedules, ….
        values = FabricValues({})
        checkpointer.wait()  # a save of this program may be the newest checkpoint
        # only training loads more than the weights
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
        """Does nothing, as `keep` decides which steps are kept."""

    def on_exception(self, exception: BaseException) -> None:
        """Record the exception, which other ranks may not have raised."""
        self._exception = exception
        strategy: Any = super()
        strategy.on_exception(exception)

    def teardown(self) -> None:
        """Wait until all checkpoints are written. After an exception that other ranks may not have
        raised, wait at most 10 s for each directory. (An exception that all ranks raise has a true
        `of_all_ranks`.) Raises SaveFailed if the last save in a directory failed."""
        try:
            while self._exception and self._checkpointers:
                _, checkpointer = self._checkpointers.popitem()
                checkpointer.__exit__(type(self._exception))
            self.close_checkpoints()
        finally:
            self._exception = None
            strategy: Any = super()
            strategy.teardown()

    def _state(self, values: FabricValues) -> dict[str, Any]:
        optimizers = enumerate(self.optimizers)
        return {
            "model": self.lightning_module,
            **{f"optimizer_{number}": optimizer for number, optimizer in optimizers},
            "values": values,
        }


class CheckpointedSingleDevice(Checkpointed, SingleDeviceStrategy):
    """The Trainer's strategy for one process, which saves and loads with this package."""


class CheckpointedDDP(Checkpointed, DDPStrategy):
    """The Trainer's DDP strategy (whole weights on each rank), which saves and loads with this
    package."""


class CheckpointedModelParallel(Checkpointed, ModelParallelStrategy):
    """The Trainer's strategy for FSDP2 and tensor parallelism, which saves and loads with this
    package."""


def _place(path: str | Path) -> tuple[str, int | None]:
    directory, _, name = str(path).rpartition("/")
    if name.endswith(".ckpt") and (found := re.search(r"step=(\d+)", name)):
        return directory or ".", int(found[1])
    return split_step(str(path))
