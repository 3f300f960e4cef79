"""The argument parser of `perdure`, and arguments that several commands share."""

import argparse
import ast
import difflib
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, get_args, get_type_hints

from checkpointing.storage.place import ObjectPath, StoragePlace, location
from elastic.node.files import write_whole
from trainer.recipe import RecipeError
from trainer.recipe.value_types import in_bucket, no_place, no_url

Commands: TypeAlias = "argparse._SubParsersAction[Any]"


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser that suggests the closest command, option or choice for a mistyped word.
    Python's own does this from 3.14 on."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*?)'.* \(choose from (.*)\)$", message)
        if wrong:
            message += _suggestion(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        super().error(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # argparse itself reports a missing argument before an unknown option.
        words = list(sys.argv[1:] if args is None else args)
        known = self._option_string_actions
        for word in itertools.takewhile(lambda word: word != "--", words):
            if self._subparsers and not word.startswith("-"):
                break  # the command's own parser checks the other words
            option = word.partition("=")[0]
            is_option = re.fullmatch(r"--?[A-Za-z][\w-]*", option)  # not a negative number
            if is_option and not any(name.startswith(option) for name in known):
                self.error(f"unrecognized option: {option}{_suggestion(option, known)}")
        return super().parse_known_args(words, namespace)


def _suggestion(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


class CommandVersionAction(argparse.Action):
    """Prints package versions without importing the packages."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        python, torch = sys.version.split()[0], _version("torch")
        parser.exit(message=f"perdure {_version('perdure')} (Python {python}, torch {torch})\n")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def add_command(
    commands: Commands, name: str, what: str, examples: str = ""
) -> argparse.ArgumentParser:
    """Add a command to `commands`, and return its parser. `what` says what the command does, and
    begins in lower case."""
    return commands.add_parser(
        name,
        help=what,
        description=what[0].upper() + what[1:] + ".",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def local_path(text: str) -> Path:
    """Parse an argument that is a local path, not a URL."""
    if what := no_url(text):
        raise argparse.ArgumentTypeError(what)
    return Path(text)


def place(text: str) -> StoragePlace:
    """Parse an argument that is a local path or the URL of an object store."""
    if what := no_place(text):
        raise argparse.ArgumentTypeError(what)
    return location(text)


def run_place(text: str) -> Path | ObjectPath:
    """Parse the place of a run: a local directory, or a folder of a bucket."""
    return ObjectPath.of(text) if in_bucket(text) else local_path(text)


def local_run(text: str) -> Path:
    """Return the path of a `run.dir`, next to which a command creates a directory. Raises
    RecipeError if `run.dir` is in a bucket."""
    if in_bucket(text):
        raise RecipeError(f"run.dir: {text} is in a bucket; give --out, or a local run.dir")
    return Path(text.rstrip("/"))


def require_file(recipe: str) -> None:
    """Raise RecipeError for a recipe from a pipe or standard input, which can be read only once.
    For commands that start processes which read the recipe again."""
    if recipe.startswith(("/dev/stdin", "/dev/fd/", "/proc/")) or Path(recipe).is_fifo():
        raise RecipeError(
            f"{recipe}: the recipe is read again whenever a rank starts, and this can be read only "
            "once; write it to a file, and name that"
        )


def add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="recipe overrides")


def add_fields(parser: argparse.ArgumentParser, options: type, *names: str) -> None:
    """Add an option for each field of a dataclass, with its type, default, and docstring as help.
    If `names` are given, add only these fields, of which none may be bool; options that are absent
    from the command line are then None."""
    # Docstrings of fields exist only in the source.
    tree: Any = ast.parse(inspect.getsource(options))
    meanings = {}
    for pair in pairwise(tree.body[0].body):
        match pair:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                meanings[name] = " ".join(text.split())
    hints = get_type_hints(options)
    for field in fields(options):
        if names and field.name not in names:
            continue
        kinds = (hints[field.name], *get_args(hints[field.name]))
        flag, meaning = f"--{field.name.replace('_', '-')}", meanings[field.name].replace("%", "%%")
        if hints[field.name] is bool:
            parser.add_argument(flag, action="store_true", help=meaning)
            continue
        words = [choice for choice in kinds if isinstance(choice, str)]
        kind = next((kind for kind in (int, float) if kind in kinds), str)
        default = None if names else field.default
        meaning += "" if default is None else f" (default {default})"
        metavar = None if words else {int: "N", float: "X", str: "TEXT"}[kind]
        parser.add_argument(
            flag,
            type=whole_number if kind is int else kind,
            choices=words or None,
            default=default,
            metavar=metavar,
            help=meaning,
        )


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return number


whole_number = at_least(0)


def add_step(add_argument: Callable[..., object]) -> None:
    """Add `--step` by `add_argument` of a parser or a group."""

    def which(text: str) -> int | str:
        return text if text == "best" else whole_number(text)

    meaning = "checkpoint of a run: step N, or the best by checkpoint.best_by (default: the newest)"
    add_argument("--step", type=which, metavar="N|best", help=meaning)


def write_output(file: Path, text: str) -> None:
    """Write a special file, such as /dev/stdout, or replace a regular one without following a link,
    which another user may have placed there. Raises OSError if the file cannot be written."""
    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8")
    else:
        write_whole(file, text)


def write_new(file: Path, text: str, otherwise: str) -> None:
    """Write a new file. Raises RecipeError if the file exists (`otherwise` names the remedy), or
    cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as output:
            output.write(text)
    except FileExistsError:
        raise RecipeError(f"{file}: already exists; {otherwise}") from None
    except OSError as error:
        raise RecipeError(f"{file}: this file cannot be written: {error.strerror}") from None
