"""The keys of a DeepSpeed configuration: read, typed, and each accounted for once."""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from trainer.recipe import RecipeError
from trainer.tools.deepspeed.imported import Imported, Line, inline
from trainer.tools.deepspeed.keys import ALIASES, DROPPED

Kind: TypeAlias = Callable[[Any], Any]
"""Gives a value its type, or raises ValueError that says what is wanted."""
AUTO = "auto: your TrainingArguments decide; this is their default"


def read_config(path: str | Path) -> dict[str, Any]:
    """The keys of a ds_config by their dotted names: "fp16.enabled".

    Raises:
        RecipeError: no file, no JSON, or a key that stands twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise RecipeError(f"{path}: {name}: this key stands twice; keep one")
        return dict(pairs)

    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "not UTF-8 text")
        raise RecipeError(f"{path}: cannot read the ds_config: {reason}") from None
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise RecipeError(f"{where}: not valid JSON: {error.msg}; mend it there") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: a ds_config is a JSON object, {{…}}")
    return _flat(tree)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"fp16": {"enabled": true}} → {"fp16.enabled": True}"""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        key = prefix + name
        if isinstance(value, dict):
            flat |= _flat(value, f"{key}.")
        else:
            flat[key] = value
    return flat


class DsConfig:
    """The keys of a ds_config; each is taken once, and told where it went."""

    def __init__(self, file: str, values: dict[str, Any], made: Imported) -> None:
        self.file, self.made = file, made
        self.spelled: dict[str, str] = {}
        """Key as it is used here → as it is written in the file."""
        self.asked: set[str] = set()
        self.left: dict[str, Any] = {}
        for written, value in values.items():
            key = ALIASES.get(written, written)
            for old in (alias for alias in ALIASES if alias.endswith(".")):
                key = ALIASES[old] + key.removeprefix(old) if key.startswith(old) else key
            if key in self.left and self.left[key] != value:
                raise self.error(key, f"is the same as {written}, but they differ; keep one")
            self.left[key], self.spelled[key] = value, written

    def error(self, key: str, problem: str) -> RecipeError:
        """A RecipeError that names a key."""
        return RecipeError(f"{self.file}: {self.spelled.get(key, key)}: {problem}")

    def take(self, key: str, kind: Kind, default: Any = None) -> Any:
        """The value of a key, or "auto", or DeepSpeed's default if it is not there or null; the
        caller accounts for it."""
        self.asked.add(key)
        value = self.left.get(key)
        if value is None or value == "auto":
            return default if value is None else value
        try:
            return kind(value)
        except ValueError as error:
            wanted = f'should be {error} or "auto", but it is {json.dumps(value)}'
            raise self.error(key, wanted) from None

    def became(self, key: str, target: str, why: str = "") -> None:
        """Account for a key: which recipe key it became ("": none), and what to say of it."""
        if key in self.left:
            value = self.left.pop(key)
            self.made.lines.append(Line(self.spelled[key], value, target, why))

    def settle(self, keys: Iterable[str], target: str, why: str = "") -> None:
        """Account for several keys alike."""
        for key in keys:
            self.became(key, target, why)

    def below(self, prefix: str) -> list[str]:
        """Keys that begin so, and are not accounted for yet."""
        return [key for key in self.left if key.startswith(prefix)]

    def put(self, key: str, target: str, value: Any, note: str = "") -> None:
        """Account for a key that became a recipe key; of one that is not there, its default did."""
        if self.left.get(key) == "auto":
            note = AUTO
        elif key not in self.left:
            note = "; ".join(filter(None, [note, "DeepSpeed's default"]))
        self.made.set(target, value, self.spelled.get(key, key), note)
        self.became(key, f"{target}={inline(value)}", "" if note == AUTO else note)

    def move(
        self, key: str, target: str, kind: Kind, default: Any, auto: Any, note: str = ""
    ) -> Any:
        """`take` and `put` in one: the value, `auto` for "auto"."""
        value = self.take(key, kind, default)
        value = auto if value == "auto" else value
        self.put(key, target, value, note)
        return value

    def drop_switched_off(self) -> None:
        """Sections with `enabled: false` say nothing more."""
        for key in [key for key in self.left if key.endswith(".enabled")]:
            if self.take(key, a_boolean) is False:
                self.settle(self.below(key.removesuffix("enabled")), "", "switched off")

    def drop_rest(self, allow_unknown: bool) -> None:
        """Name the reason for every key that nobody took."""
        for key in list(self.left):
            prefixes = [key[: end + 1] for end, letter in enumerate(key) if letter == "."]
            reason = next((DROPPED[k] for k in (key, *reversed(prefixes)) if k in DROPPED), None)
            reason = "null" if self.left[key] is None else reason
            if reason is None and not allow_unknown:
                known = {*self.asked, *DROPPED, *ALIASES}
                near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.7)
                hint = f"did you mean '{near[0]}'? Mend it" if near else "remove it"
                raise self.error(key, f"unknown key; {hint}, or add --allow-unknown to drop it")
            self.became(key, "", reason or "unknown")


def a_number(value: Any, *, whole: bool = False, above: float = -math.inf) -> float:
    """One number."""
    wanted = ("a whole number" if whole else "a number") + (f" above {above}" * (above == 0))
    with suppress(TypeError, ValueError):
        number = math.nan if isinstance(value, bool) else float(value)
        if number > above and (number.is_integer() or not whole):
            return int(number) if whole else number
    one = " (Perdure has one for all parameters)" if isinstance(value, list) else ""
    raise ValueError(wanted + one)


a_whole_number = partial(a_number, whole=True)
a_positive_number = partial(a_number, whole=True, above=0)


def a_pair(value: Any) -> list[float]:
    """Two numbers."""
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("two numbers")
    return [a_number(item) for item in value]


def a_boolean(value: Any) -> bool | str:
    """True or false, or "auto" in any case."""
    word = value.lower() if isinstance(value, str) else json.dumps(value)
    if word not in ("true", "false", "auto"):
        raise ValueError("true, false")
    return word if word == "auto" else word == "true"


def a_device(value: Any) -> str:
    """Where something is offloaded to."""
    if value not in ("none", "cpu", "nvme"):
        raise ValueError("none, cpu, nvme")
    return value
