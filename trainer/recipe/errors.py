"""Errors in the user's input, which the user can correct."""

import sys
from types import TracebackType
from typing import Any

from checkpointing.format.untrusted import printable
from trainer.recipe.yaml_tree import RecipeError

_HOMES = {
    "RecipeError": "trainer.recipe.yaml_tree",
    "ModelConfigError": "trainer.models.hf",
    "DataError": "trainer.data.shards",
    "CheckpointError": "checkpointing.errors",
    "LedgerError": "elastic.record.history",
    "JobSecretError": "elastic.group.job_secret",
    "GenerateError": "trainer.tools.generate",
}


class RecipeRefusals:
    """Collects the errors of several checks of the user's input, each inside `with refusals:`, to
    report them together."""

    def __init__(self) -> None:
        self._found: dict[str, Exception] = {}

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> bool:
        # Any other error is a bug of Perdure, and ends the command at once.
        if not isinstance(error, Exception) or not isinstance(error, known_errors()):
            return False
        self._found[str(error)] = error
        return True

    def raise_all(self) -> None:
        """Raise a single collected error as it is, several as a RecipeError with all lines."""
        if len(self._found) == 1:
            raise next(iter(self._found.values()))
        if self._found:
            raise RecipeError("\n".join(self._found))


def lines(error: Exception) -> list[str]:
    """Return the lines of an error in the user's input, one per problem. Control characters are
    escaped, because names and values could send commands to a terminal."""
    return [printable(line) for line in str(error).splitlines()]


def error_text(error: Exception) -> str:
    """Return the text that the console shows for an error in the user's input."""
    return "\n".join(f"error: {line}" for line in lines(error))


def known_errors() -> tuple[Any, ...]:
    """Return the types of exceptions for errors in the user's input. Any other exception is a bug,
    and is shown with its traceback."""
    # Modules that are not loaded cannot have raised. To import them would import torch, which would
    # delay the report of a mistyped key by seconds.
    return tuple(
        getattr(sys.modules[home], name) for name, home in _HOMES.items() if home in sys.modules
    )
