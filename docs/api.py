"""docs/api.md: the public names of elastic and checkpointing, with signatures.

`python docs/api.py` writes it anew; `make docs` runs that, and tests/test_docs.py compares.
"""

import importlib
import inspect
from pathlib import Path

PACKAGES = ("checkpointing", "elastic")
PAGE = Path(__file__).parent / "api.md"


def entry(package: str, name: str) -> str:
    """A line: what it is, and the first sentence of its docstring."""
    value = getattr(importlib.import_module(package), name)
    if not callable(value):
        return f"- `{name} = {value!r}`"
    kind = "class " if inspect.isclass(value) else ""
    parameters = "()"
    if not (inspect.isclass(value) and issubclass(value, Exception)):
        signature = inspect.signature(value)
        bare = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
        signature = signature.replace(parameters=bare, return_annotation=signature.empty)
        parameters = str(signature)
    said = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ")
    return f"- `{kind}{name}{parameters}` {said}"


def page() -> str:
    """The whole page."""
    lines = ["# Public names", "", "Made by `make docs` from `__all__` of each package.", ""]
    for package in PACKAGES:
        names = importlib.import_module(package).__all__
        lines += [f"## {package}", "", *(entry(package, name) for name in sorted(names)), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
