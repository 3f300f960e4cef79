"""Command lines that print or write a recipe: `perdure recipe` (the shipped recipes, and the
reference of all keys), `init`, `import-deepspeed`, `import-accelerate`, `import-training-args`."""

import argparse
import json
import re
import shlex
import sys
from itertools import islice
from pathlib import Path

from elastic.exits import EXIT_DONE
from trainer.cli.parser import Commands, add_command, at_least, local_path, write_new
from trainer.recipe import RecipeError, recipe_schema, shipped_recipes
from trainer.recipe.load import recipe_reference
from trainer.text import table

SCHEMA = "schema.json"
"""File name of the schema; the first line of a shipped recipe names it for editors."""
RECIPE_EXAMPLES = """\
examples:
  perdure recipe ls
  perdure recipe copy quickstart mine.yaml
  perdure recipe reference
  perdure recipe schema > schema.json
"""


def add_recipe_command(commands: Commands) -> None:
    what = "recipes that come with Perdure, and the reference of all keys"
    recipe = add_command(commands, "recipe", what, RECIPE_EXAMPLES)
    inner = recipe.add_subparsers(required=True, metavar="COMMAND")
    ls = add_command(inner, "ls", "list the recipes that come with Perdure", RECIPE_EXAMPLES)
    ls.set_defaults(run=_ls)
    copy = add_command(
        inner, "copy", "copy a recipe, and the schema, into a folder", RECIPE_EXAMPLES
    )
    what = "a name from perdure recipe ls"
    copy.add_argument("name", choices=shipped_recipes(), metavar="NAME", help=what)
    copy.add_argument("file", type=local_path, nargs="?", help="file to write (default NAME.yaml)")
    copy.set_defaults(run=_copy)
    reference = add_command(inner, "reference", "print every key, as Markdown", RECIPE_EXAMPLES)
    reference.set_defaults(run=_reference)
    schema = add_command(inner, "schema", "print the JSON Schema, for editors", RECIPE_EXAMPLES)
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


INIT_EXAMPLES = """\
examples:
  perdure init
  perdure init --model Qwen3-0.6B --data data/mine --gpus 8xH100 --out mine.yaml
  perdure init --model quickstart --data data/wikipedia --gpus cpu

On a terminal it asks for missing options. It plans as `perdure plan` does, and writes a recipe
with a comment at each key, to be changed by hand.
"""


def add_init_command(commands: Commands) -> None:
    init = add_command(
        commands, "init", "write a recipe for a model, data and a machine", INIT_EXAMPLES
    )
    init.add_argument("--model", help="Hugging Face directory, or a name from perdure recipe ls")
    init.add_argument("--data", help="directory written by perdure data prepare")
    init.add_argument("--gpus", help="GPUs of one node: 8xH100, or cpu (default: this machine's)")
    init.add_argument("--nodes", metavar="N", help="nodes (default 1)")
    init.add_argument("--out", type=local_path, metavar="FILE", help="default: the model's name")
    init.set_defaults(run=_init)


def _init(arguments: argparse.Namespace) -> int:
    from trainer.tools.draft import draft, this_machine, with_architecture

    # data/NAME is where the documentation puts prepared data.
    there = sorted(str(path.parent) for path in Path("data").glob("*/index.json"))
    question = f"Prepared data{f', such as {there[0]}' if there else ' (by perdure data prepare)'}"
    names = ", ".join(with_architecture())
    model = _answer(arguments.model, "--model", f"Model, a directory or one of {names}")
    data = _answer(arguments.data, "--data", question, there[0] if len(there) == 1 else "")
    gpus = arguments.gpus or _answer(None, "--gpus", "GPUs of a node, or cpu", this_machine())
    nodes = _number(_answer(arguments.nodes, "--nodes", "Nodes", "1"))
    name = re.sub(r"[^\w.-]", "-", Path(model).name)
    out = arguments.out or Path(f"{name}.yaml")
    write_new(out, draft(model, data, gpus, nodes, str(out)), "name another --out")
    print(f"{out}: change what you like, then: perdure train {out}")
    return EXIT_DONE


def _answer(given: str | None, option: str, question: str, default: str = "") -> str:
    """Return `given`; if that is None, ask on a terminal, else return `default`. Raises RecipeError
    if the result is empty."""
    answer = given
    if answer is None and sys.stdin.isatty():
        answer = input(f"{question}{f' [{default}]' if default else ''}: ").strip()
    if not (answer := answer or default):
        raise RecipeError(f"{option}: is required: {question[0].lower()}{question[1:]}")
    return answer


def _number(answer: str) -> int:
    if not answer.isdecimal() or int(answer) < 1:
        raise RecipeError(f"--nodes: {answer!r} is not a whole number of at least 1")
    return int(answer)


IMPORT_EXAMPLES = """\
examples:
  perdure {name} {file}
  perdure {name} {file} --out recipe.yaml run.dir=runs/mine run.steps=5000 \\
    model.init_from=Qwen3-0.6B data.sources='[{{path: data/corpus}}]' data.seq_len=2048
  perdure {name} {file} {option}

Reports each key of the file: its translation into recipe keys, or why it has none, and what
differs. Also reports each default that differs. Keys of a recipe that the file does not determine
stay open: `perdure train` names them.
"""


def add_import_command(commands: Commands) -> None:
    arguments, ranks = "--training-args args.json", "--ranks 8"
    both = f"{ranks} {arguments}"
    for kind, source, meta, file, option in (
        ("deepspeed", "a DeepSpeed configuration", "DS_CONFIG", "ds_config.json", both),
        ("accelerate", "an accelerate configuration", "CONFIG", "accelerate.yaml", arguments),
        ("training-args", "Hugging Face's TrainingArguments", "ARGS", "args.json", ranks),
    ):
        name = f"import-{kind}"
        examples = IMPORT_EXAMPLES.format(name=name, file=file, option=option)
        command = add_command(commands, name, f"turn {source} into a recipe", examples)
        add = command.add_argument
        syntax = "YAML" if meta == "CONFIG" else "JSON"
        add("config", type=local_path, metavar=meta, help=f"{syntax} file")
        add("overrides", nargs="*", metavar="key.sub=value", help="recipe overrides")
        add("--out", type=local_path, metavar="FILE", help="recipe to write (else: print)")
        what = "GPUs of the original run, if the file does not say"
        add("--ranks", type=at_least(1), metavar="N", help=what)
        if meta != "ARGS":
            what = "JSON file of TrainingArguments, with the values that the Trainer fills in"
            add("--training-args", type=local_path, metavar="FILE", help=what)
        add("--allow-unknown", action="store_true", help="accept unknown keys")
        command.set_defaults(run=_import, importer=name)


def _import(arguments: argparse.Namespace) -> int:
    from trainer.tools.importing.accelerate import import_accelerate
    from trainer.tools.importing.deepspeed import import_deepspeed
    from trainer.tools.importing.training_arguments import import_training_arguments

    config, overrides = arguments.config, arguments.overrides
    common = {"ranks": arguments.ranks, "allow_unknown": arguments.allow_unknown}
    if arguments.importer == "import-training-args":
        imported = import_training_arguments(config, overrides, **common)
    else:
        both = {"import-deepspeed": import_deepspeed, "import-accelerate": import_accelerate}
        importer = both[arguments.importer]
        imported = importer(config, overrides, training_arguments=arguments.training_args, **common)
    if arguments.out is None:
        print(imported.recipe(), end="")
        return EXIT_DONE
    imported.launch = imported.launch.replace("RECIPE.yaml", str(arguments.out))
    write_new(arguments.out, imported.recipe(), "choose another --out")
    print("\n".join(imported.report()))
    still = f"; fill in {', '.join(imported.open)}" if imported.open else ""
    print(f"{arguments.out}: written{still}")
    return EXIT_DONE
