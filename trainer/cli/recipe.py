"""Command line of `perdure recipe`: the shipped recipes, and the reference of all keys."""

import argparse
import json
import shlex
import sys
from itertools import islice
from pathlib import Path

from trainer.cli.parser import Commands, add_command, local_path, write_new
from trainer.recipe import recipe_schema, shipped_recipes
from trainer.recipe.reference_page import recipe_reference
from trainer.text import table

SCHEMA = "schema.json"
"""File name of the schema; the first line of a shipped recipe names it for editors."""
EXAMPLES = """\
examples:
  perdure recipe ls
  perdure recipe copy quickstart mine.yaml
  perdure recipe reference
  perdure recipe schema > schema.json
"""


def add_recipe_command(commands: Commands) -> None:
    what = "recipes that come with Perdure, and the reference of all keys"
    recipe = add_command(commands, "recipe", what, EXAMPLES)
    inner = recipe.add_subparsers(required=True, metavar="COMMAND")
    ls = add_command(inner, "ls", "list the recipes that come with Perdure", EXAMPLES)
    ls.set_defaults(run=_ls)
    copy = add_command(inner, "copy", "copy a recipe, and the schema, into a folder", EXAMPLES)
    what = "a name from perdure recipe ls"
    copy.add_argument("name", choices=shipped_recipes(), metavar="NAME", help=what)
    copy.add_argument("file", type=local_path, nargs="?", help="file to write (default NAME.yaml)")
    copy.set_defaults(run=_copy)
    reference = add_command(inner, "reference", "print every key, as Markdown", EXAMPLES)
    reference.set_defaults(run=_reference)
    schema = add_command(inner, "schema", "print the JSON Schema, for editors", EXAMPLES)
    schema.set_defaults(run=_schema)


def _ls(arguments: argparse.Namespace) -> int:
    rows = []
    for name, file in shipped_recipes().items():
        # the first line names the schema; the second describes the recipe
        with file.open(encoding="utf-8") as lines:
            rows.append([name, next(islice(lines, 1, None), "").lstrip("# ").rstrip()])
    print("\n".join(table(rows)))
    return 0


def _copy(arguments: argparse.Namespace) -> int:
    file = arguments.file or Path(f"{arguments.name}.yaml")
    text = shipped_recipes()[arguments.name].read_text(encoding="utf-8")
    write_new(file, text, "name another file")
    schema = file.with_name(SCHEMA)
    if not schema.exists():
        write_new(schema, _schema_text(), "name another folder")
    elif schema.read_bytes() != _schema_text().encode():
        print(f"{schema}: differs from this version's schema, and is kept", file=sys.stderr)
    print(f"{file}: change what you like, then: {shlex.join(['perdure', 'train', str(file)])}")
    return 0


def _reference(arguments: argparse.Namespace) -> int:
    print(recipe_reference(), end="")
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    print(_schema_text(), end="")
    return 0


def _schema_text() -> str:
    return json.dumps(recipe_schema(), indent=2) + "\n"
