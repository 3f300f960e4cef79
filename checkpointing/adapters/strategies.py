"""Base class of the strategies for Lightning Fabric and for Lightning's Trainer."""

from collections.abc import Mapping
from typing import Any

from checkpointing.checkpointer import Checkpointer


class LightningValues:
    """Plain values that a strategy saves in addition to modules and optimizers."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict


class WithCheckpointers:
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
