"""Checks of names, numbers and JSON from untrusted files, before they are used or printed. Pure."""

import json
import math
from collections.abc import Iterable
from typing import Any

MAX_JSON_BYTES = 256 << 20
"""Size of the largest JSON file that is read: the commit record of a checkpoint of 400 TB."""
MAX_NESTING = 64
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 1024
_MAX_COUNT = 2**63 - 1


def is_plain(name: Any) -> bool:
    """Whether a name is a printable, relative path that stays below its directory: no absolute
    path, no `..`, no NUL, line end or terminal escape."""
    if not isinstance(name, str) or not name.isprintable():
        return False
    sizes = [len(part.encode()) for part in name.split("/")]
    return (
        min(sizes) > 0
        and max(sizes) <= _MAX_NAME_BYTES
        and len(name.encode()) <= _MAX_PATH_BYTES
        and not {".", ".."}.intersection(name.split("/"))
    )


def printable(text: str) -> str:
    """Returns text for a terminal or a log, with line ends, escapes and other unprintable
    characters as in a Python string literal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def count(value: Any) -> int:
    """Returns `value`, checked to be a number of bytes, elements or steps.

    Raises:
        ValueError: `value` is no whole number from 0 to 2^63 - 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{_short(value)} where a whole number is due")
    return value


def number(value: Any) -> float:
    """Returns `value`, checked to be a finite number.

    Raises:
        ValueError: `value` is no finite number.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise ValueError(f"{_short(value)} where a number is due")
    return value


def a_list(value: Any, most: int | None = None) -> list[Any]:
    """Returns `value`, checked to be a list of at most `most` values.

    Raises:
        ValueError: `value` is no such list.
    """
    if not isinstance(value, list) or (most is not None and len(value) > most):
        raise ValueError(f"{_short(value)} where a list is due")
    return value


def a_text(value: Any) -> str:
    """Returns `value`, checked to be text.

    Raises:
        ValueError: `value` is not text.
    """
    if not isinstance(value, str):
        raise ValueError(f"{_short(value)} where text is due")
    return value


def a_name(value: Any) -> str:
    """Returns `value`, checked by `is_plain`.

    Raises:
        ValueError: `value` is no plain name.
    """
    if not is_plain(value):
        raise ValueError(f"{_short(value)} is no file in its directory")
    return str(value)


def an_object(value: Any) -> dict[str, Any]:
    """Returns `value`, checked to be a JSON object.

    Raises:
        ValueError: `value` is no object.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{_short(value)} where an object is due")
    return value


def read_object(data: bytes | str) -> dict[str, Any]:
    """Parse the object in a JSON file.

    Raises:
        ValueError: the file is no JSON object, too large or nested too deeply. The message is one
            line.
    """
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{len(data)} bytes of JSON, more than {MAX_JSON_BYTES}")
    try:
        found = an_object(json.loads(data, object_pairs_hook=_unique))
    except RecursionError:
        raise ValueError("nested too deep") from None
    level: list[Any] = [found]
    for _ in range(MAX_NESTING):
        level = [value for parent in level for value in _containers(parent)]
        if not level:
            return found
    raise ValueError("nested too deep")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object after checking that all its names differ: programs disagree about which
    of two equal names is valid."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {_short(twice)} occurs twice in one object")
    return found


def _containers(parent: Any) -> Iterable[Any]:
    values = parent.values() if isinstance(parent, dict) else parent
    return (value for value in values if isinstance(value, dict | list))


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
