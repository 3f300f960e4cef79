"""The recipe and the data of a run's attempts, as this machine finds them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from elastic.node.files import read_text
from elastic.record.history import Attempt
from trainer.data.shards import is_prepared
from trainer.recipe import Recipe, RecipeError, load_recipe
from trainer.run.provenance import digest_of, recipe_file


class AwayError(RecipeError):
    """Recipe or data of an attempt are missing, so nothing proves or refutes its steps."""


def kept_recipe(run: Path, attempts: Sequence[Attempt]) -> Recipe:
    """Read the recipe that some attempts of a run share. Attempts whose start lines name no recipe
    are older than the folder of recipes, and used recipe.yaml.

    Raises:
        AwayError: the recipe is missing, or this version cannot read it.
        RecipeError: the file is not the recipe of the attempts.
    """
    digest = attempts[0].start.recipe
    path = recipe_file(run, digest) if digest else run / "recipe.yaml"
    try:
        text = read_text(path)
    except OSError as error:
        raise AwayError(f"{path}: {error.strerror}") from error
    except ValueError:  # the file is not text
        text = ""
    if digest and digest_of(text) != digest:
        raise RecipeError(f"{path} is not the recipe of {numbers_of(attempts)}")
    try:
        return load_recipe(path, kept=True)
    except RecipeError as error:
        raise AwayError(f"{path}: this version cannot read it: {error}") from error


def where_it_lies(recipe: Recipe, directory: str) -> tuple[Recipe, str]:
    """Return the recipe with the present paths of its sources and of `model.init_from`, and without
    validation; and the path of the first missing source, "" if none is missing. Relative paths are
    looked up from `directory`, the run's working directory, then from this process's."""
    sources = []
    for source in recipe.data.sources:
        places = [source.path]
        if "://" not in source.path:
            places.insert(0, str(Path(directory) / source.path))
        place = next((path for path in places if is_prepared(path)), None)
        if place is None:
            return recipe, places[0]
        sources.append(replace(source, path=place))
    data = replace(recipe.data, sources=tuple(sources))
    model, begun = recipe.model, recipe.model.init_from
    if begun and "://" not in begun and (there := Path(directory) / begun).exists():
        model = replace(model, init_from=str(there))
    run = replace(recipe.run, evaluate_every=0)
    return replace(recipe, data=data, model=model, run=run), ""


def numbers_of(attempts: Sequence[Attempt]) -> str:
    """Format the numbers of attempts: "attempt 1, 2"."""
    numbers = ", ".join(str(attempt.number) for attempt in attempts[:8])
    more = f" and {len(attempts) - 8} more" if len(attempts) > 8 else ""
    return f"attempt {numbers}{more}"
