"""Which modules of a model are its blocks."""

import pytest
from torch import nn

from trainer.tasks.model_blocks import name_blocks, repeated_blocks


class Block(nn.Module):
    """Has a list of single layers, as the bottlenecks of a ResNet do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.short = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))

    def forward(self, x):
        return self.layer(x)


class ResNet(nn.Module):
    def __init__(self, depths):
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, 1, 1), nn.Linear(2, 2)
        for number, depth in enumerate(depths):
            setattr(self, f"layer{number}", of(Block, depth))


def of(make, depth):
    return nn.Sequential(*(make() for _ in range(depth)))


def line():
    return nn.Linear(2, 2)


def layers():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def pair():
    return nn.ModuleList([nn.Linear(2, 2), Block()])


def one_twice():
    block = Block()
    return nn.ModuleList([block, block])


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (nn.ModuleList([line(), line()]), "2 blocks of class Linear"),
        (nn.ModuleList([Block()]), "1 block of class Block"),
        (nn.ModuleList([layers(), layers()]), "2 blocks of class Sequential"),
        (nn.Sequential(line(), nn.GELU(), line()), "2 blocks of class Linear"),
        (
            nn.Sequential(nn.Embedding(2, 2), of(Block, 2), Block(), line()),
            "3 blocks of class Block",
        ),
        (nn.Sequential(of(layers, 2), nn.Flatten()), "2 blocks of class Sequential"),
        (ResNet([2, 3]), "5 blocks of class Block"),
        (ResNet([1, 1]), "2 blocks of class Block"),
        (nn.Sequential(ResNet([2]), nn.Linear(2, 3)), "2 blocks of class Block"),
        (nn.ModuleDict({"embed": line(), "h": nn.ModuleList([Block()])}), "1 block of class Block"),
        (nn.ModuleDict({"encoder": ResNet([2]), "decoder": Block()}), "2 blocks of class Block"),
        (nn.ModuleList([pair(), pair()]), "2 blocks of class Block"),
        (one_twice(), "1 block of class Block"),
        (
            nn.Transformer(8, 2, 2, 3),
            "5 blocks (2 of TransformerEncoderLayer, 3 of TransformerDecoderLayer)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_blocks_of_lists_however_they_are_written(model, found):
    blocks = repeated_blocks(model)
    assert name_blocks(blocks) == found
    assert len(set(blocks)) == len(blocks)
    inside = [module for block in blocks for module in block.modules()]
    assert len(set(inside)) == len(inside), "no block lies in another"


def test_a_model_without_lists_has_none():
    assert repeated_blocks(line()) == []
