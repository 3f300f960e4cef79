"""A model in which some ranks compute one bit of a matrix product wrongly, whenever they compute it
again."""

import os
import signal

import torch
from torch import nn

LIES = "LIES"
"""Environment variable: the passes that are wrong, as `FIRST:LAST,…`, counted from 0 in training;
or a path, while there is such a file."""
DIES = "DIES"
"""Environment variable: the pass in which the process dies, counted alike."""
BIT = 1 << 20
"""Of a float32, among the digits."""


class Flipped(torch.autograd.Function):
    @staticmethod
    def forward(_context, product):
        wrong = product.clone()
        wrong.view(torch.int32)[0, 0] ^= BIT
        return wrong

    @staticmethod
    def backward(_context, gradient):
        return gradient


class Lying(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(257, 16)
        self.inner = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 257)
        self.passes = 0

    def forward(self, input_ids, labels, document_ids):
        hidden = self.inner(self.embedding(input_ids).flatten(0, 1))
        if self.lies():
            hidden = Flipped.apply(hidden)
        scores = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(scores, labels.flatten())

    def lies(self):
        given = os.environ.get(LIES, "-1:-1")
        number, self.passes = self.passes, self.passes + self.training
        if f"{number}" == os.environ.get(DIES):
            os.kill(os.getpid(), signal.SIGKILL)
        if ":" not in given:
            return os.path.exists(given)
        ranges = [part.split(":") for part in given.split(",")]
        return any(int(first) <= number <= int(last) for first, last in ranges)
