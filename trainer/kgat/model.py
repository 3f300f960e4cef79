"""Knowledge Graph Attention Network: Wang, He, Cao, Liu, Chua, KDD 2019 (arXiv:1905.07854).

Shapes: N nodes (users, then entities, the first of which are the items), E edges in both
directions, R relations in both directions, D embedding_dim, K relation_dim, B samples of a
micro-batch, I items.
"""

import json
import math
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import ConfigDict, validate_call
from torch import Tensor, nn

from trainer.data import Samples
from trainer.kgat.graph import KgatGraph
from trainer.kgat.stream import KgatStream
from trainer.recipe import Recipe, RecipeError
from trainer.recipe.seeds import stable_seed
from trainer.recipe.value_types import Amount, Positive, Share

# Only the product with a dense matrix is used, which torch has had since 1.8.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")

TOP = 20
"""Length of the recommendation list for recall and ndcg."""
DEPTH = 100
"""Longest list in the authors' evaluator; see `ranking_metrics`."""
SLOPE = 0.2
"""Slope of LeakyReLU below 0: TensorFlow's default, which the authors use."""
CHUNK = 1 << 18
"""Edges whose attention is computed at a time."""


class _GraphTensors:
    """The graph as tensors on the model's device. They are not buffers of the model: they never
    change, so neither DDP nor checkpoints need them. `popularity`: training interactions of each
    item, (I,) int64."""

    def __init__(self, edges: KgatGraph, popularity: NDArray[np.int64]) -> None:
        self.nodes, self.relations = edges.nodes, edges.relations
        self.counts = np.bincount(edges.kinds, minlength=edges.relations).tolist()
        """Number of edges of each relation."""
        # The first edge of each head, and one past the last: rows of a CSR matrix.
        self.starts = torch.from_numpy(np.searchsorted(edges.heads, np.arange(edges.nodes + 1)))
        self.heads, self.tails = torch.from_numpy(edges.heads), torch.from_numpy(edges.tails)
        self.reverse = torch.from_numpy(edges.reverse)
        self.by_relation = torch.from_numpy(np.argsort(edges.kinds, kind="stable"))
        self.popularity = torch.from_numpy(popularity.astype(np.float32))

    def to(self, device: torch.device) -> "_GraphTensors":
        """Move the tensors in place, and return self."""
        if self.starts.device != device:
            for name, value in vars(self).items():
                if isinstance(value, Tensor):
                    setattr(self, name, value.to(device))
        return self


class KgatPropagation(torch.autograd.Function):
    """Weighted sum over the neighbours of each node, and its gradient, as sparse products. The
    graph has the inverse of every edge, so the transposed matrix has entries at the same places,
    with the weights of each edge and its inverse exchanged: backward sorts nothing."""

    @staticmethod
    def forward(ctx: Any, graph: _GraphTensors, weights: Tensor, nodes: Tensor) -> Tensor:
        """Return each node's sum (N, D) for edge weights (E,) and node embeddings (N, D)."""
        ctx.graph = graph
        ctx.save_for_backward(weights)
        return _sparse(graph, weights) @ nodes

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        # Gradient of embeddings only: the CF loss does not train attention (section 3.4).
        (weights,) = ctx.saved_tensors
        transposed = _sparse(ctx.graph, weights[ctx.graph.reverse])
        return None, None, transposed @ gradients[0].contiguous()


def _sparse(graph: _GraphTensors, weights: Tensor) -> Tensor:
    size = (graph.nodes, graph.nodes)
    return torch.sparse_csr_tensor(graph.starts, graph.tails, weights, size, check_invariants=False)


class _Aggregator(nn.Module):
    """One propagation layer (equations 6 to 8) with `width` output columns."""

    def __init__(self, kind: str, inputs: int, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.sum = nn.Linear(2 * inputs if kind == "graphsage" else inputs, width)
        self.product = nn.Linear(inputs, width) if kind == "bi-interaction" else None

    def forward(self, nodes: Tensor, neighbours: Tensor) -> Tensor:
        """Return new embeddings (N, width) from those of nodes and of neighbours (N, inputs)."""
        if self.kind == "graphsage":
            return F.leaky_relu(self.sum(torch.cat([nodes, neighbours], dim=1)), SLOPE)
        result = F.leaky_relu(self.sum(nodes + neighbours), SLOPE)
        if self.product is not None:
            result = result + F.leaky_relu(self.product(nodes * neighbours), SLOPE)
        return result


class KGAT(nn.Module):
    """The KGAT model. Its weights are in float32."""

    some_unused = True
    """Whether a step may leave parameters without a gradient: a CF step leaves relations and
    projections, a KG step the aggregators."""
    init_from_tensors = ("user_embedding.weight", "entity_embedding.weight")
    """FQNs that are loaded from `model.init_from`, such as a trained BPR-MF model; other weights
    are random."""

    @validate_call(config=ConfigDict(allow_inf_nan=False))
    def __init__(
        self,
        recipe: Recipe,
        data: Samples | None,
        *,
        embedding_dim: Positive = 64,
        relation_dim: Positive = 64,
        layers: tuple[Positive, ...] = (64, 32, 16),
        aggregator: Literal["bi-interaction", "gcn", "graphsage"] = "bi-interaction",
        node_dropout: Share = 0.1,
        message_dropout: Share = 0.1,
        l2: Amount = 1e-5,
        kg_l2: Amount = 1e-5,
    ) -> None:
        """Build the model for a graph, with initial weights; called as `model.factory`.
        docs/kgat.md explains the options, whose defaults are the paper's. Raises RecipeError if the
        data is not a graph, or a key of the recipe does not work with KGAT."""
        super().__init__()
        stream = data and data.train
        if not isinstance(stream, KgatStream):
            raise RecipeError("model.factory: KGAT needs data.factory: trainer.kgat:open_graph")
        _check(recipe)
        edges, sizes = stream.edges, stream.data
        self._epoch = stream.sequences if stream.triples_per_sample else 0
        self.node_dropout, self.message_dropout = node_dropout, message_dropout
        self.l2, self.kg_l2 = l2, kg_l2
        self.user_embedding = nn.Embedding(sizes.users, embedding_dim)
        self.entity_embedding = nn.Embedding(sizes.entities, embedding_dim)
        self.relation_embedding = nn.Embedding(edges.relations, relation_dim)
        self.relation_projection = nn.Embedding(edges.relations, embedding_dim * relation_dim)
        # Not an nn.ModuleList: each aggregator would be an FSDP unit, but a KG step calls none.
        self.aggregators = nn.Module()
        for place, widths in enumerate(pairwise([embedding_dim, *layers])):
            self.aggregators.add_module(str(place), _Aggregator(aggregator, *widths))
        self.ranked = sizes.users + sizes.items
        """Number of users and items, which are the first nodes."""
        # A buffer, and so part of checkpoints: it was computed from the weights of an earlier step,
        # which a resumed run does not have.
        self.register_buffer("attention", torch.empty(len(edges.heads)))
        self.attention: Tensor
        self._graph = _GraphTensors(edges, np.bincount(sizes.train[:, 1], minlength=sizes.items))
        self._draw(recipe.run.seed, embedding_dim + relation_dim)
        config = {
            "model_type": "kgat", "users": sizes.users, "items": sizes.items,
            "entities": sizes.entities, "relations": edges.relations,
            "embedding_dim": embedding_dim, "relation_dim": relation_dim, "layers": layers,
            "aggregator": aggregator, "node_dropout": node_dropout,
            "message_dropout": message_dropout, "l2": l2, "kg_l2": kg_l2,
        }  # fmt: skip
        self.checkpoint_files = {"config.json": (json.dumps(config, indent=2) + "\n").encode()}
        for name, names in (("users.txt", sizes.user_names), ("items.txt", sizes.item_names)):
            if names:
                self.checkpoint_files[name] = "".join(f"{line}\n" for line in names).encode()

    @torch.no_grad()
    def _draw(self, seed: int, sides: int) -> None:
        """Set initial values: Xavier uniform matrices, drawn from the seed and the tensor's name;
        zero biases; equal attention on all edges with one head entity. `sides`: rows plus columns
        of one relation's projection matrix."""
        for name, tensor in self.state_dict().items():
            if name == "attention":
                tensor.copy_(1 / self._graph.starts.diff().float()[self._graph.heads])
            elif tensor.dim() == 1:
                tensor.zero_()
            else:
                projects = name == "relation_projection.weight"
                bound = math.sqrt(6 / (sides if projects else sum(tensor.shape)))
                generator = torch.Generator().manual_seed(stable_seed(seed, name))
                tensor.uniform_(-bound, bound, generator=generator)

    def forward(self, **batch: Tensor) -> Tensor | dict[str, Tensor]:
        """Return the mean BPR loss for a batch of interactions, the mean TransR loss for edges, and
        `ranking_metrics` for users; recompute attention for an empty batch. See
        `trainer.kgat.stream`."""
        if "positives" in batch:
            return self._interaction_loss(**batch)
        if "heads" in batch:
            return self._edge_loss(**batch)
        if "wanted" in batch:
            return self._evaluate(**batch)
        return self._update_attention()

    def after_step(self, samples: int, forward: Callable[[], object]) -> None:
        """Recompute attention at the end of each epoch, after its KG phase, as in the authors'
        code. `samples`: number of samples consumed so far. `forward`: calls this module as
        training does, for instance through DDP."""
        # Without KG steps attention keeps its initial values.
        if self._epoch and samples % self._epoch == 0:
            forward()

    def _nodes(self) -> Tensor:
        return torch.cat([self.user_embedding.weight, self.entity_embedding.weight])

    def _represent(self, places: Tensor) -> Tensor:
        """Return representations (M, D + sum of layers) of the users and items at `places` (M,):
        the embedding, concatenated with each layer's output (section 3.3)."""
        nodes, aggregators = self._nodes(), list(self.aggregators.children())
        weights = F.dropout(self.attention, self.node_dropout, self.training)
        parts = [F.embedding(places, nodes)]
        for aggregator in aggregators:
            neighbours = KgatPropagation.apply(self._graph.to(nodes.device), weights, nodes)
            if aggregator is aggregators[-1]:  # after the last layer other nodes are not needed
                nodes, neighbours = nodes[: self.ranked], neighbours[: self.ranked]
            nodes = F.dropout(aggregator(nodes, neighbours), self.message_dropout, self.training)
            parts.append(F.normalize(F.embedding(places, nodes), dim=1))
        return torch.cat(parts, dim=1)

    def _interaction_loss(
        self, users: Tensor, positives: Tensor, negatives: Tensor, dropout_seed: Tensor
    ) -> Tensor:
        """Return the BPR loss with L2 regularisation (equations 12 and 13)."""
        # All micro-batches of a step draw the same dropout, so that results do not depend on their
        # number. item() does not wait, because the last step ended with a synchronisation.
        torch.manual_seed(int(dropout_seed.item()))
        first_item = self.user_embedding.num_embeddings
        places = torch.cat([users, first_item + positives, first_item + negatives])
        user, positive, negative = self._represent(places).chunk(3)
        margin = (user * (positive - negative)).sum(dim=1)
        return F.softplus(-margin).mean() + self.l2 * _half_squares(user, positive, negative)

    def _edge_loss(
        self, heads: Tensor, relations: Tensor, tails: Tensor, negative_tails: Tensor
    ) -> Tensor:
        """Return the pairwise TransR loss (equations 1 and 2; Lin et al., AAAI 2015)."""
        # Sorted by relation, so that each projection is one product. tolist() does not wait, for
        # the reason in `_interaction_loss`.
        relations, order = relations.sort(stable=True)
        counts = torch.bincount(relations, minlength=self._graph.relations).tolist()
        places = torch.stack([heads, tails, negative_tails], dim=1)[order]
        ends = F.embedding(places, self._nodes())  # Shape: (B, 3, D)
        projected = [
            group @ projection
            for group, projection in zip(ends.split(counts), self._projections(), strict=True)
        ]
        head, tail, negative = torch.cat(projected).unbind(dim=1)  # Shape: (B, K) each
        relation = self.relation_embedding(relations)
        distance = (head + relation - tail).square().sum(dim=1)
        wrong = (head + relation - negative).square().sum(dim=1)
        squares = _half_squares(head, relation, tail, negative)
        return F.softplus(distance - wrong).mean() + self.kg_l2 * squares

    def _projections(self) -> tuple[Tensor, ...]:
        """Return the projection matrix (D, K) of each relation."""
        width = self.user_embedding.embedding_dim
        return self.relation_projection.weight.unflatten(1, (width, -1)).unbind()

    @torch.no_grad()
    def _update_attention(self) -> Tensor:
        """Recompute attention (E,) by equations 4 and 5. The weights of a head's edges sum to 1."""
        nodes = self._nodes()
        graph = self._graph.to(nodes.device)
        scores = torch.empty_like(self.attention)
        groups = graph.by_relation.split(graph.counts)
        translations = self.relation_embedding.weight.unbind()
        for edges, projection, translation in zip(
            groups, self._projections(), translations, strict=True
        ):
            for chunk in edges.split(CHUNK):
                head = nodes[graph.heads[chunk]] @ projection
                tail = nodes[graph.tails[chunk]] @ projection
                scores[chunk] = (tail * torch.tanh(head + translation)).sum(dim=1)
        largest = torch.segment_reduce(scores, "max", offsets=graph.starts)
        scores = torch.exp(scores - largest[graph.heads])
        total = torch.segment_reduce(scores, "sum", offsets=graph.starts)
        self.attention.copy_(scores / total[graph.heads])
        return self.attention

    def _evaluate(self, users: Tensor, known: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """Return mean recall and ndcg over `users`, by the model and by popularity of the items."""
        popularity = self._graph.to(users.device).popularity
        items = self.user_embedding.num_embeddings + torch.arange(
            len(popularity), device=users.device
        )
        nodes = self._represent(torch.cat([users, items]))
        scores = nodes[: len(users)] @ nodes[len(users) :].T
        ours = ranking_metrics(scores, known, wanted)
        usual = ranking_metrics(popularity.expand_as(scores), known, wanted)
        names = ("recall@20", "ndcg@20", "popularity_recall@20", "popularity_ndcg@20")
        return dict(zip(names, torch.cat([ours, usual]).unbind(), strict=True))


def _check(recipe: Recipe) -> None:
    """Raise RecipeError for the first key of a recipe that does not work with KGAT."""
    precision = recipe.precision
    for key, wrong, why in (
        ("precision.dtype", precision.dtype != "fp32", "computes in fp32 only; set fp32"),
        ("precision.master", precision.master != "fp32", "has float32 weights; set fp32"),
        ("strategy.compile", recipe.strategy.compile, "cannot be compiled; set false"),
        ("run.stop_after", recipe.run.stop_after, "has no validation loss; remove it"),
    ):
        if wrong:
            raise RecipeError(f"{key}: KGAT {why}")


def ranking_metrics(scores: Tensor, known: Tensor, wanted: Tensor) -> Tensor:
    """Return the means over users of recall@20 and ndcg@20, float32 (2,), as the authors' evaluator
    defines them.

    Args:
        scores: score of each item for each user, (B, I).
        known: items to exclude from the ranking, (B, any) int64, padded with I.
        wanted: items to find, (B, any) int64, padded with I; at least one in each row.
    """
    items = scores.shape[1]
    scores = F.pad(scores, (0, 1))
    scores = scores.scatter(1, known, -math.inf)
    scores[:, items] = -math.inf
    is_wanted = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, wanted, True)
    is_wanted[:, items] = False
    hits = is_wanted.gather(1, scores.topk(min(DEPTH, items), dim=1).indices).float()
    discount = 1 / torch.arange(2, 2 + min(TOP, items), device=scores.device).log2()
    gain = hits[:, :TOP] @ discount
    best = hits.sort(dim=1, descending=True).values[:, :TOP] @ discount
    recall = hits[:, :TOP].sum(dim=1) / is_wanted.sum(dim=1)
    ndcg = torch.where(best > 0, gain / best, 0.0)
    return torch.stack([recall.mean(), ndcg.mean()])


def _half_squares(*vectors: Tensor) -> Tensor:
    """Return half the squared norm of a sample's vectors (B, width), averaged over samples."""
    return torch.stack([vector.square().sum(dim=1).mean() for vector in vectors]).sum() / 2
