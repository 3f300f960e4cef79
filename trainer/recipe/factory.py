"""A function of the user's own, which a recipe names as `package.module:function`. Imports no
torch."""

import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.recipe.yaml_tree import RecipeError

PATTERN = re.compile(r"[\w.]+:[\w.]+")
_HOME = Path(__file__).parents[2]
_OURS = tuple(f"{_HOME / name}{os.sep}" for name in ("trainer", "elastic", "checkpointing"))
_WRONG = (
    *(TypeError, ValueError, LookupError, NameError, AttributeError, ImportError, AssertionError),
    *(FileNotFoundError, NotADirectoryError, PermissionError, NotImplementedError, SyntaxError),
)
"""Errors of code or input that is wrong; others may be gone at the next start."""
CIRCUMSTANCES = re.compile(
    r"cuda|gpu|device|triton|nccl|gloo|process group|distributed|peer|connection|memory|timed? ?out"
    r"|fake|meta tensor|NoneType",
    re.IGNORECASE,
)
"""Words of errors that another place or moment may not have."""


def call_factory(key: str, name: str, options: Mapping[str, Any], *given: Any) -> Any:
    """What the function returns.

    Args:
        key: of the recipe, such as `model.factory`; that of the options ends in `_options`.
        name: module:function.
        options: keyword arguments.
        given: what it gets besides.

    Raises:
        RecipeError: it is not there, does not take these options, or fails for what is wrong.
    """
    factory = import_factory(key, name)
    try:
        return factory(*given, **options)
    except Exception as error:
        if not _is_wrong(error):
            raise
        if isinstance(error, TypeError) and not place_in(error):  # the call itself
            raise RecipeError(f"{key}_options: {name} was called with them: {error}") from error
        raise RecipeError(f"{key}: {name} {failure(error)}") from error


def import_factory(key: str, name: str) -> Any:
    """The function, or class, itself.

    Raises:
        RecipeError: it is not there, or its module fails for what is wrong.
    """
    module, _, function = name.partition(":")
    look_here_too()
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise RecipeError(
            f"{key}: cannot import {name}: {error}; is it in the working directory, or its "
            "folder on PYTHONPATH?"
        ) from error
    except Exception as error:
        if not _is_wrong(error):
            raise
        raise RecipeError(f"{key}: importing {name} {failure(error)}") from error


def _is_wrong(error: Exception) -> bool:
    plain = type(error) is RuntimeError and not CIRCUMSTANCES.search(str(error))
    return plain or isinstance(error, _WRONG)


def check_takes(key: str, name: str, given: str) -> None:
    """That the function is there, and can be called with one argument, such as "an event".

    Raises:
        RecipeError: it is not, or cannot.
    """
    function = import_factory(key, name)
    try:
        inspect.signature(function).bind(given)
    except ValueError:  # a builtin does not say what it takes
        return
    except TypeError as error:
        raise RecipeError(f"{key}: {name} is called with {given} alone: {error}") from error


def look_here_too() -> None:
    """Have modules of the user's be found in the working directory. Last: nothing in it is to be
    taken for a library."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def failure(error: BaseException) -> str:
    """`fails at FILE:LINE: Kind: first line of what it says`, the place if it is in the user's
    code."""
    place = place_in(error)
    what = f"{type(error).__name__}: {error}".partition("\n")[0]
    return f"fails at {place}: {what}" if place else f"fails: {what}"


def place_in(error: BaseException) -> str:
    """File and line of the innermost frame of the user's code, which ours has called; empty if
    there is none."""
    torch = sys.modules.get("torch")
    libraries = (f"{Path(str(torch.__file__)).parent}{os.sep}",) if torch else ()
    frames = traceback.extract_tb(error.__traceback__)
    ours = [number for number, frame in enumerate(frames) if frame.filename.startswith(_OURS)]
    users = [
        frame
        for frame in frames[ours[-1] + 1 if ours else 0 :]
        if not frame.filename.startswith((*libraries, "<"))
    ]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else ""
