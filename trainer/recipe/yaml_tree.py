"""Reads YAML as plain values, with file and line of each key.

PyYAML alone would lose line numbers, keep the last of two equal keys, and read `on` and `off` as
booleans. `${NAME}` and `${NAME:-default}` in values expand to environment variables.

Files are not trusted: a file that is too large, too deeply nested, or grows by aliases is refused
before it takes time or memory.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from elastic.node.files import read_bytes

Key = tuple[str | int, ...]
Origins = dict[Key, str]
"""Path of a key → "file:line", or the override that set it."""
MAX_BYTES, MAX_NESTING, MAX_VALUES = 256 << 10, 64, 5_000
"""Limits of a recipe: bytes of the file, levels of nesting, and values after aliases expand."""
_MAX_WHOLE, _MOST_DIGITS = 2**64, 100


class RecipeError(Exception):
    """The recipe, or an input that it names, is wrong, so a restart cannot help (exit code 2). The
    message has one line per problem."""


class RecipeProblem(NamedTuple):
    """A problem in a recipe, to be reported in one line."""

    origin: str
    """"file:line", the file, or the override."""
    key: Key
    """The wrong key; () if the problem does not belong to a single key."""
    what: str
    """The problem, and what to do."""


def listed(problems: Iterable[RecipeProblem], origins: Origins) -> str:
    """Return a line for each problem, in the order of the recipe's lines; problems of overrides
    come last."""
    order = list(dict.fromkeys(origins.values()))

    def place(problem: RecipeProblem) -> tuple[bool, int]:
        line = problem.origin.rpartition(":")[2]
        if problem.origin.startswith("override "):
            return True, order.index(problem.origin) if problem.origin in order else len(order)
        return False, int(line) if line.isdigit() else 0

    lines = [
        ": ".join(filter(None, [problem.origin, dotted(problem.key), problem.what]))
        for problem in sorted(problems, key=place)
    ]
    return "\n".join(dict.fromkeys(lines))


def dotted(key: Key) -> str:
    """Write a key with dots: data.sources.0.path."""
    return ".".join(map(str, key))


def read_tree(
    path: str | Path, overrides: Sequence[str] = (), what: str = "recipe", *, kept: bool = False
) -> tuple[dict[str, Any], Origins, list[RecipeProblem]]:
    """Read a YAML mapping and apply `key.sub=value` overrides. Return (tree, origin of each key,
    problems: duplicate keys, unset environment variables, overrides that cannot be applied). Raises
    RecipeError if the file cannot be read, or is not valid YAML.

    Args:
        what: word for the file in errors.
        kept: whether the file is a run's own copy, in a directory where others may write. A link or
            a pipe is then refused, and environment variables are not expanded.
    """
    try:
        text = read_bytes(Path(path), MAX_BYTES).decode() if kept else _read(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RecipeError(f"{path}: cannot read the {what}: {reason}") from None
    origins: Origins = {}
    problems: list[RecipeProblem] = []
    try:
        # Nodes rather than values, because nodes have line numbers.
        node = yaml.compose(text, Loader=_Loader)
        reader = _Reader(
            lambda mark: f"{path}:{mark.line + 1}", origins, problems, expands=not kept
        )
        tree = reader.plain(node, ()) if node else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise RecipeError(f"{where}: not valid YAML: {_problem(error)}") from None
    if not isinstance(tree, dict):
        sections = " of sections such as `run:` and `data:`" if what == "recipe" else ""
        raise RecipeError(f"{path}:1: a {what} is a mapping{sections}; write `key: value` lines")
    for override in overrides:
        problems += apply_override(tree, override, origins)
    return tree, origins, problems


def _read(path: str | Path) -> str:
    """Read the text of a file, or of a pipe such as a shell's `<(…)`."""
    with open(path, "rb") as file:
        # A device such as /dev/zero may never end; only standard input may be one.
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode) and str(path) != "/dev/stdin":
            raise OSError(errno.ENXIO, "it is a device")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MAX_BYTES >> 10} KiB")
    return data.decode()


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses more nodes, or deeper nesting, than a recipe may have."""

    _depth = _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth, self._nodes = self._depth + 1, self._nodes + 1
        _check_limits(self._depth, self._nodes, self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _check_limits(depth: int, values: int, mark: yaml.Mark) -> None:
    what = f"nested more than {MAX_NESTING} deep" if depth > MAX_NESTING else ""
    if values > MAX_VALUES:
        what = f"more than {MAX_VALUES:,} values (an alias counts each time)"
    if what:
        raise yaml.MarkedYAMLError(problem=what, problem_mark=mark)


class _Reader:
    """Converts YAML nodes to plain Python, and records origins and problems."""

    def __init__(
        self,
        origin: Callable[[yaml.Mark], str],
        origins: Origins,
        problems: list[RecipeProblem],
        *,
        expands: bool = True,
    ) -> None:
        self._origin, self._origins, self._problems = origin, origins, problems
        self._expands = expands
        self._values = 0

    def plain(self, node: yaml.Node, path: Key) -> Any:
        """Return the value of a node. Of equal keys the first is kept, and a problem recorded."""
        self._values += 1
        # Values are counted again here, because nested aliases multiply them.
        _check_limits(len(path), self._values, node.start_mark)
        self._origins[path] = self._origin(node.start_mark)
        if isinstance(node, yaml.MappingNode):
            result: dict[str, Any] = {}
            for key_node, value_node in node.value:
                if not isinstance(key_node, yaml.ScalarNode):
                    raise yaml.MarkedYAMLError(
                        problem="a key must be a word", problem_mark=key_node.start_mark
                    )
                key = str(key_node.value)
                here, place = self._origin(key_node.start_mark), (*path, key)
                if key in result:
                    what = f"this key occurs twice (first at {self._origins[place]}); keep one"
                    self._problems.append(RecipeProblem(here, place, what))
                    continue
                result[key] = self.plain(value_node, place)
                self._origins[place] = here
            return result
        if isinstance(node, yaml.SequenceNode):
            return [self.plain(item, (*path, i)) for i, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _scalar(self, node: yaml.Node, path: Key) -> Any:
        if node.tag == "tag:yaml.org,2002:bool" and node.value.lower() not in ("true", "false"):
            # YAML 1.1 reads on, off, yes and no as booleans; in a recipe they are strings, as in
            # `wandb: off`.
            return str(node.value)
        try:
            # SafeLoader builds only plain values, whatever tags the file has.
            value = yaml.SafeLoader("").construct_object(node)
            if isinstance(value, int) and abs(value) > _MAX_WHOLE:
                raise ValueError("it is larger than any number that a recipe needs")
        except (ValueError, ArithmeticError, LookupError, AttributeError) as error:
            digits = len(node.value) > _MOST_DIGITS
            why = f"it has {len(node.value):,} characters" if digits else one_line(error)
            raise yaml.MarkedYAMLError(
                problem=f"{_shown(node.value)} is no value: {why}", problem_mark=node.start_mark
            ) from None
        return self._expand(value, path) if self._expands and isinstance(value, str) else value

    def _expand(self, text: str, path: Key) -> str:
        """Replace ${NAME} and ${NAME:-default} by environment variables."""

        def replace(match: re.Match[str]) -> str:
            name, default = match["name"], match["default"]
            value = os.environ.get(name, default)
            if value is None:
                what = (
                    f"environment variable {name} is not set; set it, or write ${{{name}:-default}}"
                )
                self._problems.append(RecipeProblem(self._origins[path], path, what))
                return match[0]
            return value

        return re.sub(r"\$\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}", replace, text)


def apply_override(tree: dict[str, Any], override: str, origins: Origins) -> list[RecipeProblem]:
    """Apply one `key.sub=value` to a tree of plain values; returns the problems."""
    key, equals, text = override.partition("=")
    origin = f"override '{override}'"
    if not equals or not key:
        what = "write overrides as key.sub=value, such as optimizer.lr=3e-4"
        return [RecipeProblem(origin, (), what)]
    parts: Key = tuple(
        # A number of 10 or more digits is no list index, and int() refuses very long ones.
        int(part) if part.isdecimal() and len(part) < 10 else part
        for part in key.split(".")
    )
    if len(parts) > MAX_NESTING:
        return [RecipeProblem(origin, (), f"the key has more than {MAX_NESTING} parts")]
    problems: list[RecipeProblem] = []
    try:
        node = yaml.compose(text, Loader=_Loader)
        value = None if node is None else _Reader(lambda _: origin, {}, problems).plain(node, parts)
    except yaml.YAMLError as error:
        return [RecipeProblem(origin, (), f"the value is not valid YAML: {_problem(error)}")]
    here: Any = tree
    for depth, part in enumerate(parts[:-1]):
        missing = part not in here if isinstance(here, dict) else not _in_list(here, part)
        if missing and isinstance(here, list):
            return [RecipeProblem(origin, (), f"{dotted(parts[:depth])} has {len(here)} items")]
        if missing or here[part] is None:
            here[part] = {}
        here = here[part]
        if not isinstance(here, dict | list):
            name = dotted(parts[: depth + 1])
            return [RecipeProblem(origin, (), f"{name} is a single value, it has no keys")]
    last = parts[-1]
    if isinstance(here, list) and not _in_list(here, last):
        return [RecipeProblem(origin, (), f"{dotted(parts[:-1])} has {len(here)} items")]
    here[last] = value
    for depth in range(1, len(parts) + 1):
        # Sections that the override created need an origin too, for messages.
        origins.setdefault(parts[:depth], origin)
    origins[parts] = origin
    return problems


_CURES = {
    r"'\t'": "a tab cannot indent a line; write spaces",
    "another document": "a second document begins here; remove this line `---` and all below",
    "<block end>": "the indentation does not fit the lines above; align keys of one section",
}
"""Words in an error of PyYAML → what is wrong, and what to do."""


def _problem(error: yaml.YAMLError) -> str:
    text = one_line(getattr(error, "problem", None) or error)
    return next((cure for words, cure in _CURES.items() if words in text), text)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


def one_line(error: object) -> str:
    """Return the text of an exception on one line."""
    return " ".join(str(error).split())


def _in_list(items: list, index: str | int) -> bool:
    return isinstance(index, int) and index < len(items)


def origin_of(path: Key, origins: Origins, file: str) -> str:
    """Return where a key was set; else where its closest section was set; else `file`."""
    while path and path not in origins:
        path = path[:-1]
    return origins.get(path, file)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten {"fp16": {"enabled": true}} to {"fp16.enabled": True}; an empty section remains one
    key."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves
