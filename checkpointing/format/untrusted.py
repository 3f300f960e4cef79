"""Names, numbers and JSON out of files that anybody may have written: checked before they are
followed, computed with or printed. Pure."""

import json
import math
from collections.abc import Iterable
from typing import Any

MAX_JSON_BYTES = 256 << 20
"""Largest JSON file that is read; the commit record of 400 TB is as large."""
MAX_NESTING = 64
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 1024
_MAX_COUNT = 2**63 - 1


def is_plain(name: Any) -> bool:
    """Whether a name is the relative path of a file below its directory, and may be printed as it
    is: no absolute path, no `..`, no NUL, line end or terminal escape."""
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
    """Text for a terminal or a log: what does not print, such as line ends and escapes, as Python
    writes it in a string."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def count(value: Any) -> int:
    """A number of bytes, elements or steps.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{_short(value)} where a whole number is due")
    return value


def number(value: Any) -> float:
    """A number that is finite.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise ValueError(f"{_short(value)} where a number is due")
    return value


def a_list(value: Any, most: int | None = None) -> list[Any]:
    """A list of at most `most` values.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, list) or (most is not None and len(value) > most):
        raise ValueError(f"{_short(value)} where a list is due")
    return value


def a_text(value: Any) -> str:
    """A text.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, str):
        raise ValueError(f"{_short(value)} where text is due")
    return value


def a_name(value: Any) -> str:
    """A name that `is_plain`.

    Raises:
        ValueError: it is none.
    """
    if not is_plain(value):
        raise ValueError(f"{_short(value)} is no file in its directory")
    return str(value)


def an_object(value: Any) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{_short(value)} where an object is due")
    return value


def read_object(data: bytes | str) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        ValueError: it is not JSON, too large, nested too deep, or holds no object; in one line.
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
    """An object whose names differ: of two equal ones, readers disagree which counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{_short(twice)} stands there twice")
    return found


def _containers(parent: Any) -> Iterable[Any]:
    values = parent.values() if isinstance(parent, dict) else parent
    return (value for value in values if isinstance(value, dict | list))


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
