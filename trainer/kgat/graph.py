"""Reads interactions and knowledge-graph triples, and joins them in one graph. Does not import
torch."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elastic.group.sampler import SamplerPermutation
from trainer.data.shards import DataError

Pairs = NDArray[np.int64]
"""(N, 2): user, item; sorted and unique."""


@dataclass(frozen=True)
class KgatInteractions:
    """Interactions of users with items, and triples of a knowledge graph about items."""

    users: int
    items: int
    entities: int
    """Number of entities, items included: entity i < `items` is item i."""
    kg_relations: int
    train: Pairs
    held_out: Pairs
    """Interactions that an evaluation predicts."""
    masked: Pairs
    """Further interactions that an evaluation excludes from the ranking, as it does `train`."""
    triples: NDArray[np.int64]
    """(T, 3): head entity, relation, tail entity; sorted and unique."""
    user_names: Sequence[str] | None = None
    item_names: Sequence[str] | None = None
    """Names of users and items in the files; None if the files use numbers."""


@dataclass(frozen=True)
class KgatGraph:
    """The collaborative knowledge graph (section 3 of Wang et al. 2019): interactions and triples,
    each edge in both directions, sorted by head, tail, relation. Nodes are the users, then the
    entities. Relation 0 is interaction; the relations of the triples follow, then the inverses of
    all."""

    nodes: int
    relations: int
    heads: NDArray[np.int64]
    kinds: NDArray[np.int64]
    tails: NDArray[np.int64]
    """Head node, relation and tail node of each edge, (E,)."""
    reverse: NDArray[np.int64]
    """Index of the inverse of each edge, (E,)."""


def read_interactions(
    path: str, format: str = "auto", evaluate_on: str = "test", split_seed: int = 0
) -> KgatInteractions:
    """Read a data set. The arguments are options of `trainer.kgat.open_graph`. Raises DataError if
    a file is missing or malformed."""
    directory = Path(path)
    if format == "auto":
        format = "recbole" if any(directory.glob("*.inter")) else "kgat"
    read = _read_recbole if format == "recbole" else _read_kgat
    data = read(directory, evaluate_on, split_seed)
    if not len(data.train) or not len(data.held_out):
        raise DataError(
            f"{directory}: {len(data.train)} interactions to train on and {len(data.held_out)} to "
            "evaluate on; both are needed"
        )
    per_user = np.bincount(data.train[:, 0])
    if per_user.max() >= data.items:
        raise DataError(
            f"{directory}: user {per_user.argmax()} has every one of the {data.items} items, so "
            "none remains for a negative sample; remove this user"
        )
    return data


def build_edges(data: KgatInteractions) -> KgatGraph:
    """Join interactions and triples in one graph."""
    kinds = 1 + data.kg_relations
    head = np.concatenate([data.train[:, 0], data.users + data.triples[:, 0]])
    kind = np.concatenate([np.zeros(len(data.train), np.int64), 1 + data.triples[:, 1]])
    tail = data.users + np.concatenate([data.train[:, 1], data.triples[:, 2]])
    heads, tails = np.concatenate([head, tail]), np.concatenate([tail, head])
    both = np.concatenate([kind, kinds + kind])
    order = np.lexsort((both, tails, heads))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    reverse = np.roll(place, len(head))[order]
    return KgatGraph(
        data.users + data.entities, 2 * kinds, heads[order], both[order], tails[order], reverse
    )


def fingerprint(data: KgatInteractions) -> str:
    """Return the SHA-256 of the training data: numbers of nodes, interactions and triples."""
    digest = hashlib.sha256(repr((data.users, data.items, data.entities)).encode())
    for array in (data.train, data.triples):
        digest.update(array.tobytes())
    return digest.hexdigest()


# --- the format of the paper's authors ---------------------------------------------------------


def _read_kgat(directory: Path, evaluate_on: str, _split_seed: int) -> KgatInteractions:
    if evaluate_on != "test":
        raise DataError(
            f"{directory}: train.txt and test.txt have no validation part; set "
            "data.factory_options.evaluate_on=test"
        )
    train_file, test_file, kg_file = (
        _existing(directory, name) for name in ("train.txt", "test.txt", "kg_final.txt")
    )
    train, test = _read_lists(train_file), _read_lists(test_file)
    triples = _unique(_read_numbers(kg_file, columns=3))
    items = 1 + _largest(train[:, 1], test[:, 1])
    return KgatInteractions(
        users=1 + _largest(train[:, 0], test[:, 0]),
        items=items,
        entities=max(items, 1 + _largest(triples[:, ::2])),
        kg_relations=1 + _largest(triples[:, 1]),
        train=train,
        held_out=test,
        masked=np.empty((0, 2), np.int64),
        triples=triples,
    )


def _largest(*arrays: NDArray[np.int64]) -> int:
    return max(int(array.max(initial=-1)) for array in arrays)


def _read_lists(path: Path) -> Pairs:
    """Read the pairs in lines of `user item item …`; a line may have no items. Raises DataError if
    a line is empty, or has anything but whole numbers from 0 on."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            numbers = [int(word) for word in line.split()]
        except ValueError:
            numbers = []
        if not numbers or min(numbers) < 0:
            raise _malformed(path, number, line, "whole numbers: user item item ...")
        rows.append(numbers)
    users = np.repeat([row[0] for row in rows], [len(row) - 1 for row in rows])
    items = list(chain.from_iterable(row[1:] for row in rows))
    return _unique(np.column_stack([users, items]).astype(np.int64))


def _read_numbers(path: Path, columns: int) -> NDArray[np.int64]:
    try:
        table = np.loadtxt(path, dtype=np.int64, ndmin=2, comments=None)
    except ValueError as error:
        raise DataError(f"{path}: expected {columns} whole numbers in each line: {error}") from None
    if table.size and (table.shape[1] != columns or table.min() < 0):
        raise DataError(f"{path}: expected {columns} numbers, none negative, in each line")
    return table.reshape(-1, columns)


# --- RecBole's atomic files ----------------------------------------------------------------------


def _read_recbole(directory: Path, evaluate_on: str, split_seed: int) -> KgatInteractions:
    # All interactions count, whatever their rating. If several items link to one entity, the first
    # item gets the entity's triples.
    user, item = _read_columns(_existing(directory, "*.inter"), "user_id", "item_id")
    facts = _read_columns(_existing(directory, "*.kg"), "head_id", "relation_id", "tail_id")
    links = _read_columns(_existing(directory, "*.link"), "item_id", "entity_id")

    user_names, users = np.unique(user, return_inverse=True)
    item_names, items = np.unique(item, return_inverse=True)
    number = {name: place for place, name in enumerate(item_names)}
    entity: dict[str, int] = {}
    for name, target in sorted(zip(*links, strict=True)):
        if name in number:
            entity.setdefault(target, number[name])
    heads, relations, tails = facts
    others = sorted({*heads, *tails} - entity.keys())
    entity |= {name: len(item_names) + place for place, name in enumerate(others)}
    relation_names, kinds = np.unique(relations, return_inverse=True)
    ends = [np.array([entity[name] for name in side], np.int64) for side in (heads, tails)]

    train, validation, test = _split(_unique(np.column_stack([users, items])), split_seed)
    testing = evaluate_on == "test"
    return KgatInteractions(
        users=len(user_names),
        items=len(item_names),
        entities=len(item_names) + len(others),
        kg_relations=len(relation_names),
        train=train,
        held_out=test if testing else validation,
        masked=validation if testing else validation[:0],
        triples=_unique(np.column_stack([ends[0], kinds, ends[1]])),
        user_names=user_names.tolist(),
        item_names=item_names.tolist(),
    )


def _split(pairs: Pairs, seed: int) -> tuple[Pairs, Pairs, Pairs]:
    """Split pairs into training, validation and test: of a user's n interactions in random order,
    the last n // 10 are for testing and the n // 10 before them for validation."""
    shuffled = pairs[SamplerPermutation(len(pairs), seed)(np.arange(len(pairs)))]
    shuffled = shuffled[np.argsort(shuffled[:, 0], kind="stable")]
    counts = np.bincount(shuffled[:, 0])
    ends = np.cumsum(counts)
    # 1 for the last interaction of each user, 2 for the last but one, and so on.
    from_end = ends[shuffled[:, 0]] - np.arange(len(shuffled))
    part = (from_end - 1) // np.maximum(1, counts // 10)[shuffled[:, 0]]
    part[counts[shuffled[:, 0]] < 10] = 2
    return _unique(shuffled[part >= 2]), _unique(shuffled[part == 1]), _unique(shuffled[part == 0])


def _read_columns(path: Path, *names: str) -> list[list[str]]:
    """Read the columns of a tab-separated file whose first line is `name:type …`."""
    header, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    found = [field.split(":")[0] for field in header.split("\t")]
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(
            f"{path}: no column {missing[0]} in its first line, only {header!r}; name it there"
        )
    places = [found.index(name) for name in names]
    columns: list[list[str]] = [[] for _ in names]
    for number, line in enumerate(lines, start=2):
        fields = line.split("\t")
        if len(fields) != len(found):
            raise _malformed(path, number, line, f"{len(found)} fields separated by tabs")
        for column, place in zip(columns, places, strict=True):
            column.append(fields[place])
    return columns


# --- for all formats -----------------------------------------------------------------------------


def _unique(rows: NDArray) -> NDArray[np.int64]:
    return np.unique(rows.astype(np.int64), axis=0) if len(rows) else rows.astype(np.int64)


def _existing(directory: Path, pattern: str) -> Path:
    """Return the only file that matches a name or pattern."""
    paths = sorted(directory.glob(pattern))
    if len(paths) != 1:
        found = f"{len(paths)} of them are" if paths else "none is"
        raise DataError(
            f"data.factory_options.path: expected one {pattern} in {directory}, but {found} there; "
            "a data set is train.txt, test.txt and kg_final.txt, or RecBole's .inter, .kg and "
            ".link file (docs/kgat.md says where to get one)"
        )
    return paths[0]


def _malformed(path: Path, number: int, line: str, expected: str) -> DataError:
    shown = line if len(line) < 40 else line[:37] + "..."
    return DataError(f"{path}, line {number}: expected {expected}, but found {shown!r}")
