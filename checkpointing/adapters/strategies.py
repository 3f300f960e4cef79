"""What strategies of Lightning Fabric and of Lightning's Trainer have in common."""

from collections.abc import Mapping
from typing import Any

from checkpointing.checkpointer import Checkpointer


class WithCheckpointers:
    """Stands before a strategy among the bases of a class: a `Checkpointer` for each directory.

    Args:
        checkpoint: options of `Checkpointer`, such as {"keep": 2}.
        args, kwargs: those of the strategy.
    """

    def __init__(
        self, *args: Any, checkpoint: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._options = dict(checkpoint or {})
        self._checkpointers: dict[str, Checkpointer] = {}

    def checkpointer(self, directory: str) -> Checkpointer:
        """That of a directory: `outcomes` tells how saves ended, `wait` when."""
        if directory not in self._checkpointers:
            self._checkpointers[directory] = Checkpointer(directory, **self._options)
        return self._checkpointers[directory]

    def close_checkpoints(self) -> None:
        """Wait until all is written. The end of the program does so, too.

        Raises:
            SaveFailed: a last save failed.
        """
        while self._checkpointers:
            _, checkpointer = self._checkpointers.popitem()
            with checkpointer:
                checkpointer.wait()
