"""Samples a collaborative knowledge graph by position, for training and evaluation."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.data.order import ORDER_VERSION, Order, random_integers
from trainer.data.shards import DataError
from trainer.kgat.graph import Edges, Interactions, fingerprint
from trainer.recipe.seeds import stable_seed

Batch = dict[str, torch.Tensor]
TRIES = 1000
"""Attempts to draw a wrong tail at random."""


class GraphStream:
    """Training samples by position, see [Note: phases].

    Args:
        data: what is sampled.
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
        self._data, self._edges, self._seed = data, edges, seed
        self._global_batch, self._triples = global_batch, triples_per_sample
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
        text = f"(one interaction each); an epoch is {self._cf_steps} CF steps"
        if self._triples:
            text += f" and {self._kg_steps} KG steps of {global_batch * self._triples:,} edges"
        return text

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
        before = epochs * self._kg + places - self._cf
        return self._edge_batch(
            (before[:, None] * self._triples + np.arange(self._triples)).reshape(-1)
        )

    def _interaction_batch(self, numbers: NDArray[np.int64]) -> Batch:
        _, _, samples = self._interactions.locate(numbers)
        users, items = self._data.train[samples].T
        negatives = self._negatives(
            numbers,
            self._data.items,
            "negative items",
            lambda rows, drawn: _contains(self._chosen, self._pair_key(users[rows], drawn)),
        )
        return _tensors(users=users, positives=items, negatives=negatives)

    def _edge_batch(self, numbers: NDArray[np.int64]) -> Batch:
        edges = self._edges
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
        """Draw for each of `numbers` one of range(size), uniformly among those that are not true.

        Args:
            is_true: predicate on (rows, values drawn for them).
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
            f"data.graph.path: {purpose}: found none in {TRIES} tries that is not in the data; "
            "a node is joined to almost all others"
        )

    def _pair_key(self, users: NDArray[np.int64], items: NDArray[np.int64]) -> NDArray[np.int64]:
        """Encode each pair as one number that preserves the order of pairs."""
        return users * self._data.items + items

    def _edge_key(
        self, heads: NDArray[np.int64], kinds: NDArray[np.int64], tails: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        return (heads * self._edges.relations + kinds) * self._edges.nodes + tails


class UserStream:
    """The users with held-out items, in order."""

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
        """Return users (B,); known and wanted items (B, K) int64 of each, padded with the number of
        items."""
        users = self._users[np.asarray(positions)]
        return _tensors(
            users=users,
            known=_padded(self._known, users, self._items),
            wanted=_padded(self._wanted, users, self._items),
        )


Lists = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Offset of each user's list (users + 1,), and all lists concatenated."""


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
    """Whether each value is in the sorted array."""
    places = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return ordered[places] == values


def _tensors(**arrays: NDArray[np.int64]) -> Batch:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
