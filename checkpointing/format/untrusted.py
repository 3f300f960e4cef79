"""Checks of names, numbers and JSON from untrusted files, before they are used or printed. Pure."""

import json
import math
from collections.abc import Sequence
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
    """Returns text for a terminal or a log, with unprintable characters, such as line ends and
    escapes, as in a Python string literal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def listed(names: Sequence[str], most: int = 3) -> str:
    """Returns the first names for a message, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def count(value: Any) -> int:
    """Returns `value` if it is a number of bytes, elements or steps: a whole number from 0 to
    2^63 - 1. Raises ValueError otherwise."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return _checked(value, whole and 0 <= value <= _MAX_COUNT, "a whole number")


def number(value: Any) -> float:
    finite = isinstance(value, int | float) and abs(value) < math.inf
    return _checked(value, finite and not isinstance(value, bool), "a number")


def a_list(value: Any, most: int | None = None) -> list[Any]:
    right = isinstance(value, list) and (most is None or len(value) <= most)
    return _checked(value, right, "a list")


def a_text(value: Any) -> str:
    return _checked(value, isinstance(value, str), "text")


def an_object(value: Any) -> dict[str, Any]:
    return _checked(value, isinstance(value, dict), "an object")


def _checked(value: Any, right: bool, due: str) -> Any:
    if not right:
        raise ValueError(f"{_short(value)} where {due} is due")
    return value


def a_name(value: Any) -> str:
    """Returns `value` if `is_plain`, else raises ValueError."""
    if not is_plain(value):
        raise ValueError(f"{_short(value)} is no file in its directory")
    return str(value)


def read_object(data: bytes | str) -> dict[str, Any]:
    """Parse the object in a JSON file. Raises ValueError, with a message of one line, if it is no
    JSON object, has a name twice, is too large, or is nested too deeply."""
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{len(data)} bytes of JSON, more than {MAX_JSON_BYTES}")
    try:
        found = an_object(json.loads(data, object_pairs_hook=_unique))
    except RecursionError:
        raise ValueError("nested too deep") from None
    level: list[Any] = [found]
    for _ in range(MAX_NESTING):
        values = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for of in values for one in of if isinstance(one, dict | list)]
        if not level:
            return found
    raise ValueError("nested too deep")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError unless all names in a JSON object differ: programs disagree about which of
    two equal names is valid."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {_short(twice)} occurs twice in one object")
    return found


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
