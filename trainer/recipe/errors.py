"""Errors that the user can correct."""

import sys
from types import TracebackType
from typing import Any

from checkpointing.format.untrusted import printable
from trainer.recipe.yaml_tree import RecipeError

_HOMES = {
    "RecipeError": "trainer.recipe.yaml_tree",
    "ConfigError": "trainer.models.hf",
    "DataError": "trainer.data.shards",
    "CheckpointError": "checkpointing.errors",
    "LedgerError": "elastic.record.history",
    "SecretError": "elastic.group.job_secret",
    "GenerateError": "trainer.tools.generate",
}


class Refusals:
    """Collects the errors of several checks of the user's input, each made inside `with refusals:`,
    to report all of them together."""

    def __init__(self) -> None:
        self._found: dict[str, Exception] = {}

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> bool:
        # Any other error is a fault of ours, and ends the command at once.
        if not isinstance(error, Exception) or not isinstance(error, known_errors()):
            return False
        self._found[str(error)] = error
        return True

    def raise_all(self) -> None:
        """Raise what was collected; return if there is nothing.

        Raises:
            RecipeError: the lines of all errors; a single error is raised as it is.
        """
        if len(self._found) == 1:
            raise next(iter(self._found.values()))
        if self._found:
            raise RecipeError("\n".join(self._found))


def lines(error: Exception) -> list[str]:
    """The lines of an error of the user's input, one for each thing to correct. Control characters
    from names and values are escaped, as they could steer a terminal."""
    return [printable(line) for line in str(error).splitlines()]


def error_text(error: Exception) -> str:
    """An error of the user's input as the console shows it."""
    return "\n".join(f"error: {line}" for line in lines(error))


def known_errors() -> tuple[Any, ...]:
    """Exception types of the user's input; any other exception is a fault of ours and keeps its
    traceback."""
    # Only of loaded modules, as no others can have raised: a mistyped key is reported without the
    # seconds that importing torch takes.
    return tuple(
        getattr(sys.modules[home], name) for name, home in _HOMES.items() if home in sys.modules
    )
