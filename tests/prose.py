"""What stands in a Markdown page: sentences, commands, links, paths."""

import itertools
import re
from collections.abc import Iterable

from docs.website import slug

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
PYTHON = re.compile(r"(?<! -->\n)^```python\n(.*?)^```", re.M | re.S)
"""A block that is not made from a file of examples/."""
PROGRAMS = ("SOAK=1", "docker", "git", "hf", "make", "perdure", "pip", "python", "sbatch", "source")
PROGRAMS += ("torchrun", "unzip")
PLACEHOLDER = re.compile(r"[A-Z]+(\.\w+)?")


def sentences(text: str) -> list[str]:
    """Sentences of running text, without headings, tables and code blocks. A list item is one.
    What stands between backticks is a word."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("\n\n", text), flags=re.S)
    lines = [line for line in text.split("\n") if not re.match(r"\s*(#|\||!\[)", line)]
    text = re.sub(r"`[^`]*`", lambda code: re.sub(r"[.!?\s]", "_", code[0]), "\n".join(lines))
    text = re.sub(r"\]\([^)]*\)", "]", text)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        flat = " ".join(re.sub(r"^\s*(?:[-*]|\d+\.) ", "", block).split())
        found += re.split(r"(?<=[.!?])(?:[*_)\]]*)\s+", flat)
    return [sentence for sentence in found if words(sentence)]


def words(sentence: str) -> int:
    """Words of a sentence; signs alone are none."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def blocks(text: str) -> list[list[str]]:
    """The commands of each block of a shell: of `sh` all lines, of `console` those after "$ "."""
    found = []
    for language, body in FENCE.findall(text):
        if language == "sh":
            found.append(commands(body.splitlines()))
        elif language == "console":
            typed = re.sub(r"^(?!\$ |    ).*\n", "", body, flags=re.M)  # less what is printed
            found.append(commands(re.sub(r"^\$ ", "", typed, flags=re.M).splitlines()))
    return found


def commands(lines: list[str]) -> list[str]:
    """Lines of a shell → whole commands, without comments and continuations."""
    found, part = [], ""
    for line in lines:
        part += re.sub(r"(^|\s+)#\s.*$", "", line).strip()
        if part.endswith("\\"):
            part = part[:-1]
        elif part.count("'") % 2 or part.count("{") != part.count("}"):
            part += "\n"
        elif part:
            found.append(part)
            part = ""
    return found


def code(text: str) -> list[str]:
    """What stands between backticks in running text and tables."""
    found = re.findall(r"`([^`]+)`", FENCE.sub("", text))
    return [" ".join(span.replace("\\|", "|").split()) for span in found]


def typed(text: str) -> list[str]:
    """The commands in running text and tables: a program, and what it is told."""
    return [span for span in code(text) if " " in span and span.split()[0] in PROGRAMS]


def stands_for(span: str, commands: Iterable[str]) -> bool:
    """Whether a command in running text is short for some of `commands`: it names no more than a
    subcommand, or has RECIPE, [and more], this|that or … in the place of what they have there."""
    words = re.sub(r" \[.*?\]", "", span).split()
    named = all(re.fullmatch(r"[a-z][a-z-]*", word) for word in words) and words[0] == "perdure"
    if not named and not any(
        PLACEHOLDER.fullmatch(w) or "…" in w or "|" in w for w in span.split()
    ):
        return False
    ways = itertools.product(*(word.split("|") for word in words))
    return all(any(_within(way, command.split()) for command in commands) for way in ways)


def _within(words: Iterable[str], command: Iterable[str]) -> bool:
    """Whether the words stand in a command, in that order."""
    rest = iter(command)
    return all(any(re.fullmatch(_pattern(word), other) for other in rest) for word in words)


def _pattern(word: str) -> str:
    parts = (r"\S+" if PLACEHOLDER.fullmatch(part) else re.escape(part) for part in word.split("…"))
    return r"\S*".join(parts)


def paths(text: str) -> list[str]:
    """Files with a folder, between backticks."""
    file = r"(?<![\w/.<-])[\w-]+(?:/[\w-]+)+\.(?:py|sh|yaml)\b"
    return [path for span in code(text) for path in re.findall(file, span)]


def links(text: str) -> list[str]:
    """Where links and pictures lead to."""
    return re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    return {slug(title) for title in re.findall(r"^#+ (.*)$", FENCE.sub("", text), flags=re.M)}
