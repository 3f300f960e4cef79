"""A module that is imported when a test first uses it."""

import importlib
from typing import Any


class Late:
    """Stands for a module that takes seconds to import. All workers collect all tests, but only the
    one that runs a test needs its library."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):  # pytest asks each name of a test module whether it is a test
            raise AttributeError(key)
        return getattr(importlib.import_module(self._name), key)
