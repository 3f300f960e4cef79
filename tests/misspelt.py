"""Documents in which one key is misspelt, for tests of whether a schema refuses them."""

import copy
from collections.abc import Iterator
from typing import Any

FREE = {"labels", "matchLabels", "data", "limits", "requests", "file_mounts", "volumes", "secrets"}
"""Mappings whose keys are the user's own; a list of this name has none."""


def misspelt(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, copy of the document with one key misspelt), for every key that is not free."""

    def places(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if isinstance(value, list):
            for number, one in enumerate(value):
                yield from places(one, (*path, number))
        elif isinstance(value, dict):
            for key, one in value.items():
                if not (path and path[-1] in FREE):
                    yield (*path, key)
                yield from places(one, (*path, key))

    for *path, key in places(document, ()):
        if key in ("apiVersion", "kind") and not path:
            continue  # without these it is not known what it is
        spoilt = copy.deepcopy(document)
        inside: Any = spoilt
        for part in path:
            inside = inside[part]
        inside[f"{key}x"] = inside.pop(key)
        yield ".".join(map(str, (*path, key))), spoilt
