"""Samples a collaborative knowledge graph by position, for training and evaluation."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import validate_call

from trainer.data import Samples
from trainer.data.order import ORDER_VERSION, Order, random_integers
from trainer.data.shards import DataError
from trainer.kgat.graph import (
    KgatGraph,
    KgatInteractions,
    build_edges,
    fingerprint,
    read_interactions,
)
from trainer.recipe import Recipe
from trainer.recipe.seeds import stable_seed
from trainer.recipe.value_types import Count

Batch = dict[str, torch.Tensor]
TRIES = 1000
"""Attempts to draw a negative sample at random."""


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
    """Open interactions of users with items, and a knowledge graph about the items; called as
    `data.factory`. docs/kgat.md explains the options. Raises DataError if a file is missing or
    malformed."""
    data = read_interactions(path, format, evaluate_on, split_seed)
    seed, global_batch = recipe.run.seed, recipe.batch.global_batch
    train = KgatStream(data, build_edges(data), seed, global_batch, triples_per_sample)
    return Samples(train, validation=KgatEvaluationStream(data))


class KgatStream:
    """Training samples by position: interactions, and edges of the graph.

    [Note: phases] An epoch is a phase of CF steps (collaborative filtering), whose samples are
    interactions, and then a phase of KG steps (knowledge graph), whose samples are edges. A phase
    has as many whole steps as are needed to take all interactions, or edges, once. It takes them
    from their endless order, beginning where the previous phase of its kind has ended.

    Args: `edges` is `build_edges(data)`, `global_batch` the samples per step, `triples_per_sample`
    the edges in a sample of the KG phase (0: there is no KG phase).
    """

    def __init__(
        self,
        data: KgatInteractions,
        edges: KgatGraph,
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
        """Return the batch at B positions, all of which belong to one CF step or to one KG step.

        CF batch: users, positives and negatives (items), (B,) int64; dropout_seed, (), which is
        equal for all micro-batches of a step. KG batch: heads, relations, tails and negative_tails
        (nodes), (B x triples_per_sample,) int64. Raises DataError if no negative sample was found.
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
        """Draw an integer in range(size) for each position in `numbers`, uniformly among those that
        do not complete a true pair or triple. `is_true`: (indices in `numbers`, integers drawn for
        them) → whether each integer completes a true pair or triple."""
        key = stable_seed(self._seed, purpose)
        result, rows = np.empty_like(numbers), np.arange(len(numbers))
        for attempt in range(TRIES):
            drawn = random_integers(numbers[rows], size, key, attempt)
            result[rows] = drawn
            rows = rows[is_true(rows, drawn)]
            if not rows.size:
                return result
        raise DataError(
            f"data.factory_options.path: {purpose}: in {TRIES} tries none was found that is not in "
            "the data, because a node is joined to almost all others; remove such nodes"
        )

    def _pair_key(self, users: NDArray[np.int64], items: NDArray[np.int64]) -> NDArray[np.int64]:
        """Encode each pair as one number that preserves the order of pairs."""
        return users * self.data.items + items

    def _edge_key(
        self, heads: NDArray[np.int64], kinds: NDArray[np.int64], tails: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        return (heads * self.edges.relations + kinds) * self.edges.nodes + tails


class KgatEvaluationStream:
    """Evaluation samples by position: the users with held-out items, and their items."""

    def __init__(self, data: KgatInteractions) -> None:
        self._items = data.items
        self._users = np.unique(data.held_out[:, 0])
        self._known = _by_user(np.concatenate([data.train, data.masked]), data.users)
        self._wanted = _by_user(data.held_out, data.users)
        self.sequences = len(self._users)
        self.fingerprint = "users:" + fingerprint(data)

    def describe(self, global_batch: int) -> str:
        return "users"

    def fetch(self, positions: Sequence[int]) -> Batch:
        """Return the users (B,) at `positions`, the items to exclude from each user's ranking
        (B, K), and the items to find (B, L). All are int64. Short rows are padded with the size of
        the catalogue, which is no item."""
        users = self._users[np.asarray(positions)]
        return _tensors(
            users=users,
            known=_padded(self._known, users, self._items),
            wanted=_padded(self._wanted, users, self._items),
        )


Lists = tuple[NDArray[np.int64], NDArray[np.int64]]
"""(Offset of each user's list (users + 1,), all lists concatenated)."""


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
    """Return whether each value is in a sorted array."""
    places = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return ordered[places] == values


def _tensors(**arrays: NDArray[np.int64]) -> Batch:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
