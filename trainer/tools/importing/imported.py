"""A recipe under construction, and the report about each key of the imported file."""

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
"""Required key of a recipe → (example value, meaning)."""

ABSENT = object()
"""Value in a report for a key that is missing in the file."""


@dataclass(frozen=True)
class ImportReportLine:
    """Line of the report about one key of the configuration."""

    key: str
    value: Any
    became: str
    """Recipe key that the key became; "": there is no counterpart."""
    why: str
    differs: bool = False
    """Whether training differs from the configuration, or from its trainer's default."""

    @property
    def kind(self) -> str:
        """Section of the report."""
        kept = "translated" if self.became else "no meaning here"
        return "differs" if self.differs else kept

    @property
    def shown(self) -> str:
        """Key and value, as JSON."""
        if self.value is ABSENT:
            return f"{self.key} (not set)"
        return f"{self.key}: {json.dumps(self.value, ensure_ascii=False, default=str)}"


@dataclass
class ImportedRecipe:
    """A recipe under construction, with the report about the imported configuration."""

    file: str
    tree: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The recipe: section → key → value."""
    notes: dict[str, str] = field(default_factory=dict)
    """Recipe key → comment on its line."""
    origins: Origins = field(default_factory=dict)
    """Recipe key → origin of its value, "file: key"."""
    given: set[str] = field(default_factory=set)
    """Recipe keys set by the configuration itself, not by its trainer's defaults."""
    lines: list[ImportReportLine] = field(default_factory=list)
    overridden: dict[str, Any] = field(default_factory=dict)
    """Sections and keys that the user's overrides set."""
    replicas: int | None = None
    """Number of model replicas, if the configuration determines it."""
    accumulation: int | None = None
    """Forward passes per optimizer step, if the configuration determines them."""
    _overrides: tuple[str, ...] = ()
    launch: str = ""
    """Perdure's command for the launch that the configuration describes; "" for none."""

    def set(self, key: str, value: Any, origin: str, note: str = "", given: bool = True) -> None:
        """Set a recipe key, whose value came from `origin`, "file: key"."""
        section, name = key.split(".")
        self.tree.setdefault(section, {})[name] = value
        self.origins[section, name] = origin
        self.notes[key] = note
        if given:
            self.given.add(key)

    def get(self, key: str) -> Any:
        section, name = key.split(".")
        return self.tree.get(section, {}).get(name)

    @property
    def steps(self) -> int | None:
        """Steps of the run, if known."""
        steps = self.overridden.get("run", {}).get("steps", self.get("run.steps"))
        return steps if isinstance(steps, int) and steps else None

    def override(self, overrides: Sequence[str]) -> None:
        """Parse the user's `section.key=value`, which `finish` applies over the configuration.
        Raises RecipeError if an override is malformed; `finish` finds unknown keys."""
        for override in overrides:
            if "." not in override.partition("=")[0]:
                raise RecipeError(f"override '{override}': write it as section.key=value")
            if problems := apply_override(self.overridden, override, self.origins):
                raise RecipeError(listed(problems, self.origins))
        self._overrides = tuple(overrides)

    def finish(self) -> None:
        """Apply the overrides, and check the recipe."""
        for place, line in enumerate(self.lines):  # all values are known now
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
        """Keys of NEEDED without a value."""
        model = self.tree.get("model", {})
        given = {f"{section}.{key}" for section, keys in self.tree.items() for key in keys}
        if model.get("architecture") or model.get("factory"):
            given.add("model.init_from")
        if self.tree.get("run", {}).get("epochs"):
            given.add("run.steps")
        return [key for key in NEEDED if key not in given]

    def check(self) -> None:
        """Check that the recipe can run once the open keys are filled in. Raises RecipeError, which
        names the key of the configuration, or the override."""
        # on a copy, as the examples serve only this check
        tree = {section: dict(keys) for section, keys in self.tree.items()}
        for key in self.open:
            section, name = key.split(".")
            example = NEEDED[key][0]
            if key == "run.steps":  # longer than any warm-up
                example += int(tree.get("schedule", {}).get("warmup_steps", 0))
            tree.setdefault(section, {})[name] = example
        validate(tree, self.origins, self.file)

    def recipe(self) -> str:
        """Format the recipe as YAML, with open keys as comments."""
        sections = dict.fromkeys([*(key.split(".")[0] for key in NEEDED), *self.tree])
        text = [f"# Imported from {Path(self.file).name}; what became of each key is at the end."]
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
        """Lines of text about every key of the configuration, every differing default of its
        trainer, and the open keys."""
        width = min(60, max((len(line.shown) for line in self.lines), default=0))
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
    """Default of a recipe key; None if the key is required."""
    if key == "strategy.sharding":
        return "FULL_SHARD"  # the meaning of null
    section, name = key.split(".")
    for known in fields(get_type_hints(Recipe)[section]):
        if known.name == name and known.default is not MISSING:
            return list(known.default) if isinstance(known.default, tuple) else known.default
        if known.name == name and known.default_factory is not MISSING:
            return known.default_factory()
    return None


def inline(value: Any) -> str:
    """Format a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    # safe_dump ends a scalar with a document mark
    return text.removesuffix("...\n").strip()
