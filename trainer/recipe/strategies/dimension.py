"""What is to be known of one kind of model parallelism."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trainer.recipe.sections import Recipe, Strategy

Divided = Literal["layers", "sequences", "experts", "stages"]
"""What a kind of model parallelism divides among its ranks, which decides their place:

- layers: ranks of a node compute each layer together. A mesh dimension, inside the FSDP shards.
- sequences: ranks of a node each have a part of every sequence. No mesh dimension, because FSDP
  treats them as data-parallel ranks.
- experts: data-parallel ranks each have some experts. A dimension of a second mesh.
- stages: each rank has some of the blocks. A mesh dimension, around the FSDP shards.
"""


@dataclass(frozen=True)
class TriedSizes:
    """What limits the numbers of ranks that `perdure plan` tries."""

    world_size: int
    gpus_per_node: int
    seq_len: int
    blocks: int
    """Number of blocks of the model."""
    experts: Sequence[int]
    """Number of experts of each stack; () without experts."""

    @property
    def powers(self) -> list[int]:
        """The powers of two up to the number of ranks."""
        return [1 << n for n in range(self.world_size.bit_length())]

    @property
    def in_node(self) -> list[int]:
        """The powers of two that divide the number of GPUs of a node."""
        return [n for n in self.powers if self.gpus_per_node % n == 0]

    @property
    def experts_apart(self) -> int:
        """The most ranks of a node that divide all experts evenly; 1 without experts."""
        return math.gcd(self.gpus_per_node, *self.experts) if self.experts else 1


class Dimension(Protocol):
    """One kind of model parallelism: what its module in this package has. The recipe, the mesh, the
    model and the plan iterate over `MODEL_PARALLEL`, so a new one is added by a field in
    `sections.Strategy`, such a module, its entry there, and the module that applies it."""

    KEYS: tuple[str, ...]
    """Its keys in `strategy`. The first is the number of ranks, and the name of their groups."""
    DIVIDES: Divided
    APPLIED_BY: str
    """Module that applies it, imported only if it is used. `check_model(model, recipe, shards)`
    raises RecipeError for a model that cannot be divided. If DIVIDES is layers or experts,
    `apply(model, mesh, strategy)` changes a model in place over a 1-D mesh, and returns the modules
    that FSDP shards only over ranks with the same experts."""

    def ranks(self, strategy: Strategy) -> int:
        """Return the number of ranks; 1: it is not used."""
        ...

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        """Yield (key, problem and remedy) for what it cannot be combined with."""
        ...

    def describe(self, strategy: Strategy, idle: float) -> str:
        """Return its part of a run's first line; "" if it is not used. `idle`: fraction of a step
        in which pipeline ranks wait."""
        ...

    def tried(self, sizes: TriedSizes) -> Iterable[dict[str, Any]]:
        """Yield the values of its keys that `perdure plan` tries."""
        ...
