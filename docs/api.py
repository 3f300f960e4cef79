"""docs/api.md: the public names of each package and adapter, with signatures.

`python docs/api.py` writes it anew; `make docs` runs that, and tests/test_docs.py compares.
"""

import ast
import importlib
import inspect
from dataclasses import is_dataclass
from itertools import pairwise
from pathlib import Path

from trainer.text import wrapped

PACKAGES = ("trainer", "checkpointing", "elastic")
ADAPTERS = (
    *(f"checkpointing.adapters.{name}" for name in ("dcp", "fabric", "hugging_face", "lightning")),
    *(f"elastic.adapters.{name}" for name in ("hugging_face", "lightning")),
)
"""Each needs the library that it adapts to."""
PAGE = Path(__file__).parent / "api.md"


def docstring(package: str, name: str) -> str:
    """That of a public name; of a constant, the string that stands below it."""
    home = importlib.import_module(package)
    value = getattr(home, name)
    if callable(value):
        own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        return inspect.cleandoc(own or "")
    source = inspect.getsource(importlib.import_module(f"{package}.{home._HOME[name]}"))
    body = ast.parse(source).body
    for before, after in pairwise(body):
        match before, after:
            case (
                ast.Assign(targets=[ast.Name(id=found)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ) if found == name:
                return inspect.cleandoc(text)
    return ""


def shown(default: object) -> object:
    """A default whose repr is short, and the same every day."""
    if inspect.isfunction(default):
        return Shown(default.__name__)
    if is_dataclass(default):
        return Shown(f"{type(default).__name__}()")
    return default


class Shown:
    """Has a given repr."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def entry(package: str, name: str) -> str:
    """A list item: what it is, and the first paragraph of its docstring."""
    value = getattr(importlib.import_module(package), name)
    said = docstring(package, name).partition("\n\n")[0].replace("\n", " ")
    if not callable(value):
        return wrapped(f"- `{name} = {value!r}` {said}")
    kind = "class " if inspect.isclass(value) else ""
    parameters = "()"
    if not (inspect.isclass(value) and issubclass(value, Exception)):
        signature = inspect.signature(value)
        bare = [
            one.replace(annotation=one.empty, default=shown(one.default))
            for one in signature.parameters.values()
        ]
        parameters = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return wrapped(f"- `{kind}{name}{parameters}` {said}")


def page() -> str:
    """The whole page."""
    lines = [
        "# Public names",
        "",
        "Made by `make docs` from `__all__` of each package and adapter.",
        "",
    ]
    for package in (*PACKAGES, *ADAPTERS):
        names = importlib.import_module(package).__all__
        lines += [f"## {package}", "", *(entry(package, name) for name in sorted(names)), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
