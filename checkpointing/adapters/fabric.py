"""Strategies of Lightning Fabric whose `fabric.save` and `fabric.load` use this package.

They are strategies because Fabric gives its CheckpointIO plugins only rank 0's copies, and no
sharded tensors. The bases `FabricCheckpointers` and `FabricValues` also serve the strategies of
Lightning's Trainer, whose package brings Fabric."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from checkpointing.checkpointer import Checkpointer
from checkpointing.errors import CheckpointError, WrongModel
from checkpointing.format.layout import split_step
from checkpointing.state import Stateful

__all__ = [
    "Checkpointed",
    "CheckpointedDDP",
    "CheckpointedModelParallel",
    "CheckpointedSingleDevice",
]
VALUES = "values"
"""Key of the object that holds all plain values."""


class FabricValues:
    """Plain values that a strategy saves in addition to modules and optimizers."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict


class FabricCheckpointers:
    """Mixin that holds a `Checkpointer` for each directory. Must precede the strategy among a
    class's bases. `checkpoint` has options of `Checkpointer`, such as {"keep": 2}."""

    def __init__(
        self, *args: Any, checkpoint: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._options = dict(checkpoint or {})
        self._checkpointers: dict[str, Checkpointer] = {}

    def checkpointer(self, directory: str) -> Checkpointer:
        """Returns the Checkpointer of a directory, to wait for saves and get their outcomes."""
        if directory not in self._checkpointers:
            self._checkpointers[directory] = Checkpointer(directory, **self._options)
        return self._checkpointers[directory]

    def close_checkpoints(self) -> None:
        """Wait until all checkpoints are written. The program also waits at its end. Raises
        SaveFailed if the last save in a directory failed."""
        while self._checkpointers:
            # removed first: if its save has failed, a second call continues with the others
            _, checkpointer = self._checkpointers.popitem()
            with checkpointer:
                checkpointer.wait()


class Checkpointed(FabricCheckpointers):
    """Mixin that makes a strategy of Fabric save and load with this package. Must precede the
    strategy among a class's bases.

    Paths given to `fabric.save` have the form DIRECTORY/step-00000100. `fabric.save` returns once
    the state may change; a process of each node writes. `fabric.load` takes such a path, or
    DIRECTORY for the newest good checkpoint. Any number of ranks may have saved the checkpoint."""

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,
    ) -> None:
        """Called by `fabric.save` on all ranks with modules, optimizers, tensors, objects with
        state_dict, and plain values. Raises ValueError, which says why, if the path names no step,
        or part of the state cannot be saved."""
        if storage_options is not None or filter is not None:
            raise ValueError("fabric.save: storage_options and filter are not supported; omit them")
        directory, step = split_step(str(path))
        if step is None:
            raise ValueError(f"fabric.save({str(path)!r}): name it DIRECTORY/step-00000100")
        checkpointer = self.checkpointer(directory)
        objects = checkpointer.on_all(lambda: _objects(state))
        optimizers = [one for one in state.values() if isinstance(one, torch.optim.Optimizer)]
        checkpointer.guard(*optimizers)  # their steps wait for the copy, so that `save` need not
        checkpointer.save(step, objects)

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Called by `fabric.load` on all ranks. Loads `state` in place, from
        DIRECTORY/step-00000100 or from the newest undamaged step of DIRECTORY, and returns {}.
        `weights_only` is ignored, as nothing is unpickled. If `state` is a single module or
        optimizer, the call is from `fabric.load_raw`, which still reads torch's own files.

        Raises:
            CheckpointError: there is no such checkpoint, none is undamaged, or one cannot be read.
            SaveFailed: the previous save failed.
            WrongModel: the checkpoint's tensors do not fit `state`.
            ValueError: no state is given, strict is false, or part of `state` cannot be loaded
                into.
        """
        if isinstance(state, nn.Module | torch.optim.Optimizer):
            strategy: Any = super()
            found: dict[str, Any] = strategy.load_checkpoint(path, state, strict, weights_only)
            return found
        if not state or not strict:
            raise ValueError(
                "fabric.load: give the whole state that was saved, and strict=True: no part of a "
                "checkpoint is loaded alone"
            )
        directory, step = split_step(str(path))
        checkpointer = self.checkpointer(directory)
        objects = checkpointer.on_all(lambda: _objects(state))
        checkpointer.wait()  # a save of this program may be the newest checkpoint
        if checkpointer.load(objects, step) is None:
            raise CheckpointError(f"{directory} has no checkpoint; save one first")
        state.update(objects[VALUES].values)
        return {}


class CheckpointedSingleDevice(Checkpointed, SingleDeviceStrategy):
    """Fabric's strategy for one process, which saves and loads with this package."""


class CheckpointedDDP(Checkpointed, DDPStrategy):
    """Fabric's DDP strategy (whole weights on each rank), which saves and loads with this
    package."""


class CheckpointedModelParallel(Checkpointed, ModelParallelStrategy):
    """Fabric's strategy for FSDP2 and tensor parallelism, which saves and loads with this
    package."""


class _ValuesByKey(FabricValues):
    """All plain values of a state. Fabric restores them by key."""

    def refuse_state(self, state_dict: dict[str, Any]) -> None:
        if state_dict.keys() != self.values.keys():
            names = ", ".join(sorted(state_dict.keys() ^ self.values.keys()))
            raise WrongModel(
                f"only the checkpoint or only this state has {names}; load into the same keys"
            )


def _objects(state: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (nn.Module, torch.optim.Optimizer, Tensor, Stateful)
    objects = {key: value for key, value in state.items() if isinstance(value, kinds)}
    if VALUES in state:
        raise ValueError(f"state[{VALUES!r}]: rename this key; it is reserved for plain values")
    plain = {key: value for key, value in state.items() if key not in objects}
    return {**objects, VALUES: _ValuesByKey(plain)}
