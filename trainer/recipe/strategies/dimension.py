"""The interface of the modules cp, ep, pp and tp, each of which describes a kind of model
parallelism."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trainer.recipe.sections import Recipe, StrategySection
from trainer.recipe.strategies import sharding

Divided = Literal["layers", "sequences", "experts", "stages"]
"""What a kind of model parallelism divides among its ranks, which decides their place:

- layers: ranks of a node compute each layer together. They are a mesh dimension inside that of the
  FSDP shards.
- sequences: ranks of a node each have a part of every sequence. They are no mesh dimension, because
  FSDP treats them as data-parallel ranks.
- experts: data-parallel ranks each have some experts. They are a dimension of a second mesh.
- stages: each rank has some of the blocks. They are a mesh dimension around that of the FSDP
  shards.
"""


@dataclass(frozen=True)
class RecipeStrategySizes:
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
        """The powers of two up to `world_size`."""
        return [1 << n for n in range(self.world_size.bit_length())]

    @property
    def in_node(self) -> list[int]:
        """The powers of two up to `world_size` that divide the number of GPUs of a node."""
        return [n for n in self.powers if self.gpus_per_node % n == 0]

    @property
    def experts_apart(self) -> int:
        """Largest number of ranks of a node among which the experts of every stack divide evenly; 1
        without experts."""
        return math.gcd(self.gpus_per_node, *self.experts) if self.experts else 1


def missing_beside(recipe: Recipe, ranks: str, *keys: str) -> Iterator[tuple[str, str]]:
    """Yield (key, problem and remedy) for each of `keys` whose setting does not work together with
    `strategy.<ranks>` yet."""
    chosen = {
        "data.factory": (bool(recipe.data.factory), f"set strategy.{ranks}=1"),
        "strategy.sharding": (sharding.zero1(recipe), "use SHARD_GRAD_OP"),
    }
    for key in keys:
        used, instead = chosen[key]
        if used:
            yield key, f"does not work with strategy.{ranks} above 1 yet; {instead}"


class RecipeStrategyDimension(Protocol):
    """What a module of this package defines for one kind of model parallelism. The recipe, the
    mesh, the model and the plan iterate over `MODEL_PARALLEL`. So a new kind needs a field in
    `sections.Strategy`, a module with these members, an entry in `MODEL_PARALLEL`, and a module
    that applies it."""

    KEYS: tuple[str, ...]
    """Keys of this kind in `strategy`. The first is its number of ranks, and the name of their
    groups."""
    DIVIDES: Divided
    APPLIED_BY: str
    """Module that applies this kind to a model, imported only if the kind is used. Its
    `check_model(model, recipe, shards)` raises RecipeError for a model that cannot be divided. If
    DIVIDES is layers or experts, its `apply(model, mesh, strategy)` changes a model in place over a
    1-D mesh, and returns the modules that FSDP shards only over ranks with the same experts."""

    def ranks(self, strategy: StrategySection) -> int:
        """Return the number of ranks of one group of this kind; 1: the kind is not used."""
        ...

    def check(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        """Yield (key, problem and remedy) for each setting that this kind cannot be combined
        with."""
        ...

    def describe(self, strategy: StrategySection, idle: float) -> str:
        """Return the part of a run's first line for this kind; "" if the kind is not used. `idle`:
        fraction of a step in which pipeline ranks wait."""
        ...

    def tried(self, sizes: RecipeStrategySizes) -> Iterable[dict[str, Any]]:
        """Yield key → value, for each combination of KEYS that `perdure plan` tries."""
        ...

    def bytes_sent(self, strategy: StrategySection, reduced: float, divided: float) -> float:
        """Return the bytes that a rank sends in its all-reduces and all-to-alls, by ring
        algorithms; 0 if it has none. Bytes of other messages follow from shapes in a trace.

        Args:
            reduced: bytes of all activations that were all-reduced. If several kinds in use
                all-reduce activations, these are the bytes of all, so each returns too much.
            divided: bytes of all rows in all-to-alls, including rows that stay on the rank.
        """
        ...
