"""docs/glossary.md: each public class, its module, and the first sentence of its docstring.

`python docs/glossary.py` writes it anew; `make docs` runs that, and tests/test_docs.py compares.
"""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("trainer", "elastic", "checkpointing")
PAGE = ROOT / "docs/glossary.md"
SENTENCE = re.compile(r".*?[.!?](?=\s+[A-Z`[]|$)|.*")


@cache
def classes(package: str) -> list[tuple[str, str, str]]:
    """(class, module, first sentence) of the public classes of a package, without importing it."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.append((node.name, module, sentence(ast.get_docstring(node) or "")))
    return found


def sentence(docstring: str) -> str:
    """The first sentence of a docstring, in one line."""
    found = SENTENCE.match(" ".join(docstring.split()))
    return found[0] if found else ""


def page() -> str:
    """The whole page: a table for each package, in the order of names."""
    lines = [
        "# Glossary",
        "",
        "The public classes of each package, made by `make docs`. No two share a name, but for",
        "adapters: these are named after the classes of other libraries that they extend.",
        "",
    ]
    for package in PACKAGES:
        lines += [f"## {package}", "", "| class | module | |", "|---|---|---|"]
        for name, module, text in sorted(classes(package), key=lambda row: row[0].lower()):
            lines.append(f"| `{name}` | `{module}` | {text.replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
