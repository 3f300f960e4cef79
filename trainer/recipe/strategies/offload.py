"""`strategy.offload` and `offload_directory`: FSDP shards in host memory or in files on a local
disk; applied by trainer/parallel/fsdp.py and offload.py."""

from collections.abc import Iterator

from trainer.recipe.sections import Recipe, StrategySection
from trainer.recipe.strategies import sharding


def used(strategy: StrategySection) -> bool:
    return strategy.offload != "none"


def to_host(strategy: StrategySection) -> bool:
    return strategy.offload == "cpu"


def to_disk(strategy: StrategySection) -> bool:
    return strategy.offload == "nvme"


def check(recipe: Recipe) -> Iterator[tuple[str, str]]:
    strategy, optimizer = recipe.strategy, recipe.optimizer
    if used(strategy) and strategy.name == "ddp":
        yield "strategy.offload", "only with strategy.name: fsdp (DDP keeps all on the GPU)"
    if used(strategy) and not sharding.shards_parameters(recipe):
        yield (
            "strategy.offload",
            f"needs sharded parameters, but sharding is {sharding.name(recipe)}; "
            "use SHARD_GRAD_OP, FULL_SHARD or HYBRID_SHARD",
        )
    if to_disk(strategy) != (strategy.offload_directory is not None):
        yield (
            "strategy.offload_directory",
            "goes with strategy.offload: nvme; set both, or neither (a directory on a local disk)",
        )
    if not to_disk(strategy):
        return
    if optimizer.state_dtype != "fp32":
        yield (
            "strategy.offload",
            f"nvme updates float32 state, not optimizer.state_dtype={optimizer.state_dtype}; "
            "use strategy.offload=cpu, or optimizer.state_dtype=fp32",
        )
    if recipe.precision.master != "fp32":
        yield (
            "strategy.offload",
            f"nvme updates float32 weights, not precision.master={recipe.precision.master}; use "
            "strategy.offload=cpu, or precision.master=fp32",
        )
    if optimizer.factory or optimizer.name == "muon":
        yield (
            "strategy.offload",
            "nvme cuts weights at pages, so it needs an update that takes each element by itself: "
            "use optimizer.name=adamw, or strategy.offload=cpu",
        )


def describe(strategy: StrategySection) -> str:
    return f" with offload to {strategy.offload}," if used(strategy) else ""
