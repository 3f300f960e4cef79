"""Converts `data.stages` to a table: the first sequence of each stage, and its mixture."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from trainer.recipe.sections import DataSection, Recipe, SourceSection


class RecipeStageRow(NamedTuple):
    """A row of the table: a stage, with data sets by their number in `ordered`. A source consists
    of a first data set, after which it is named, and of the data sets appended to it."""

    begin: int
    """First sequence of the stage."""
    weights: Mapping[int, float]
    """First data set of a source → share of the source."""
    joins: Mapping[int, int]
    """Data set that is used from this stage on → first data set of its source."""


def ordered(data: "DataSection") -> "Sequence[SourceSection]":
    """Return the data sets in the order in which stages first name them; within a stage, in recipe
    order. So a stage that is added later does not change the numbers of earlier data sets."""
    found: dict[str, SourceSection] = {}
    for stage in data.stages:
        names = {*(stage.weights or ()), *stage.append, *_flat(stage.append.values())}
        found |= {one.called: one for one in data.sources if one.called in names - found.keys()}
    return list(found.values()) if data.stages else data.sources


def table(data: "DataSection") -> list[RecipeStageRow]:
    """Return the row of each stage; [] without stages."""
    numbers = {source.called: number for number, source in enumerate(ordered(data))}
    rows, begin, weights, known = list[RecipeStageRow](), 0, dict[str, float](), set[str]()
    for stage in data.stages:
        weights = dict(stage.weights or weights)
        extends = {new: name for name, several in stage.append.items() for new in several}
        named = [name for name in numbers if name in {*weights, *stage.append} - known]
        joins = dict(zip(named, named, strict=True)) | extends
        known |= joins.keys()
        rows.append(
            RecipeStageRow(
                begin,
                {numbers[name]: weight for name, weight in weights.items()},
                {numbers[name]: numbers[joins[name]] for name in numbers if name in joins},
            )
        )
        begin = stage.until or 0
    return rows


def stage_contradictions(recipe: "Recipe") -> Iterator[tuple[str, str]]:
    """Yield (key, problem and remedy) for stages that contradict each other or other keys."""
    data = recipe.data
    if not data.stages:
        return
    if data.factory:
        yield "data.stages", "only for data.sources; remove it"
        return
    if recipe.run.epochs:
        yield "data.stages", "leaves open what an epoch is; give run.steps instead of run.epochs"
    if recipe.objective.referenced:
        yield (
            "data.stages",
            f"objective.name={recipe.objective.name} computes reference log-probabilities once, "
            "for data that does not change; remove data.stages",
        )
    yield from _borders(data)
    names = [source.called for source in data.sources]
    for number, source in enumerate(data.sources):
        if source.called in names[:number]:
            yield (
                f"data.sources.{number}.name",
                f"{source.called!r} is also the name of another source; give another name",
            )
        if source.weight != 1.0:
            yield (
                f"data.sources.{number}.weight",
                "with data.stages, weights are set in data.stages.N.weights; remove it",
            )
    yield from _names(data, names)


def _borders(data: "DataSection") -> Iterator[tuple[str, str]]:
    *others, last = range(len(data.stages))
    for number in others:
        if data.stages[number].until is None:
            yield (
                f"data.stages.{number}.until",
                "is required; give the number of sequences after which the next stage begins",
            )
    if data.stages[last].until is not None:
        yield f"data.stages.{last}.until", "the last stage lasts to the end of the run; remove it"
    for number, (one, other) in enumerate(pairwise(data.stages), 1):
        if one.until and other.until and other.until <= one.until:
            yield (
                f"data.stages.{number}.until",
                f"{other.until} is not after {one.until}, where the stage begins; raise it",
            )


def _names(data: "DataSection", names: Sequence[str]) -> Iterator[tuple[str, str]]:
    weighted = set(_flat(stage.weights or () for stage in data.stages))
    appended = list[str]()
    if data.stages[0].weights is None:
        yield "data.stages.0.weights", "is required; give the sources of the first stage"
    for number, stage in enumerate(data.stages):
        key = f"data.stages.{number}"
        if stage.weights == {}:
            yield f"{key}.weights", "is empty; name at least one source, or leave the key out"
        for name in {*(stage.weights or ())} - {*names}:
            yield f"{key}.weights", _unknown(name, names)
        if stage.append and not number:
            yield f"{key}.append", "nothing precedes the first stage; name the sources in weights"
        for target, several in stage.append.items():
            if target not in weighted:
                yield f"{key}.append", _unknown(target, sorted(weighted))
            for name in several:
                if name not in names:
                    yield f"{key}.append", _unknown(name, names)
                elif name in weighted:
                    yield (
                        f"{key}.append",
                        f"{name!r} is also a source with a weight; remove one of the two",
                    )
                elif name in appended:
                    yield f"{key}.append", f"{name!r} is appended twice; remove one of the two"
                appended.append(name)
    for number, name in enumerate(names):
        if name not in weighted and name not in appended:
            yield f"data.sources.{number}", f"no stage names {name!r}; name it in one, or remove it"


def _unknown(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"data.sources has {', '.join(known)}"
    return f"there is no source {name!r}; {hint}"


def _flat(several: Iterable[Iterable[str]]) -> Iterator[str]:
    return (name for names in several for name in names)
