"""A function of the user's own, which a recipe names as `package.module:function`. Imports no
torch."""

import difflib
import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trainer.recipe.yaml_tree import RecipeError, dotted

PATTERN = re.compile(r"[\w.]+:[\w.]+")
_HOME = Path(__file__).parents[2]
_OURS = tuple(f"{_HOME / name}{os.sep}" for name in ("trainer", "elastic", "checkpointing"))
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_STDLIB = f"{sysconfig.get_path('stdlib')}{os.sep}"
_TORCH = f"-packages{os.sep}torch{os.sep}"
_WRONG = (
    *(TypeError, ValueError, LookupError, NameError, AttributeError, ImportError, AssertionError),
    *(FileNotFoundError, NotADirectoryError, PermissionError, NotImplementedError, SyntaxError),
)
"""Errors of code or input that is wrong, whatever they say."""
CIRCUMSTANCES = re.compile(
    r"cuda|gpu|device|triton|nccl|gloo|process group|dist|peer|connect|memory|timed? ?out",
    re.IGNORECASE,
)
"""Words of errors that another place or moment may not have."""


class OwnCodeError(RecipeError):
    """The user's code failed in a run that had begun, and will do so at every start."""


def call_factory(
    key: str, name: str, options: Mapping[str, Any], *given: Any, **offered: Any
) -> Any:
    """What the function returns.

    Args:
        key: of the recipe, such as `model.factory`; that of the options ends in `_options`.
        name: module:function.
        options: keyword arguments.
        given: what it gets besides.
        offered: what it gets by keyword where a parameter without a default has that name.

    Raises:
        RecipeError: it is not there, does not take these options, fails for what is wrong, or
            returns nothing.
    """
    factory = import_factory(key, name)
    if not callable(factory):
        raise RecipeError(f"{key}: {name} is of type {type(factory).__name__}, no function")
    if offered:
        required = {one.name for one in _parameters(factory) if one.default is one.empty}
        options = {**{one: value for one, value in offered.items() if one in required}, **options}
    try:
        with refusing(key, name):
            result = factory(*given, **options)
    except RecipeError as error:
        call = error.__cause__
        called = getattr(factory, "__qualname__", "none")  # or its __init__, by validate_call
        if isinstance(call, ValidationError) and call.title.startswith(called):
            wrong = (f"{dotted(one['loc'])}: {_explain(one)}" for one in call.errors())
            raise RecipeError("\n".join(f"{key}_options.{one}" for one in wrong)) from call
        if not isinstance(call, TypeError) or place_in(call):
            raise
        parts = [*(f"a {type(one).__name__}" for one in given), *(f"{one}=" for one in options)]
        what = ", ".join(parts) or "nothing"
        raise RecipeError(f"{key}_options: {name} is called with {what}, but: {call}") from call
    if result is None:
        raise RecipeError(f"{key}: {returned_none(name, factory)}")
    return result


def with_defaults(key: str, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a function with the defaults of those that are left out, as JSON values."""
    import json  # imported only where a run is resumed

    parameters = _parameters(import_factory(key, name))
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
    return dict(json.loads(json.dumps({**defaults, **options}, default=str)))


def _parameters(factory: Any) -> list[inspect.Parameter]:
    """The named parameters of a function or class; none, if Python does not know them."""
    try:
        every = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one for one in every if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]


def _explain(problem: ErrorDetails) -> str:
    what = f"{problem['msg'][0].lower()}{problem['msg'][1:]}"
    # Where an argument is missing, pydantic shows all others.
    return what if "missing" in problem["type"] else f"{what}, but it is {problem['input']!r:.80}"


def returned_none(name: str, factory: Any) -> str:
    """What to say of a function that returned None."""
    code = getattr(factory, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{name}{place} returned None (is its `return` missing?)"


@contextmanager
def refusing(key: str, what: str) -> Generator[None, None, None]:
    """Code of the user's that fails for what is wrong, and not for want of something that may be
    there at the next start, is wrong input.

    Args:
        key: of the recipe, which names the code.
        what: fails; the message goes on after it.

    Raises:
        RecipeError: with the place in the user's code.
    """
    from trainer.recipe.errors import known_errors  # imported only where there is such code

    try:
        yield
    except known_errors():  # each says by itself what is wrong
        raise
    except (Exception, SystemExit) as error:
        if not is_wrong(error):
            raise
        raise RecipeError(f"{key}: {what} {failure(error)}") from error


def import_factory(key: str, name: str) -> Any:
    """The function, or class, itself.

    Raises:
        RecipeError: it is not there, or its module fails for what is wrong.
    """
    module, _, function = name.partition(":")
    look_here_too()
    try:
        with refusing(key, f"importing {name}"):
            found = importlib.import_module(module)
    except RecipeError as error:
        missing = error.__cause__
        inside = isinstance(missing, ModuleNotFoundError) and f"{module}.".startswith(
            f"{missing.name}."
        )
        if not inside or place_in(missing):  # what the file itself imports is not there
            raise
        near = _nearest(module, [path.stem for path in Path.cwd().glob("*.py")])
        raise RecipeError(
            f"{key}: cannot import {name}: {missing}; {near}is it in the working directory, or its "
            "folder on PYTHONPATH?"
        ) from missing
    try:
        return getattr(found, function)
    except AttributeError:
        names = [one for one in vars(found) if not one.startswith("_") and _is_own(found, one)]
        near, known = _nearest(function, names), ", ".join(names[:8]) or "no names"
        file = getattr(found, "__file__", None) or module
        raise RecipeError(f"{key}: {file} has no {function}; {near}it has {known}") from None


def _is_own(module: Any, name: str) -> bool:
    """Whether a name of a module is no import."""
    value = getattr(module, name)
    imported = inspect.isclass(value) or inspect.isroutine(value)
    return not inspect.ismodule(value) and not (
        imported and not str(value.__module__).startswith(module.__name__)
    )


def _nearest(name: str, known: list[str]) -> str:
    by_lower = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), by_lower, 1)
    return f"did you mean {by_lower[near[0]]}? " if near else ""


def is_wrong(error: BaseException) -> bool:
    """Whether the code or its input is wrong, and not the place or the moment."""
    if isinstance(error, _WRONG):
        return True
    passing = isinstance(error, (OSError, MemoryError))
    return not passing and not CIRCUMSTANCES.search(f"{type(error).__name__}: {error}")


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
    said = error.msg if isinstance(error, SyntaxError) else error
    what = f"{type(error).__name__}: {said}".partition("\n")[0]
    return f"fails at {place}: {what}" if place else f"fails: {what}"


def place_in(error: BaseException | None) -> str:
    """File and line of the innermost frame of the user's code, which ours has called; empty if
    there is none."""
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    called = list(dropwhile(lambda frame: not frame.filename.startswith(_OURS), frames))
    others = [frame for frame in called if not frame.filename.startswith((*_OURS, "<"))]
    installed = [frame for frame in others if _INSTALLED.search(frame.filename)]
    own = [frame for frame in others if frame not in installed and _STDLIB not in frame.filename]
    users = own or [frame for frame in installed if _TORCH not in frame.filename]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else ""
