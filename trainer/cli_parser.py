"""The parser of `perdure`: says what may have been meant, and which versions these are."""

import argparse
import difflib
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that names the command, or the choice of an option, that a mistyped one
    resembles. Python's own does so from 3.14 on, if asked."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message; exit code 2."""
        wrong = re.search(r"invalid choice: '(.*?)'.* \(choose from (.*)\)$", message)
        if wrong:
            close = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), n=1)
            message += f"; did you mean '{close[0]}'?" if close else ""
        super().error(message)


class Version(argparse.Action):
    """Prints the versions, and imports nothing of what it names."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Print and leave."""
        python = sys.version.split()[0]
        torch = _version("torch")
        parser.exit(message=f"perdure {_version('perdure')} (Python {python}, torch {torch})\n")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
