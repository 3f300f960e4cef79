"""A recipe in the making: made from another trainer's configuration, with what became of each of
its keys."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from trainer.recipe import validate
from trainer.recipe.yaml_tree import Origins

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


@dataclass(frozen=True)
class Line:
    """What became of one key."""

    key: str
    value: Any
    became: str
    """A recipe key, or nothing: it was dropped."""
    why: str


@dataclass
class Imported:
    """A recipe in the making."""

    file: str
    """The ds_config."""
    tree: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Section → key → value."""
    notes: dict[str, str] = field(default_factory=dict)
    """Recipe key → comment on its line."""
    origins: Origins = field(default_factory=dict)
    """Recipe key → where its value was written."""
    lines: list[Line] = field(default_factory=list)

    def set(self, key: str, value: Any, origin: str, note: str = "") -> None:
        """Give a recipe key its value."""
        section, name = key.split(".")
        self.tree.setdefault(section, {})[name] = value
        self.origins[section, name] = f"{self.file}: {origin}"
        self.notes[key] = note

    @property
    def open(self) -> list[str]:
        """Keys of NEEDED that still have no value."""
        model = self.tree.get("model", {})
        given = {f"{section}.{key}" for section, keys in self.tree.items() for key in keys}
        if model.get("architecture") or model.get("factory"):
            given.add("model.init_from")
        return [key for key in NEEDED if key not in given]

    def check(self) -> None:
        """Refuse what could not run however the open keys are filled in.

        Raises:
            RecipeError: naming the key of the ds_config, or the override.
        """
        tree = {section: dict(keys) for section, keys in self.tree.items()}
        for key in self.open:
            section, name = key.split(".")
            example = NEEDED[key][0]
            if key == "run.steps":  # long enough for any warm-up
                example += tree.get("schedule", {}).get("warmup_steps", 0)
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
        """Every key of the ds_config with what became of it, and what is open; lines of text."""
        width = max((len(f"{line.key}: {_json(line.value)}") for line in self.lines), default=0)
        width = min(width, 60)
        text = []
        for title, kept in (("translated", True), ("dropped", False)):
            lines = [line for line in self.lines if bool(line.became) == kept]
            text += [f"{title}: {len(lines)}"]
            for line in lines:
                became = ": ".join(filter(None, [line.became, line.why]))
                text.append(f"  {f'{line.key}: {_json(line.value)}':{width}}  {became}")
        text.append(f"open: {len(self.open)}")
        text += [f"  {key}={inline(NEEDED[key][0])}  {NEEDED[key][1]}" for key in self.open]
        return text


def inline(value: Any) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
