"""What a person may choose of a Knowledge Graph Attention Network and its data."""

from dataclasses import dataclass
from typing import Literal

from trainer.recipe.bounds import Amount, Count, Positive, Share


@dataclass(frozen=True, kw_only=True)
class Kgat:
    """Knowledge Graph Attention Network (Wang et al., KDD 2019), a recommender. The defaults are
    the paper's."""

    embedding_dim: Positive = 64
    """Width of the embeddings of users, items and entities."""

    relation_dim: Positive = 64
    """Width of the embeddings of relations, and of the space that TransR projects into."""

    layers: tuple[Positive, ...] = (64, 32, 16)
    """Output width of each attentive propagation layer. An empty list, together with
    data.graph.triples_per_sample: 0, makes the model BPR-MF (Rendle et al., UAI 2009)."""

    aggregator: Literal["bi-interaction", "gcn", "graphsage"] = "bi-interaction"
    """How a layer joins a node with what its neighbours send."""

    node_dropout: Share = 0.1
    """Share of the edges that a training step leaves out."""

    message_dropout: Share = 0.1
    """Share of the elements of each layer's output that a training step sets to 0."""

    l2: Amount = 1e-5
    """Weight of the squares of the representations in the loss of a CF step."""

    kg_l2: Amount = 1e-5
    """Weight of the squares of the projected embeddings in the loss of a KG step."""


@dataclass(frozen=True, kw_only=True)
class GraphData:
    """Interactions of users with items, and a knowledge graph about the items."""

    path: str
    """Directory of the data set."""

    format: Literal["auto", "kgat", "recbole"] = "auto"
    """kgat: the files of the paper's authors, train.txt, test.txt and kg_final.txt. recbole: one
    .inter, one .kg and one .link file. auto: whichever is there."""

    triples_per_sample: Count = 4
    """Edges of the knowledge graph that a sample of a KG step holds: its batch is so many times
    batch.global_batch. 0: no KG steps, and every edge of a node keeps the same weight."""

    evaluate_on: Literal["test", "validation"] = "test"
    """What recall and ndcg are measured on (recbole: 10 % of each user's interactions each). Tune
    on validation, report on test."""

    split_seed: int = 0
    """Seed of the division of RecBole's interactions into 80 % for training, 10 % for validation
    and 10 % for testing, user by user."""
