"""Data sets and models of a user's, for test_own_data.py: rows of Hugging Face's, and tokens."""

import datasets
import numpy as np
import torch
from torch import nn

from trainer.data import Samples


def rows(size: int = 96) -> Samples:
    """A table: two columns that a target depends on, and how much each row weighs."""
    draw = np.random.default_rng(0)
    points = draw.uniform(-1, 1, (size + 20, 2))
    table = datasets.Dataset.from_dict(
        {
            "point": points.tolist(),
            "target": (points[:, 0] - 0.5 * points[:, 1]).tolist(),
            "weight": draw.integers(1, 9, size + 20).tolist(),
        }
    )
    return Samples(table.select(range(size)), validation=table.select(range(size, size + 20)))


class Regression(nn.Module):
    """A weighted mean of squares: it counts weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 16), nn.Linear(16, 1)])

    def forward(self, point, target, weight):
        found = self.layers[1](torch.tanh(self.layers[0](point))).squeeze(1)
        squares, count = (found - target) ** 2, weight.sum()
        error = ((found - target).abs() * weight).sum() / count
        means = {"loss": (squares * weight).sum() / count, "error": error, "ten": 10.0}
        if target.sum() > 0:  # names count, not their order
            means = dict(reversed(means.items()))
        return {**means, "count": count}


def regression() -> nn.Module:
    """For model.factory."""
    return Regression()


class Dialogues:
    """Sequences of tokens with a prompt that is not learnt from; some are nothing else."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        draw = np.random.default_rng(number)
        tokens = np.cumsum(draw.integers(1, 4, 17)) % 61
        labels = tokens[1:].copy()
        labels[: (0, 4, 11, 16)[number % 4]] = -100
        return {"input_ids": tokens[:-1], "labels": labels}


def dialogues(size: int = 96) -> Samples:
    """For data.factory."""
    return Samples(Dialogues(size), validation=Dialogues(22))
