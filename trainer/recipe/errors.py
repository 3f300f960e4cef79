"""Which errors are the user's to mend."""

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
    """What several checks of the user's input find wrong, to be told at once: each is made inside
    `with refusals:`."""

    def __init__(self) -> None:
        self._found: dict[str, Exception] = {}

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or not isinstance(error, known_errors()):
            return False
        self._found[str(error)] = error
        return True

    def tell(self) -> None:
        """Go on if all was well.

        Raises:
            RecipeError: of all lines of what was not; a single error as it is.
        """
        if len(self._found) == 1:
            raise next(iter(self._found.values()))
        if self._found:
            raise RecipeError("\n".join(self._found))


def lines(error: Exception) -> list[str]:
    """The lines of such an error, each of which is one thing to mend. What names and values in
    it, of files or the command line, would do to a terminal is written out."""
    return [printable(line) for line in str(error).splitlines()]


def told(error: Exception) -> str:
    """Such an error as people read it."""
    return "\n".join(f"error: {line}" for line in lines(error))


def known_errors() -> tuple[Any, ...]:
    """Errors of the user's input; anything else is a fault of ours and keeps its traceback.

    Only of modules that are loaded, as no others can have raised one: whoever has mistyped a key is
    told so without waiting for torch.
    """
    return tuple(
        getattr(sys.modules[home], name) for name, home in _HOMES.items() if home in sys.modules
    )
