"""`strategy.name`, `sharding`, `zero` and `shard_size`: what is sharded over data-parallel ranks;
applied by trainer/parallel/fsdp.py and ddp.py."""

from collections.abc import Iterator
from dataclasses import replace

from trainer.recipe.sections import ZERO_STAGES, Recipe, Sharding, StrategySection


def name(recipe: Recipe) -> Sharding:
    """Return the sharding of the recipe, NO_SHARD for DDP."""
    return recipe.sharding


def zero1(recipe: Recipe) -> bool:
    """Return whether only the optimizer state is sharded (ZeRO-1), and DDP replicates
    parameters."""
    return recipe.sharding == "OPTIMIZER_STATE"


def shards_parameters(recipe: Recipe) -> bool:
    """Return whether parameters are sharded between steps."""
    return recipe.sharding not in ("NO_SHARD", "OPTIMIZER_STATE")


def by_fsdp(recipe: Recipe) -> bool:
    """Return whether the recipe selects FSDP, even if it is not used for groups of one rank."""
    return recipe.strategy.name == "fsdp" and not zero1(recipe)


def fixed_group(recipe: Recipe) -> int:
    """Return the number of ranks of a shard group, over which FSDP shards parameters, if the recipe
    sets it; 1 if it depends on the world size."""
    return (recipe.sharding == "HYBRID_SHARD" and recipe.strategy.shard_size) or 1


def group(recipe: Recipe, sharing: int, in_node: int) -> int:
    """Return the number of ranks of a shard group, over which FSDP shards parameters. `sharing`:
    number of data-parallel ranks; `in_node`: how many of them are on a node."""
    if not shards_parameters(recipe):
        return 1
    if recipe.sharding == "HYBRID_SHARD":
        return recipe.strategy.shard_size or min(in_node, sharing)
    return sharing


def resolved(strategy: StrategySection) -> StrategySection:
    """Replace `zero` by the equivalent `sharding`, unless the two contradict each other."""
    if strategy.zero is None or strategy.name == "ddp":
        return strategy
    meant = ZERO_STAGES[strategy.zero]
    if strategy.sharding not in (None, meant):
        return strategy
    return replace(strategy, sharding=meant, zero=None)


def check(recipe: Recipe) -> Iterator[tuple[str, str]]:
    strategy = recipe.strategy
    if strategy.name == "ddp":
        for key in ("sharding", "zero", "shard_size"):
            if getattr(strategy, key) is not None:
                yield (
                    f"strategy.{key}",
                    "only with strategy.name: fsdp; set it to null, or set fsdp",
                )
    elif strategy.zero is not None:
        stage = ZERO_STAGES[strategy.zero]
        yield "strategy.zero", f"{strategy.zero} means {stage}, but sharding is {strategy.sharding}"
    if strategy.shard_size is not None and recipe.sharding != "HYBRID_SHARD":
        yield "strategy.shard_size", f"only with HYBRID_SHARD, but sharding is {recipe.sharding}"
    if zero1(recipe) and recipe.precision.master == "bf16_stochastic":
        yield (
            "strategy.sharding",
            "with precision.master=bf16_stochastic: OPTIMIZER_STATE (ZeRO-1) would add up "
            "gradients in bf16; use SHARD_GRAD_OP, or precision.master=fp32",
        )


def describe(recipe: Recipe) -> str:
    return recipe.sharding if recipe.strategy.name == "fsdp" else "DDP"
