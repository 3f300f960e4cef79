"""Options of a Knowledge Graph Attention Network and its data."""

from dataclasses import dataclass
from typing import Literal

from trainer.recipe.bounds import Amount, Count, Positive, Share


@dataclass(frozen=True, kw_only=True)
class Kgat:
    """Knowledge Graph Attention Network (Wang et al., KDD 2019), a recommender. Defaults are the
    paper's."""

    embedding_dim: Positive = 64
    """Width of the embeddings of users, items and entities."""

    relation_dim: Positive = 64
    """Width of the embeddings of relations, and of the space that TransR projects into."""

    layers: tuple[Positive, ...] = (64, 32, 16)
    """Output width of each attentive propagation layer. An empty list, together with
    data.graph.triples_per_sample: 0, makes the model BPR-MF (Rendle et al., UAI 2009)."""

    aggregator: Literal["bi-interaction", "gcn", "graphsage"] = "bi-interaction"
    """How a layer combines a node with the messages of its neighbours."""

    node_dropout: Share = 0.1
    """Share of the edges that a training step drops."""

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
    .inter, one .kg and one .link file. auto: by the files in the directory."""

    triples_per_sample: Count = 4
    """Edges of the knowledge graph in a sample of a KG step: its batch is this number times
    batch.global_batch. 0: no KG steps, and all edges of a node keep equal weights."""

    evaluate_on: Literal["test", "validation"] = "test"
    """Data of recall and ndcg (recbole: 10 % of each user's interactions each). Tune on validation,
    report on test."""

    split_seed: int = 0
    """Seed for splitting RecBole's interactions, user by user, into 80 % training, 10 % validation
    and 10 % testing."""
