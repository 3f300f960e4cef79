"""Images that are arrays, and a small CNN: a data set and a model in one file.

perdure train own_data.yaml
"""

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trainer import Samples


class Stripes:
    """Grey images of stripes in one of four directions, under noise. Any map-style data set will
    do: this one draws an image when it is asked for it."""

    def __init__(self, size: int, first: int = 0) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> dict[str, np.ndarray | int]:
        draw = np.random.default_rng(self.first + number)
        label = number % 4
        rows, columns = np.mgrid[:16, :16]
        angle = np.pi * label / 4
        wave = np.sin(rows * np.cos(angle) + columns * np.sin(angle) + draw.uniform(0, 6))
        image = wave + draw.normal(0, 1, (16, 16))
        return {"image": image[None].astype(np.float32), "label": label}


def data(size: int = 2048) -> Samples:
    """What `data.factory` names."""
    return Samples(train=Stripes(size), validation=Stripes(256, first=size))


class CNN(nn.Module):
    """`forward` gets what an item holds, stacked: image (B, 1, 16, 16), label (B)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [1, width, 2 * width]
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, after, 3, stride=2, padding=1),
                nn.GroupNorm(4, after),
                nn.ReLU(),
            )
            for before, after in pairwise(widths)
        )
        self.head = nn.Linear(2 * width, 4)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            image = layer(image)
        logits = self.head(image.mean(dim=(2, 3)))
        hits = (logits.argmax(dim=1) == label).float()
        return {"loss": F.cross_entropy(logits, label), "accuracy": hits.mean()}


def model(width: int = 16) -> nn.Module:
    """What `model.factory` names."""
    return CNN(width)
