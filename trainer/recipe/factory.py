"""Imports and calls a user's functions, which a recipe names as `package.module:function`. Imports
no torch."""

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
# Errors of other types may also come from a busy machine or a lost peer.
_WRONG = (
    *(TypeError, ValueError, LookupError, NameError, AttributeError, ImportError, AssertionError),
    *(FileNotFoundError, NotADirectoryError, PermissionError, NotImplementedError, SyntaxError),
)
"""Types of errors that always show a fault in code or input."""
CIRCUMSTANCES = re.compile(
    r"cuda|gpu|device|triton|nccl|gloo|process group|dist|peer|connect|memory|timed? ?out",
    re.IGNORECASE,
)
"""Matches messages of errors that may not occur on another machine or at another time."""


class RecipeFactoryError(RecipeError):
    """The user's code failed after the first step, and will fail again at every start."""


def call_factory(
    key: str, name: str, options: Mapping[str, Any], *given: Any, **offered: Any
) -> Any:
    """Call a user's function, and return its result.

    Args:
        key: recipe key of the function, such as `model.factory`. The key of its options ends in
            `_options`.
        name: the function, as module:function.
        options: keyword arguments from the recipe.
        given: positional arguments.
        offered: keyword arguments that are passed if the function has parameters of these names
            without a default.

    Raises:
        RecipeError: the function is missing, does not accept these arguments, fails, or returns
            None.
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
        # pydantic's validate_call names the function or, for a class, its __init__.
        called = getattr(factory, "__qualname__", "none")
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
    """Return the options of a function as JSON values. Options that are not given have the defaults
    of the function's parameters."""
    import json  # imported only if a run is resumed

    parameters = _parameters(import_factory(key, name))
    defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
    return dict(json.loads(json.dumps({**defaults, **options}, default=str)))


def _parameters(factory: Any) -> list[inspect.Parameter]:
    """Return the parameters of a function or class that can be passed by name; [] if Python cannot
    determine its signature."""
    try:
        every = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one for one in every if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]


def _explain(problem: ErrorDetails) -> str:
    what = f"{problem['msg'][0].lower()}{problem['msg'][1:]}"
    # For a missing argument pydantic's input is all other arguments, which is not shown.
    return what if "missing" in problem["type"] else f"{what}, but it is {problem['input']!r:.80}"


def returned_none(name: str, factory: Any) -> str:
    """Return the message for a function that returned None."""
    code = getattr(factory, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{name}{place} returned None (is its `return` missing?)"


@contextmanager
def refusing(key: str, what: str) -> Generator[None, None, None]:
    """Context that converts a failure of the user's code to RecipeError, which names the place in
    the code, unless the cause may be gone at the next start. `key`: recipe key that names the code.
    `what`: subject of the message, such as "the step of NAME"."""
    from trainer.recipe.errors import known_errors  # imported only if the recipe names user's code

    try:
        yield
    except known_errors():  # these errors explain themselves
        raise
    # SystemExit, because a user's code may call sys.exit.
    except (Exception, SystemExit) as error:
        if not is_wrong(error):
            raise
        raise RecipeError(f"{key}: {what} {failure(error)}") from error


def import_factory(key: str, name: str) -> Any:
    """Import the function or class that a key names. Raises RecipeError if it or its module is
    missing, or importing the module fails."""
    module, _, function = name.partition(":")
    look_here_too()
    try:
        with refusing(key, f"importing {name}"):
            imported = importlib.import_module(module)
    except RecipeError as error:
        missing = error.__cause__
        # True if the named module itself, or a package that contains it, is missing.
        inside = isinstance(missing, ModuleNotFoundError) and f"{module}.".startswith(
            f"{missing.name}."
        )
        if not inside or place_in(missing):  # missing is a module that the user's module imports
            raise
        near = _nearest(module, [path.stem for path in Path.cwd().glob("*.py")])
        raise RecipeError(
            f"{key}: cannot import {name}: {missing}; {near}is it in the working directory, or its "
            "folder on PYTHONPATH?"
        ) from missing
    try:
        return getattr(imported, function)
    except AttributeError:
        names = [
            one for one in vars(imported) if not one.startswith("_") and _is_own(imported, one)
        ]
        near, known = _nearest(function, names), ", ".join(names[:8]) or "no names"
        file = getattr(imported, "__file__", None) or module
        raise RecipeError(f"{key}: {file} has no {function}; {near}it has {known}") from None


def _is_own(module: Any, name: str) -> bool:
    """Return whether a name of a module is neither a module, nor a class or function that is
    imported from elsewhere."""
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
    """Return whether an error is a fault of code or input, not of the machine or the moment."""
    if isinstance(error, _WRONG):
        return True
    passing = isinstance(error, (OSError, MemoryError))
    return not passing and not CIRCUMSTANCES.search(f"{type(error).__name__}: {error}")


def check_takes(key: str, name: str, given: str) -> None:
    """Raise RecipeError if a function does not exist, or does not accept one argument. `given`: the
    argument in words."""
    function = import_factory(key, name)
    try:
        inspect.signature(function).bind(given)
    except ValueError:  # builtins have no signature
        return
    except TypeError as error:
        raise RecipeError(f"{key}: {name} is called with {given} alone: {error}") from error


def look_here_too() -> None:
    """Let modules be imported from the working directory."""
    if os.getcwd() not in sys.path:
        # Appended last, so that no file in the working directory hides a library.
        sys.path.append(os.getcwd())


def failure(error: BaseException) -> str:
    """Describe an error as `fails at FILE:LINE: Kind: first line of the message`. The place is left
    out if it is not in the user's code."""
    place = place_in(error)
    said = error.msg if isinstance(error, SyntaxError) else error
    what = f"{type(error).__name__}: {said}".partition("\n")[0]
    return f"fails at {place}: {what}" if place else f"fails: {what}"


def place_in(error: BaseException | None) -> str:
    """Return file and line of the innermost frame of the user's code that Perdure called; "" if
    there is none."""
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__ if error else None)
    called = list(dropwhile(lambda frame: not frame.filename.startswith(_OURS), frames))
    others = [frame for frame in called if not frame.filename.startswith((*_OURS, "<"))]
    installed = [frame for frame in others if _INSTALLED.search(frame.filename)]
    own = [frame for frame in others if frame not in installed and _STDLIB not in frame.filename]
    # The user's own file is the most helpful place; an installed package is second.
    users = own or [frame for frame in installed if _TORCH not in frame.filename]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else ""
