"""The picture in docs/design.md: the rooms of each package, and which imports which.

`python docs/rooms.py` writes it anew; `make docs` runs that, and tests/test_docs.py compares.
"""

from pathlib import Path

import grimp

PACKAGES = ("trainer", "elastic", "checkpointing", "lab")
PAGE = Path(__file__).parent / "design.md"
BEGIN, END = "<!-- made by docs/rooms.py -->\n", "<!-- end of what docs/rooms.py made -->\n"


def imports() -> dict[str, set[str]]:
    """room → the rooms that its modules import. A room is a folder or a file of a package."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    rooms: dict[str, set[str]] = {}
    for module in graph.modules:
        mine = rooms.setdefault(room(module), set())
        mine |= {room(other) for other in graph.find_modules_directly_imported_by(module)}
    return {mine: others - {mine} for mine, others in rooms.items()}


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def reachable(start: str, arrows: dict[str, set[str]]) -> set[str]:
    """All that `start` leads to over one arrow or more."""
    found: set[str] = set()
    ahead = set(arrows[start])
    while ahead:
        found |= ahead
        ahead = set().union(*(arrows[name] for name in ahead)) - found
    return found


def direct(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that follow from others.

    Raises ValueError if rooms import each other in a circle.
    """
    below = {name: reachable(name, arrows) for name in arrows}
    circle = sorted(name for name in arrows if name in below[name])
    if circle:
        raise ValueError(f"rooms import each other in a circle: {', '.join(circle)}")
    return {
        name: others - set().union(*(below[other] for other in others))
        for name, others in arrows.items()
    }


def picture() -> str:
    """A Mermaid flowchart: a box for each package with its rooms, an arrow for each import."""
    rooms = imports()
    lines = ["```mermaid", "flowchart TD"]
    for package in PACKAGES:
        inside = sorted(name for name in rooms if name.startswith(package + "."))
        arrows = {name: rooms[name] & set(inside) for name in inside}
        lines.append(f"  subgraph {package}")
        lines += [f'    {name}["{name.split(".")[1]}"]' for name in inside]
        for name, others in direct(arrows).items():
            lines += [f"    {name} --> {other}" for other in sorted(others)]
        lines.append("  end")
    pairs = {
        (mine.split(".")[0], other.split(".")[0])
        for mine, others in rooms.items()
        for other in others
    }
    lines += [f"  {mine} ==> {other}" for mine, other in sorted(pairs) if mine != other]
    return "\n".join([*lines, "```\n"])


def with_picture(page: str) -> str:
    """The page with the picture between its marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + picture() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(with_picture(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
