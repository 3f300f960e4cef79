"""What stands in a Markdown page: sentences, commands, links, paths."""

import re

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


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


def paths(text: str) -> list[str]:
    """Files with a folder, between backticks."""
    file = r"(?<![\w/.<-])[\w-]+(?:/[\w-]+)+\.(?:py|sh|yaml)\b"
    return [path for span in code(text) for path in re.findall(file, span)]


def links(text: str) -> list[str]:
    """Where links and pictures lead to."""
    return re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", text), flags=re.M)
    kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in kept}
