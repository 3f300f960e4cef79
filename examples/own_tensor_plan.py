"""A model of the user's that some ranks compute together: it says how its modules are cut."""

import torch.nn.functional as F
from torch import Tensor, nn

from trainer import HeadLoss


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mixed = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (self.heads(part(y)) for part in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mixed(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def heads(self, x: Tensor) -> Tensor:
        """(B, T, heads of this rank, H) → (B, heads, T, H): a rank does not have all heads."""
        return x.unflatten(2, (-1, self.head_size)).transpose(1, 2)


class Model(nn.Module):
    def __init__(self, vocab_size: int = 257, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList([Block(width, heads) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.loss = HeadLoss()
        self.tensor_plan = {
            "embed": "vocabulary",
            "head": "vocabulary",
            "*.query": "column",
            "*.key": "column",
            "*.value": "column",
            "*.mixed": "row",
            "*.up": "column",
            "*.down": "row",
            "*norm*": "norm",
        }

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.loss(self.norm(x), self.head.weight, labels)
