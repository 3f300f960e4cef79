"""Reads another trainer's configuration: keys are typed, and each is accounted for exactly once."""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from trainer.recipe import RecipeError
from trainer.recipe.yaml_tree import listed, read_tree
from trainer.tools.importing.imported import (
    ABSENT,
    ImportedRecipe,
    ImportReportLine,
    inline,
    recipe_default,
)

Converter: TypeAlias = Callable[[Any], Any]
"""Converts a value, or raises ValueError with the expected type."""


@dataclass(frozen=True)
class ImportedConfigKeys:
    """Rules for the untranslated keys of one kind of file. A key that ends in a dot stands for all
    keys below it."""

    owner: str
    """Program whose defaults apply to missing keys, such as "DeepSpeed"."""
    no_meaning: Mapping[str, str]
    """Key → why a recipe needs no counterpart."""
    differs: Mapping[str, str]
    """Key → how training differs without it, unless its value switches a feature off."""
    aliases: Mapping[str, str]
    """Other spelling of a key → spelling in this package."""
    automatic: bool = False
    """Whether a value may be "auto", for which Trainer inserts a value."""
    complete: Callable[[str], str] = str
    """Expands an abbreviated key."""


def reasons(text: str, whole: Callable[[str], str] = str) -> dict[str, str]:
    """Parse a table of key → reason: each line of `text` is a reason, followed by indented lines
    with its keys. `whole` expands a key."""
    by_key, reason = {}, ""
    for line in text.splitlines():
        if line.startswith(" "):
            by_key.update({whole(key): reason for key in line.split()})
        else:
            reason = line
    return by_key


def read_json(path: str | Path, what: str) -> dict[str, Any]:
    """Read the object in a JSON file, which errors call `what`. Raises RecipeError if the file is
    missing, is no JSON, or repeats a key."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # json itself would silently keep the last of equal keys
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise RecipeError(f"{path}: {name}: this key occurs twice; keep one")
        return dict(pairs)

    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "not UTF-8 text")
        raise RecipeError(f"{path}: cannot read the {what}: {reason}") from None
    except json.JSONDecodeError as error:
        where = f"{path}:{error.lineno}:{error.colno}"
        raise RecipeError(f"{where}: not valid JSON: {error.msg}; correct it there") from None
    except RecursionError:
        raise RecipeError(f"{path}: nested too deep for a {what}") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: a {what} is a JSON object, {{…}}")
    return tree


def read_yaml(path: str | Path, what: str) -> dict[str, Any]:
    """Like `read_json`, for a mapping in a YAML file."""
    tree, origins, problems = read_tree(path, what=what)
    if problems:
        raise RecipeError(listed(problems, origins))
    return tree


def beside(named: str, file: str, key: str) -> Path:
    """Return the path of the file that a key of `file` names, relative to the working directory or
    to the folder of `file`. Raises RecipeError if neither exists."""
    for path in (Path(named), Path(file).parent / named):
        if path.is_file():
            return path
    raise RecipeError(
        f"{file}: {key}: there is no file {named}, neither in the working directory nor in the "
        f"folder of {file}; copy {Path(named).name} to one of them"
    )


class ImportedConfig:
    """The keys of a configuration file. What became of each key is recorded exactly once."""

    def __init__(
        self,
        file: str,
        values: Mapping[str, Any],
        table: ImportedConfigKeys,
        imported: ImportedRecipe,
        *,
        prefix: str = "",
    ) -> None:
        """`values`: dotted key → value, as from `flat`. `prefix`: removed from a key before it is
        looked up; messages keep it."""
        self.file, self.table, self.imported = file, table, imported
        self.assumed: dict[str, Any] = {}
        """Key → its value if the file lacks it."""
        self.label = "" if file == imported.file else f"{Path(file).name}: "
        """Prefix of the keys in the report, if they come from a second file."""
        self.spelled: dict[str, str] = {}
        """Key in this package's spelling → its spelling in the file."""
        self.requested: set[str] = set()
        self.left: dict[str, Any] = {}
        aliases = table.aliases
        for written, value in values.items():
            bare = table.complete(written.removeprefix(prefix))
            key = aliases.get(bare, bare)
            for old in (alias for alias in aliases if alias.endswith(".")):
                key = aliases[old] + key.removeprefix(old) if key.startswith(old) else key
            # the file has two spellings of one key
            if key in self.left and self.left[key] != value:
                problem = f"is another spelling of {written}, but their values differ; keep one"
                raise self.error(key, problem)
            self.left[key], self.spelled[key] = value, written
        self.automatic = "auto" in self.left.values()
        """Whether some value is "auto", for which Hugging Face's Trainer inserts a value."""

    def origin(self, key: str) -> str:
        """Format file and key, for messages."""
        return f"{self.file}: {self.spelled.get(key, key)}"

    def error(self, key: str, problem: str) -> RecipeError:
        return RecipeError(f"{self.origin(key)}: {problem}")

    def take(self, key: str, kind: Converter, default: Any = None) -> Any:
        """Return the converted value of a key; "auto" stays as it is, and a missing or null key has
        the default. The caller records the result."""
        self.requested.add(key)
        value = self.left.get(key)
        value = self.assumed.get(key) if value is None else value
        if value is None or (value == "auto" and self.table.automatic):
            return default if value is None else value
        try:
            return kind(value)
        except ValueError as error:
            auto = ' or "auto"' if self.table.automatic else ""
            wanted = f"should be {error}{auto}, but it is {json.dumps(value, default=str)}"
            raise self.error(key, wanted) from None

    def became(self, key: str, target: str, why: str = "", *, differs: bool = False) -> None:
        """Record what became of a key of the file.

        Args:
            target: the recipe key that has its value; "" if none has.
            why: a remark for the report.
            differs: whether training differs from what the file says.
        """
        if key in self.left:
            value = self.left.pop(key)
            name = self.label + self.spelled[key]
            self.imported.lines.append(ImportReportLine(name, value, target, why, differs))

    def settle(
        self, keys: Iterable[str], target: str, why: str = "", *, differs: bool = False
    ) -> None:
        """Record the same result for several keys."""
        for key in list(keys):
            self.became(key, target, why, differs=differs)

    def set(self, key: str, target: str, value: Any, note: str = "", given: bool = True) -> None:
        """Set a recipe key from a key of the file, which the caller accounts for."""
        self.imported.set(target, value, self.origin(key), note, given)

    def below(self, prefix: str) -> list[str]:
        """Keys with a prefix that are not accounted for yet."""
        return [key for key in self.left if key.startswith(prefix)]

    def has(self, key: str) -> bool:
        """Whether the file sets this key to a value other than null and "auto"."""
        return self.left.get(key) not in (None, "auto")

    def put(self, key: str, target: str, value: Any, note: str = "", differs: str = "") -> None:
        """Set the recipe key `target` from a key of the file, and record that. If the key is
        missing, `value` is the default of the file's trainer; another default in recipes is
        recorded as a difference. `differs`: how training differs nevertheless; "" if it does
        not."""
        given, present = self.has(key), key in self.left
        remark = note = "; ".join(filter(None, [note, differs]))
        usual = recipe_default(target)
        other = not given and value != usual
        if not given:
            theirs = AUTO if self.left.get(key) == "auto" else f"a default of {self.table.owner}"
            note = "; ".join(filter(None, [note, theirs]))
            ours = "none" if usual is None else inline(usual)
            remark = note + (f", where a recipe has {ours}" if other else "")
        self.set(key, target, value, note, given)
        became = f"{target}={inline(value)}"
        if present:
            self.became(key, became, remark, differs=bool(differs) or other)
        elif differs or other:
            name = self.label + self.spelled.get(key, key)
            self.imported.lines.append(ImportReportLine(name, ABSENT, became, remark, True))

    def move(
        self,
        key: str,
        target: str,
        kind: Converter,
        default: Any,
        note: str = "",
        differs: str = "",
    ) -> Any:
        """Call `take`, then `put`, and return the value. For "auto", return None and set nothing,
        as TrainingArguments have the value."""
        value = self.take(key, kind, default)
        if value == "auto":
            return self.leave(key, target)
        self.put(key, target, value, note, differs)
        return value

    def leave(self, key: str, target: str) -> None:
        """Record a key that is "auto", and leave its recipe key to TrainingArguments."""
        self.became(key, target, AUTO)

    def drop_switched_off(self) -> None:
        """Record the remaining keys of sections with `enabled: false` as without effect."""
        for key in [key for key in self.left if key.endswith(".enabled")]:
            if self.take(key, a_boolean) is False:
                self.settle(self.below(key.removesuffix("enabled")), "", "switched off")

    def drop_rest(self, allow_unknown: bool) -> None:
        """Record every remaining key with the reason from the table. Raises RecipeError for an
        unknown key without `allow_unknown`, and for a value where a section should be."""
        table = self.table
        known = {*self.requested, *table.no_meaning, *table.differs, *table.aliases}
        for key in list(self.left):
            ends = [key[: end + 1] for end, letter in enumerate(key) if letter == "."]
            # The most specific rule applies: one for the key, else for its longest prefix.
            places = (key, *reversed(ends), f"{key}.")
            differs = next((table.differs[k] for k in places if k in table.differs), None)
            reason = next((table.no_meaning[k] for k in places if k in table.no_meaning), None)
            if differs and not is_off(self.left[key]):
                self.became(key, "", differs, differs=True)
                continue
            empty = self.left[key] in (None, {}, [])
            within = [name for name in sorted(known) if name.startswith(f"{key}.")]
            if within and key not in known and not empty:
                problem = f"should be a section with keys, such as {within[0]}, but it is "
                raise self.error(key, problem + json.dumps(self.left[key]))
            if differs or reason or within or key in known:
                reason = "it is empty" if empty else reason or "switched off"
            if key.rpartition(".")[2].lstrip("_/").lower() in ("comment", "comments", ""):
                reason = "a comment"
            if reason is None and not allow_unknown:
                near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.7)
                hint = f"did you mean '{near[0]}'? Correct it" if near else "remove it"
                raise self.error(key, f"unknown key; {hint}, or add --allow-unknown to drop it")
            self.became(key, "", reason or "unknown", differs=reason is None)


AUTO = "auto: from TrainingArguments"


def is_off(value: Any) -> bool:
    words = ("none", "no", "false", "off", "auto", "", "0")
    return value in (None, False, 0, {}, []) or (isinstance(value, str) and value.lower() in words)


def a_number(value: Any, *, whole: bool = False, above: float = -math.inf) -> float:
    """Convert a value to a number, whole or above a bound if requested. Raises ValueError for
    another value."""
    wanted = ("a whole number" if whole else "a number") + (f" above {above}" * (above == 0))
    with suppress(TypeError, ValueError):
        # Python would accept true as 1; here it is a mistake.
        number = math.nan if isinstance(value, bool) else float(value)
        if math.isfinite(number) and number > above and (number.is_integer() or not whole):
            return int(number) if whole else number
    shared = " (Perdure has one for all parameters)" if isinstance(value, list) else ""
    raise ValueError(wanted + shared)


a_whole_number = partial(a_number, whole=True)
a_positive_number = partial(a_number, whole=True, above=0)


def a_pair(value: Any) -> list[float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("two numbers")
    return [a_number(item) for item in value]


def a_boolean(value: Any) -> bool | str:
    """Convert true, false or "auto" in any case. Raises ValueError for another value."""
    word = value.lower() if isinstance(value, str) else json.dumps(value)
    if word not in ("true", "false", "auto"):
        raise ValueError("true, false")
    return word if word == "auto" else word == "true"


def a_boolean_or_word(value: Any) -> bool:
    """Convert true, false, or accelerate's "yes" and "no". Raises ValueError for another value."""
    if isinstance(value, str) and value.lower() in ("yes", "no"):
        return value.lower() == "yes"
    return bool(a_boolean(value))


def words(value: Any) -> list[str]:
    """Convert a list of words, or a string of words with spaces between. Raises ValueError for
    another value."""
    parts = value.split() if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(word, str) for word in parts):
        raise ValueError("words with spaces between, or a list of words")
    return parts


def one_of(*names: str) -> Converter:
    """Return a `Converter` of `names` in any case to their spelling in `names`."""

    def a_word(value: Any) -> str:
        for name in names:
            if str(value).lower() == name.lower():
                return name
        raise ValueError(" | ".join(names))

    return a_word
