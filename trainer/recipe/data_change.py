"""Changes of a run's data while it runs, and recipes that include them. Imports no torch."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from annotated_types import Gt, MaxLen
from pydantic import ConfigDict, ValidationError

from trainer.recipe.checking import adapter
from trainer.recipe.load import resolved, validate
from trainer.recipe.sections import Recipe, SourceSection
from trainer.recipe.value_types import Position
from trainer.recipe.yaml_tree import RecipeError

REQUEST, CHANGES = "data_change.json", "data_changes.json"
"""Files in a run directory: a requested change, and all accepted changes."""


@dataclass(frozen=True, kw_only=True)
class RecipeDataChange:
    """A requested stage of the data, which begins at a sequence and lasts until the next stage."""

    name: Annotated[str, MaxLen(32)]
    """Random name that distinguishes changes."""
    begin: Position
    """First sequence of the stage."""
    weights: dict[str, Annotated[float, Gt(0)]] | None = None
    """See `DataStageSection.weights`."""
    append: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """See `DataStageSection.append`."""
    sources: tuple[SourceSection, ...] = ()
    """Data sets that are not in the recipe yet."""

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid", "allow_inf_nan": False}


def plain(changes: Iterable[RecipeDataChange]) -> list[dict[str, Any]]:
    """Convert changes to JSON values."""
    return [adapter(RecipeDataChange).dump_python(one, mode="json") for one in changes]


def parsed(values: Any) -> list[RecipeDataChange]:
    """Parse changes from JSON values. Raises ValueError if they are not a list of changes."""
    try:
        return adapter(list[RecipeDataChange]).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ValueError(f"not a valid change of the data: {key}: {first['msg']}") from error


def with_changes(recipe: Recipe, changes: Iterable[RecipeDataChange], file: str) -> Recipe:
    """Return the recipe with a stage for each change. A change that it already contains has no
    effect. Later changes override earlier ones. `file`: file of the changes, for messages. Raises
    RecipeError, with a line for each wrong key, if the changed stages contradict each other."""
    tree = resolved(recipe)
    for change in plain(changes):
        _insert(tree["data"], change)
    return validate(tree, {}, file)


def refuse_taken_names(recipe: Recipe, change: RecipeDataChange, directory: str) -> None:
    """Raise RecipeError if a change adds a data set under a name that the recipe gives to another
    data set: `with_changes` would use the recipe's data set. `directory`: working directory of the
    run, where its relative paths begin."""

    def place(source: SourceSection) -> str:
        url = "://" in source.path
        return source.path if url else os.path.abspath(os.path.join(directory, source.path))

    known = {source.called: place(source) for source in recipe.data.sources}
    for source in change.sources:
        if known.get(source.called, place(source)) != place(source):
            raise RecipeError(
                f"{source.path}: the run has a data set named {source.called!r} in "
                f"{known[source.called]}; choose another name, by --add NAME=PATH or by a link to "
                "the directory"
            )


def _insert(data: dict[str, Any], change: dict[str, Any]) -> None:
    """Add one change to the `data` section of a resolved recipe."""
    known = [SourceSection(**source).called for source in data["sources"]]
    stages = data["stages"]
    if not stages:
        weights = [source["weight"] for source in data["sources"]]
        stages.append({"until": None, "weights": dict(zip(known, weights, strict=True))})
        for source in data["sources"]:
            source["weight"] = 1.0
    new = [one for one in change["sources"] if SourceSection(**one).called not in known]
    data["sources"] += new
    begin = change["begin"]
    borders = [0, *(stage["until"] for stage in stages[:-1])]
    number = sum(border < begin for border in borders) - 1
    if begin not in borders:
        stages.insert(number + 1, {"until": stages[number]["until"]})
        stages[number] = {**stages[number], "until": begin}
    stage = stages[number + 1]
    stage["weights"] = change["weights"] or stage.get("weights")
    append = stage.setdefault("append", {})
    for name, more in change["append"].items():
        append[name] = [*dict.fromkeys([*append.get(name, ()), *more])]
