"""Reads a recipe: a YAML file → a frozen, validated `Recipe`. Imports no torch.

`load_recipe` reads the YAML with line numbers, expands `${NAME}` and `${NAME:-default}`, applies
`key.sub=value` overrides, and checks types, then combinations. It reports all problems together: a
`RecipeError` with one line each, which names file, line, key and remedy. `recipe_schema` and
`recipe_reference` describe all keys, from the docstrings of sections.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from trainer.recipe.checking import adapter, checked, definition_of, schema_of
from trainer.recipe.rules import contradictions
from trainer.recipe.sections import Recipe
from trainer.recipe.strategies import sharding
from trainer.recipe.yaml_tree import (
    Key,
    Origins,
    RecipeError,
    RecipeProblem,
    listed,
    origin_of,
    read_tree,
)


def shipped_recipes() -> dict[str, Path]:
    """Return the paths of the bundled recipes, by name."""
    files = (Path(__file__).parents[1] / "recipes").glob("*.yaml")
    return {file.stem: file for file in sorted(files)}


def load_recipe(path: str | Path, overrides: Sequence[str] = (), *, kept: bool = False) -> Recipe:
    """Read, override and validate a recipe.

    Args:
        path: YAML file.
        overrides: `key.sub=value` strings, applied in order; list items by number
            (`data.sources.0.path=…`). Values are YAML.
        kept: whether the file is a run's own copy. It may have keys of older versions; see also
            `read_tree`.

    Raises:
        RecipeError: has a line for each problem, with file, line, key and remedy.
    """
    name = Path(path).stem
    if not Path(path).exists() and name in shipped_recipes():
        raise RecipeError(
            f"{path}: there is no such file; Perdure comes with a recipe of this name: perdure "
            f"recipe copy {name} {shlex.quote(str(Path(path).with_suffix('.yaml')))}"
        )
    tree, origins, problems = read_tree(path, overrides, kept=kept)
    return validate(renewed(tree)[0] if kept else tree, origins, str(path), problems)


def validate(
    tree: dict[str, Any], origins: Origins, file: str, problems: Sequence[RecipeProblem] = ()
) -> Recipe:
    """Convert plain values to a recipe. Raises RecipeError as `load_recipe`.

    Args:
        tree: sections by name; None is an empty section.
        origins: file and line of each key.
        file: origin of all other keys, for messages.
        problems: problems that were found before, to be reported too.
    """
    tree = {section: {} if keys is None else keys for section, keys in tree.items()}
    tree, former = renewed(tree)
    all_problems = list(problems)
    all_problems += [
        RecipeProblem(origin_of(key, origins, file), key, what) for key, what in former
    ]
    wrong = {problem.key for problem in all_problems}
    recipe = checked(Recipe, tree, origins, file, all_problems, wrong)
    if recipe:
        recipe = _completed(recipe)
        # A contradiction that involves a wrong value may vanish once the value is right.
        names = {part for key in wrong for part in key[1:] or key if isinstance(part, str)}
        for key, what in contradictions(recipe):
            if not names & set(re.findall(r"\w+", f"{key} {what}")):
                path = tuple(key.split("."))
                all_problems.append(RecipeProblem(origin_of(path, origins, file), path, what))
    if all_problems or not recipe:
        raise RecipeError(listed(all_problems, origins))
    return recipe


_FORMER = (("model", "kgat", "trainer.kgat:KGAT"), ("data", "graph", "trainer.kgat:open_graph"))
"""(section, key of older versions, factory that replaces it and has its keys as options)."""


def renewed(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[Key, str]]]:
    """Replace keys of older versions. Returns the new tree of plain values, and (key, what to write
    instead) for each replaced key. Keys of older versions that are null are dropped and not
    returned, as resolved recipes of these versions have them."""
    new, former = dict(tree), list[tuple[Key, str]]()
    for section, key, factory in _FORMER:
        keys = new.get(section)
        if not isinstance(keys, Mapping) or key not in keys:
            continue
        new[section] = {name: value for name, value in keys.items() if name != key}
        if (options := keys[key]) is not None:
            new[section] |= {"factory": factory, "factory_options": options}
            what = f"write {section}.factory: {factory}, and its keys in {section}.factory_options"
            former.append(((section, key), what))
    return new, former


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe with all defaults, as JSON values."""
    values: dict[str, Any] = adapter(Recipe).dump_python(recipe, mode="json")
    return values


def dump_recipe(recipe: Recipe) -> str:
    """Return the recipe with all defaults, as YAML from which `load_recipe` reads an equal
    recipe."""
    return yaml.safe_dump(resolved(recipe), sort_keys=False, allow_unicode=True)


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe, for editors."""
    schema = schema_of(Recipe)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _completed(recipe: Recipe) -> Recipe:
    """Return the recipe with the values that follow from others: `strategy.sharding` from
    `strategy.zero`, `data.seq_len` from `data.factory`, `checkpoint.slot_directory` from
    `strategy.offload_directory`."""
    data, checkpoint = recipe.data, recipe.checkpoint
    if data.factory and not data.seq_len:
        data = replace(data, seq_len=1)
    # With `offload: nvme` the model may not fit in host memory. Then the slots, which are copies
    # of it, do not fit either, and go to the offload directory.
    if checkpoint.slot_directory is None:
        checkpoint = replace(checkpoint, slot_directory=recipe.strategy.offload_directory)
    strategy = sharding.resolved(recipe.strategy)
    return replace(recipe, data=data, checkpoint=checkpoint, strategy=strategy)


def recipe_reference() -> str:
    """Return the recipe reference as a Markdown page."""
    schema = recipe_schema()
    lines = [
        "# Recipe reference",
        "",
        "Made from the code by `make docs`. Every key can be overridden on the command line as",
        "`section.key=value`. `${NAME}` and `${NAME:-default}` expand environment variables.",
    ]
    for name, section in schema["properties"].items():
        definition = definition_of(section, schema)
        lines += ["", f"## `{name}`", "", definition.get("description", ""), ""]
        lines += list(_reference_rows(definition, schema, prefix=f"{name}."))
    return "\n".join(lines) + "\n"


def _reference_rows(
    definition: dict[str, Any], schema: dict[str, Any], prefix: str
) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    nested: list[tuple[str, dict[str, Any]]] = []
    required = definition.get("required", [])
    for key, value in definition["properties"].items():
        # Schemas omit defaults made by a factory, which are all {} in these tables.
        absent: Any = {} if value.get("type") == "object" else None
        default = f"`{yaml_scalar(value.get('default', absent))}`"
        default = "required" if key in required else default
        meaning = " ".join(value.get("description", "").split())
        yield f"| `{prefix}{key}` | {_type_name(value, schema)} | {default} | {meaning} |"
        inner = definition_of(value, schema)
        if "properties" in inner:
            nested.append((f"{prefix}{key}." + ("N." if _is_list(value) else ""), inner))
    for inner_prefix, inner in nested:
        yield ""
        yield inner.get("description", "")
        yield ""
        yield from _reference_rows(inner, schema, inner_prefix)


def yaml_scalar(value: Any) -> str:
    """Format a value on one line, as in a recipe."""
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


def _is_list(value: dict[str, Any]) -> bool:
    return value.get("type") == "array"


def _type_name(value: dict[str, Any], schema: dict[str, Any]) -> str:
    if "enum" in value:
        return ", ".join(f"`{yaml_scalar(item)}`" for item in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if "anyOf" in value:
        options = [option for option in value["anyOf"] if option.get("type") != "null"]
        return " or ".join(_type_name(option, schema) for option in options)
    if "$ref" in value:
        return "section"
    if _is_list(value):
        return "list"
    return {"object": "mapping", "string": "text"}.get(value.get("type", ""), value.get("type", ""))
