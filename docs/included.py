"""The files in examples/ as the pages show them.

`python docs/included.py` writes them anew, each below its mark, `<!-- examples/NAME -->`;
`make docs` runs that, and tests/test_docs.py compares.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHOWN = re.compile(r"(<!-- (examples/[\w.]+) -->\n```(?:python|yaml)\n).*?^```", re.M | re.S)


def with_examples(page: str) -> str:
    """The page with each file below its mark."""

    def shown(found: re.Match[str]) -> str:
        return f"{found[1]}{(ROOT / found[2]).read_text(encoding='utf-8')}```"

    return SHOWN.sub(shown, page)


if __name__ == "__main__":
    for path in sorted((ROOT / "docs").glob("*.md")):
        path.write_text(with_examples(path.read_text(encoding="utf-8")), encoding="utf-8")
