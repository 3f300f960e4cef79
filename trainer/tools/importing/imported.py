"""A recipe in the making, with what became of each key of the configuration it is made from."""

import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from trainer.recipe import Recipe, RecipeError, validate
from trainer.recipe.yaml_tree import Origins, apply_override, listed

NEEDED: dict[str, tuple[Any, str]] = {
    "run.dir": ("runs/imported", "directory of the run"),
    "run.steps": (1000, "optimizer steps of the whole run"),
    "model.init_from": ("path/to/model", "Hugging Face directory; or model.architecture"),
    "data.sources": ([{"path": "data/corpus"}], "written by `perdure data prepare`"),
    "data.seq_len": (2048, "tokens per sequence"),
    "batch.global_batch": (64, "sequences per optimizer step, over all ranks"),
    "optimizer.lr": (1e-4, "peak learning rate"),
}
"""What a recipe cannot do without → (an example, its meaning)."""

ABSENT = object()
"""The value, in a report, of a key that the file does not have."""


@dataclass(frozen=True)
class Line:
    """What became of one key."""

    key: str
    value: Any
    became: str
    """A recipe key, or nothing: none stands for it."""
    why: str
    differs: bool = False
    """Whether the run trains otherwise than the configuration says, or by a default that a recipe
    does not have."""

    @property
    def kind(self) -> str:
        """The part of the report that this line is in."""
        kept = "translated" if self.became else "no meaning here"
        return "differs" if self.differs else kept

    @property
    def shown(self) -> str:
        """The key and its value, as JSON."""
        if self.value is ABSENT:
            return f"{self.key} (not set)"
        return f"{self.key}: {json.dumps(self.value, ensure_ascii=False, default=str)}"


@dataclass
class Imported:
    """A recipe in the making."""

    file: str
    """The configuration."""
    tree: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Section → key → value."""
    notes: dict[str, str] = field(default_factory=dict)
    """Recipe key → comment on its line."""
    origins: Origins = field(default_factory=dict)
    """Recipe key → where its value was written."""
    given: set[str] = field(default_factory=set)
    """Recipe keys whose values the configuration gives, rather than a default of its trainer."""
    lines: list[Line] = field(default_factory=list)
    overridden: dict[str, Any] = field(default_factory=dict)
    """Sections and keys that the user says, over the configuration."""
    replicas: int | None = None
    """How many copies of the model the ranks make, where the configuration tells."""
    accumulation: int | None = None
    """Passes per optimizer step, where the configuration tells."""
    _overrides: tuple[str, ...] = ()
    launch: str = ""
    """The command that starts the run as the configuration was started, if it says how."""

    def set(self, key: str, value: Any, origin: str, note: str = "", given: bool = True) -> None:
        """Give a recipe key its value, from a key of a file: "file: key"."""
        section, name = key.split(".")
        self.tree.setdefault(section, {})[name] = value
        self.origins[section, name] = origin
        self.notes[key] = note
        if given:
            self.given.add(key)

    def get(self, key: str) -> Any:
        """The value of a recipe key so far, or None."""
        section, name = key.split(".")
        return self.tree.get(section, {}).get(name)

    @property
    def steps(self) -> int | None:
        """The length of the run, as far as it is known."""
        steps = self.overridden.get("run", {}).get("steps", self.get("run.steps"))
        return steps if isinstance(steps, int) and steps else None

    def override(self, overrides: Sequence[str]) -> None:
        """Read the user's `key.sub=value`, which `finish` puts over the configuration.

        Raises:
            RecipeError: an override that leads nowhere.
        """
        for override in overrides:
            if "." not in override.partition("=")[0]:
                raise RecipeError(f"override '{override}': write it as section.key=value")
            if problems := apply_override(self.overridden, override, self.origins):
                raise RecipeError(listed(problems, self.origins))
        self._overrides = tuple(overrides)

    def finish(self) -> None:
        """Put the overrides over the configuration, and check the recipe."""
        for place, line in enumerate(self.lines):  # their values are known by now
            section, dot, name = line.became.partition(".")
            if dot and name in self.tree.get(section, {}):
                became = f"{line.became}={inline(self.tree[section][name])}"
                self.lines[place] = replace(line, became=became)
        for override in self._overrides:
            if problems := apply_override(self.tree, override, self.origins):
                raise RecipeError(listed(problems, self.origins))
            self.notes[override.partition("=")[0]] = ""
        self.check()

    @property
    def open(self) -> list[str]:
        """Keys of NEEDED that still have no value."""
        model = self.tree.get("model", {})
        given = {f"{section}.{key}" for section, keys in self.tree.items() for key in keys}
        if model.get("architecture") or model.get("factory"):
            given.add("model.init_from")
        if self.tree.get("run", {}).get("epochs"):
            given.add("run.steps")
        return [key for key in NEEDED if key not in given]

    def check(self) -> None:
        """Refuse what could not run however the open keys are filled in.

        Raises:
            RecipeError: naming the key of the configuration, or the override.
        """
        tree = {section: dict(keys) for section, keys in self.tree.items()}
        for key in self.open:
            section, name = key.split(".")
            example = NEEDED[key][0]
            if key == "run.steps":  # long enough for any warm-up
                example += int(tree.get("schedule", {}).get("warmup_steps", 0))
            tree.setdefault(section, {})[name] = example
        validate(tree, self.origins, self.file)

    def recipe(self) -> str:
        """The recipe as YAML; open keys are comments, which `perdure train` asks for by name."""
        sections = dict.fromkeys([*(key.split(".")[0] for key in NEEDED), *self.tree])
        text = [f"# Made from {Path(self.file).name}; at the end, what became of each of its keys."]
        for section in sections:
            text += ["", f"{section}:"]
            for name, value in self.tree.get(section, {}).items():
                note = self.notes.get(f"{section}.{name}")
                text.append(f"  {name}: {inline(value)}" + (f"  # {note}" if note else ""))
            for key in self.open:
                if key.startswith(f"{section}."):
                    example, meaning = NEEDED[key]
                    name = key.split(".")[1]
                    text.append(f"  # {name}: {inline(example)}  # fill in: {meaning}")
        return "\n".join([*text, "", *(f"# {line}".rstrip() for line in self.report()), ""])

    def report(self) -> list[str]:
        """Every key of the configuration with what became of it, every default of its trainer that
        differs, and what is open; lines of text."""
        width = max((len(line.shown) for line in self.lines), default=0)
        width = min(width, 60)
        text = []
        for title in ("translated", "differs", "no meaning here"):
            lines = [line for line in self.lines if line.kind == title]
            text += [f"{title}: {len(lines)}"]
            for line in lines:
                became = ": ".join(filter(None, [line.became, line.why]))
                text.append(f"  {line.shown:{width}}  {became}")
        text.append(f"open: {len(self.open)}")
        text += [f"  {key}={inline(NEEDED[key][0])}  {NEEDED[key][1]}" for key in self.open]
        return [*text, *([f"start: {self.launch}"] if self.launch else [])]


@cache
def recipe_default(key: str) -> Any:
    """What a recipe has for a key that it does not name; None if it must name it."""
    if key == "strategy.sharding":
        return "FULL_SHARD"  # what null means
    section, name = key.split(".")
    for found in fields(get_type_hints(Recipe)[section]):
        if found.name == name and found.default is not MISSING:
            return list(found.default) if isinstance(found.default, tuple) else found.default
        if found.name == name and found.default_factory is not MISSING:
            return found.default_factory()
    return None


def inline(value: Any) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.removesuffix("...\n").strip()
