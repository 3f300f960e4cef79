"""Where a node stands, and an order in which nodes that stand together are neighbours.

[Note: place] A node states its place when it arrives: the names of what it is in, from the outside
in, such as `spine0/rack3/nvl-8c41f0d2.1`, and perhaps its number there: `rack3#17`. Ranks follow
the order of the nodes. So nodes of one NVLink domain, one rack or one block get ranks next to each
other, and groups of neighbours (tp, cp, ep, the shards of a replica) take the shortest ways.

A place orders nodes that come. It moves none that stay: their order among themselves is kept, so
that they keep their ranks when the last ones leave, and their neighbours when others do. What a
rank computes depends on its rank alone, so places change no bit of a step.

`PERDURE_PLACE` states the place by hand; empty, it states none. Without it Slurm's topology and
NVIDIA's library are asked.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")

PLACE = "PERDURE_PLACE"
"""Environment variable: the place of this node."""
SLURM_ADDRESS, SLURM_PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
"""Environment variables of a Slurm step: switches or blocks and the node's name, with dots between
them, and the kind of each."""
SLURM_NODE = "SLURM_NODEID"
"""Environment variable of a Slurm step: number of this node, in Slurm's order."""
MOST_LEVELS, MOST_LETTERS = 4, 40
"""Names of a place, and characters of a name: every node reads the places of all."""
MOST_TOLD = 8
"""Places that are told."""
_NAME = rf"[!\"$-.0-~]{{1,{MOST_LETTERS}}}"
_PLACE = re.compile(rf"({_NAME}(/{_NAME}){{0,{MOST_LEVELS - 1}}})?(#[0-9]{{1,9}})?", re.ASCII)


def is_place(text: object) -> bool:
    """Whether a text, perhaps of another node, is a place or empty."""
    return isinstance(text, str) and _PLACE.fullmatch(text) is not None


def own_place(environment: Mapping[str, str], domain: str = "") -> str:
    """The place of this node.

    Args:
        environment: of this process.
        domain: of the NVLinks of its GPUs; empty if they reach no other node.

    Raises:
        ValueError: PERDURE_PLACE is none.
    """
    if PLACE in environment:
        place = environment[PLACE]
        if not is_place(place):
            raise ValueError(
                f"{PLACE}={place!r}: name at most {MOST_LEVELS} things that this node is in, from "
                f"the outside in, each of at most {MOST_LETTERS} visible ASCII characters: "
                "row2/rack7"
            )
        return place
    address = environment.get(SLURM_ADDRESS, "").split(".")
    kinds = environment.get(SLURM_PATTERN, "").split(".")
    # The last is the node, whose own name may have dots.
    names = address[: len(kinds) - 1] if kinds != [""] else address[:-1]
    visible = [re.sub(r"[^!\"$-.0-~]", "_", name)[-MOST_LETTERS:] for name in [*names, domain]]
    path = "/".join(list(filter(None, visible))[-MOST_LEVELS:])
    number = environment.get(SLURM_NODE, "")
    return f"{path}#{number}" if re.fullmatch("[0-9]{1,9}", number) else path


def levels(place: str) -> tuple[str, ...]:
    """The names of a place, from the outside in."""
    path = place.partition("#")[0]
    return tuple(path.split("/")) if path else ()


def common(places: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The levels that all these places, as `levels` gives them, have in common."""
    shared = []
    for names in zip(*places, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return tuple(shared)


def natural(text: str) -> list[str | int]:
    """A key by which numbers in names count as numbers: node2 comes before node10."""
    parts = re.split("([0-9]{1,18})", text)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]


def grouped(items: Sequence[T], where: Callable[[T], Sequence[str]], depth: int = 0) -> list[T]:
    """The items, those of one place next to each other at every level. Places come in the order of
    their first items, and the items of a place in the order they had.

    Args:
        items: to be ordered.
        where: an item's `levels`.
        depth: level at which to begin.
    """
    found: dict[str | None, list[T]] = {}
    for item in items:
        path = where(item)
        found.setdefault(path[depth] if depth < len(path) else None, []).append(item)
    return [
        item
        for name, group in found.items()
        for item in (group if name is None else grouped(group, where, depth + 1))
    ]


def tell(nodes: Sequence[tuple[str, int]]) -> str:
    """Which ranks stand where, in words; empty if no node has stated its place.

    Args:
        nodes: (place, ranks) of each, in the order of their ranks.
    """
    parts, first = [], 0
    for path, group in groupby(nodes, key=lambda node: levels(node[0])):
        count = sum(ranks for _, ranks in group)
        ranks = f"{first}-{first + count - 1}" if count > 1 else f"{first}"
        parts.append(f"{ranks} in {'/'.join(path) or 'a place that is not stated'}")
        first += count
    if not any(levels(place) for place, _ in nodes):
        return ""
    more = len(parts) - MOST_TOLD
    return f"ranks {', '.join(parts[:MOST_TOLD])}" + (f" and {more} more" if more > 0 else "")
