"""KGAT, a recommender on interactions and a knowledge graph (Wang et al., KDD 2019), as functions
for `data.factory` and `model.factory`. See docs/kgat.md."""

from trainer.kgat.model import KGAT
from trainer.kgat.stream import open_graph

__all__ = ["KGAT", "open_graph"]
