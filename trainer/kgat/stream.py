"""Samples of a collaborative knowledge graph, by position: for training, and for evaluation.

[Note: phases] KGAT alternates two kinds of steps. An epoch is a CF phase, in which every sample is
an interaction with an item that the user did not choose beside it, and a KG phase, in which every
sample is a handful of edges with a wrong tail beside each. Each is as long as it takes to see all
interactions, and all edges, as with the authors. Both are whole global batches, so every step
belongs to one of them. Positions within the CF phases of all epochs, put one after another, run
through the interactions again and again, each time in another order, and leave none out; likewise
those of the KG phases through the edges. What stands at a position depends on the data, the seed
and `global_batch`.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import validate_call

from trainer.data import Samples
from trainer.data.order import ORDER_VERSION, Order, random_integers
from trainer.data.shards import DataError
from trainer.kgat.graph import Edges, Interactions, build_edges, fingerprint, read_interactions
from trainer.recipe import Recipe
from trainer.recipe.bounds import Count
from trainer.recipe.seeds import stable_seed

Batch = dict[str, torch.Tensor]
TRIES = 1000
"""For a random tail that is wrong."""


@validate_call
def open_graph(
    recipe: Recipe,
    path: str,
    *,
    format: Literal["auto", "kgat", "recbole"] = "auto",
    triples_per_sample: Count = 4,
    evaluate_on: Literal["test", "validation"] = "test",
    split_seed: int = 0,
) -> Samples:
    """`data.factory`: interactions of users with items, and a knowledge graph about the items.
    docs/kgat.md says what its options mean.

    Raises:
        DataError: a file is missing or malformed.
    """
    data = read_interactions(path, format, evaluate_on, split_seed)
    seed, global_batch = recipe.run.seed, recipe.batch.global_batch
    train = GraphStream(data, build_edges(data), seed, global_batch, triples_per_sample)
    return Samples(train, validation=UserStream(data))


class GraphStream:
    """Training samples. See [Note: phases].

    Args:
        data: what is sampled.
        edges: of its graph.
        seed: of the run.
        global_batch: samples per step.
        triples_per_sample: edges in a sample of the KG phase; 0: there is no KG phase.
    """

    def __init__(
        self,
        data: Interactions,
        edges: Edges,
        seed: int,
        global_batch: int,
        triples_per_sample: int,
    ) -> None:
        self.data, self.edges, self._seed = data, edges, seed
        self._global_batch, self.triples_per_sample = global_batch, triples_per_sample
        self._cf_steps, self._kg_steps = -(-len(data.train) // global_batch), 0
        if triples_per_sample:
            self._kg_steps = -(-len(edges.heads) // (global_batch * triples_per_sample))
        self._cf, self._kg = self._cf_steps * global_batch, self._kg_steps * global_batch
        self.sequences = self._cf + self._kg
        order = (ORDER_VERSION, global_batch, triples_per_sample, self.sequences)
        parts = (*order, fingerprint(data))
        self.fingerprint = "graph:" + "/".join(map(str, parts))
        self._interactions = Order([len(data.train)], [1.0], stable_seed(seed, "interactions"))
        self._edge_order = Order([len(edges.heads)], [1.0], stable_seed(seed, "edges"))
        self._chosen = self._pair_key(data.train[:, 0], data.train[:, 1])
        self._facts = np.sort(self._edge_key(edges.heads, edges.kinds, edges.tails))

    def describe(self, global_batch: int) -> str:
        sizes = f"{self.data.users:,} users, {self.data.items:,} items, {len(self._facts):,} edges"
        kg = f" and {self._kg_steps} KG steps of {global_batch * self.triples_per_sample:,} edges"
        text = f"(one interaction each) of {sizes}; an epoch is {self._cf_steps} CF steps"
        return text + (kg if self._kg_steps else "")

    def fetch(self, positions: Sequence[int]) -> Batch:
        """A CF batch of B positions: users, positives, negatives, (B,) int64 (items as entities),
        and dropout_seed, (): every micro-batch of a step leaves out the same part of the graph. A
        KG batch: heads, relations, tails, negative_tails, (B x triples_per_sample,) int64, nodes.

        Raises:
            DataError: no wrong tail was found for an edge.
        """
        numbers = np.asarray(positions, dtype=np.int64)
        epochs, places = np.divmod(numbers, self.sequences)
        if places[0] < self._cf:
            batch = self._interaction_batch(epochs * self._cf + places)
            step = int(numbers[0]) // self._global_batch
            batch["dropout_seed"] = torch.tensor(stable_seed(self._seed, "graph dropout", step))
            return batch
        before, each = epochs * self._kg + places - self._cf, self.triples_per_sample
        return self._edge_batch((before[:, None] * each + np.arange(each)).reshape(-1))

    def _interaction_batch(self, numbers: NDArray[np.int64]) -> Batch:
        _, _, samples = self._interactions.locate(numbers)
        users, items = self.data.train[samples].T
        negatives = self._negatives(
            numbers,
            self.data.items,
            "negative items",
            lambda rows, drawn: _contains(self._chosen, self._pair_key(users[rows], drawn)),
        )
        return _tensors(users=users, positives=items, negatives=negatives)

    def _edge_batch(self, numbers: NDArray[np.int64]) -> Batch:
        edges = self.edges
        _, _, samples = self._edge_order.locate(numbers)
        heads, kinds, tails = (side[samples] for side in (edges.heads, edges.kinds, edges.tails))
        wrong = self._negatives(
            numbers,
            edges.nodes,
            "negative tails",
            lambda rows, drawn: _contains(
                self._facts, self._edge_key(heads[rows], kinds[rows], drawn)
            ),
        )
        return _tensors(heads=heads, relations=kinds, tails=tails, negative_tails=wrong)

    def _negatives(
        self,
        numbers: NDArray[np.int64],
        size: int,
        purpose: str,
        is_true: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]],
    ) -> NDArray[np.int64]:
        """For each of `numbers` one of range(size), uniformly among those that are not true.

        `is_true` is asked about rows, and what was drawn for each.
        """
        key = stable_seed(self._seed, purpose)
        result, rows = np.empty_like(numbers), np.arange(len(numbers))
        for attempt in range(TRIES):
            drawn = random_integers(numbers[rows], size, key, attempt)
            result[rows] = drawn
            rows = rows[is_true(rows, drawn)]
            if not rows.size:
                return result
        raise DataError(
            f"data.factory_options.path: {purpose}: found none in {TRIES} tries that is not in the "
            "data; a node is joined to almost all others"
        )

    def _pair_key(self, users: NDArray[np.int64], items: NDArray[np.int64]) -> NDArray[np.int64]:
        """One number for each pair; in the order of pairs."""
        return users * self.data.items + items

    def _edge_key(
        self, heads: NDArray[np.int64], kinds: NDArray[np.int64], tails: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        return (heads * self.edges.relations + kinds) * self.edges.nodes + tails


class UserStream:
    """The users that something is held out of, with what is to be predicted, in their order."""

    def __init__(self, data: Interactions) -> None:
        self._items = data.items
        self._users = np.unique(data.held_out[:, 0])
        self._known = _by_user(np.concatenate([data.train, data.masked]), data.users)
        self._wanted = _by_user(data.held_out, data.users)
        self.sequences = len(self._users)
        self.fingerprint = "users:" + fingerprint(data)

    def describe(self, global_batch: int) -> str:
        return "users"

    def fetch(self, positions: Sequence[int]) -> Batch:
        """users (B,); known and wanted (B, K) int64: items of each, filled up with the number of
        items, which is none."""
        users = self._users[np.asarray(positions)]
        return _tensors(
            users=users,
            known=_padded(self._known, users, self._items),
            wanted=_padded(self._wanted, users, self._items),
        )


Lists = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Where the list of each user begins (users + 1,), and all lists, one after another."""


def _by_user(pairs: NDArray[np.int64], users: int) -> Lists:
    ordered = pairs[np.argsort(pairs[:, 0], kind="stable")]
    return np.searchsorted(ordered[:, 0], np.arange(users + 1)), ordered[:, 1]


def _padded(lists: Lists, users: NDArray[np.int64], filler: int) -> NDArray[np.int64]:
    starts, items = lists
    counts = starts[users + 1] - starts[users]
    places = np.arange(counts.max(initial=1))
    inside = places < counts[:, None]
    table = np.full(inside.shape, filler, dtype=np.int64)
    table[inside] = items[(starts[users][:, None] + places)[inside]]
    return table


def _contains(ordered: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which values are among the ordered ones."""
    places = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return ordered[places] == values


def _tensors(**arrays: NDArray[np.int64]) -> Batch:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
