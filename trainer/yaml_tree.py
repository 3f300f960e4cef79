"""YAML → plain values, with the place where each key was written.

PyYAML alone loses line numbers, lets the last of two equal keys win, and reads `on` and `off` as
booleans. Environment variables expand only where a value says `${NAME}` or `${NAME:-default}`.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

Key = tuple[str | int, ...]
Origins = dict[Key, str]
"""Path of a key → "file:line", or the override that set it."""


class RecipeError(Exception):
    """The recipe, or the input it names, is wrong; restarting cannot help (exit code 2)."""


def read_tree(path: str | Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], Origins]:
    """Read a YAML mapping and apply `key.sub=value` overrides to it.

    Raises:
        RecipeError: unreadable file, invalid YAML, a key that stands twice, an unset environment
            variable, an override that leads nowhere.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RecipeError(f"{path}: cannot read the recipe: {reason}") from None
    origins: Origins = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = _plain(node, (), lambda mark: f"{path}:{mark.line + 1}", origins) if node else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise RecipeError(f"{where}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}:1: a recipe is a mapping of sections such as `run:` and `data:`")
    for override in overrides:
        apply_override(tree, override, origins)
    return tree, origins


def _plain(
    node: yaml.Node,
    path: Key,
    origin: Callable[[yaml.Mark], str],
    origins: Origins,
) -> Any:
    """YAML node → plain Python, refusing duplicate keys and noting where each key stands."""
    origins[path] = origin(node.start_mark)
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            here = origin(key_node.start_mark)
            if key in result:
                raise RecipeError(
                    f"{here}: {'.'.join(map(str, (*path, key)))}: this key stands twice "
                    f"(first at {origins[(*path, key)]}); keep one"
                )
            result[key] = _plain(value_node, (*path, key), origin, origins)
            origins[(*path, key)] = here
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*path, i), origin, origins) for i, item in enumerate(node.value)]
    return _scalar(node, origins[path])


def _scalar(node: yaml.Node, origin: str) -> Any:
    if node.tag == "tag:yaml.org,2002:bool" and node.value.lower() not in ("true", "false"):
        # YAML 1.1 reads the words on, off, yes and no as booleans; `wandb: off` is a word.
        return str(node.value)
    value = yaml.SafeLoader("").construct_object(node)
    return _expand(value, origin) if isinstance(value, str) else value


def _expand(text: str, origin: str) -> str:
    """Replace ${NAME} and ${NAME:-default} by environment variables."""

    def replace(match: re.Match[str]) -> str:
        name, default = match["name"], match["default"]
        value = os.environ.get(name, default)
        if value is None:
            raise RecipeError(
                f"{origin}: environment variable {name} is not set; set it, or write "
                f"${{{name}:-default}}"
            )
        return value

    return re.sub(r"\$\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}", replace, text)


def apply_override(tree: dict[str, Any], override: str, origins: Origins) -> None:
    """Set one `key.sub=value` in a tree of plain values.

    Raises:
        RecipeError: it is no such thing, or leads nowhere.
    """
    key, equals, text = override.partition("=")
    origin = f"override '{override}'"
    if not equals or not key:
        raise RecipeError(f"{origin}: write overrides as key.sub=value, such as optimizer.lr=3e-4")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{origin}: the value is not valid YAML: {error}") from None
    parts = [int(part) if part.isdigit() else part for part in key.split(".")]
    value = None if node is None else _plain(node, tuple(parts), lambda _: origin, {})
    here: Any = tree
    for depth, part in enumerate(parts[:-1]):
        missing = part not in here if isinstance(here, dict) else not _in_list(here, part)
        if missing and isinstance(here, list):
            raise RecipeError(
                f"{origin}: {'.'.join(map(str, parts[:depth]))} has {len(here)} items"
            )
        if missing or here[part] is None:
            here[part] = {}
        here = here[part]
        if not isinstance(here, dict | list):
            name = ".".join(map(str, parts[: depth + 1]))
            raise RecipeError(f"{origin}: {name} is a single value, it has no keys")
    last = parts[-1]
    if isinstance(here, list) and not _in_list(here, last):
        raise RecipeError(f"{origin}: {'.'.join(map(str, parts[:-1]))} has {len(here)} items")
    here[last] = value
    for depth in range(1, len(parts) + 1):
        origins.setdefault(tuple(parts[:depth]), origin)
    origins[tuple(parts)] = origin


def _in_list(items: list, index: str | int) -> bool:
    return isinstance(index, int) and index < len(items)


def origin_of(path: Key, origins: Origins, file: str) -> str:
    """Where the key, or the closest section around it, was written."""
    while path and path not in origins:
        path = path[:-1]
    return origins.get(path, file)
