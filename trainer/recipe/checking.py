"""Converts plain values to a dataclass by its types, and reports all problems, key by key."""

import copy
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from trainer.recipe.yaml_tree import Key, Origins, RecipeProblem, origin_of

T = TypeVar("T")


@cache  # to create the adapter of a recipe takes 0.1 s, and every save needs it
def adapter(kind: type[T]) -> TypeAdapter[T]:
    """Return the pydantic adapter of a dataclass."""
    return TypeAdapter(kind)


def checked(
    kind: type[T],
    tree: dict[str, Any],
    origins: Origins,
    file: str,
    problems: list[RecipeProblem],
    wrong: set[Key],
) -> T | None:
    """Check the keys and types of `tree`, and return the dataclass `kind` built from it.

    Wrong keys are added to `problems` and `wrong`. In a copy of the tree they are removed, or
    replaced by a value if they are required, so that the remaining keys can be checked. None if
    even this copy cannot be built."""
    tree = copy.deepcopy(tree)
    # Several rounds, because a repaired key may uncover errors below it. Only errors of the first
    # round are reported: the repair itself may cause others.
    for attempt in range(4):
        try:
            result: T = adapter(kind).validate_python(tree)  # type: ignore[arg-type]
            for path, value in _taken_for_numbers(tree, result, ()):
                where = origin_of(path, origins, file)
                problems.append(RecipeProblem(where, path, _not_a_number(value)))
                wrong.add(path)
            return result
        except ValidationError as error:
            errors = [(_key_path(e["loc"], tree), e) for e in error.errors(include_url=False)]
            # If a key is misspelt, its correct name is missing too. That is not a second problem.
            wrong |= {
                (*path[:-1], meant)
                for path, e in errors
                if e["type"] == _UNKNOWN and (meant := _similar_key(kind, path))
            }
            known = set(wrong)
            for path, e in errors:
                if not attempt and path not in known:
                    known.add(path)
                    what = _explain(kind, e, path)
                    # Messages of a section's `__post_init__` begin with the key.
                    named = (*path, what.split()[0]) if e["type"] == "value_error" else path
                    problems.append(RecipeProblem(origin_of(named, origins, file), path, what))
                wrong.add(path)
                _repair_key(kind, tree, path, e["type"] in _MISSING)
    return None


def _taken_for_numbers(tree: Any, result: Any, path: Key) -> Iterator[tuple[Key, bool]]:
    """Yield (key, value) of the booleans in a tree of which pydantic has made numbers.

    With them `evaluate_every: true` would be every step."""
    if isinstance(tree, bool) and type(result) in (int, float):
        yield path, tree
    elif isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            inside = getattr(result, str(key)) if is_dataclass(result) else result[key]
            yield from _taken_for_numbers(value, inside, (*path, key))


def _not_a_number(value: bool) -> str:
    return f"must be a number, but it is {str(value).lower()}"


def _repair_key(kind: type, tree: dict[str, Any], path: Key, missing: bool) -> None:
    """Remove a wrong key from a tree; set a missing key to a value of its type."""
    here: Any = tree
    for part in path[:-1]:
        inside = isinstance(here, list) and isinstance(part, int) and part < len(here)
        here = here[part] if inside else here.get(part) if isinstance(here, dict) else None
    if missing and isinstance(here, dict):
        needed = _schema_at(kind, path)[1].get("type")
        here[path[-1]] = {"string": "x", "integer": 1, "number": 1.0}.get(str(needed), {})
    elif isinstance(here, dict):
        here.pop(path[-1], None)
    elif isinstance(here, list):
        here.clear()


_MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
_SECTION = ("dataclass_type", "dict_type")
_UNKNOWN = "unexpected_keyword_argument"
_LEFT_OUT = dict.fromkeys(
    ("dora", "use_dora"), "DoRA is not supported; remove it, or take LoRA with rslora: true"
)
"""Key of a feature that is not supported → what to do."""
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _similar_key(kind: type, path: Key) -> str | None:
    """Return the known key that is most similar to the unknown key at `path`; None if no key is
    similar."""
    close = difflib.get_close_matches(str(path[-1]), _keys_at(kind, path[:-1]), n=1, cutoff=0.5)
    return close[0] if close else None


def _explain(kind: type, problem: ErrorDetails, path: Key) -> str:
    """Describe the problem with a key, and what to do."""
    if problem["type"] == _UNKNOWN:
        if left_out := _LEFT_OUT.get(str(path[-1])):
            return left_out
        if meant := _similar_key(kind, path):
            return f"unknown key; did you mean '{meant}'?"
        return f"unknown key; known keys: {', '.join(_keys_at(kind, path[:-1]))}"
    if problem["type"] in _MISSING and len(problem["loc"]) > len(path):
        return f"the list has too few items: {problem['input']}"
    if problem["type"] in _MISSING:
        meaning = _description_at(kind, path)
        return "required, but not set" + (f" ({meaning})" if meaning else "")
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    shown = repr(problem.get("input"))
    shown = shown if len(shown) < 80 else shown[:77] + "..."
    if problem["type"] == "finite_number":
        return f"must be a finite number, but it is {shown}"
    if problem["type"] in _SECTION:
        return f"must be a section of `key: value` lines, but it is {shown}"
    if problem["type"] in _BOUNDS and isinstance(problem["input"], bool):
        return _not_a_number(problem["input"])
    if problem["type"] in _BOUNDS:
        words, bound = _BOUNDS[problem["type"]]
        return f"must be {words} {problem['ctx'][bound]:g}, but it is {shown}"
    text = f"{problem['msg'][0].lower()}{problem['msg'][1:]}, but it is {shown}"
    if problem["type"] == "literal_error":
        values = re.findall("'([^']*)'", problem["ctx"]["expected"])
        close = difflib.get_close_matches(str(problem["input"]), values, n=1, cutoff=0.5)
        text += f"; did you mean '{close[0]}'?" if close else ""
    return text


def _key_path(loc: Sequence[str | int], tree: Any) -> Key:
    """Convert pydantic's location of an error to a key, without the names of union branches."""
    path: list[str | int] = []
    for part in loc:
        if isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(tree, list) and isinstance(part, int) and part < len(tree):
            tree = tree[part]
        else:
            break
        path.append(part)
    return tuple(path)


@cache
def schema_of(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a dataclass, with the docstrings of its fields as descriptions.

    `adapter` is without them: until Python 3.12, pydantic parses the module anew for each class to
    find them, in four times the time of all else that a recipe needs."""
    config = kind.__pydantic_config__
    config["use_attribute_docstrings"] = True
    try:
        return TypeAdapter(kind).json_schema()
    finally:
        del config["use_attribute_docstrings"]


def definition_of(value: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return the definition in a JSON schema to which a value refers by $ref, also inside optional
    values and lists. Without a $ref, return the value itself."""
    if "$ref" in value:
        return schema["$defs"][value["$ref"].rsplit("/", 1)[1]]
    for option in value.get("anyOf", []):
        if "$ref" in option:
            return definition_of(option, schema)
    if isinstance(value.get("items"), dict):
        return definition_of(value["items"], schema)
    return value


def _schema_at(kind: type, path: Key) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (schema of the key at `path`, with its description; definition to which that schema
    refers)."""
    schema = schema_of(kind)
    value: dict[str, Any] = schema
    for part in path:
        if isinstance(part, str):
            value = definition_of(value, schema).get("properties", {}).get(part, {})
    return value, definition_of(value, schema)


def _keys_at(kind: type, path: Key) -> list[str]:
    return list(_schema_at(kind, path)[1].get("properties", {}))


def _description_at(kind: type, path: Key) -> str:
    value, definition = _schema_at(kind, path)
    text = value.get("description") or definition.get("description", "")
    return " ".join(text.split()).split(". ")[0].rstrip(".")
