"""The site that `make site` builds: README.md and docs/, with the files that they link to.

mkdocs calls `on_config`, `on_files` and `on_page_markdown`; mkdocs.yml names this file. Pages keep
the links that GitHub follows. On the site README.md is the first page, and files outside of docs/
lie where they do in the repository, those of code as pages.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIRST = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
CODE = {".py": "python", ".yaml": "yaml", ".sh": "sh"}
_LINK = re.compile(r"^```.*?^```|\]\(([^)\s]+)\)", re.M | re.S)
"""A fenced block, or the target of a link or picture."""
_SPAN = re.compile(r"`[^`\n]+`")


def slug(title: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def targets(path: str, text: str) -> Iterator[str]:
    """The files that a page of this repository links to, as paths below ROOT."""
    for found in _LINK.finditer(text):
        if found[1] and "://" not in found[1] and (target := found[1].partition("#")[0]):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def site_path(path: str) -> str:
    """Where a file of this repository is on the site, as mkdocs counts: before it makes HTML."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") + (".md" if Path(path).suffix in CODE else "")


def linked_as_on_site(path: str, text: str) -> str:
    """The text of a page, with links that lead from its place on the site."""
    folder = posixpath.dirname(site_path(path))

    def changed(found: re.Match[str]) -> str:
        link = found[1]
        if not link or "://" in link or link.startswith("#"):
            return found[0]
        _, hash_sign, anchor = link.partition("#")
        (target,) = targets(path, found[0])
        return f"]({posixpath.relpath(site_path(target), folder or '.')}{hash_sign}{anchor})"

    return _LINK.sub(changed, text)


def with_bars(text: str) -> str:
    """The text with `a|b` for `a\\|b` in tables: Python-Markdown knows a bar in code by itself."""
    rows = text.split("\n")
    for number, row in enumerate(rows):
        if row.startswith("|"):
            rows[number] = _SPAN.sub(lambda span: span[0].replace("\\|", "|"), row)
    return "\n".join(rows)


def page_of(path: str) -> str:
    """A file of code as a page, which the search leaves out."""
    text = (ROOT / path).read_text(encoding="utf-8")
    head = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n"
    return f"{head}~~~~~~{CODE[Path(path).suffix]}\n{text}~~~~~~\n"


def on_config(config: Any) -> None:
    """Give headings GitHub's anchors, and leave Mermaid's pictures to the theme."""
    from pymdownx.superfences import fence_code_format

    mermaid = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [mermaid]}


def on_files(files: Any, config: Any) -> None:
    """Add README.md, and all that it and the pages lead to."""
    from mkdocs.structure.files import File

    pages = [f"docs/{file.src_uri}" for file in files if file.is_documentation_page()]
    ahead, known = [*pages, *FIRST], {*pages}
    while ahead:
        path = ahead.pop()
        if not (ROOT / path).is_file():
            continue  # mkdocs reports the link
        if path not in known and not path.startswith("docs/"):
            source: dict[str, Any] = {"abs_src_path": str(ROOT / path)}
            if Path(path).suffix in CODE:
                source = {"content": page_of(path)}
            files.append(File.generated(config, site_path(path), **source))
        known.add(path)
        if path.endswith(".md"):
            text = (ROOT / path).read_text(encoding="utf-8")
            ahead += {*targets(path, text)} - known


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page as mkdocs is to read it."""
    place = page.file.src_uri
    places = ("README.md" if place == "index.md" else place, f"docs/{place}")
    path = next((path for path in places if (ROOT / path).exists()), None)
    return with_bars(linked_as_on_site(path, markdown)) if path else markdown  # else code
