"""Places of nodes in the network, and an order in which nodes of one place are neighbours.

[Note: place] A node reports its place when it arrives: the names of its surroundings, outermost
first, such as `spine0/rack3/nvl-8c41f0d2.1`. The place may end with the number of the node in it:
`rack3#17`. Ranks follow the order of the nodes. So nodes of one NVLink domain, rack or block get
consecutive ranks, and groups of consecutive ranks (tp, cp, ep, the shards of a replica) use the
shortest paths.

Places order only nodes that arrive. Nodes that stay keep their order, and thus their neighbours.
What a rank computes depends on its rank alone, so places change no bit of a step.

`PERDURE_PLACE` sets the place; if the variable is empty, the node has no place. Without the
variable the place comes from Slurm's topology and from NVIDIA's library.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")

PLACE = "PERDURE_PLACE"
"""Environment variable that names the place of this node: its rack, switch or NVLink domain."""
SLURM_ADDRESS, SLURM_PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
"""Environment variables of a Slurm step: the dotted path of switches or blocks that ends in the
node's name, and a dotted path with the kind of each element."""
SLURM_NODE = "SLURM_NODEID"
"""Environment variable of a Slurm step: index of this node in Slurm's order."""
MAX_LEVELS, MAX_NAME_LENGTH = 4, 40
"""Largest number of names in a place, and of characters per name, as every node reads all
places."""
MAX_DESCRIBED = 8
_NAME = rf"[!\"$-.0-~]{{1,{MAX_NAME_LENGTH}}}"
_PLACE = re.compile(rf"({_NAME}(/{_NAME}){{0,{MAX_LEVELS - 1}}})?(#[0-9]{{1,9}})?", re.ASCII)


def is_place(text: object) -> bool:
    return isinstance(text, str) and _PLACE.fullmatch(text) is not None


def own_place(environment: Mapping[str, str], domain: str = "") -> str:
    """Returns the place of this node; empty: unknown. Raises ValueError if PERDURE_PLACE is not a
    place. `domain`: NVLink domain of the node's GPUs; empty if they reach no other node."""
    if PLACE in environment:
        place = environment[PLACE]
        if not is_place(place):
            raise ValueError(
                f"{PLACE}={place!r} is no place: give at most {MAX_LEVELS} names, such as those of "
                "row and rack, outermost first and separated by /, each of at most "
                f"{MAX_NAME_LENGTH} visible ASCII characters: row2/rack7"
            )
        return place
    address = environment.get(SLURM_ADDRESS, "").split(".")
    kinds = environment.get(SLURM_PATTERN, "").split(".")
    # The last element is the node, whose name may contain dots.
    names = address[: len(kinds) - 1] if kinds != [""] else address[:-1]
    visible = [re.sub(r"[^!\"$-.0-~]", "_", name)[-MAX_NAME_LENGTH:] for name in [*names, domain]]
    path = "/".join(list(filter(None, visible))[-MAX_LEVELS:])
    number = environment.get(SLURM_NODE, "")
    return f"{path}#{number}" if re.fullmatch("[0-9]{1,9}", number) else path


def levels(place: str) -> tuple[str, ...]:
    """Returns the names of a place without its number, outermost first."""
    path = place.partition("#")[0]
    return tuple(path.split("/")) if path else ()


def common_levels(places: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Returns the leading names that all `places` (results of `levels`) have in common."""
    shared = []
    for names in zip(*places, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return tuple(shared)


def natural_key(text: str) -> list[str | int]:
    """Sort key that compares digits in names as numbers: node2 comes before node10."""
    parts = re.split("([0-9]{1,18})", text)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]


def group_by_place(
    items: Sequence[T], where: Callable[[T], Sequence[str]], depth: int = 0
) -> list[T]:
    """Sort items so that items of one place are adjacent, at every level of places from `depth` on.
    Places keep the order of their first items, and items of one place keep their order. `where`:
    returns an item's `levels`."""
    groups: dict[str | None, list[T]] = {}
    for item in items:
        path = where(item)
        groups.setdefault(path[depth] if depth < len(path) else None, []).append(item)
    return [
        item
        for name, group in groups.items()
        for item in (group if name is None else group_by_place(group, where, depth + 1))
    ]


def describe_places(nodes: Sequence[tuple[str, int]]) -> str:
    """Returns a text that says which ranks are at which place; empty if no node has a place."""
    parts, first = [], 0
    for path, group in groupby(nodes, key=lambda node: levels(node[0])):
        count = sum(ranks for _, ranks in group)
        ranks = f"{first}-{first + count - 1}" if count > 1 else f"{first}"
        parts.append(f"{ranks} in {'/'.join(path) or 'a place that is not stated'}")
        first += count
    if not any(levels(place) for place, _ in nodes):
        return ""
    more = len(parts) - MAX_DESCRIBED
    return f"ranks {', '.join(parts[:MAX_DESCRIBED])}" + (f" and {more} more" if more > 0 else "")
