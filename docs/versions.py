"""docs/versions.md: the releases of torch and Python, and what was run on each.

`python docs/versions.py` writes it anew; `make docs` runs that, and tests/test_docs.py compares.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from trainer.text import markdown, wrapped

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "versions.md"
RESULTS = ROOT / "benchmarks" / "results"
TITLE = """# Versions

`pyproject.toml` admits Python {python} and torch {torch}. What was run on which stands
below. Each line is of an environment of its own.
"""
TESTS = """
- *Contract*: what Perdure relies on in private parts of torch.
- *Tests*: the test command, without lint. A skipped test needs what the machine does not have.

`python -m benchmarks.versions` in an environment runs both, and replaces its line in
[versions.json](../benchmarks/results/versions.json).
"""
FAKE = """
## On a CUDA runtime without a GPU

`make fakecuda` trains with torch's CUDA build. It shows the order of copies and exchanges, never
speed.

| torch | cases that pass | commit |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (torch,) = (one for one in project["dependencies"] if re.match(r"torch\W", one))
    title = TITLE.format(
        python=f"`{project['requires-python']}`", torch=f"`{torch.removeprefix('torch')}`"
    )
    lines = json.loads((RESULTS / "versions.json").read_text(encoding="utf-8"))
    columns = ["torch", "Python", "contract", "tests", "date", "commit"]
    table = markdown(columns, [cells(line) for line in lines])
    failed = [text for line in lines for text in failures(line)]
    return "\n".join([title, *table, "", *failed]) + "\n" + TESTS + FAKE + "\n".join(fakes()) + "\n"


def cells(line: dict[str, Any]) -> list[str]:
    """The row of an environment."""
    ended = [counts(line["contract"]), counts(line["tests"])]
    return [line["torch"], line["python"], *ended, line["date"], line["commit"]]


def counts(found: dict[str, Any]) -> str:
    """How many tests ended in which way."""
    some = {"failed": len(found["failed"]), "skipped": found["skipped"]}
    return ", ".join([f"{found['passed']} passed", *(f"{n} {how}" for how, n in some.items() if n)])


def failures(line: dict[str, Any]) -> list[str]:
    """A list item for each test that failed."""
    names = [*line["contract"]["failed"], *line["tests"]["failed"]]
    return [wrapped(f"- Failed on torch {line['torch']}: `{name}`") for name in names]


def fakes() -> list[str]:
    """A row for each table of `make fakecuda`."""
    rows = []
    for path in sorted(RESULTS.glob("fake-cuda-*.md")):
        said = re.search(
            r"(\d+ of \d+) passed\. Commit (.*), torch (\S+)\. ", path.read_text(encoding="utf-8")
        )
        assert said, path
        passed, commit, torch = said.groups()
        link = path.relative_to(ROOT)
        rows.append(f"| {torch} | [{passed}](../{link}) | {commit} |")
    return rows


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
