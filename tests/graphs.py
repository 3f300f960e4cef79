"""A small data set in the files of KGAT's authors: users and items of a few kinds."""

from pathlib import Path

import numpy as np

USERS, ITEMS, KINDS = 60, 40, 4


def write_graph(folder: Path) -> Path:
    """Users choose items of their own kind; the graph tells the kind of an item, and pairs items.

    Entities: the items, then the kinds. Relations: 0 is of that kind, 1 goes with.
    """
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    train, test = [], []
    for user in range(USERS):
        own = np.arange(user % KINDS, ITEMS, KINDS)
        chosen = random.permutation(own)[:8].tolist()
        train.append([user, *chosen[:6]])
        test.append([user, *chosen[6:]])
    triples = [(item, 0, ITEMS + item % KINDS) for item in range(ITEMS)]
    triples += [(item, 1, (item + KINDS) % ITEMS) for item in range(ITEMS)]
    for name, rows in (("train.txt", train), ("test.txt", test), ("kg_final.txt", triples)):
        lines = (" ".join(map(str, row)) + "\n" for row in rows)
        (folder / name).write_text("".join(lines))
    return folder
